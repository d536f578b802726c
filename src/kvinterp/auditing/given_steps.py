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

WINS = 0.5
"""An alignment or a temperature is accepted where it leaves less than this share of the mean difference on held-out positions."""
REPRODUCES = 0.7
"""The same of a cause: noise of the engine's own precision stays."""
BANDS = {"float32": (5.0, 10.0), "": (1.6, 3.5)}
"""How far clean engines stand from float64 in units of ours, mean and max: in float32 up to 3.5, in 16 bits up to 1.4."""
FEWEST = 32
"""Of fewer tokens nothing is judged."""
DRAWS = 400
ALIKE = 0.1
"""A coarser precision than the declared one is named where the rank correlation of its differences with ours is surely above
this: of faults of the same size it is at most 0.06, of engines that compute in that precision from 0.2 on."""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens that were given, behind each other.

    Attributes:
        engine: ``[token]``, what the engine gave.
        sequence: Which path each is of.
        position: Where in it.
        held: Whether it is held out.
        unit: What is drawn when resampling: the sequence, or of few sequences a block of 16 positions.
    """

    engine: np.ndarray
    sequence: np.ndarray
    position: np.ndarray
    held: np.ndarray
    unit: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[GivenPath]) -> Tokens:
        """Of all paths what was given behind the first position."""
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
        unit = sequence if count >= 8 else sequence * 100_000 + position // 16
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


def winner(tokens: Tokens, truth: np.ndarray, others: Mapping[str, np.ndarray], share: float) -> tuple[str, float]:
    """The one of some alternatives to ``truth`` that is nearest to the engine, and what it leaves on held-out positions.

    Returns:
        Its name and the share of the mean difference that it leaves; an empty name where none leaves less than ``share``.
    """
    if not others:
        return "", 1.0
    every = {name: (np.isfinite(row) & np.isfinite(truth), row) for name, row in others.items()}
    fit = {
        name: mean_gap(tokens.engine, row, ok & ~tokens.held)
        / max(mean_gap(tokens.engine, truth, ok & ~tokens.held), 1e-30)
        for name, (ok, row) in every.items()
    }
    best = min(fit, key=fit.__getitem__)
    ok, row = every[best]
    left = mean_gap(tokens.engine, row, ok & tokens.held) / max(mean_gap(tokens.engine, truth, ok & tokens.held), 1e-30)
    enough = int((ok & tokens.held).sum()) >= FEWEST // 2
    return (best if enough and left < share and fit[best] < share else ""), left


def slope(effect: np.ndarray, seen: np.ndarray) -> float:
    """By how much of an effect the engine differs: the median of the quotients where the effect is large."""
    large = np.isfinite(effect) & np.isfinite(seen) & (np.abs(effect) > np.nanmedian(np.abs(effect)))
    return float(np.median(seen[large] / effect[large])) if large.any() else 0.0


def temperature(engine: np.ndarray, logits: Tensor, ids: np.ndarray, held: np.ndarray) -> tuple[float, float]:
    """The temperature at which our logits are nearest to the engine's log-probs, and the share that it leaves held out.

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
        return float(np.abs(engine - at(np.exp(value)))[~held].mean())

    # The loss has one valley near the truth and may be flat elsewhere: a grid first.
    grid = np.linspace(-1.5, 1.5, 13)
    near = float(grid[np.argmin([loss(value) for value in grid])])
    found = float(np.exp(scipy.optimize.minimize_scalar(loss, bounds=(near - 0.25, near + 0.25), method="bounded").x))
    before = max(float(np.abs(engine - at(1.0))[held].mean()), 1e-30)
    return found, float(np.abs(engine - at(found))[held].mean()) / before


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
    """The engine's distance to float64 over ours, mean and max, with 95% of the resampled means.

    Args:
        tokens: The tokens.
        engine: ``[token]``, the engine's ``|difference to float64|``.
        ours: The same of one of our precisions.
        seed: Seeds the resampling.
    """
    _, index = np.unique(tokens.unit, return_inverse=True)
    sums = [np.bincount(index, each) for each in (engine, ours)]
    drawn = np.random.default_rng(seed).integers(0, len(sums[0]), (DRAWS, len(sums[0])))
    means = sums[0][drawn].sum(1) / np.maximum(sums[1][drawn].sum(1), 1e-300)
    low, high = np.quantile(means, [0.025, 0.975])
    mean, most = engine.sum() / max(ours.sum(), 1e-300), engine.max() / max(ours.max(), 1e-300)
    return {"mean": float(mean), "low": float(low), "high": float(high), "max": float(most)}


def alike(seen: np.ndarray, ours: np.ndarray) -> float:
    """The lower end of the 98% interval of the rank correlation of two signed differences; 0 where one of them has none."""
    if not seen.any() or not ours.any():
        return 0.0
    return float(scipy.stats.spearmanr(seen, ours).statistic) - 2.33 / float(np.sqrt(len(seen)))


def within(rung: str, found: Mapping[str, float]) -> bool:
    """Whether a distance lies in the band of clean engines, its mean and its max."""
    mean, most = BANDS.get(rung, BANDS[""])
    return found["mean"] <= mean and found["max"] <= most


def shape(tokens: Tokens, difference: np.ndarray, noise: np.ndarray) -> tuple[str, int | None]:
    """Where a difference lies, as a word of suspicion, and the position where it begins if it does.

    Args:
        tokens: The tokens.
        difference: ``[token]``, absolute.
        noise: ``[token]``, the same of one of our precisions: what late positions have anyway is not said of the engine.
    """
    total = difference.sum()
    if not total:
        return "nowhere", None
    few = np.sort(difference)[::-1][: max(1, len(difference) // 100)].sum() / total
    if few > 0.5:
        return f"on few tokens: 1% of them hold {few:.0%} of it", None
    level, own = np.log(difference + 1e-12), np.log(noise + 1e-12)
    best, cut = 0.0, None
    for position in np.unique(tokens.position)[::4]:
        late = tokens.position >= position
        if min(late.sum(), (~late).sum()) >= FEWEST // 2:
            # Early tokens may be surer than late ones: that shows in our own rounding too.
            rise = _step(level, late) - _step(own, late)
            gain = rise * np.sqrt(min(late.sum(), (~late).sum()))
            if rise > np.log(4) and gain > best:
                best, cut = float(gain), int(position)
    if cut is not None:
        early = tokens.position < cut
        if np.median(level[early]) - np.median(own[early]) < np.log(4):
            return f"from position {cut} on", cut
        return f"everywhere, and more of it from position {cut} on", None
    level = level - own
    for size in (16, 32, 64, 128):
        block = tokens.position // size
        blocks = [float(np.median(level[block == b])) for b in np.unique(block) if (block == b).sum() >= 8]
        if len(blocks) >= 3 and max(blocks) - float(np.median(blocks)) > np.log(20):
            return f"in a block of {size}, from position {int(np.unique(block)[int(np.argmax(blocks))]) * size}", None
    return "everywhere", None


def _step(level: np.ndarray, late: np.ndarray) -> float:
    return float(np.median(level[late]) - np.median(level[~late]))


def smallest(rung: str, ours: np.ndarray) -> tuple[float, float]:
    """The mean difference that would have left the band of a precision, and one token's, in nats: errors add as squares."""
    mean, most = BANDS.get(rung, BANDS[""])
    return float(np.sqrt(mean**2 - 1) * ours.mean()), float(most * ours.max())


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
