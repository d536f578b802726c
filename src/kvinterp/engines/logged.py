"""What a training run logs of log-probs: trainer beside rollout, with intervals, and beside what
rounding alone would log.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from kvinterp.engines.numbers import CHANCE, Tokens
from kvinterp.metrics.rollouts import rollout_intervals, rollout_statistics
from kvinterp.recording.engine_path import EnginePath


def logged(
    paths: Sequence[EnginePath],
    tokens: Tokens,
    truth: np.ndarray,
    ours: np.ndarray | None,
    precision: str,
    seed: int,
) -> dict[str, Any] | None:
    """Compares trainer and rollout: the file's own trainer where it has one, or our float64; None
    where nothing is given.

    Args:
        paths: The sequences.
        tokens: The judged tokens.
        truth: ``[token]``, our float64.
        ours: ``[token]``, our own path in the rollout's precision; None where it could not be run.
        precision: Its name.
        seed: Seeds the resampling.
    """
    own = any(path.trainer is not None for path in paths)
    trainer = tokens.gathered(dict(enumerate(path.trainer for path in paths))) if own else truth
    known = np.isfinite(trainer)
    if not known.any():
        return None
    trainer, rollout, sequence = trainer[known], tokens.engine[known], tokens.sequence[known]
    rows = []
    for number in np.unique(sequence):
        at = sequence == number
        rows.append(
            {
                "sequence": paths[number].id,
                **rollout_statistics(trainer[at], rollout[at], sequence[at]),
            }
        )
    every = rollout_statistics(trainer, rollout, sequence)
    found: dict[str, Any] = {
        "trainer": "the file's trainer" if own else "our float64",
        "all": every,
        "by_sequence": rows,
    }
    found["intervals"] = rollout_intervals(trainer, rollout, sequence, CHANCE, seed)
    if ours is not None:
        # What a faultless engine in this precision would log.
        found["null"] = rollout_statistics(truth[known], ours[known], sequence)
        apart = (truth - ours)[known]
        means = [float(apart[sequence == number].mean()) for number in np.unique(sequence)]
        floor = {
            "token": np.median(np.abs(np.expm1(apart))),
            "sequence": np.median(np.abs(np.expm1(means))),
        }
        found["floor"] = {name: float(value) for name, value in floor.items()} | {
            "precision": precision
        }
    return found
