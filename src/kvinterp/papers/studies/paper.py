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
import io
import logging
import time
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.commands.cells import those
from kvinterp.commands.kit import (
    Cell,
    CellResults,
    Chart,
    Charts,
    OfModels,
    Panel,
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
    only,
    option,
    paths_of,
    sampled,
    shared,
)
from kvinterp.common.numbers import listed
from kvinterp.metrics.statistics import FEWEST, FEWEST_RESAMPLED
from kvinterp.papers.behaviour.boundary import boundary_tables
from kvinterp.papers.behaviour.divergence import kl_by_step_of
from kvinterp.papers.behaviour.paper_figures import SHOWN, bare, bars_of, titled, views_of, written
from kvinterp.papers.behaviour.paper_tables import (
    PAPER,
    PROTOCOLS,
    RESAMPLES,
    decodes_of,
    mean_by_step,
    table_1,
    table_2,
    table_3,
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

_PATCHES = {
    ("paper", "single"): "the paper's patch, one layer",
    ("paper", "cumulative"): "the paper's patch, layers 0 to this one",
    ("kv-into-cached", "single"): "control: K and V into the cached path, one layer",
    ("kv-into-cached", "cumulative"): "control: K and V into the cached path, layers 0 to this one",
}
_ONCE = f"95% of {RESAMPLES:,} resamples of prompts, each once"
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
    kernels: str = shared("kernels")

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

    def second_stage(self, results: CellResults) -> list[Cell]:
        """Drift and patches of the examples whose decodes by the first strategy are the furthest
        apart.
        """
        decodes, _ = decodes_of(results, "float16")
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
        preset, prompts, seconds = PRESETS[self.preset], self.prompt_list, np.zeros(2)
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

    def tables(self, results: CellResults) -> Tables:
        """The paper's tables, and what its figures show."""
        fp16 = decodes_of(results, "float16")
        both = (
            {"fp16": fp16, "fp32": decodes_of(results, "float32")}
            if any(key[:7] == "float32" for key in results)
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
            "figure_2": self._drift_by_layer(results),
            **{f"figure_4_{name}": table for name, table in boundary.items()},
            "figure_5": self._recovery(results),
            "failures": joined(results, "-behaviour-")["failures"],
        }

    def _drift_by_layer(self, results: CellResults) -> pd.DataFrame:
        if not (drifted := those(results, "layer-drift-")):
            return pd.DataFrame()
        table = only(self._drift().tables(drifted)["drift_by_layer"], selection=ONE_STEP)
        table = table[
            table["measure"].isin(["l2", "cosine", "cosine_distance"])
            & (table["protocol"] != "matched")
        ]
        return table.assign(rows=table["rule"].where(table["protocol"] != NULL, NULL))

    def _recovery(self, results: CellResults) -> pd.DataFrame:
        if not (patched := those(results, "localisation-")):
            return pd.DataFrame()
        table = recovery_by_layer(found_in(*gathered(patched)))
        if table.empty:
            return table
        names = [_PATCHES[key] for key in zip(table["part"], table["sweep"], strict=True)]
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
