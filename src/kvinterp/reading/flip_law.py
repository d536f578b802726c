"""What was foretold of flips and what came, in sentences."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.reading.numbers import counted, ends_said, machine_of, number, share

__all__ = ["said_of_flip_law"]


def said_of_flip_law(summary: Mapping[str, Any]) -> list[str]:
    """The finding, then a line a path; ``summary`` is that of :class:`kvinterp.experiments.flip_law.FlipLaw`."""
    rows = summary["law"]
    by = {word: sum(row["verdict"] == word for row in rows) for word in ("holds", "fails", "open")}
    first = rows[0]
    decided, of = by["holds"] + by["fails"], f"({counted(first['prompts'], 'prompt')}, {first['steps']} steps each)"
    lines = [
        f"Flips come as foretold at {by['holds']} of {decided} counts that could tell; {by['open']} are open {of}."
        if decided
        else f"Too few flips are expected, or too few prompts were given, to tell whether they come as foretold {of}."
    ]
    lines += [f"  {row['path']}, {row['unembedding']}: {_count(row)}" for row in rows]
    alike = summary["as_rounded"]
    third = sum(row["third"] for row in rows[::2])
    lines.append(
        f"Rounding the exact logits gives the model's own choice at {share(alike['alike'], alike['steps'])} of "
        f"{alike['steps']} steps; {counted(third, 'flip')} to or from a third token, not foretold, are counted."
    )
    return [*lines, f"Measured on {machine_of(summary['provenance'])}."]


def _count(row: Mapping[str, Any]) -> str:
    # NaN where it was measured, null where it is read again.
    if pd.isna(row["foretold"]):
        return f"{counted(row['flips'], 'flip')}; nothing is foretold from fewer than five prompts."
    said = f"{counted(row['flips'], 'flip')}, foretold {number(row['foretold'])}"
    return f"{said}{ends_said(row['low'], row['high'], ' (95% of counts: {})')}: {row['verdict']}."
