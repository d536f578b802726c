"""What is measured of logits: how far some are from the donor's, by a distance of ours, of two answers, or a user's function."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp import metrics
from kvinterp.errors import InputError, NonFiniteError
from kvinterp.models.answers import LOGIT_DIFFERENCE, logit_difference

Distance = Callable[[Tensor, Tensor], Tensor]
"""Given logits of the donor and of another ``[..., vocab]``, how far apart they are ``[...]``."""
DISTANCES: dict[str, Distance] = {
    "kl": metrics.kl_divergence,
    "l2": lambda donor, other: (donor.double() - other.double()).norm(dim=-1),
    "margin": lambda donor, other: (metrics.logit_margin(donor) - metrics.logit_margin(other)).abs(),
}


def distances_of(asked: str | Callable[..., Any], answers: tuple[int, int] | None = None) -> dict[str, Distance]:
    """By name the distances asked for, and L2, which tells paths that are bitwise equal.

    Args:
        asked: Names with commas between, or a function of logits ``[batch, position, vocab]``.
        answers: The token ids of the logit difference.
    """
    if callable(asked):
        own: dict[str, Distance] = {name_of(asked): functools.partial(_by_function, asked)}
        return own | {"l2": DISTANCES["l2"]}
    names = dict.fromkeys([*map(str.strip, asked.split(",")), "l2"])
    return {name: DISTANCES.get(name, functools.partial(_by_answers, answers)) for name in names}


def _by_answers(pair: tuple[int, int] | None, donor: Tensor, other: Tensor) -> Tensor:
    assert pair is not None, "checked where they are given"
    return (logit_difference(donor, pair) - logit_difference(other, pair)).abs()


def _by_function(function: Callable[[Tensor], Any], donor: Tensor, other: Tensor) -> Tensor:
    """How far a function of logits ``[batch, position, vocab]`` is from the donor's, row by row."""
    given, found = ([one_number(function, row[None, None]) for row in rows] for rows in (donor, other))
    return (torch.stack(given) - torch.stack(found)).abs()


def one_number(function: Callable[[Tensor], Any], logits: Float[Tensor, "batch position vocab"]) -> Tensor:
    """What a user's metric gives of logits, in float64.

    Raises:
        InputError: It is not one number.
    """
    given = function(logits)
    try:
        one = torch.as_tensor(given)
        was = f"the shape {tuple(one.shape)}" if one.numel() != 1 or one.is_complex() else ""
    except (TypeError, ValueError, RuntimeError):
        was = f"a {type(given).__name__}"
    # Of logits that are not finite the number need not be, and what is to be done is another thing.
    if not was and not one.isfinite() and logits.isfinite().all():
        was = str(float(one))
    if was:
        raise InputError(
            f"the metric {name_of(function)} gave {was} for logits of shape {tuple(logits.shape)}: expected a function that "
            "gives one finite number, such as the mean over the batch."
        )
    return one.double().reshape(())


def name_of(function: Any) -> str:
    """What a user's function is called in tables."""
    name = str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "function")
    return f"own {name}" if name in (*DISTANCES, LOGIT_DIFFERENCE) else name


def check_finite(distances: Float64[Tensor, "*any"], what: str) -> None:
    """Raises NonFiniteError where a distance is not a number: there is then no share of it to recover."""
    if not bool(distances.isfinite().all()):
        raise NonFiniteError(
            f"{what}: NaN or Inf appeared in the logits: use a dtype with a wider range, such as dtype='bfloat16' or "
            "'float32'; compare() says where it appears first."
        )
