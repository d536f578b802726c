"""The steps by which another engine's log-probs are judged, each on numbers alone: which of them, in what order, is in ``given``.

Whatever is chosen among several is chosen on one half of the positions and accepted on the other.
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

from kvinterp.recording.given import GivenPath

FEWEST = 32
"""Of fewer tokens nothing is judged."""
DRAWS = 400
CHANCE = 1e-3
"""The level of every test here: how often it may call chance a difference."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens that were given, behind each other.

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
    def of(cls, paths: Sequence[GivenPath]) -> Tokens:
        """Gathers what all paths were given behind the first position."""
        usable = [np.flatnonzero(np.isfinite(path.chosen[1:])) + 1 for path in paths]
        sequence = np.concatenate([np.full(len(at), n) for n, at in enumerate(usable)]).astype(int)
        position = np.concatenate(usable).astype(int)
        engine = np.concatenate([path.chosen[at] for path, at in zip(paths, usable, strict=True)])
        _, rank = np.unique(sequence, return_inverse=True)
        count = int(rank.max(initial=-1)) + 1
        halves = [position // 8 % 2 == 1, np.arange(len(engine)) // 4 % 2 == 1]
        halves = [rank % 2 == 1, *halves] if count >= 4 else halves
        # The tokens may lie in few sequences or at few positions: both halves have some.
        held = next((half for half in halves if min(half.sum(), (~half).sum()) >= FEWEST // 2), halves[-1])
        unit = sequence if count >= 8 else sequence * 100_000 + position // 8
        return cls(engine, sequence, position, held, unit)

    def some(self, most: int) -> np.ndarray:
        """``[token]``: at most so many, drawn from the first sequences that have as many, and from at least four if there are.

        Of few tokens there are some of each half, and of the end of a text as well as of its beginning.
        """
        found = np.zeros(len(self.engine), bool)
        numbers = np.unique(self.sequence)
        draw = np.random.default_rng(0)
        for number in numbers:
            own = np.flatnonzero(self.sequence == number)
            count = min(len(own), most - int(found.sum()), -(-most // min(4, len(numbers))))
            found[draw.permutation(own)[:count]] = True
        return found

    def gathered(self, rows: Sequence[np.ndarray | None], offset: int = 0) -> np.ndarray:
        """``[token]``: of numbers by sequence and position those of the tokens; NaN where there are none."""
        found = np.full(len(self.engine), np.nan)
        for number, row in enumerate(rows):
            if row is None:
                continue
            here = np.flatnonzero(self.sequence == number)
            at = self.position[here] + offset
            fits = (at > 0) & (at < len(row))
            found[here[fits]] = row[at[fits]]
        return found


def mean_gap(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> float:
    """The mean of ``|a - b|`` where both are and ``where`` holds; infinity where none is."""
    gap = np.abs(a - b)[where]
    gap = gap[np.isfinite(gap)]
    return float(gap.mean()) if len(gap) else float("inf")


def nearest(tokens: Tokens, others: Mapping[str, np.ndarray]) -> str:
    """The alternative that is nearest to the engine on the positions that are not held out; empty of none."""
    fit = {name: mean_gap(tokens.engine, row, ~tokens.held) for name, row in others.items()}
    return min(fit, key=fit.__getitem__) if fit else ""


def nearer(tokens: Tokens, row: np.ndarray, truth: np.ndarray) -> bool:
    """Whether an alternative is surely nearer to the engine than the truth on held-out positions (Wilcoxon's signed ranks)."""
    ok = tokens.held & np.isfinite(row) & np.isfinite(truth)
    gain = np.abs(tokens.engine - truth)[ok] - np.abs(tokens.engine - row)[ok]
    if not gain.any():
        return False
    return bool(scipy.stats.wilcoxon(gain, alternative="greater").pvalue < CHANCE)


def temperature(engine: np.ndarray, logits: Tensor, ids: np.ndarray, held: np.ndarray) -> tuple[float, np.ndarray]:
    """The temperature at which our logits are nearest to the engine's log-probs where none is held out, and what they are then.

    Args:
        engine: ``[token]``.
        logits: ``[token, vocabulary]`` of our float64.
        ids: ``[token]``.
        held: ``[token]``, the held-out ones.
    """
    own = torch.from_numpy(ids)[:, None]

    def at(value: float) -> np.ndarray:
        return (logits / value).log_softmax(-1).gather(1, own)[:, 0].numpy()

    def loss(value: float) -> float:
        return mean_gap(engine, at(np.exp(value)), ~held)

    # The loss has one valley near the truth and may be flat elsewhere: a grid first.
    grid = np.linspace(-1.5, 1.5, 13)
    near = float(grid[np.argmin([loss(value) for value in grid])])
    found = float(np.exp(scipy.optimize.minimize_scalar(loss, bounds=(near - 0.25, near + 0.25), method="bounded").x))
    return found, at(found)


def truncations(logits: Tensor) -> dict[str, np.ndarray]:
    """By how much each way of truncation raises the log-prob of a token that it keeps, ``[token]``."""
    ordered = logits.softmax(-1).sort(-1, descending=True).values
    sums = ordered.cumsum(-1)
    found = {f"top_k={k}": -sums[:, k - 1].log() for k in (5, 10, 20, 40, 50, 64, 100) if k < logits.shape[1]}
    for share in (0.5, 0.8, 0.9, 0.95, 0.99):
        kept = sums.gather(1, (sums < share).sum(-1, keepdim=True).clamp(max=logits.shape[1] - 1))[:, 0]
        found[f"top_p={share:g}"] = -kept.log()
    return {name: row.numpy() for name, row in found.items()}


def one_sided(difference: np.ndarray) -> tuple[float, float]:
    """The share of differences above 0, and the chance of as one-sided a share where both signs are as likely."""
    moved = difference[difference != 0]
    if not len(moved):
        return 0.5, 1.0
    above = int((moved > 0).sum())
    return above / len(moved), float(scipy.stats.binomtest(above, len(moved)).pvalue)


def ratio(tokens: Tokens, engine: np.ndarray, ours: np.ndarray, seed: int) -> dict[str, float]:
    """One distance to float64 over another, mean and max, with 98% of the resampled means, where both are.

    Args:
        tokens: The tokens.
        engine: ``[token]``, the engine's ``|difference to float64|``.
        ours: The same of one of our precisions.
        seed: Seeds the resampling.
    """
    ok = np.isfinite(engine) & np.isfinite(ours)
    _, index = np.unique(tokens.unit[ok], return_inverse=True)
    engine, ours = engine[ok], ours[ok]
    sums = [np.bincount(index, each) for each in (engine, ours)]
    drawn = np.random.default_rng(seed).integers(0, len(sums[0]), (DRAWS, len(sums[0])))
    means = sums[0][drawn].sum(1) / np.maximum(sums[1][drawn].sum(1), 1e-300)
    low, high = np.quantile(means, [0.01, 0.99])
    mean, most = engine.sum() / max(ours.sum(), 1e-300), engine.max() / max(ours.max(), 1e-300)
    return {"mean": float(mean), "low": float(low), "high": float(high), "max": float(most)}


def alike(seen: np.ndarray, ours: np.ndarray) -> bool:
    """Whether two signed differences surely go together (Spearman's rank correlation, one-sided)."""
    ok = np.isfinite(seen) & np.isfinite(ours)
    if not seen[ok].any() or not ours[ok].any():
        return False
    return bool(scipy.stats.spearmanr(seen[ok], ours[ok], alternative="greater").pvalue < CHANCE)


def onset(tokens: Tokens, difference: np.ndarray, noise: np.ndarray) -> int | None:
    """The position from which on an engine surely differs by more, in units of our own noise; None where there is none.

    Args:
        tokens: The tokens.
        difference: ``[token]``, absolute.
        noise: ``[token]``, the same of one of our precisions: what late positions have anyway is not said of the engine.
    """
    level = scipy.stats.rankdata(np.log(difference + 1e-12) - np.log(noise + 1e-12))
    best, cut, tried = 0.0, None, np.unique(tokens.position)[::2]
    for position in tried:
        late = tokens.position >= position
        n, m = int(late.sum()), int((~late).sum())
        if min(n, m) < FEWEST // 4:
            continue
        # The normal form of Mann and Whitney's test of late against early.
        z = (level[late].sum() - n * (n + m + 1) / 2) / np.sqrt(n * m * (n + m + 1) / 12)
        if z > best:
            best, cut = float(z), int(position)
    # One of many cuts is the best one by chance: the level is divided among them.
    return cut if cut is not None and scipy.stats.norm.sf(best) < CHANCE / len(tried) else None


Written = tuple[str, Callable[[np.ndarray], np.ndarray]]
"""How numbers were written down, and what writes others so."""


def written(values: np.ndarray, step: float | None = None) -> Written | None:
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
        if np.abs(values * 10.0**digits - np.round(values * 10.0**digits)).max() < 1e-5:
            return f"with {digits} decimal{'s' * (digits > 1)}", functools.partial(_decimals, digits=digits)
    for dtype in (torch.bfloat16, torch.float16):
        if np.array_equal(rounded(values, dtype), values):
            return f"in {str(dtype).removeprefix('torch.')}", functools.partial(rounded, dtype=dtype)
    return None


def _decimals(values: np.ndarray, digits: int) -> np.ndarray:
    return np.asarray(np.round(values, digits))


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Numbers as a dtype holds them."""
    return torch.from_numpy(values).to(dtype).double().numpy()  # type: ignore[no-any-return]
