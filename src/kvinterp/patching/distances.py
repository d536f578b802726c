"""Distances between the donor's logits and others: our own, the logit difference of two answers, or
a user's function.
"""

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
"""Returns how far apart the donor's logits and others ``[..., vocab]`` are, ``[...]``."""
DISTANCES: dict[str, Distance] = {
    "kl": metrics.kl_divergence,
    "l2": lambda donor, logits: (donor.double() - logits.double()).norm(dim=-1),
    "margin": lambda donor, logits: (
        metrics.logit_margin(donor) - metrics.logit_margin(logits)
    ).abs(),
}


def distances_of(
    distance: str | Callable[..., Any], answers: tuple[int, int] | None = None
) -> dict[str, Distance]:
    """Returns distances by name, always with L2, which shows whether logits are bitwise equal.

    Args:
        distance: Names with commas between, or a function of logits ``[batch, position, vocab]``.
        answers: The token ids of the logit difference.
    """
    if callable(distance):
        return {name_of(distance): functools.partial(_by_function, distance), "l2": DISTANCES["l2"]}
    names = dict.fromkeys([*map(str.strip, distance.split(",")), "l2"])
    return {name: DISTANCES.get(name, functools.partial(_by_answers, answers)) for name in names}


def _by_answers(pair: tuple[int, int] | None, donor: Tensor, logits: Tensor) -> Tensor:
    assert pair is not None, "sweep() checks that answers are given"
    return (logit_difference(donor, pair) - logit_difference(logits, pair)).abs()


def _by_function(function: Callable[[Tensor], Any], donor: Tensor, logits: Tensor) -> Tensor:
    """How far a function of logits ``[batch, position, vocab]`` is from its value on the donor's,
    row by row.
    """
    of_donor, of_logits = (
        torch.stack([one_number(function, row[None, None]) for row in rows])
        for rows in (donor, logits)
    )
    return (of_donor - of_logits).abs()


def one_number(
    function: Callable[[Tensor], Any], logits: Float[Tensor, "batch position vocab"]
) -> Tensor:
    """Calls a user's metric and returns its value in float64.

    Raises:
        InputError: The value is not one number.
    """
    result = function(logits)
    try:
        number = torch.as_tensor(result)
        wrong = (
            f"the shape {tuple(number.shape)}" if number.numel() != 1 or number.is_complex() else ""
        )
    except (TypeError, ValueError, RuntimeError):
        wrong = f"a {type(result).__name__}"
    # If the logits are not finite, the number need not be either, and check_finite() says what to
    # do.
    if not wrong and not number.isfinite() and logits.isfinite().all():
        wrong = str(float(number))
    if wrong:
        raise InputError(
            f"the metric {name_of(function)} gave {wrong} for logits of shape {tuple(logits.shape)}: expected a function that "
            "gives one finite number, such as the mean over the batch."
        )
    return number.double().reshape(())


def name_of(function: Any) -> str:
    """The name of a user's function in tables."""
    name = str(getattr(function, "__name__", type(function).__name__)).replace(
        "<lambda>", "function"
    )
    return f"own {name}" if name in (*DISTANCES, LOGIT_DIFFERENCE) else name


def check_finite(distances: Float64[Tensor, "*any"], what: str) -> None:
    """Raises NonFiniteError if a distance is NaN or Inf, of which no share can be recovered."""
    if not bool(distances.isfinite().all()):
        raise NonFiniteError(
            f"{what}: NaN or Inf appeared in the logits: use a dtype with a wider range, such as dtype='bfloat16' or "
            "'float32'; compare() says where it appears first."
        )
