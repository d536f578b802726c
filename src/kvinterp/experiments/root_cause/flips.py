"""Experiment 4: when a token flips, beside how far apart the paths are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics
from kvinterp.comparison import compare

__all__ = ["correlations_of", "flips_against_kl", "flips_of", "seeds_of"]


def flips_against_kl(
    model: Any,
    prompts: Any,
    kernels: str = "native",
    strategy: str = "greedy",
    max_new_tokens: int = 48,
    dtype: str | None = None,
    seeds: Sequence[int] = (0, 1, 2),
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Experiment 4: the step of the first flipped token against the mean KL, and the control that the paper lacks.

    In the free protocol the KL after a flip is that of two texts: an early flip leaves more such steps, so a negative
    correlation follows from counting alone. Beside it: the KL before the flip, and the matched protocol's, which hold only
    arithmetic.

    Args:
        model: A model of any kind.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        kernels: The kernel mode of both paths.
        strategy: How tokens are chosen; sampled ones stand at a boundary more often than a sure model's greedy ones.
        max_new_tokens: Most steps.
        dtype: The dtype of both paths; the model's own where it is not given.
        seeds: Seeds of the sampling, each decoding every prompt once; greedy decoding uses the first alone.

    Returns:
        The examples, one row a prompt and seed (flip_index, mean_kl, mean_kl_before_flip, which counts the step of the flip
        itself, mean_kl_after_flip, matched_mean_kl, smallest_margin), and the correlations of the flip index as
        :func:`correlations_of` gives them.
    """
    runs = seeds_of(strategy, seeds)
    examples = pd.concat(
        [flips_of(model, prompts, kernels, strategy, max_new_tokens, dtype, seed) for seed in runs], ignore_index=True
    )
    return examples, correlations_of(examples)


def seeds_of(strategy: str, seeds: Sequence[int]) -> Sequence[int]:
    """The seeds that make a difference: a greedy decode draws no random number."""
    return seeds[:1] if strategy == "greedy" else seeds


def flips_of(
    model: Any,
    prompts: Any,
    kernels: str,
    strategy: str,
    max_new_tokens: int,
    dtype: str | None = None,
    seed: int = 0,
) -> pd.DataFrame:
    """One seed's examples of :func:`flips_against_kl`."""
    tail = f"[kernels={kernels}]" + (f"@{dtype}" if dtype else "")
    settings: dict[str, Any] = {"strategy": strategy, "max_new_tokens": max_new_tokens, "record": "", "seed": seed}
    settings["progress"] = "none"
    free = compare(model, prompts, f"cached{tail}", f"recompute{tail}", protocol="free", **settings).examples
    matched = compare(model, prompts, f"cached{tail}", f"recompute{tail}", **settings).examples
    columns = [
        "example",
        "id",
        "flip_index",
        "mean_kl",
        "mean_kl_before_flip",
        "mean_kl_after_flip",
        "smallest_margin",
        "steps",
    ]
    return (
        free[columns]
        .merge(
            matched[["example", "mean_kl", "smallest_margin"]].rename(
                columns={"mean_kl": "matched_mean_kl", "smallest_margin": "matched_smallest_margin"}
            ),
            on="example",
        )
        .assign(seed=seed)
    )


def correlations_of(examples: pd.DataFrame) -> pd.DataFrame:
    """How the step of the first flip goes with each KL, over the decodes that flip.

    Args:
        examples: As :func:`flips_against_kl` gives them, of one model or several.

    Returns:
        One row a quantity: against, examples (decodes that flip), prompts (those they come from), pearson with an interval
        (pearson_low, pearson_high) from resampling whole prompts, since the decodes of one prompt are not independent,
        spearman, and the paper's split into the earliest and the latest third: early_mean, late_mean. NaN where fewer than
        six decodes flip or nothing varies.
    """
    flipped = examples.dropna(subset=["flip_index"])
    rows = []
    for against in ("mean_kl", "mean_kl_before_flip", "matched_mean_kl", "matched_smallest_margin"):
        pair = flipped[np.isfinite(flipped[against].astype(float))]
        found = _correlated(pair["flip_index"].astype(float), pair[against].astype(float), pair["id"])
        rows.append({"against": against, "examples": len(pair), "prompts": pair["id"].nunique(), **found})
    return pd.DataFrame(rows)


def _correlated(x: pd.Series, y: pd.Series, prompt: pd.Series) -> dict[str, float]:
    names = ("pearson", "pearson_low", "pearson_high", "spearman", "early_mean", "late_mean")
    if len(x) < 6 or x.nunique() < 2 or y.nunique() < 2:
        return dict.fromkeys(names, np.nan)
    early, late = y[x <= x.quantile(1 / 3)], y[x >= x.quantile(2 / 3)]
    interval = metrics.clustered_interval(_pearson, prompt.to_numpy(), x.to_numpy(), y.to_numpy())
    numbers = (_pearson(x, y), *interval, stats.spearmanr(x, y).statistic, early.mean(), late.mean())
    return dict(zip(names, map(float, numbers), strict=True))


def _pearson(x: Any, y: Any) -> float:
    if len(np.unique(x)) < 2 or len(np.unique(y)) < 2:
        return float("nan")
    return float(stats.pearsonr(x, y).statistic)
