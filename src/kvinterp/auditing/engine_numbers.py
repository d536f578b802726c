"""What is asked of log-probs as numbers alone: which are compared, how far apart, surely or by chance.

Whatever is chosen among several is chosen on one half of the tokens and accepted on the other, the held-out one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy.optimize
import scipy.stats
import torch
from torch import Tensor

from kvinterp.recording.engine_path import EnginePath

FEWEST = 32
"""Of fewer tokens nothing is judged."""
DRAWS = 400
CHANCE = 1e-3
"""The level of every test here: how often it may call chance a difference."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens whose log-probs are judged, behind each other.

    Attributes:
        engine: ``[token]``, what the engine gave.
        sequence: Which path each is of.
        position: Where in it.
        held: Whether it is held out.
        unit: What is drawn when resampling: the sequence, or of few sequences a block of 8 positions.
    """

    engine: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    held: np.ndarray
    unit: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[EnginePath]) -> Tokens:
        """Gathers what all paths have behind the first position."""
        places = [np.flatnonzero(np.isfinite(path.chosen[1:])) + 1 for path in paths]
        sequence = np.repeat(np.arange(len(paths)), [len(at) for at in places])
        position = np.concatenate([*places, np.array([], int)])
        engine = np.concatenate([*(path.chosen[at] for path, at in zip(paths, places, strict=True)), np.array([])])
        numbers, rank = np.unique(sequence, return_inverse=True)
        halves = [position // 8 % 2 == 1, np.arange(len(engine)) // 4 % 2 == 1]
        halves = [rank % 2 == 1, *halves] if len(numbers) >= 4 else halves
        # The tokens may lie in few sequences or at few positions: both halves have some.
        held = next((half for half in halves if min(half.sum(), (~half).sum()) >= FEWEST // 2), halves[-1])
        unit = sequence if len(numbers) >= 8 else sequence * 100_000 + position // 8
        return cls(engine, sequence, position, held, unit)

    def some(self, most: int) -> np.ndarray:
        """``[token]``: at most so many, drawn from the first sequences that have as many, and from at least four if there are.

        Of few tokens there are some of each half, and of the end of a text as well as of its beginning.
        """
        drawn = np.zeros(len(self.engine), bool)
        numbers = np.unique(self.sequence)
        draw = np.random.default_rng(0)
        for number in numbers:
            own = np.flatnonzero(self.sequence == number)
            count = min(len(own), most - int(drawn.sum()), -(-most // min(4, len(numbers))))
            drawn[draw.permutation(own)[:count]] = True
        return drawn

    def gathered(self, rows: Sequence[np.ndarray | None], offset: int = 0) -> np.ndarray:
        """``[token]``: of numbers by sequence and position those of the tokens; NaN where there are none."""
        values = np.full(len(self.engine), np.nan)
        for number, row in enumerate(rows):
            here = np.flatnonzero(self.sequence == number)
            at = self.position[here] + offset
            fits = (at > 0) & (at < (0 if row is None else len(row)))
            if row is not None:
                values[here[fits]] = row[at[fits]]
        return values

    def nearer(self, row: np.ndarray, truth: np.ndarray) -> bool:
        """Whether a row is surely nearer to the engine than the truth is on held-out tokens (Wilcoxon's signed ranks)."""
        gain = (np.abs(self.engine - truth) - np.abs(self.engine - row))[self.held]
        gain = gain[np.isfinite(gain)]
        return bool(gain.any()) and bool(scipy.stats.wilcoxon(gain, alternative="greater").pvalue < CHANCE)

    def ratio(self, engine: np.ndarray, ours: np.ndarray, seed: int) -> dict[str, float]:
        """One distance to float64 over another, mean and max, with 98% of the resampled means, where both are.

        Args:
            engine: ``[token]``, the engine's ``|difference to float64|``.
            ours: The same of one of our precisions.
            seed: Seeds the resampling.
        """
        ok = np.isfinite(engine) & np.isfinite(ours)
        _, index = np.unique(self.unit[ok], return_inverse=True)
        engine, ours = engine[ok], ours[ok]
        sums = [np.bincount(index, each) for each in (engine, ours)]
        drawn = np.random.default_rng(seed).integers(0, len(sums[0]), (DRAWS, len(sums[0])))
        low, high = np.quantile(sums[0][drawn].sum(1) / np.maximum(sums[1][drawn].sum(1), 1e-300), [0.01, 0.99])
        mean, most = engine.sum() / max(ours.sum(), 1e-300), engine.max() / max(ours.max(), 1e-300)
        return {"mean": float(mean), "low": float(low), "high": float(high), "max": float(most)}

    def onset(self, difference: np.ndarray, noise: np.ndarray) -> int | None:
        """The position from which on an engine surely differs by more, in units of our own noise; None where there is none.

        Args:
            difference: ``[token]``, absolute.
            noise: ``[token]``, the same of one of our precisions: what late positions have anyway is not said of the engine.
        """
        level = scipy.stats.rankdata(np.log(difference + 1e-12) - np.log(noise + 1e-12))
        best, cut, tried = 0.0, None, np.unique(self.position)[::2]
        for position in tried:
            late = self.position >= position
            n, m = int(late.sum()), int((~late).sum())
            if min(n, m) < FEWEST // 4:
                continue
            # The normal form of Mann and Whitney's test of late against early.
            z = (level[late].sum() - n * (n + m + 1) / 2) / np.sqrt(n * m * (n + m + 1) / 12)
            if z > best:
                best, cut = float(z), int(position)
        # One of many cuts is the best one by chance: the level is divided among them.
        return cut if scipy.stats.norm.sf(best) < CHANCE / len(tried) else None


def mean_gap(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> float:
    """The mean of ``|a - b|`` where both are and ``where`` holds; infinity where none is."""
    gap = np.abs(a - b)[where]
    gap = gap[np.isfinite(gap)]
    return float(gap.mean()) if len(gap) else float("inf")


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two signed differences surely go together (Spearman's rank correlation, one-sided)."""
    ok = np.isfinite(a) & np.isfinite(b)
    moved = a[ok].any() and b[ok].any()
    return bool(moved) and bool(scipy.stats.spearmanr(a[ok], b[ok], alternative="greater").pvalue < CHANCE)


def one_sided(difference: np.ndarray) -> tuple[float, float]:
    """The share of differences above 0, and the chance of as one-sided a share where both signs are as likely."""
    moved = difference[np.isfinite(difference) & (difference != 0)]
    above = int((moved > 0).sum())
    return (above / len(moved), float(scipy.stats.binomtest(above, len(moved)).pvalue)) if len(moved) else (0.5, 1.0)


def fitted(loss: Callable[[float], float], near: float, reach: float) -> float:
    """The size of least loss, looked for in its logarithm, as exactly as float32 has to be reproduced."""
    bounds, options = (np.log(near) - reach, np.log(near) + reach), {"xatol": 1e-8, "maxiter": 40}
    best = scipy.optimize.minimize_scalar(lambda size: loss(np.exp(size)), bounds=bounds, method="bounded", options=options)
    return float(np.exp(best.x))


def processed(engine: np.ndarray, logits: Tensor, ids: np.ndarray, held: np.ndarray) -> Mapping[str, np.ndarray]:
    """Our log-probs, ``[token]``, after the temperature that is nearest to the engine, and after each truncation.

    Args:
        engine: ``[token]``.
        logits: ``[token, vocabulary]`` of our float64.
        ids: ``[token]``.
        held: ``[token]``, those that choose no temperature.
    """

    def at(value: float) -> np.ndarray:
        return (logits / value).log_softmax(-1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()

    def loss(value: float) -> float:
        return mean_gap(engine, at(value), ~held)

    # The loss has one valley near the truth and may be flat elsewhere: a grid first.
    value = fitted(loss, min(np.exp(np.linspace(-1.5, 1.5, 13)), key=loss), 0.25)
    sums = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    last = logits.shape[1] - 1
    keeps = {f"top_k={k}": torch.full((len(ids), 1), k - 1) for k in (5, 10, 20, 40, 50, 64, 100) if k <= last}
    for share in (0.5, 0.8, 0.9, 0.95, 0.99):
        keeps[f"top_p={share:g}"] = (sums < share).sum(-1, keepdim=True).clamp(max=last)
    rows = {f"after {name}": at(1) - sums.gather(1, keep)[:, 0].log().numpy() for name, keep in keeps.items()}
    return {f"after temperature {value:.3g}": at(value), **rows}


Grid = tuple[str, Callable[[np.ndarray], np.ndarray]]
"""How numbers were written down, and what writes others so."""


def grid_of(values: np.ndarray, step: float | None = None) -> Grid | None:
    """The grid that every value lies on, coarser than float32 has it; None where there is none.

    Args:
        values: ``[token]``.
        step: The step of the format that they are from, where it has one.
    """
    if step is not None:
        return f"in steps of {step:.2g}", lambda row: np.round(row / step) * step
    if len(np.unique(values)) < FEWEST // 2:
        return None
    for digits in range(1, 7):
        if np.abs(values - np.round(values, digits)).max() < 10.0 ** (-5 - digits):
            return f"with {digits} decimal{'s' * (digits > 1)}", functools.partial(np.round, decimals=digits)  # type: ignore[return-value]
    for dtype in (torch.bfloat16, torch.float16):
        if np.array_equal(rounded(values, dtype), values):
            return f"in {str(dtype).removeprefix('torch.')}", functools.partial(rounded, dtype=dtype)
    return None


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Numbers as a dtype holds them."""
    return torch.from_numpy(values).to(dtype).double().numpy()  # type: ignore[no-any-return]
