"""What a study says first: how many claims hold here, of what, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.numbers import counted, listed, machines_of

__all__ = ["VERDICTS", "said_of_study"]

VERDICTS = ("holds here", "does not hold here", "not testable here")


def said_of_study(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> list[str]:
    """Sentences about a whole study.

    Args:
        tables: Its tables by name.
        summary: What its ``summary.json`` holds.
    """
    said, counts = [], summary["counts"]
    if "claims" in tables:
        verdicts = tables["claims"]["verdict"].value_counts()
        each = [f"{int(verdicts.get(name, 0))} {'is ' * name.startswith('not')}{name}" for name in VERDICTS]
        said.append(f"Of {counted(len(tables['claims']), 'claim')}: {listed(each)}.")
    models = list(summary["provenance"])
    said.append(
        f"This is of {listed(models)} on {machines_of(summary['provenance'].values())}: of other models and other kernels it "
        "says nothing."
    )
    if summary["interrupted"]:
        missing = f"; not among the tables yet: {listed(summary['left_out'])}" if summary["left_out"] else ""
        said.append(f"Interrupted: {counts['finished']} of {counts['cells']} known cells are finished{missing}.")
    return said
