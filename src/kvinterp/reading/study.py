"""What a study says first: how many claims hold here, of what, and what is missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.claims import claims_said
from kvinterp.reading.numbers import listed, machines_of

__all__ = ["said_of_study"]


def said_of_study(tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> list[str]:
    """Sentences about a whole study.

    Args:
        tables: Its tables by name.
        summary: What its ``summary.json`` holds.
    """
    counts = summary["counts"]
    # The first two: how many hold, and how that was decided.
    said = claims_said(tables["claims"])[:2] if "claims" in tables else []
    models = list(summary["provenance"])
    said.append(
        f"This is of {listed(models)} on {machines_of(summary['provenance'].values())}: of other models and other kernels it "
        "says nothing."
    )
    if summary["interrupted"]:
        missing = f"; not among the tables yet: {listed(summary['left_out'])}" if summary["left_out"] else ""
        said.append(f"Interrupted: {counts['finished']} of {counts['cells']} known cells are finished{missing}.")
    return said
