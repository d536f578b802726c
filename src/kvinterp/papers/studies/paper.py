"""Write the FP16 paper's three tables and five figures with your models, the paper's own numbers
beside them.

The paper is arXiv 2604.15409. Its tables 1 to 3 and figures 1 to 5 have their names and columns
here, and each table ends with
a control that the paper lacks: the same number where both paths are fed the same tokens, so that it
is rounding and not two different texts. --preset quick takes small trained models and minutes, real
takes SmolLM2 and hours, paper the paper's own models, problems and counts. Steps are counted as the
paper counts them: its step 0 is the first that a cache decides, which is step 1 elsewhere in
kvinterp, where the prefill's token is step 0.
"""

from __future__ import annotations

import dataclasses
import functools
import io
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.commands.cells import those
from kvinterp.commands.kit import (
    Cell,
    Chart,
    Charts,
    OfModels,
    Panel,
    Parts,
    Result,
    Rows,
    Tables,
    argument,
    between,
    check_known,
    compare_examples,
    counted,
    ends_of,
    joined,
    load_prompts,
    number,
    only,
    option,
    paths_of,
    sampled,
)
from kvinterp.common.numbers import ends_said, listed
from kvinterp.metrics.statistics import FEWEST, FEWEST_RESAMPLED, quiet
from kvinterp.papers.behaviour.boundary import boundary_tables, pooled
from kvinterp.papers.behaviour.divergence import (
    DECODE,
    accuracy_of,
    conditions,
    divergence_of,
    kl_by_step_of,
    with_ends,
    with_free_steps,
)
from kvinterp.papers.studies.behaviour import Behaviour, failures_of
from kvinterp.papers.studies.layer_drift import NULL, ONE_STEP, LayerDrift
from kvinterp.papers.studies.localisation import (
    Localisation,
    chosen_of,
    found_in,
    gathered,
    recovery_by_layer,
)

log = logging.getLogger("kvinterp")

PRESETS: dict[str, dict[str, Any]] = {
    "quick": {
        "models": ("zoo:llama-mini", "zoo:mistral-mini", "zoo:gemma2-mini"),
        "prompts": "arithmetic:8",
        # Small models are sure of their sums: with a high temperature some tokens flip.
        "strategies": ("greedy", "top_k(50,2.0)", "top_p(0.95,2.0)"),
        "seeds": 2,
        "max_new_tokens": 24,
        "few": 6,
        # As far as the decodes go: a first flip comes late.
        "patched_steps": 24,
        "block": 4,
    },
    "real": {
        "models": ("real:smollm2-135m",),
        "prompts": "natural:24",
        "strategies": Behaviour.strategies,
        "seeds": 2,
        "max_new_tokens": 32,
        "few": 6,
        "patched_steps": 4,
        "block": 1,
    },
    "paper": {
        "models": ("meta-llama/Llama-2-7b-hf", "mistralai/Mistral-7B-v0.3", "google/gemma-2-2b"),
        "prompts": "gsm8k(openai/gsm8k,shots=5,count=700,seed=42)",
        "strategies": Behaviour.strategies,
        "seeds": 5,
        "max_new_tokens": 128,
        "few": 50,
        "patched_steps": 32,
        "block": 20,
    },
}
"""What each preset runs. How many examples the paper ran in FP32, drifted and patched is not said
in the text that we have, nor are top_k's and top_p's constants: ``few`` (those of the highest KL,
where the paper chose so) and the two strategies are ours."""

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
_PATCHES = {
    ("paper", "single"): "the paper's patch, one layer",
    ("paper", "cumulative"): "the paper's patch, layers 0 to this one",
    ("kv-into-cached", "single"): "control: K and V into the cached path, one layer",
    ("kv-into-cached", "cumulative"): "control: K and V into the cached path, layers 0 to this one",
}
_ONCE = f"95% of {RESAMPLES:,} resamples of prompts, each once"
ENDS = ("", "_low", "_high")
"""What ends the names of the columns of a number and of the ends of its interval."""
MEASURES = {"l2": "L2", "cosine_distance": "1 - cosine"}
_ROWS = {
    "none": "each path its own text, as in the paper",
    "same tokens": "rows where both read the same tokens",
    NULL: "control: recompute among more rows, no cache",
}


class Paper(OfModels):
    """What do the FP16 paper's tables and figures say of these models?"""

    NOTED = ("kernels", "strategies", "seeds", "max_new_tokens")
    PARTIAL = "yes"

    models: tuple[str, ...] = argument(
        (), "zoo:NAME, checkpoint folders or hub ids. Default: the preset's."
    )
    preset: str = option(
        "quick", "How much is run: quick, real or paper.", among=("quick", "real", "paper")
    )
    prompts: str = option("", "Prompts, as for other studies. Default: the preset's.")
    strategies: tuple[str, ...] = option(
        (), "How tokens are chosen. Default: the preset's three.", flag="--strategy"
    )
    seeds: int = option(0, "Seeds for each sampled strategy. Default: the preset's.")
    max_new_tokens: int = option(0, "The most tokens to generate per text. Default: the preset's.")
    kernels: str = option("native", "Kernels for both paths, such as batch_invariant.")

    def __post_init__(self) -> None:
        """Sets what is not given to the preset's."""
        check_known("preset", self.preset, PRESETS)
        for name in ("models", "prompts", "strategies", "seeds", "max_new_tokens"):
            object.__setattr__(self, name, vars(self)[name] or PRESETS[self.preset][name])

    def check(self) -> None:
        """The studies that it runs are asked too."""
        super().check()
        for study in (*self._decoding().values(), self._drift(), self._patching()):
            study.check()

    def _shared(self) -> dict[str, Any]:
        """The choices that the studies have in common."""
        return self.choices(
            "models", "prompts", "kind", "device", "attention", "kernels", "max_new_tokens"
        )

    def _decoding(self) -> dict[str, Behaviour]:
        """The decodes in FP16 and in FP32, by what begins the keys of their cells."""
        choices = self._shared() | {
            "strategies": self.strategies,
            "block": PRESETS[self.preset]["block"],
            "controls": 0,
        }
        if sampled(*self.strategies):
            choices["seeds"] = self.seeds
        return {
            dtype: Behaviour(**choices, stop="length", dtype=dtype)
            for dtype in ("float16", "float32")
        }

    def _drift(self) -> LayerDrift:
        # Only the paper's decode step 1 is shown.
        few = {"divergent": PRESETS[self.preset]["few"], "max_new_tokens": 4}
        return LayerDrift(**self._shared() | few, strategy=self.strategies[0])

    def _patching(self) -> Localisation:
        preset = PRESETS[self.preset]
        few = {
            "count": preset["few"],
            "max_new_tokens": min(preset["patched_steps"], self.max_new_tokens),
        }
        return Localisation(**self._shared() | few, part=("paper", "kv-into-cached"))

    # What is run ----------------------------------------------------------------------------------

    def cells(self) -> list[Cell]:
        """The decodes, in FP32 those of a few examples; an interrupted run has some of both."""
        few, cells = PRESETS[self.preset]["few"], list[Cell]()
        self._log_estimate()
        for dtype, study in self._decoding().items():
            for cell in study.cells():
                first, most = cell.settings["first"], cell.settings["most"]
                if (most := min(most, few - first) if dtype == "float32" else most) > 0:
                    settings = {**cell.settings, "most": most}
                    cells.append(
                        dataclasses.replace(cell, key=f"{dtype}-{cell.key}", settings=settings)
                    )
        return sorted(cells, key=lambda cell: cell.settings["first"])

    def second_stage(self, parts: Parts) -> list[Cell]:
        """Drift and patches of the examples whose decodes by the first strategy are the furthest
        apart.
        """
        decodes, _ = decodes_of(parts, "float16")
        numbers = {adapter.facts.name: number for number, _, adapter in self.numbered_models()}
        first = only(decodes, protocol="free", strategy=decodes["strategy"].iloc[0], seed=0)
        chosen = chosen_of(
            first.assign(number=first["model"].map(numbers)), PRESETS[self.preset]["few"]
        )
        keys = {f"layer-drift-{row.number}-{row.example}" for row in chosen.itertuples()}
        return [
            cell for cell in self._drift().cells() if cell.key in keys
        ] + self._patching().patches(chosen)

    def _log_estimate(self) -> None:
        """Says how long all of it will take, by a few steps of each model."""
        preset, prompts, seconds = PRESETS[self.preset], load_prompts(self.prompts), np.zeros(2)
        few = min(preset["few"], len(prompts))
        decodes = sum(1 if name == "greedy" else self.seeds for name in self.strategies)
        steps = (len(prompts) + few) * decodes * self.max_new_tokens
        for adapter in self.adapters():
            begun = time.perf_counter()
            compare_examples(
                adapter, prompts[0], *paths_of(self.kernels), max_new_tokens=4, stop="length"
            )
            patched = few * adapter.facts.layers * min(preset["patched_steps"], self.max_new_tokens)
            # Where no token flips the free protocol costs nothing; where all decodes flip, the
            # recompute path runs twice more.
            seconds += (
                np.array([steps + patched, 3 * steps + patched]) * (time.perf_counter() - begun) / 4
            )
        low, high = (
            f"{each / 60:.0f} minutes" if each < 7200 else f"{each / 3600:.0f} hours"
            for each in seconds
        )
        log.info(
            "%s here if no token flips, up to %s if all decodes do; what is finished is not done again",
            low,
            high,
        )

    # What it comes to -----------------------------------------------------------------------------

    def tables(self, parts: Parts) -> Tables:
        """The paper's tables, and what its figures show."""
        fp16 = decodes_of(parts, "float16")
        both = (
            {"fp16": fp16, "fp32": decodes_of(parts, "float32")}
            if any(key[:7] == "float32" for key in parts)
            else {}
        )
        facts = [
            {"model": adapter.facts.name, "architecture": adapter.facts.architecture}
            for adapter in self.adapters()
        ]
        papers = pd.DataFrame(facts).merge(pd.read_csv(io.StringIO(PAPER)), on="architecture")
        by_step, boundary = (
            kl_by_step_of(fp16[1]).merge(mean_by_step(fp16[1])),
            boundary_tables(*fp16),
        )
        flips = boundary["flips"]
        boundary["flips"] = flips.assign(flip_index=flips["flip_index"] - 1)
        return {
            "table_1": table_1(*fp16, self.seeds, papers),
            "table_2": table_2(both, papers),
            "table_3": table_3(boundary["correlations"], fp16[0]["model"].unique(), papers),
            "figure_1": by_step.assign(step=by_step["step"] - 1).query("step >= 0"),
            "figure_2": self._drift_by_layer(parts),
            **{f"figure_4_{name}": table for name, table in boundary.items()},
            "figure_5": self._recovery(parts),
            "failures": joined(parts, "-behaviour-")["failures"],
        }

    def _drift_by_layer(self, parts: Parts) -> pd.DataFrame:
        if not (drifted := those(parts, "layer-drift-")):
            return pd.DataFrame()
        table = only(self._drift().tables(drifted)["drift_by_layer"], selection=ONE_STEP)
        table = table[
            table["measure"].isin(["l2", "cosine", "cosine_distance"])
            & (table["protocol"] != "matched")
        ]
        return table.assign(rows=table["rule"].where(table["protocol"] != NULL, NULL))

    def _recovery(self, parts: Parts) -> pd.DataFrame:
        if not (patched := those(parts, "localisation-")):
            return pd.DataFrame()
        table = recovery_by_layer(found_in(*gathered(patched)))
        if table.empty:
            return table
        names = [_PATCHES[place] for place in zip(table["part"], table["sweep"], strict=True)]
        every = gathered(patched)[0]["recovery"]
        whys = (
            every[every["why"] != ""]
            .groupby(["model", "part"])["why"]
            .first()
            .str.split(":")
            .str[0]
        )
        table = ends_of(table, "interval").assign(patch=names).join(whys, on=["model", "part"])
        table["why"] = [
            f"{row.defined} of {row.examples} have a recovery: {row.why}"
            if row.defined < row.examples
            else ""
            for row in table.itertuples()
        ]
        return table[
            ["model", "patch", "layer", "examples", "defined", "median", "low", "high", "why"]
        ]

    def noted(self) -> dict[str, Any]:
        """The preset's choices that no option shows, too."""
        return super().noted() | {
            name: PRESETS[self.preset][name] for name in ("few", "patched_steps")
        }

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """Table 1 beside its control, in a sentence."""
        table = result.tables["table_1"]
        flips, decodes = (table["div_rate"] * table["decodes"]).sum(), int(table["decodes"].sum())
        free, same = (
            between(table[name].dropna().tolist() or [np.nan])
            for name in ("mean_kl", "same_tokens")
        )
        lines = [f"A token flips in {flips:.0f} of {counted(decodes, 'decode')}: measured as in the paper, each path on its own "
                 f"text, the mean KL is {free} nats; fed the same tokens it is {same}."]  # fmt: skip
        return lines + failures_of(result)

    def rows(self, result: Result) -> Rows:
        """None beside the tables, in which each number has its interval and control."""
        return []

    def page_parts(self, result: Result) -> list[Any]:
        """The tables as the paper has them: a row of ours, and below it the paper's."""
        from kvinterp.report.page import Column, Table, Text

        parts: list[Any] = []
        for name, (caption, note, columns) in SHOWN.items():
            rows = [
                [written(row, column, own) for column in columns.values()]
                for row in result.tables[name].to_dict("records")
                for own in ("", "paper_")
                if not own or isinstance(row["paper"], str)
            ]
            table = Table([*map(Column, columns)], rows, name=f"paper-{name}", look="cards")
            note = (
                note
                if rows
                else "Nothing to show: no token flips, or nothing in FP32 is finished yet."
            )
            parts += [
                Text(f"{name.replace('_', ' ').capitalize()}. {caption}", look="h2"),
                table,
                Text(note, look="note"),
            ]
        return parts

    def charts(self, result: Result) -> Charts:
        """The paper's five figures."""
        tables, counted_so = result.tables, "steps counted as in the paper"
        first, fifth, models = (
            tables["figure_1"],
            tables["figure_5"],
            titled(tables["figure_1"], "n_examples"),
        )
        flips = tables["figure_4_flips"]
        none = [
            bare(model)
            for model in tables["table_1"]["model"].unique()
            if model not in set(flips["model"])
        ]
        about = next(iter(result.provenances().values()))
        # One less than there are, which the prefill decides, and one less for where counting
        # begins.
        last = min(about["patched_steps"], about["max_new_tokens"]) - 2
        figures: dict[str, tuple[str, list[Panel], list[str]]] = {
            "figure_1": ("KL at every decode step", [
                Panel(ends_of(only(first, protocol=protocol).drop(columns=["low", "high"]), "mean_kl"), "step", "mean_kl",
                      color="strategy", facet="model", titles=models, ends="band", xlabel="decode step",
                      label=f"mean KL (nats),\n{name}")
                for protocol, name in PROTOCOLS.items()
            ], [counted_so, f"bands: {_ONCE}"]),
            "figure_2": ("Drift of the residual stream by layer, at decode step 1", [
                Panel(table, "layer", "median", color="rows", names=_ROWS, facet="model", titles=titled(table, "n"),
                      label=f"{MEASURES[measure]} (median)")
                for measure in MEASURES if len(tables["figure_2"])
                for table in [only(tables["figure_2"], measure=measure)]
            ], [counted_so, "n: prompts; bars: 95% intervals of medians"]),
            "figure_3": ("KL in FP16 and in FP32", [
                Panel(bars_of(tables["table_2"]), "kl", "line", "dots", color="protocol", names=PROTOCOLS, label="mean KL (nats)")
            ], ["n: prompts", f"bars: those of Table 2; of the control {_ONCE}"]),
            "figure_4": ("When the first token flips", views_of(tables), [
                counted_so, "n: prompts",
                f"bars: 95% intervals, of margins for {FEWEST} prompts or more, else for {FEWEST_RESAMPLED} or more",
                *[f"no decode of {listed(none)} flips"] * bool(none),
            ]),
            "figure_5": ("What patches recover", [
                Panel(fifth, "layer", "median", color="patch", facet="model", titles=titled(fifth, "defined"),
                      scale="signed", level=0, label="recovery (median)", why="why")
            ], [counted_so, f"over steps 0 to {last} of greedy decodes", "n: prompts that have a difference to recover",
                "bars: 95% intervals of medians"]),
        }  # fmt: skip
        return {
            name: Chart(f"Figure {name[-1]}. {title}", panels, notes)
            for name, (title, panels, notes) in figures.items()
        }


# Tables -------------------------------------------------------------------------------------------


def decodes_of(parts: Parts, dtype: str) -> tuple[pd.DataFrame, pd.DataFrame]:
    """The decodes in a precision and their steps in both protocols; the mean KL is that of the
    steps that the paper counts.
    """
    tables = joined(parts, f"{dtype}-")
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


# Figures ------------------------------------------------------------------------------------------

METHODS = {
    "pearson": "full",
    "restricted>1": "without step 0",
    "restricted>9": "without steps 0 to 8",
}


def bars_of(table: pd.DataFrame) -> pd.DataFrame:
    """Table 2 as Figure 3 draws it: a row a model, precision and protocol."""
    return pd.DataFrame([
        {"line": f"{bare(row['model'])}, {precision.upper()} (n = {row['n']})", "protocol": protocol}
        | dict(zip(("kl", "low", "high"), (row[f"{name}{end}"] for end in ENDS), strict=True))
        for row, precision in itertools.product(table.to_dict("records"), ("fp16", "fp32"))
        for protocol, name in (("free", f"{precision}_kl"), ("matched", f"same_tokens_{precision}_kl"))
    ])  # fmt: skip


def views_of(tables: Tables) -> list[Panel]:
    """The four views of Figure 4: flip step and KL, early against late flips, correlations, and the
    decision boundary.
    """
    names = {"mean_kl": PROTOCOLS["free"], "matched_mean_kl": PROTOCOLS["matched"]}
    flips, thirds, correlations, margins = (
        tables[f"figure_4_{name}"] for name in ("flips", "thirds", "correlations", "prediction")
    )
    points = flips.melt(["flip_index", "model"], list(names), "quantity", "kl").dropna(
        subset=["kl"]
    )
    prompts = flips.groupby("model", sort=False)["example"].nunique()
    of = {model: f"{bare(model)}: {counted(int(count), 'flip')} (n = {prompts[model]})" for model, count in
          flips["model"].value_counts(sort=False).items()}  # fmt: skip
    thirds = thirds.assign(line=_lines(thirds, "strategy", "n_prompts"))
    at = {"margin_at_flip": "at a first flip", "margin_elsewhere": "at other steps"}
    margins = margins.assign(line=_lines(margins, "strategy", "n", "flips"))
    margins = pd.concat(
        [ends_of(margins, name).rename(columns={name: "margin"}).assign(at=name) for name in at]
    )
    correlations = correlations[correlations["method"].isin(METHODS)]
    correlations = correlations.assign(
        line=_lines(correlations.replace({"method": METHODS}), "method", "n_prompts")
    )
    dots = functools.partial(Panel, y="line", kind="dots")
    return [
        Panel(points, "flip_index", "kl", "points", color="model", names=of, facet="quantity", titles=names,
              label="mean KL (nats)", xlabel="step of the first flip"),
        dots(thirds, "ratio", color="quantity", names=names, scale="log", level=1, why="why",
             label="mean KL of the earliest third of flips over the latest"),
        dots(correlations, "value", color="quantity", names=names, scale="linear", level=0, why="why",
             label="Pearson's correlation of flip step and mean KL"),
        dots(margins.dropna(subset=["margin"]), "margin", color="at", names=at, scale="linear",
             label="margin of the two highest logits (median over prompts)"),
    ]  # fmt: skip


def _lines(table: pd.DataFrame, what: str, n: str, flips: str = "") -> list[str]:
    """The labels of dots: the model, what a row is of, and how many prompts, and flips, it rests
    on.
    """
    return [
        f"{bare(row['model'])}, {row[what]} "
        + f"(n = {row[n]}{', ' + counted(row[flips], 'flip') if flips else ''})".replace(
            " ", "\u00a0"
        )
        for row in table.to_dict("records")
    ]


def titled(table: pd.DataFrame, n: str) -> dict[str, str]:
    """The titles of panels by model, with how many prompts they rest on."""
    ends = table.groupby("model", sort=False)[n].agg(["min", "max"]) if len(table) else table
    return {
        model: f"{bare(model)}, n = {' to '.join(dict.fromkeys(map(str, each)))}"
        for model, *each in ends.itertuples()
    }


def bare(model: str) -> str:
    """A model's name in a figure."""
    return model.removeprefix("zoo:")


# The tables on the page ---------------------------------------------------------------------------


def written(row: Mapping[str, Any], column: str, own: str) -> str:
    """A cell of ours (``own`` is empty) or of the paper: an estimate and its interval; one that
    begins with % is a share.
    """
    if own and column == "model":
        return f"paper: {row['paper']}"
    if own and column == "strategy":
        return str(row[column]).partition("(")[0]
    name = f"{own}{column.removeprefix('%')}"
    value = row.get(name, "")
    if isinstance(value, str):
        return value
    form = _share if column[0] == "%" else "{:.4g}".format if own else number
    return form(value) + ends_said(
        row.get(f"{name}_low"), row.get(f"{name}_high"), " [{}]", form
    ).replace(" to ", ", ")


def _share(value: float) -> str:
    return "–" if pd.isna(value) else f"{100 * value:.3g}%"


SHOWN: dict[str, tuple[str, str, dict[str, str]]] = {
    "table_1": (
        "Divergence, KL and accuracy",
        "The mean's interval is the paper's bootstrap: it takes run pairs as independent, though seeds of a prompt are not and "
        "greedy's are copies. The median's is by order statistics over prompts. They differ because a mean follows the few "
        "decodes that flip early. The control's interval resamples prompts, each once. p is of the difference of the accuracies: "
        "McNemar's exact test where a prompt is decoded once, else sign flips by prompt; Bonferroni over the rows.",
        {
            "Model": "model",
            "Strategy": "strategy",
            "n": "n",
            "Decodes": "decodes",
            "Div. rate": "%div_rate",
            "Mean KL [95% CI]": "mean_kl",
            "Median KL [95% CI]": "median_kl",
            "Cache acc.": "%cache_acc",
            "No-cache acc.": "%no_cache_acc",
            "p (Bonferroni)": "p_bonferroni",
            "Control: mean KL, same tokens": "same_tokens",
        },
    ),
    "table_2": (
        "FP16 against FP32, strategies pooled",
        "With the same tokens as many decodes flip, since up to the first flip both paths read the same. Where the paper's rows "
        "are empty, its numbers are lost in the text that we have.",
        {
            "Model": "model",
            "n": "n",
            "FP16 KL": "fp16_kl",
            "FP32 KL": "fp32_kl",
            "FP16 flip": "%fp16_flip",
            "FP32 flip": "%fp32_flip",
            "Control: FP16 KL, same tokens": "same_tokens_fp16_kl",
            "Control: FP32 KL, same tokens": "same_tokens_fp32_kl",
        },
    ),
    "table_3": (
        "Pearson's correlation of the step of the first flip and the mean KL, strategies pooled",
        "An early flip leaves more steps of two texts, so the correlation is negative by counting; with the same tokens no step "
        "is of two texts. Steps are counted as in the paper: flip 0 is at the first step that a cache decides. The trend is from "
        "Full to Excl. flip 0, where that lies outside the interval of Full.",
        {
            "Model": "model",
            "flips": "flips",
            "n": "n",
            "Full": "full",
            "Excl. flip 0": "without_0",
            "Excl. flips 0 to 8": "without_8",
            "Trend": "trend",
            "Control: full, same tokens": "same_tokens",
        },
    ),
}
"""The tables of the page: what each is, a note, and the columns by their heads."""
