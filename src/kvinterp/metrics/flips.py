"""Predicts how many tokens flip from margins, the errors of the two top logits and the grid,
without looking at flips.

A greedy step flips if an error e carries the runner-up over the top. Near 0 the margin x1 - x2 has
a density p, and of exact logits a share p E|e1 - e2| / 2 flips, to first order in the error, the
mean being that of steps near a
tie: where a model hesitates its errors can be twice as large. Logits in 16 bits are rounded to a
grid first, so that a shift of both logits, which no softmax sees, can flip a token too.
:func:`foretold` adds the errors of other prompts, at steps of similar margin, to this prompt's
logits, rounds, and counts: no formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.errors import InputError, shown

EXACT = "exact"
"""The grid of logits that are not rounded."""
LEAST = 5
"""The fewest prompts for a prediction, and the fewest expected flips for a verdict."""
NEAR = 0.2
"""The share of steps, those of the least margins, that gives the density of margins near 0 and the
error there.
"""
LIKE = 0.1
"""The share of other prompts' steps, those of the nearest margins, whose errors a step may get."""
WORLDS = 400
"""How many worlds are simulated."""
_TRIES = 8
"""How many steps are drawn to find one of the world's half of the prompts. In 0.4% of cases none
is; the first is taken then.
"""


def first_order(steps: pd.DataFrame) -> float:
    """The share of steps that flip, to first order in the error, for logits that are not rounded.

    Args:
        steps: A row a step: first, second (the two top logits of one path), first_error,
            second_error (the other path's less these).
    """
    margin = (steps["first"] - steps["second"]).to_numpy(float)
    ends = np.quantile(margin, NEAR) if len(margin) else 0.0
    if not ends > 0:
        return float("nan")
    moved = (
        (steps["first_error"] - steps["second_error"]).abs().to_numpy(float)[margin <= ends].mean()
    )
    return float(np.mean(margin <= ends) / ends * moved / 2)


def foretold(steps: pd.DataFrame, grid: str) -> tuple[float, float, float]:
    """Predicts how many of these steps flip from the errors of other prompts, with the interval of
    95% of such counts.

    In each of many simulated worlds a prompt gets the errors of a random half of the other prompts:
    each of its steps those of one of their steps, drawn among the tenth whose margins rank next to
    its own. A prompt's own errors, and whether its steps flipped, are never used.

    Args:
        steps: As for :func:`first_order`, with example, and first_token and second_token, whose
            order decides a tie.
        grid: The dtype that logits are rounded to, such as ``"bfloat16"``, or :data:`EXACT`.

    Returns:
        The mean count and the ends of the interval; NaN for fewer than five prompts.

    Raises:
        InputError: The grid is no floating dtype of torch.
    """
    dtype = None if grid == EXACT else getattr(torch, str(grid), None)
    if grid != EXACT and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise InputError(
            f"grid {shown(grid)} was given: expected a floating dtype such as 'bfloat16', or 'exact'."
        )
    examples = steps["example"].to_numpy()
    names = np.unique(examples)
    if len(names) < LEAST:
        return float("nan"), float("nan"), float("nan")
    random, counts = np.random.default_rng(0), np.zeros(WORLDS)
    errors, margin = (
        steps[["first_error", "second_error"]].to_numpy(float),
        (steps["first"] - steps["second"]).to_numpy(float),
    )
    ranked = np.argsort(margin, kind="stable")
    for name in names:
        inside, elsewhere = examples == name, ranked[examples[ranked] != name]
        width = min(len(elsewhere), max(LEAST, int(LIKE * len(elsewhere))))
        begin = np.searchsorted(margin[elsewhere], margin[inside]) - width // 2
        begin = begin.clip(0, len(elsewhere) - width)[:, None, None]
        tried = elsewhere[begin + random.integers(width, size=(len(begin), WORLDS, _TRIES))]
        half = random.permuted(np.tile(np.arange(len(names)) % 2 == 0, (WORLDS, 1)), axis=1)
        met = half[np.arange(WORLDS)[:, None], np.searchsorted(names, examples[tried])].argmax(-1)
        errors_met = errors[np.take_along_axis(tried, met[..., None], -1)[..., 0]]
        group = steps[inside]
        before = torch.tensor(group[["first", "second"]].to_numpy(float))[:, None]
        lower = torch.tensor((group["first_token"] < group["second_token"]).to_numpy())[:, None]
        stays = _leads(before, lower, dtype) == _leads(
            before + torch.from_numpy(errors_met), lower, dtype
        )
        counts += (~stays).sum(0).numpy()
    low, high = np.quantile(counts, [0.025, 0.975], method="nearest")
    return float(counts.mean()), float(low), float(high)


def _leads(logits: Float[Tensor, "*step two"], lower: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Whether argmax takes the first of two tokens; of equal logits it takes the lower id."""
    first, second = (logits if dtype is None else logits.to(dtype)).unbind(-1)
    return (first > second) | ((first == second) & lower)


def verdict_of(observed: int, interval: Sequence[float]) -> str:
    """Says whether a count is as predicted: ``"holds"``, ``"fails"``, or ``"open"`` where too few
    were expected to tell.

    Args:
        observed: How many flipped.
        interval: What :func:`foretold` returned.
    """
    mean, low, high = (float(number) for number in interval)
    if not np.isfinite(mean) or (mean < LEAST and low <= observed <= high):
        return "open"
    return "holds" if low <= observed <= high else "fails"


def counted(steps: pd.DataFrame, grid: str, flips: str) -> dict[str, Any]:
    """Makes one row of the table: the predicted and the observed number of flips."""
    expected, observed = foretold(steps, grid), int(steps[flips].sum())
    return {
        "prompts": int(steps["example"].nunique()),
        "steps": len(steps),
        **dict(zip(("foretold", "low", "high"), expected, strict=True)),
        "first_order": first_order(steps) * len(steps) if grid == EXACT else float("nan"),
        "flips": observed,
        "verdict": verdict_of(observed, expected),
    }
