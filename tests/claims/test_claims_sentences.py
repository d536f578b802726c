"""Sentences on claims say what the table holds, and no more."""

from __future__ import annotations

import pandas as pd
import pytest
import worlds
from worlds import World

from kvinterp.study.claims import CLAIMS, claims_of
from kvinterp.study.claims.said import claims_said, how_decided, reasons_said

QUICK = ("diverges-always", "kl-large", "eight-orders", "order-causes", "layer-1", "cache-carries", "q8-instructions")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return claims_of(worlds.tables(World(n=40)), [claim for claim in CLAIMS if claim.id in QUICK])


def test_how_many_hold(table):
    said = claims_said(table)
    counts = table.loc[table["construction"] == "", "verdict"].value_counts()
    assert said.endswith("; counted as none of these: 1 verdict by construction.")
    assert f"{counts.get('holds here', 0)} hold here, {counts.get('does not hold here', 0)} do not" in said
    assert "0 hold here, 0 do not and" in claims_said(claims_of({}))
    assert claims_said(claims_of({}).iloc[:0]) == "No claim was looked for."


def test_the_chief_reasons_why_claims_are_not_testable():
    why = [
        *["there is no table scores"] * 3,
        *["no token flips", "a token flips in 0 examples, and fewer than 10 are no correlation"],
        *["the number of independent units is 4, and fewer than 6 decide nothing"] * 2,
        *["the interval reaches both sides of the bound (n is 9)", "something else"],
    ]
    claims = pd.DataFrame({"verdict": [*["not testable here"] * len(why), "holds here"], "why": [*why, "no token flips"]})
    assert reasons_said(claims) == (
        "Not testable mostly because an experiment did not run (3), tokens flip too seldom (2) and examples are too few (2)."
    )
    assert reasons_said(claims.tail(1)) == ""


def test_every_usual_reason_is_known():
    """Of a run without any table every claim is open, for one reason."""
    claims = claims_of({})
    assert f"an experiment did not run ({len(claims)})" in reasons_said(claims)


def test_how_many_tests_are_corrected_for_is_said(table):
    tested = int(table["p"].notna().sum())
    assert tested > 1
    assert f"{tested} of these verdicts rest on a test, corrected by Holm" in how_decided(table)
    assert "1 of these verdict rests on a test" in how_decided(table[table["p"].notna()].iloc[:1])
    assert "None of these verdicts rests on a test" in how_decided(claims_of({}))
