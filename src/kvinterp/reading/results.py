"""Facts about results that sentences, tables and figures are made of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import pandas as pd
import torch

from kvinterp.data import JUDGES, score
from kvinterp.models import dtype_named

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison
    from kvinterp.data import Prompt
    from kvinterp.results import Result


def model_of(result: Result) -> str:
    """The model's name without ``zoo:``."""
    return str(result.comparison.provenance["model"]).removeprefix("zoo:")


def kind_of(result: Result) -> str:
    """The model's kind."""
    return str(result.comparison.provenance["kind"])


def place_of(result: Result) -> tuple[str, str]:
    """The model's name and kind."""
    return model_of(result), kind_of(result)


def with_protocol(results: Sequence[Result], protocol: str) -> list[Result]:
    """Those made under one protocol."""
    return [r for r in results if r.comparison.provenance["protocol"] == protocol]


def grouped(results: Iterable[Result]) -> dict[tuple[str, str], list[Result]]:
    """The results of each model and kind."""
    groups: dict[tuple[str, str], list[Result]] = {}
    for result in results:
        groups.setdefault(place_of(result), []).append(result)
    return groups


def leading(results: Sequence[Result]) -> list[Result]:
    """One result of each model and kind: the matched one where there is one, because it measures arithmetic alone."""
    return [(with_protocol(group, "matched") or group)[0] for group in grouped(results).values()]


def judged(prompt: Prompt | None, text: object) -> bool | None:
    """Whether a prompt was answered right; None where it has nothing to judge it by."""
    return None if prompt is None or prompt.task not in JUDGES else score(prompt, str(text))


def right_answers(result: Result) -> tuple[int, int] | None:
    """How many prompts each path answered right, or None where a prompt has nothing to judge it by."""
    prompts = {prompt.id: prompt for prompt in result.prompts}
    examples = result.comparison.examples
    sides = [[judged(prompts.get(row["id"]), row[f"text_{s}"]) for row in examples.to_dict("records")] for s in ("a", "b")]
    return None if examples.empty or None in sides[0] else (sum(map(bool, sides[0])), sum(map(bool, sides[1])))


def only(table: pd.DataFrame, **values: Any) -> pd.DataFrame:
    """The rows of a table in which each of these columns holds that value."""
    for column, value in values.items():
        table = table[table[column] == value]
    return table


def unit_roundoff(dtype: str) -> float:
    """Half the distance from 1 to the next number of a dtype."""
    named = dtype_named(dtype)
    assert named is not None, "a comparison names its dtype"
    return float(torch.finfo(named).eps / 2)


def decoded(comparison: Comparison, table: pd.DataFrame) -> pd.DataFrame:
    """The rows of a table from step 1 on at which both paths hold the same text."""
    table = comparison.same_text(table)
    return table[table["step"] > 0]


def site_of(comparison: Comparison) -> str:
    """The site whose drift is told: resid_post, or else the first recorded; empty where none was."""
    sites = list(comparison.layers["site"].unique())
    return "resid_post" if "resid_post" in sites else str(sites[0]) if sites else ""


def drift_medians(comparison: Comparison) -> pd.Series:
    """Median relative L2 of :func:`site_of` by layer over prompts and steps from 1 on at which both hold the same text."""
    frame = decoded(comparison, comparison.layers)
    return frame[frame["site"] == site_of(comparison)].groupby("layer")["relative_l2"].median().dropna()
