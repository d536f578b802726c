"""What is asked of log-probs as numbers alone: which are compared, how far apart, surely or by
chance.

Whatever is chosen among several is chosen on a third of the tokens and accepted on the others, the
held-out ones: to choose takes fewer than to be sure.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np
import scipy
import torch
from torch import Tensor

from kvinterp.recording.engine_path import EnginePath

CHANCE = 1e-3
"""The level of every test and interval here: how often it may call chance a difference."""
MOVED = 1e-6
"""What moves a log-prob by no more than this part of the most that it moves any does not act on it:
float64 rounds.
"""
FEWEST = math.ceil(-math.log2(CHANCE) * 3 / 2)
"""The fewest tokens that are judged: on two thirds of fewer no signed-rank test can reject at this
level.
"""


@dataclasses.dataclass(frozen=True, eq=False)
class Tokens:
    """The tokens whose log-probs are judged, one after another.

    Attributes:
        engine: ``[token]``, what the engine gave.
        sequence: Which path each is of.
        position: Where in it.
    """

    engine: np.ndarray
    sequence: np.ndarray
    position: np.ndarray

    @classmethod
    def of(cls, paths: Sequence[EnginePath]) -> Tokens:
        """Gathers what all paths have behind the first position."""
        positions = [np.flatnonzero(np.isfinite(path.chosen[1:])) + 1 for path in paths]
        engine = np.concatenate(
            [*(path.chosen[at] for path, at in zip(paths, positions, strict=True)), np.array([])]
        )
        sequence = np.repeat(np.arange(len(paths)), [len(at) for at in positions])
        return cls(engine, sequence, np.concatenate([*positions, np.array([], int)]))

    @property
    def run(self) -> np.ndarray:
        """``[token]``: which run of neighbours each is of; runs, at least :data:`FEWEST`, are what
        is resampled.
        """
        return np.arange(len(self.engine)) // max(1, len(self.engine) // FEWEST)

    @property
    def held_out(self) -> np.ndarray:
        """``[token]``: two runs of three."""
        return self.run % 3 > 0

    def at(self, where: np.ndarray) -> Tokens:
        """Those where a mask holds."""
        return Tokens(self.engine[where], self.sequence[where], self.position[where])

    def some(self, most: int) -> Tokens:
        """At most so many of them: of the first sequences that have as many, and of at least four
        if there are.
        """
        numbers, at = np.unique(self.sequence), np.array([], int)
        draw = np.random.default_rng(0)
        for number in numbers:
            own = draw.permutation(np.flatnonzero(self.sequence == number))
            at = np.append(at, own[: min(most - len(at), -(-most // min(4, len(numbers))))])
        at.sort()
        return self.at(at)

    def gathered(self, rows: Mapping[int, np.ndarray | None]) -> np.ndarray:
        """``[token]``: of numbers by sequence and position those of the tokens; NaN where there are
        none.
        """
        values = np.full(len(self.engine), np.nan)
        for number, row in rows.items():
            here = self.sequence == number
            values[here] = np.nan if row is None else row[self.position[here]]
        return values

    def ratio(self, distance: np.ndarray, ours: np.ndarray, seed: int) -> dict[str, float]:
        """One distance to float64 over another where both are: of the means, with an interval by
        resampling, and of the largest.

        Args:
            distance: ``[token]``, the engine's ``|difference to float64|``.
            ours: The same of one of our precisions.
            seed: Seeds the resampling.
        """
        known = np.isfinite(distance) & np.isfinite(ours)
        _, index = np.unique(self.run[known], return_inverse=True)
        sums = np.array([np.bincount(index, each[known]) for each in (distance, ours)])
        drawn = np.random.default_rng(seed).integers(
            0, sums.shape[1], (round(10 / CHANCE), sums.shape[1])
        )
        above, below = np.maximum(sums[:, drawn].sum(-1), TINY)
        low, high = np.quantile(above / below, [CHANCE, 1 - CHANCE])
        mean, most = (of(distance[known]) / max(of(ours[known]), TINY) for of in (np.mean, np.max))
        return {"mean": float(mean), "low": float(low), "high": float(high), "max": float(most)}

    def onset(self, distance: np.ndarray, noise: np.ndarray) -> int | None:
        """The position from which on an engine surely differs by more, in units of our own noise;
        None where there is none.

        Args:
            distance: ``[token]``, absolute.
            noise: ``[token]``, the same of one of our precisions: what late positions have anyway
                is not said of the engine.
        """
        level = scipy.stats.rankdata((distance + TINY) / (noise + TINY))
        best, cut, tried = 0.0, None, np.unique(self.position)[::2]
        for position in tried:
            late = self.position >= position
            n, m = int(late.sum()), int((~late).sum())
            if min(n, m) >= FEWEST // 2:
                # The normal form of Mann and Whitney's test of late against early.
                z = (level[late].sum() - n * (n + m + 1) / 2) / np.sqrt(n * m * (n + m + 1) / 12)
                best, cut = max((best, cut), (float(z), int(position)), key=lambda one: one[0])
        # One of many cuts is the best one by chance: the level is divided among them.
        return cut if scipy.stats.norm.sf(best) < CHANCE / len(tried) else None


TINY = float(np.finfo(float).tiny)


def mean_gap(a: np.ndarray, b: np.ndarray, where: np.ndarray) -> float:
    """The mean of ``|a - b|`` where both are and ``where`` holds; infinity where none is."""
    gap = np.abs(a - b)[where]
    gap = gap[np.isfinite(gap)]
    return float(gap.mean()) if len(gap) else float("inf")


def nearer(side: np.ndarray, row: np.ndarray, truth: np.ndarray, where: np.ndarray) -> bool:
    """Whether a row is surely nearer to a side than the truth is (Wilcoxon's signed ranks), at the
    tokens that it moves.
    """
    moved = np.abs(row - truth)
    gain = (np.abs(side - truth) - np.abs(side - row))[
        where & (moved > MOVED * np.nanmax(moved, initial=0.0))
    ]
    gain = gain[np.isfinite(gain)]
    return bool(gain.any()) and bool(
        scipy.stats.wilcoxon(gain, alternative="greater").pvalue < CHANCE
    )


def alike(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two signed differences surely go together (Spearman's rank correlation,
    one-sided).
    """
    known = np.isfinite(a) & np.isfinite(b)
    moved = a[known].any() and b[known].any()
    return bool(moved) and bool(
        scipy.stats.spearmanr(a[known], b[known], alternative="greater").pvalue < CHANCE
    )


def fitted(loss: Callable[[float], float], near: float, reach: float) -> float:
    """The size of least loss, looked for in its logarithm, as exactly as float32 has to be
    reproduced.
    """
    bounds, options = (np.log(near) - reach, np.log(near) + reach), {"xatol": 1e-8, "maxiter": 40}
    best = scipy.optimize.minimize_scalar(
        lambda size: loss(np.exp(size)), bounds=bounds, method="bounded", options=options
    )
    return float(np.exp(best.x))


def truncated(logits: Tensor, ids: np.ndarray) -> Mapping[str, np.ndarray]:
    """Log-probs, ``[token]``, after each truncation, of ``[token, vocabulary]`` logits and
    ``[token]`` ids.
    """
    own = logits.log_softmax(-1).gather(1, torch.from_numpy(ids)[:, None])
    sums = logits.softmax(-1).sort(-1, descending=True).values.cumsum(-1)
    last = logits.shape[1] - 1
    keeps = {
        f"top_k={k}": torch.full((len(ids), 1), k - 1)
        for k in (5, 10, 20, 40, 50, 64, 100)
        if k <= last
    }
    for share in (0.5, 0.8, 0.9, 0.95, 0.99):
        keeps[f"top_p={share:g}"] = (sums < share).sum(-1, keepdim=True).clamp(max=last)
    rows = {
        f"after {name}": (own - sums.gather(1, keep).log())[:, 0].numpy()
        for name, keep in keeps.items()
    }
    probabilities = logits.softmax(-1)
    for share in (0.01, 0.02, 0.05, 0.1, 0.2):
        kept = (
            probabilities.masked_fill(
                probabilities < share * probabilities.amax(-1, keepdim=True), 0
            )
            .sum(-1)
            .log()
        )
        rows[f"after min_p={share:g}"] = (own[:, 0] - kept).numpy()
    return rows


def warm(value: float, logits: Tensor, ids: np.ndarray) -> np.ndarray:
    """Log-probs, ``[token]``, after a temperature."""
    return (logits / value).log_softmax(-1).gather(1, torch.from_numpy(ids)[:, None])[:, 0].numpy()  # type: ignore[no-any-return]


_WARM = "after temperature "


def warmth(name: str) -> float | None:
    """The temperature of a cause's name; None of another cause."""
    return float(name.removeprefix(_WARM).split()[0]) if name.startswith(_WARM) else None


def warmed(
    engine: np.ndarray, logits: Tensor, ids: np.ndarray, where: np.ndarray
) -> Mapping[str, np.ndarray]:
    """Log-probs as :func:`truncated` gives them after the temperature that is nearest to the engine
    at some of the tokens.
    """

    def loss(value: float) -> float:
        return mean_gap(engine, warm(value, logits, ids), where)

    # The loss has one valley near the truth and may be flat elsewhere: a grid first.
    grid = np.exp(np.linspace(-1.5, 1.5, 13))
    value = fitted(loss, min(grid, key=loss), float(np.log(grid[1] / grid[0])))
    return {f"{_WARM}{value:.3g}": warm(value, logits, ids)}


def warmed_and_truncated(logits: Tensor, ids: np.ndarray) -> dict[str, np.ndarray]:
    """Log-probs after a usual temperature and a truncation, of few tokens and small vocabularies,
    since each sorts them.
    """
    values = (0.5, 0.6, 0.7, 0.8, 0.9, 1.1, 1.2, 1.3) if logits.shape[1] * len(ids) < 2**22 else ()
    return {f"{_WARM}{value:.3g} and {name.removeprefix('after ')}": row
            for value in values for name, row in truncated(logits / value, ids).items()}  # fmt: skip


def penalised(
    engine: np.ndarray,
    logits: Tensor,
    ids: np.ndarray,
    seen: Sequence[Sequence[int]],
    cuts: np.ndarray,
    where: np.ndarray,
) -> Mapping[str, np.ndarray]:
    """Log-probs after each penalty, of the size that is nearest to the engine at some of the
    tokens.

    Args:
        engine: ``[token]``, the engine's log-probs.
        logits: ``[token, vocabulary]``, as the model gives them: a repetition penalty divides those
            above 0.
        ids: ``[token]``.
        seen: For each token the ids before it.
        cuts: How many of them are the prompt's.
        where: ``[token]``: those that sizes are chosen on.
    """
    counts, every = torch.zeros_like(logits), torch.zeros_like(logits)
    for row, (before, cut) in enumerate(zip(seen, cuts.tolist(), strict=True)):
        every[row, list(before)] = 1
        reply = torch.tensor(before[cut:], dtype=torch.int64)
        counts[row].index_add_(0, reply, torch.ones(len(reply), dtype=counts.dtype))

    def repeated(seen: Tensor, size: float) -> Tensor:
        return torch.where(seen > 0, torch.where(logits > 0, logits / size, logits * size), logits)

    kinds = {
        # CTRL's (arXiv 1909.05858, section 4.1) as transformers and vLLM have it.
        "repetition_penalty={:.3g} over prompt and reply": lambda size: repeated(every, size),
        "repetition_penalty={:.3g} over the reply": lambda size: repeated(counts, size),
        "presence_penalty={:.3g}": lambda size: logits - (size - 1) * (counts > 0),
        "frequency_penalty={:.3g}": lambda size: logits - (size - 1) * counts,
    }
    rows = dict[str, np.ndarray]()
    for name, made in kinds.items():

        def loss(size: float, made: Callable[[float], Tensor] = made) -> float:
            return mean_gap(engine, warm(1.0, made(size), ids), where)

        grid = (1.02, 1.05, 1.1, 1.2, 1.5, 2.0)
        size = fitted(loss, min(grid, key=loss), 0.4)
        rows["after " + name.format(size if name.startswith("repetition") else size - 1)] = warm(
            1.0, made(size), ids
        )
    return rows


def masked(
    engine: np.ndarray, logits: Tensor, ids: np.ndarray, where: np.ndarray
) -> Mapping[str, np.ndarray]:
    """Log-probs where one token is banned or biased, and those of the likeliest token in the place
    of the drawn one.

    Banning the token v raises the log-prob of another by ``-log(1 - p(v))``; the token is the
    nearest one at some of the tokens.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, torch.from_numpy(ids)[:, None])
    gap = torch.from_numpy(engine)[:, None] - own
    chosen = torch.from_numpy(where)
    rows = {"of the likeliest token, not of the drawn one": logprobs.amax(-1).numpy()}
    # A bias b of v gives log(1 + p(v) (e^b - 1)) less; here for each token v at once.
    is_own = torch.from_numpy(ids)[:, None] == torch.arange(logits.shape[1])
    for bias in (-math.inf, -10.0, -5.0, -2.0, -1.0, 1.0, 2.0, 5.0, 10.0):
        moved = -(math.expm1(bias) * logprobs.exp()).clamp(min=-1 + 1e-12).log1p()
        moved = moved + is_own * bias if bias > -math.inf else moved
        token = int((gap - moved).abs()[chosen].mean(0).argmin())
        name = f"with a bias of {bias:+g}" if bias > -math.inf else "banned"
        rows[f"those with token {token} {name}"] = (own[:, 0] + moved[:, token]).numpy()
    return rows


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
    for dtype in (torch.bfloat16, torch.float16):
        if np.array_equal(rounded(values, dtype), values):
            return f"in {str(dtype).removeprefix('torch.')}", functools.partial(
                rounded, dtype=dtype
            )
    for digits in range(1, 7):
        if np.array_equal(np.round(values, digits), values):
            return f"with {digits} decimal{'s' * (digits > 1)}", functools.partial(
                np.round, decimals=digits
            )  # type: ignore[return-value]
    return None


def rounded(values: np.ndarray, dtype: torch.dtype) -> np.ndarray:
    """Numbers as a dtype holds them."""
    return torch.from_numpy(values).to(dtype).double().numpy()  # type: ignore[no-any-return]
