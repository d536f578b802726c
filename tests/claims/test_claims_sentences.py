"""Sentences on claims say what the table holds, and no more."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import worlds
from worlds import World

from kvinterp.study.claims import CLAIMS, OPEN, claims_of
from kvinterp.study.reading.claims import claim_said, claims_said, how_decided

QUICK = ("diverges-always", "kl-large", "eight-orders", "order-causes", "layer-1", "cache-carries", "q8-instructions")


@pytest.fixture(scope="module")
def table() -> pd.DataFrame:
    return claims_of(worlds.tables(World(n=40)), [claim for claim in CLAIMS if claim.id in QUICK])


def said_of(table: pd.DataFrame, name: str, **changed: object) -> str:
    return claim_said({**table.set_index("id").loc[name].to_dict(), "id": name, **changed})


def test_a_claim_is_said_with_its_numbers(table):
    said = said_of(table, "kl-large")
    row = table.set_index("id").loc["kl-large"]
    assert said.startswith("Does not hold here: Rounding moves")
    assert "FP16 paper, 6.1, table 1: 10.68 to 12.83 nats" in said
    assert "under its protocol" in said
    assert "n = 40" in said
    assert row["p"] < 1e-10
    assert "p < 1.0\u00a0×\u00a010⁻¹⁰" in said
    assert "p = 0.0123, corrected p = 0.2" in said_of(table, "kl-large", p=0.0123, p_corrected=0.2)


def test_what_is_not_there_is_not_said(table):
    said = said_of(table, "kl-large", paper_protocol=np.nan, low=np.nan, high=np.nan, p=np.nan, paper_value="", why="")
    for word in ("under its protocol", "interval", "p =", "nan", "()", "None"):
        assert word not in said
    assert said_of(table, "kl-large", verdict="holds here").startswith("Holds here")


def test_counts_and_reasons(table):
    lines = claims_said(table)
    counts = table.loc[table["construction"] == "", "verdict"].value_counts()
    assert lines[0].endswith("; counted as none of these: 1 verdict by construction.")
    assert any("By construction: kernels of a fixed order" in line for line in lines)
    assert f"{counts.get('holds here', 0)} hold here, {counts.get('does not hold here', 0)} do not" in lines[0]
    assert (
        sum(line.startswith(("Holds here:", "Does not hold here:")) for line in lines) == (table["verdict"] != OPEN).sum()
    )
    empty = claims_said(claims_of({}))
    assert "0 hold here, 0 do not and" in empty[0]
    assert "None of these verdicts rests on a test" in empty[1]
    assert any(line.startswith("Not testable here since there is no table decodes:") for line in empty)
    assert claims_said(claims_of({}).iloc[:0]) == ["No claim was looked for."]


def test_how_many_tests_are_corrected_for_is_said(table):
    tested = int(table["p"].notna().sum())
    assert tested > 1
    assert f"{tested} of these verdicts rest on a test, corrected by Holm" in how_decided(table)
    assert "1 of these verdict rests on a test" in how_decided(table[table["p"].notna()].iloc[:1])
