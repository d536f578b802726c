"""What a study says first: how many claims hold here, of what, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.common.numbers import counted, listed, machines_of
from kvinterp.study.reading.claims import claims_said, reasons_said


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
