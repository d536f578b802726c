"""What is said of the claims of the papers and posts: a sentence of each, and how the verdicts were come by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.common.numbers import counted, ends_said, listed, number, upper
from kvinterp.study.claims import FAILS, HOLDS, OPEN


def claims_said(claims: pd.DataFrame) -> list[str]:
    """A table of claims in sentences: how it was decided, how many hold, then each that was decided, and why others were not.

    Args:
        claims: As :func:`kvinterp.study.claims.claims_of` gives it.
    """
    if claims.empty:
        return ["No claim was looked for."]
    decided = claims[claims["verdict"] != OPEN]
    known = decided[decided["construction"] != ""]
    counts = claims.drop(known.index)["verdict"].value_counts()
    sources = [f"{counted(int(n), 'claim')} of the {name}" for name, n in claims["source"].value_counts(sort=False).items()]
    hold, fail, open_ = (counts.get(verdict, 0) for verdict in (HOLDS, FAILS, OPEN))
    by = f"; counted as none of these: {counted(len(known), 'verdict')} by construction" if len(known) else ""
    return [
        f"Of {listed(sources)}, {hold} hold here, {fail} do not and {open_} are not testable here{by}.",
        how_decided(claims),
        *map(claim_said, decided.to_dict("records")),
        # Those that could not be decided, a sentence for each reason.
        *(
            f"Not testable here since {why}: {listed(list(group['id']))}."
            for why, group in claims.drop(decided.index).groupby("why", sort=False)
        ),
    ]


def how_decided(claims: pd.DataFrame) -> str:
    """How verdicts are come by, and for how many tests they are corrected."""
    tested = int(claims["p"].notna().sum())
    said = (
        "A claim holds here where the effect under the control is shown to lie on its side of the bound that its rule names, "
        "does not where it is shown to lie on the other, and is not testable here between the two or without data. "
    )
    if not tested:
        return said + "None of these verdicts rests on a test."
    rest = "verdict rests" if tested == 1 else "verdicts rest"
    return (
        f"{said}{tested} of these {rest} on a test, corrected by Holm for all tests of the table, those for a claim and those "
        "against one apart (a claim of two sources is one test): the chance that any one of either kind is an accident is "
        "at most 5%. The others rest on a count, such as one counterexample to what is said of every case."
    )


def claim_said(row: Mapping[str, Any]) -> str:
    """One claim of the table, what was found of it, and the verdict."""
    value = f": {row['paper_value']}" if row["paper_value"] else ""
    said = f"{upper(row['verdict'])}: {row['claim'].rstrip('.')} ({row['source']}, {row['section']}{value})."
    found = []
    if pd.notna(row["paper_protocol"]):
        found.append(f"{number(row['paper_protocol'])} under its protocol")
    if pd.notna(row["matched"]):
        ends = "" if row["low"] == row["high"] else ends_said(row["low"], row["high"], " (95% interval {})")
        found.append(f"{number(row['matched'])}{ends} under the control")
    said += f" {upper(row['measure'])}: {'; '.join(found) or 'no number'}" if found or row["verdict"] != OPEN else ""
    said += f", n = {int(row['n'])}" if row["n"] else ""
    if pd.notna(row["p"]):
        said += f", p {_p(row['p'])}, corrected p {_p(row['p_corrected'])}"
    said += f". By construction: {row['construction']}" if row["construction"] else ""
    return f"{said}. {upper(row['why'])}." if row["why"] else f"{said}."


def _p(value: float) -> str:
    # Far out in its tail a p-value is its distribution's word, not the data's.
    return f"= {number(value)}" if value >= _TAIL else f"< {number(_TAIL)}"


_TAIL = 1e-10
