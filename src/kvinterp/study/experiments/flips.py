"""Measure when a token flips, and how far apart the paths are then (experiment 4 of the FP16 paper)."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics
from kvinterp.common.numbers import between, counted
from kvinterp.common.result import Result
from kvinterp.comparison import compare, failures_kept
from kvinterp.data import load_prompts
from kvinterp.findings import Chart, Panel, finding, median_of
from kvinterp.study.behaviour.divergence import conditions
from kvinterp.study.cells import Cell, loaded
from kvinterp.study.experiments.base import Charts, Parts, Rows, Tables
from kvinterp.study.experiments.of_models import OfModels
from kvinterp.study.experiments.options import DRAWS, option, sampled

KLS = {"mean_kl": "free, all steps", "mean_kl_before_flip": "free, up to the flip", "matched_mean_kl": "matched, all steps"}
"""Which KL is set against the step of the flip."""


@dataclasses.dataclass(frozen=True)
class Flips(OfModels):
    """Do early flips come with a higher KL, and in the matched protocol too?

    Each kernel mode and strategy is run beside the machine's own kernels and greedy decoding.
    """

    STEPS: ClassVar = ("steps",)
    TABLES: ClassVar = ("flips", "correlations")

    def headline(self, result: Result) -> list[str]:
        """How many decodes flip, and whether an early flip goes with a high KL in the matched protocol too."""
        flips, found = result.tables["flips"], result.tables["correlations"]
        flipped = int(flips["flip_index"].notna().sum())
        lines = [f"A token flips in {flipped} of {counted(len(flips), 'decode')}."]
        free, matched = (found[found["against"] == name]["pearson"].dropna() for name in ("mean_kl", "matched_mean_kl"))
        if len(free) and len(matched):
            lines.append(
                f"The step of the flip correlates {between(free.tolist())} with the free protocol's KL, which counts other text "
                f"too, and {between(matched.tolist())} with the matched one's."
            )
        return lines

    def rows(self, tables: Tables) -> Rows:
        """How many decodes flip, the KL of those, and how it goes with the step of the flip."""
        rows = []
        for (strategy, kernels), mine in tables["flips"].groupby(["strategy", "kernels"], sort=False):
            of = {"strategy": strategy, "kernels": kernels}
            flipped = mine.dropna(subset=["flip_index"])
            rate = metrics.rate_of(mine["flip_index"].notna().to_numpy(), mine["id"].to_numpy(str))
            rows.append(
                finding("decodes that flip a token", rate.effect, (rate.low, rate.high), len(mine), "decodes", "%", **of)
            )
            for column, name in KLS.items() if len(flipped) else ():
                what = f"median KL of decodes that flip, {name}"
                rows.append(median_of(what, flipped[column], flipped["id"], measure="nats", **of))
        known = tables["correlations"].dropna(subset=["pearson"])
        known = known[known["against"].isin(KLS)]
        known = known[known["model"] == "all"] if (known["model"] == "all").any() else known
        for row in known.to_dict("records"):
            what = f"Pearson's correlation of the flip step and the KL, {KLS[row['against']]}"
            of = {name: row[name] for name in ("strategy", "kernels", "model") if row[name] != "all"}
            rows.append(finding(what, row["pearson"], (row["pearson_low"], row["pearson_high"]), row["prompts"], **of))
        return rows

    def charts(self, result: Result) -> Charts:
        """The first flipped step against the KL: free, up to the flip, and matched."""
        table = result.tables["flips"].dropna(subset=["flip_index"])
        if table.empty:
            return {}
        table = table.assign(way=table["kernels"] + " kernels, " + table["strategy"]).reset_index(drop=True)
        points = table.melt(["flip_index", "way"], list(KLS), "quantity", "kl").dropna(subset=["kl"])
        panel = Panel(points, "flip_index", "kl", "points", color="way", facet="quantity", titles=KLS,
                      label="mean KL of a decode (nats)", xlabel="step of the first flipped token")  # fmt: skip
        return {"root_cause_flips": Chart("When a token flips, and how far apart the paths are", [panel])}

    kernels: str = option("split_k(8,float16)", "Kernels for both paths.")
    strategy: str = option("top_p(1.0,2.0)", "The sampling strategy to run besides greedy.")
    steps: int = option(48, "The most tokens to decode per prompt.", min=1)
    seeds: int = option(
        3, "How many seeds to sample with.", min=1, times="yes", only=(lambda asked: sampled(asked.strategy), DRAWS)
    )

    def cells(self) -> list[Cell]:
        """A cell a model, kernel mode, strategy and seed."""
        found = []
        for number, (model, adapter) in enumerate(zip(self.models, self.adapters(), strict=True)):
            chosen = itertools.product(dict.fromkeys(("native", self.kernels)), dict.fromkeys(("greedy", self.strategy)))
            for turn, (kernels, strategy) in enumerate(chosen):
                told = f"flips of {adapter.facts.name}, {kernels} kernels, {strategy}"
                settings = {"model": self.named(model), "prompts": self.prompts, "kernels": kernels, "strategy": strategy}
                # A greedy decode draws no random number.
                for seed in range(1 if strategy == "greedy" else self.seeds):
                    more = {"max_new_tokens": self.steps, "seed": seed}
                    key = f"flips-{number}-{turn}-{seed}"
                    found.append(Cell(key, f"{__name__}:measured", settings | more, told * (seed == 0)))
        return found

    def tables(self, made: Parts) -> Tables:
        """The decodes, and how the step of the first flip goes with each KL: of each model, and of all."""
        flips = super().tables(made)["flips"]
        pooled = [flips.assign(model="all")] if len(self.models) > 1 else []
        tables = [
            correlations_of(group).assign(**told)
            for table in (flips, *pooled)
            for told, group in conditions(table, "model", "kernels", "strategy")
        ]
        return {"flips": flips, "correlations": pd.concat(tables, ignore_index=True)}

    def noted(self) -> dict[str, Any]:
        """Under which kernels and strategy."""
        return {"flip_kernels": self.kernels, "flip_strategy": self.strategy}


def measured(model: Mapping[str, Any], prompts: str, kernels: str, strategy: str, **settings: Any) -> pd.DataFrame:
    """One seed's decodes of one model."""
    adapter = loaded(model)
    table = flips_of(adapter, load_prompts(prompts), kernels, strategy, **settings)
    return table.assign(model=adapter.facts.name, kernels=kernels, strategy=strategy)


def flips_of(
    model: Any,
    prompts: Any,
    kernels: str,
    strategy: str,
    max_new_tokens: int,
    seed: int = 0,
) -> pd.DataFrame:
    """The step of the first flipped token against the mean KL, and the control that the paper lacks.

    In the free protocol the KL after a flip is that of two texts: an early flip leaves more such steps, so a negative
    correlation follows from counting alone. Beside it: the KL before the flip, and the matched protocol's, which hold only
    arithmetic.

    Args:
        model: A model of any kind.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        kernels: The kernel mode of both paths.
        strategy: How tokens are chosen; sampled ones stand at a boundary more often than a sure model's greedy ones.
        max_new_tokens: Most steps.
        seed: Seeds the sampling.

    Returns:
        One row a prompt: flip_index, mean_kl, mean_kl_before_flip, which counts the step of the flip itself,
        mean_kl_after_flip, matched_mean_kl, smallest_margin, seed.
    """
    paths = f"cached[kernels={kernels}]", f"recompute[kernels={kernels}]"
    how: dict[str, Any] = {"strategy": strategy, "max_new_tokens": max_new_tokens, "seed": seed}
    how |= {"record": "", "progress": "none", "done": failures_kept}
    free, matched = (compare(model, prompts, *paths, protocol=each, **how).examples for each in ("free", "matched"))
    kls = ["mean_kl", "mean_kl_before_flip", "mean_kl_after_flip"]
    apart = free[["example", "id", "flip_index", *kls, "smallest_margin", "steps"]]
    together = matched.set_index("example")[["mean_kl", "smallest_margin"]].add_prefix("matched_")
    return apart.merge(together, on="example").assign(seed=seed)


def correlations_of(examples: pd.DataFrame) -> pd.DataFrame:
    """How the step of the first flip goes with each KL, over the decodes that flip.

    Args:
        examples: As :func:`flips_of` gives them, of several seeds, one model or several.

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
