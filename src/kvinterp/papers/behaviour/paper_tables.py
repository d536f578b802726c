"""The FP16 paper's three tables, each with a control that the paper lacks, and its own numbers beside them.

Decodes and their steps come in as the behaviour study keeps them; out go tables with the paper's columns. The command is
``papers/studies/paper.py``, which runs the decodes, and ``paper_figures.py`` draws and words what is here.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.commands.kit import CellResults, joined, only
from kvinterp.metrics.statistics import FEWEST, FEWEST_RESAMPLED, quiet
from kvinterp.papers.behaviour.boundary import pooled
from kvinterp.papers.behaviour.divergence import (
    DECODE,
    accuracy_of,
    conditions,
    divergence_of,
    with_ends,
    with_free_steps,
)

PAPER = """
architecture,paper,strategy,mean_kl,mean_kl_low,mean_kl_high,cache_acc,no_cache_acc,trend
LlamaForCausalLM,LLaMA-2-7B,greedy,10.68,10.63,10.74,.033,.020,weakens
LlamaForCausalLM,LLaMA-2-7B,top_k,10.70,10.65,10.74,.033,.012,weakens
LlamaForCausalLM,LLaMA-2-7B,top_p,10.79,10.75,10.83,.028,.017,weakens
MistralForCausalLM,Mistral-7B-v0.3,greedy,11.46,11.40,11.53,.066,.020,strengthens
MistralForCausalLM,Mistral-7B-v0.3,top_k,10.70,10.66,10.76,.065,.017,strengthens
MistralForCausalLM,Mistral-7B-v0.3,top_p,10.90,10.85,10.94,.050,.019,strengthens
Gemma2ForCausalLM,Gemma-2-2B,greedy,12.66,12.62,12.70,.019,.021,strengthens
Gemma2ForCausalLM,Gemma-2-2B,top_k,12.80,12.76,12.84,.039,.011,strengthens
Gemma2ForCausalLM,Gemma-2-2B,top_p,12.83,12.79,12.86,.033,.013,strengthens
"""
"""The paper's Table 1, by the architecture of its models, and the last column of its Table 3. In
every condition all of its decodes diverge, and in FP32 none flips; the other numbers of its Tables
2 and 3 are lost in the text that we have."""

RESAMPLES = 1000

PROTOCOLS = {
    "free": "each path its own text, as in the paper",
    "matched": "control: the same tokens",
}

ENDS = ("", "_low", "_high")
"""What ends the names of the columns of a number and of the ends of its interval."""

METHODS = {
    "pearson": "full",
    "restricted>1": "without step 0",
    "restricted>9": "without steps 0 to 8",
}


def decodes_of(results: CellResults, dtype: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The decodes in a precision and their steps in both protocols; the mean KL is that of the
    steps that the paper counts.
    """
    tables = joined(results, f"{dtype}-")
    steps = with_free_steps(tables["decodes"], tables["steps"])
    means = steps[steps["step"] > 0].groupby([*DECODE, "protocol"])["kl"].mean().rename("mean_kl")
    return tables["decodes"].drop(columns="mean_kl").join(means, on=[*DECODE, "protocol"]), steps


def mean_kl_of(decodes: pd.DataFrame, seeds: int) -> tuple[float, float, float]:
    """The mean KL with its interval as the paper takes it: run pairs are resampled as if each were
    independent of the others.

    Args:
        decodes: Some decodes.
        seeds: How often a greedy decode counts, which draws nothing: once a seed.
    """
    kl = (
        decodes["mean_kl"]
        .repeat(np.where(decodes["strategy"] == "greedy", seeds, 1))
        .dropna()
        .to_numpy(float)
    )
    if len(kl) < 2:
        return kl.mean() if len(kl) else np.nan, np.nan, np.nan
    random = np.random.default_rng(0)
    with quiet():
        drawn = stats.bootstrap(
            (kl,), np.mean, method="percentile", n_resamples=RESAMPLES, random_state=random
        )
    return kl.mean(), *drawn.confidence_interval


def mean_over_prompts(kl: pd.Series, examples: pd.Series) -> tuple[float, float, float]:
    """The mean KL with its interval, each prompt once: by the mean of its decodes, of which
    greedy's are copies.

    Args:
        kl: One number a decode.
        examples: The prompt of each.
    """
    return next(
        _resampled(kl.groupby(examples).mean().to_frame()).itertuples(index=False, name=None)
    )


def mean_by_step(steps: pd.DataFrame) -> pd.DataFrame:
    """The same of every step.

    Args:
        steps: As :func:`decodes_of` gives them.

    Returns:
        One row a model, strategy, protocol and step: mean_kl_low, mean_kl_high.
    """
    tables = []
    for labels, group in conditions(steps, "model", "strategy", "protocol"):
        means = group.pivot_table("kl", "example", "step", aggfunc="mean")
        tables.append(
            _resampled(means)
            .drop(columns="mean_kl")
            .rename_axis("step")
            .reset_index()
            .assign(**labels)
        )
    return pd.concat(tables, ignore_index=True)


def _resampled(means: pd.DataFrame) -> pd.DataFrame:
    """The mean of every column with the percentile interval of its resampled rows, a row a column;
    NaN for fewer than FEWEST.
    """
    values, n = means.to_numpy(float), len(means)
    ends = np.full((2, values.shape[1]), np.nan)
    if n >= FEWEST:
        draws = np.random.default_rng(0).integers(n, size=(RESAMPLES, n))
        counts = np.stack([np.bincount(draw, minlength=n) for draw in draws])
        ends = np.quantile(counts @ values / n, (0.025, 0.975), axis=0)
    return pd.DataFrame(
        dict(
            zip(
                (f"mean_kl{end}" for end in ENDS),
                (values.mean(0) if n else ends[0], *ends),
                strict=True,
            )
        ),
        index=means.columns,
    )


def beside(
    table: pd.DataFrame, papers: pd.DataFrame, on: Sequence[str], **columns: str
) -> pd.DataFrame:
    """A table with the paper's numbers, the control's columns behind them."""
    named = papers[["paper", *on, *columns]].drop_duplicates().rename(columns=columns)
    control = [name for name in table if name.startswith("same_tokens")]
    # The estimates behind their ends, so that the last column is the control.
    control.sort(key=lambda name: not name.endswith(("_low", "_high")))
    merged = table.merge(named, "left", list(on))
    return merged[[*merged.columns.drop(control), *control]]


def table_1(
    decodes: pd.DataFrame, steps: pd.DataFrame, seeds: int, papers: pd.DataFrame
) -> pd.DataFrame:
    """The paper's Table 1, a row a model and strategy.

    Args:
        decodes: As :func:`decodes_of` gives them.
        steps: The same.
        seeds: How often the paper counts a greedy decode.
        papers: The paper's numbers, by model and strategy.

    Returns:
        decodes, n (examples), div_rate and mean_kl (free, with the paper's interval), median_kl
        (over examples, by order statistics), cache_acc, no_cache_acc, p_bonferroni (McNemar's test,
        or sign flips by example), what the paper has, and same_tokens, the mean KL with both paths
        fed the same tokens, each example once. Estimates have their ends in _low and _high.
    """
    answers = {
        "accuracy_a": "cache_acc",
        "accuracy_b": "no_cache_acc",
        "p_bonferroni": "p_bonferroni",
    }
    right = accuracy_of(decodes)[["model", "strategy", *answers]].rename(columns=answers)
    table = _conditions(decodes, steps, seeds).merge(right, "left", ["model", "strategy"])
    numbers = papers.rename(columns={"strategy": "family"}).assign(div_rate=1.0)
    names = ("div_rate", "mean_kl", "mean_kl_low", "mean_kl_high", "cache_acc", "no_cache_acc")
    return beside(table, numbers, ["model", "family"], **{name: f"paper_{name}" for name in names})


def _conditions(decodes: pd.DataFrame, steps: pd.DataFrame, seeds: int) -> pd.DataFrame:
    """How often and how far the paths part on their own texts, by model and strategy, and the mean
    KL of both protocols.
    """
    table = only(divergence_of(decodes, steps), protocol="free").rename(
        columns={"rate": "div_rate", "low": "div_rate_low", "high": "div_rate_high"}
        | {f"typical_kl{end}": f"median_kl{end}" for end in ENDS}
    )
    rows = table[["model", "strategy"]].to_dict("records")
    groups = [only(decodes, **condition) for condition in rows]
    free, same = ([only(group, protocol=protocol) for group in groups] for protocol in PROTOCOLS)
    means = {
        "mean_kl": [mean_kl_of(group, seeds) for group in free],
        "same_tokens": [mean_over_prompts(group["mean_kl"], group["example"]) for group in same],
    }
    for name, estimates in means.items():
        table[[f"{name}{end}" for end in ENDS]] = estimates
    table["family"] = table["strategy"].str.partition("(")[0]
    numbers = [
        f"{name}{end}"
        for name in ("div_rate", "mean_kl", "median_kl", "same_tokens")
        for end in ENDS
    ]
    return table[["model", "strategy", "family", "decodes", "n", *numbers]]


def table_2(
    found: Mapping[str, tuple[pd.DataFrame, pd.DataFrame]], papers: pd.DataFrame
) -> pd.DataFrame:
    """The paper's Table 2, a row a model: the decodes of all strategies in FP16 and in FP32, of the
    examples that have both.

    Args:
        found: Decodes and steps by precision; empty where none was finished.
        papers: The paper's numbers, by model.

    Returns:
        n (examples), decodes; of each precision the mean KL (free, with the paper's interval) and
        the share of decodes that flip; what the paper has; the mean KL of each with the same
        tokens.
    """
    if not found:
        return pd.DataFrame()
    shared = found["fp32"][0][DECODE].drop_duplicates()
    tables = []
    for precision, parts in found.items():
        decodes, steps = (pooled(part.merge(shared, on=DECODE)) for part in parts)
        table = _conditions(decodes, steps, 1).set_index("model")
        names = {
            "mean_kl": f"{precision}_kl",
            "div_rate": f"{precision}_flip",
            "same_tokens": f"same_tokens_{precision}_kl",
        }
        columns = {f"{old}{end}": f"{new}{end}" for old, new in names.items() for end in ENDS}
        # The counts are those of FP16.
        counts = ["n", "decodes"] * (precision == "fp16")
        tables.append(table[[*counts, *columns]].rename(columns=columns))
    both = pd.concat(tables, axis=1).reset_index()
    return beside(both, papers.assign(fp32_flip=0.0), ["model"], fp32_flip="paper_fp32_flip")


def table_3(
    correlations: pd.DataFrame, models: Sequence[str], papers: pd.DataFrame
) -> pd.DataFrame:
    """The paper's Table 3, a row a model: Pearson's correlation of the first flip's step and the
    mean KL, strategies pooled.

    Args:
        correlations: As :func:`kvinterp.papers.behaviour.boundary.correlations_with_flip` gives
            them of pooled decodes.
        models: Those that have a row, also where no decode flips.
        papers: The paper's trend, by model.

    Returns:
        flips, n (examples); full, without_0 (flips after step 0) and without_8; trend from full to
        without_0, where that lies outside the interval of full, or why there is none; the paper's;
        same_tokens, full, of the KL with the same tokens.
    """
    rows = []
    for model in models:
        group = only(correlations, model=model)
        if group.empty:
            rows.append({"model": model, "flips": 0, "n": 0, "trend": "no decode flips"})
            continue
        free, same = (
            only(group, quantity=name).set_index("method")
            for name in ("mean_kl", "matched_mean_kl")
        )
        full, without_0 = free.loc["pearson"], free.loc["restricted>1"]
        row = {
            "model": model,
            "flips": full["n"],
            "n": full["n_prompts"],
            "trend": _trend(full, without_0),
        }
        estimates = dict(
            zip(
                ("full", "without_0", "without_8"),
                (free.loc[method] for method in METHODS),
                strict=True,
            )
        )
        for name, estimate in {**estimates, "same_tokens": same.loc["pearson"]}.items():
            row |= with_ends(name, *estimate[["value", "low", "high"]])
        rows.append(row)
    return beside(pd.DataFrame(rows), papers, ["model"], trend="paper_trend")


def _trend(full: pd.Series, without_0: pd.Series) -> str:
    """How a correlation changes without the flips at step 0, which only an interval can say; or why
    nothing is said.
    """
    why = full["why"] or without_0["why"]
    if why or without_0["n"] == full["n"]:
        return why or "no flip at step 0"
    if pd.isna([full["low"], full["high"], without_0["low"], without_0["high"]]).any():
        return f"no interval: fewer than {FEWEST_RESAMPLED} prompts"
    if full["low"] <= without_0["value"] <= full["high"]:
        return "not told apart: within the interval"
    return "strengthens" if abs(without_0["value"]) > abs(full["value"]) else "weakens"
