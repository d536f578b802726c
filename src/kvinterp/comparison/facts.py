"""Facts about results that sentences, tables and figures are made of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import pandas as pd

from kvinterp.data import JUDGES, score

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison
    from kvinterp.data import Prompt


def matched(comparisons: Sequence[Comparison]) -> list[Comparison]:
    """Those that measure arithmetic alone, or where there is none all."""
    return [one for one in comparisons if one.provenance["protocol"] == "matched"] or list(comparisons)


def judged(prompt: Prompt | None, text: object) -> bool | None:
    """Whether a prompt was answered right; None where it has nothing to judge it by."""
    return None if prompt is None or prompt.task not in JUDGES else score(prompt, str(text))


def right_answers(comparison: Comparison) -> dict[str, list[bool]]:
    """By path, whether each prompt was answered right; nothing where a prompt has nothing to judge it by."""
    prompts = {prompt.id: prompt for prompt in comparison.prompts}
    rows = comparison.examples.to_dict("records")
    found = {path: [judged(prompts.get(row["id"]), row[f"text_{side}"]) for row in rows]
             for side, path in comparison.provenance["paths"].items()}  # fmt: skip
    return {} if not rows or any(None in each for each in found.values()) else found  # type: ignore[return-value]


def alike(comparison: Comparison, table: str, *columns: str, first: int = 1) -> Iterator[pd.DataFrame]:
    """The rows of a table from a step on at which both paths hold the same text, in pieces of whole examples.

    Args:
        comparison: The comparison.
        table: The table's name; what it sums over the steps leaves out step 0, which is the prefill's on both paths.
        columns: The columns that are wanted.
        first: The step.
    """
    for piece in comparison.pieces(table, *columns, "after_flip", "step"):
        same = comparison.same_text(piece)
        yield same[same["step"] >= first] if "step" in same else same


def decoded(comparison: Comparison, table: str, *columns: str, first: int = 1) -> pd.DataFrame:
    """The rows of :func:`alike` together, of as few columns as are asked for."""
    return pd.concat(alike(comparison, table, *columns, first=first), ignore_index=True)


def means_of(comparison: Comparison, table: str, keys: Sequence[str], value: str, first: int = 1) -> pd.Series:
    """The mean of a column over the rows of :func:`alike`, where they are of several vectors over those."""
    sums = []
    for piece in alike(comparison, table, *keys, value, "vectors", first=first):
        weights = piece["vectors"] if "vectors" in piece else piece[value].notna()
        sums.append(pd.DataFrame({"of": piece[value] * weights, "by": weights}).groupby([piece[k] for k in keys]).sum())
    total = pd.concat(sums).groupby(level=list(keys)).sum()
    return total["of"] / total["by"]


def let_go_of(comparison: Comparison) -> list[tuple[str, int, int, int]]:
    """How many rows each path's policy let go by the last step, of how many, and of how many prompts."""
    pieces = comparison.pieces("kv_steps", "example", "step", "tensor", "let_go_a", "let_go_b")
    last = pd.concat([each[each["step"] == each.groupby("example")["step"].transform("max")] for each in pieces])
    last = last[last["tensor"] == last["tensor"].min()]
    context = last["example"].map(comparison.examples.set_index("example")["prompt_tokens"]) + last["step"]
    sides, prompts = comparison.provenance.get("lets_go", ()) if len(last) else (), last["example"].nunique()
    return [(side, int(last[f"let_go_{side}"].sum()), int(context.sum()), prompts) for side in sides]


def sites_of(comparison: Comparison) -> list[str]:
    """The sites whose drift was measured."""
    return list(dict.fromkeys(site for piece in comparison.pieces("layers", "site") for site in piece["site"].unique()))


def site_of(comparison: Comparison) -> str:
    """The site whose drift is told: resid_post, or else the first recorded; empty where none was."""
    sites = sites_of(comparison)
    return "resid_post" if "resid_post" in sites else str(sites[0]) if sites else ""
