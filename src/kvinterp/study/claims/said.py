"""What is said of claims, and of a study of them: how many hold here, how that was decided, and what is missing."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.common.numbers import counted, listed, machines_of
from kvinterp.study.claims.base import FAILS, HOLDS, OPEN


def claims_said(claims: pd.DataFrame) -> str:
    """How many claims hold, of a table as :func:`kvinterp.study.claims.claims_of` gives it."""
    if claims.empty:
        return "No claim was looked for."
    known = claims[(claims["verdict"] != OPEN) & (claims["construction"] != "")]
    counts = claims.drop(known.index)["verdict"].value_counts()
    sources = [f"{counted(int(n), 'claim')} of the {name}" for name, n in claims["source"].value_counts(sort=False).items()]
    hold, fail, open_ = (counts.get(verdict, 0) for verdict in (HOLDS, FAILS, OPEN))
    by = f"; counted as none of these: {counted(len(known), 'verdict')} by construction" if len(known) else ""
    return f"Of {listed(sources)}, {hold} hold here, {fail} do not and {open_} are not testable here{by}."


_REASONS = {
    "tokens flip too seldom": r"flip|decode parts",
    "an experiment did not run": "^there is no table",
    "intervals reach both sides": "both sides",
    "other models are asked for": "^it is of|all models share",
    "examples are too few": "fewer than|too few|are the least|correction for many",
}
"""What is found in why a claim is not testable, by what is said of it; the first that fits."""


def reasons_said(claims: pd.DataFrame) -> str:
    """The chief reasons why claims are not testable; nothing where there is none."""
    why = claims.loc[claims["verdict"] == OPEN, "why"].astype(str)
    found = [next((said for said, sign in _REASONS.items() if re.search(sign, each)), "") for each in why]
    counts = pd.Series([said for said in found if said], dtype=object).value_counts(sort=True).head(3)
    reasons = [f"{said} ({count})" for said, count in counts.items()]
    return f"Not testable mostly because {listed(reasons)}." if reasons else ""


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


def said_of_study(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> list[str]:
    """Sentences about a whole study, from its tables and its summary."""
    counts = summary["counts"]
    said = [claims_said(tables["claims"]), reasons_said(tables["claims"])] if "claims" in tables else []
    models = list(summary["provenance"])
    said.append(
        f"This is of {listed(models)} on {machines_of(summary['provenance'].values())}: of other models and other kernels it "
        "says nothing."
    )
    if summary["interrupted"]:
        missing = f"; not among the tables yet: {listed(summary['left_out'])}" if summary["left_out"] else ""
        said.append(f"Interrupted: {counts['finished']} of {counts['cells']} known cells are finished{missing}.")
    return [line for line in said if line]


def judged_anew(before: pd.DataFrame, now: pd.DataFrame) -> list[str]:
    """Which verdicts are other than those that were written with the tables, since the rules are; nothing where none is."""
    then, today = (dict(zip(claims["id"], claims["verdict"], strict=True)) for claims in (before, now))
    changed = [
        f"{name} ({then[name]} before, {today.get(name, 'no longer asked')} now)" if name in then else f"{name} (new)"
        for name in today | then
        if then.get(name) != today.get(name)
    ]
    if not changed:
        return []
    return [
        f"Judged anew, by the rules of this version of kvinterp: {counted(len(changed), 'verdict')} "
        f"other than in claims.parquet, which keeps those that were written with the tables: {listed(changed)}."
    ]
