"""Patch and split the examples whose paths differ most: as the FP16 paper does, and with controls.

The FP16 paper's causal localisation (arXiv 2604.15409, sections 5.2 and 6.5) copies the cached
path's residual stream into the recompute path at the first cached step, one layer at a time and
cumulatively, on the examples with the highest KL. It recovers nothing, from which the paper
concludes that the cache carries the difference. But the recompute path keeps nothing between steps,
so such a patch can affect a later step only through the chosen token. Beside it run the same patch
at every step and at all positions, patches of K and V in both directions, together and each alone,
and the split of the difference by its source, with nulls.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.commands.cells import those
from kvinterp.commands.kit import (
    Cell,
    CellResult,
    CellResults,
    Chart,
    Charts,
    Finding,
    OfModels,
    Panel,
    Result,
    Rows,
    Tables,
    compare_examples,
    counted,
    joined,
    median_of,
    numbered,
    only,
    option,
    paths_of,
    shared,
    stacked,
)
from kvinterp.common.numbers import percent
from kvinterp.common.vocabulary import RECOVERED
from kvinterp.models.inputs import encode_all
from kvinterp.patching import PRESETS, Decomposition, Sweep, decompose, sweep
from kvinterp.patching.decomposition import check_splittable
from kvinterp.patching.findings import (
    of_model,
)

SETS: dict[str, dict[str, str]] = {
    "paper": {
        name: PRESETS["paper"][name]
        for name in ("site", "over", "direction", "steps", "protocol", "distance")
    },
    "residual": {"site": "resid_post", "over": "single,cumulative"},
    "residual-all": {"site": "resid_post", "over": "single,cumulative", "positions": "all"},
    "kv-into-recompute": {"site": "kv", "over": "single,cumulative-from"},
    "kv-into-cached": {"site": "kv", "over": "single,cumulative", "direction": "into-cached"},
    "k-into-recompute": {"site": "cache_k", "over": "cumulative-from", "controls": "none"},
    "v-into-recompute": {"site": "cache_v", "over": "cumulative-from", "controls": "none"},
    "k-into-cached": {
        "site": "cache_k",
        "over": "cumulative",
        "direction": "into-cached",
        "controls": "none",
    },
    "v-into-cached": {
        "site": "cache_v",
        "over": "cumulative",
        "direction": "into-cached",
        "controls": "none",
    },
}
"""What is patched, as :func:`kvinterp.sweep` takes it: the paper's, then at every matched step (by
the logits' L2 first).
"""
SPLIT = "decomposition"
"""Not a patch: the split of the difference by what makes it."""
_RANKED, _PATCHED = "localisation-kl", "localisation-patched"


class Localisation(OfModels):
    """What carries the difference, on the examples whose paths differ most?"""

    NOTED = ("kernels", "max_new_tokens")

    dtype: str = shared("dtype")
    count: int = option(
        10,
        "How many examples to patch: those with the highest mean KL in the free protocol.",
        min=1,
    )
    max_new_tokens: int = shared("max_new_tokens", 32, min=2)
    kernels: str = shared("kernels")
    part: tuple[str, ...] = option(
        (*SETS, SPLIT),
        f"What to run: {', '.join(SETS)} or {SPLIT}; may be given several times.",
        show_default="all of them",
        among=(*SETS, SPLIT),
    )

    def cells(self) -> list[Cell]:
        """The first stage, a cell a model and example: how far apart its paths are."""
        cells, prompts = [], self.prompt_list
        for number, model, adapter in self.numbered_models():
            if SPLIT in self.part:
                check_splittable(adapter, 8)
            encode_all(adapter, prompts, self.max_new_tokens + 8)
            for example in range(len(prompts)):
                cells.append(Cell(f"{_RANKED}-{number}-{example}", self.ranked, {"model": model}))
        return cells

    def second_stage(self, results: CellResults) -> list[Cell]:
        """The second stage, a cell a model and example of the highest KL, which is known from the
        first.
        """
        return self.patches(self._chosen(results))

    def patches(self, chosen: pd.DataFrame) -> list[Cell]:
        """A cell a model and example, as :func:`chosen_of` gives them."""
        return [
            Cell(
                f"{_PATCHED}-{number}-{example}",
                self.localised,
                {"model": self.models[number], "example": example},
            )
            for number, example in zip(
                chosen["number"].tolist(), chosen["example"].tolist(), strict=True
            )
        ]

    def _chosen(self, results: CellResults) -> pd.DataFrame:
        ranked = [
            tables["table"].assign(number=int(key.split("-")[2]))
            for key, (tables, _) in those(results, _RANKED).items()
        ]
        return chosen_of(pd.concat(ranked, ignore_index=True), self.count)

    def ranked(self, keys: Sequence[str], keep: Callable[..., None], model: str) -> None:
        """How far apart the paths of some prompts are in the free protocol, as
        :func:`kvinterp.patching.highest_kl` has it.
        """
        adapter, prompts = self.adapter(model), self.prompt_list
        options = self.choices("max_new_tokens") | {"protocol": "free"}
        with adapter.one_call():
            for example, key in numbered(keys).items():
                part = compare_examples(
                    adapter,
                    prompts[example],
                    *paths_of(self.kernels),
                    examples=[example],
                    **options,
                )
                # A prompt that ends with the prefill's token has no step that could differ.
                later = (
                    part.steps[part.steps["step"] > 0]
                    .groupby("example")["kl"]
                    .mean()
                    .get(example, 0.0)
                )
                row = part.examples[
                    ["example", "id", "prompt_tokens", "steps", "flip_index"]
                ].assign(mean_kl=later)
                row = part.failures.assign(mean_kl=np.nan) if len(part.failures) else row
                row.insert(0, "model", adapter.facts.name)
                keep(key, {"table": row})

    def localised(self, model: str, example: int) -> CellResult:
        """Patches and splits one of the chosen examples."""
        adapter, prompts = self.adapter(model), self.prompt_list
        paths = zip(("cached", "recompute"), paths_of(self.kernels), strict=True)
        options = {
            **dict(paths),
            **self.choices("max_new_tokens"),
            "only": [example],
            "progress": "none",
        }
        tables, summaries = list[Tables](), dict[str, Any]()
        for part in dict.fromkeys(self.part):
            if part == SPLIT:
                split = decompose(adapter, prompts, **options)
                made, summaries[part] = (
                    {"decomposition": split.steps, "layers": split.layers},
                    split.provenance,
                )
            else:
                swept = sweep(adapter, prompts, **options | SETS[part])
                made = {
                    "recovery": swept.recovery,
                    "steps": swept.steps,
                    "controls": swept.controls,
                }
                summaries[part] = swept.provenance
            labels = {"model": adapter.facts.name, "part": part}
            tables.append(
                {name: table.assign(**labels) for name, table in made.items() if len(table)}
            )
        return stacked(tables), {"model": adapter.facts.name, "parts": summaries}

    def reduce(self, results: CellResults) -> Result:
        """The sweeps and the split of every model, and their tables one below the other."""
        tables, summaries = gathered(results)
        found = found_in(tables, summaries)
        said = [
            {"model": model, "part": part, **one.summary()} for (model, part), one in found.items()
        ]
        tables["chosen"] = self._chosen(results).drop(columns="number")
        tables["recovery_by_layer"] = recovery_by_layer(found)
        summary = {
            "chosen": tables["chosen"].to_dict("records"),
            "sweeps": [one for one in said if one["part"] != SPLIT],
            "decompositions": [one for one in said if one["part"] == SPLIT],
            "by_layer": tables["recovery_by_layer"].to_dict("records"),
            "provenance": self.provenances(),
            "told": summaries,
        }
        return Result(tables, summary)

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """What the paper's patch and K and V recover with all layers together."""
        table, said = result.tables["recovery_by_layer"], []
        names = {"paper": "the paper's patch", "kv-into-cached": "K and V put into the cached path"}
        for part, name in names.items() if len(table) else ():
            known = table[(table["part"] == part) & (table["defined"] > 0)]
            found = [
                whole["median"] for _, mine in known.groupby("model") for whole in _all_layers(mine)
            ]
            if found:
                low, high = percent(min(found)), percent(max(found))
                said.append(f"{name} {low if low == high else f'{low} to {high}'}")
        lines = [f"Patching all layers together recovers, at the median: {'; '.join(said)}." if said else
                 "There is no difference to recover, or neither the paper's patch nor K and V were asked for."]  # fmt: skip
        if "paper" in self.part and said:
            lines.append("The recompute path carries nothing from step to step: the paper's patch changes the step that it acts "
                         "at, and later ones only by another token, wherever the difference arises.")  # fmt: skip
        return lines

    def rows(self, result: Result) -> Rows:
        """For each model which examples, what each patch recovers, and the split."""
        for model, group in result.tables["chosen"].groupby("model", sort=False):
            flips, labels = int(group["flip_index"].notna().sum()), int(group["of"].iloc[0])
            note = f"the highest of {counted(labels, 'example')}; {flips} flip a token"
            extra = {"unit": "examples", "measure": "nats", "model": model, "note": note}
            yield median_of(
                "mean KL of an example that is patched, free protocol", group["mean_kl"], **extra
            )
        for (model, part), one in found_in(result.tables, result.summary["told"]).items():
            for row in one.rows():
                yield {"model": model, "part": part, **row} | (
                    {"part": f"split, {row['part']}"} if part == SPLIT else {}
                )

    def charts(self, result: Result) -> Charts:
        """The map of all patches, and of each model the paper's patch by example and the split."""
        summaries, charts = result.summary["told"], dict[str, Chart]()
        found, table = found_in(result.tables, summaries), result.tables["recovery_by_layer"]
        if len(table):
            measures = {
                part: RECOVERED[one.provenance["distance"]]
                for (_, part), one in found.items()
                if part != SPLIT
            }
            table = table.assign(
                patch=[
                    f"{row.part}, {row.sweep} ({measures[row.part]})" for row in table.itertuples()
                ]
            )
            panel = Panel(
                table,
                "layer",
                "patch",
                "map",
                "median",
                facet="model",
                scale="signed",
                label="median recovery",
            )
            charts["localisation"] = Chart(
                "What each patch recovers, layer by layer", [panel], ["in brackets: of what"]
            )
        for (model, part), one in found.items():
            for chart in (
                list(one.charts(of_model(one.provenance)).values())[:1]
                if part in ("paper", SPLIT)
                else ()
            ):
                charts[f"localisation_{part}_{[*summaries].index(model)}"] = chart
        return charts


def _all_layers(rows: pd.DataFrame) -> list[Finding]:
    """The row of a sweep in which every layer is patched together, where there is one."""
    whole = rows["sweep"].eq("cumulative") & rows["layer"].eq(rows["layer"].max())
    whole |= rows["sweep"].eq("cumulative-from") & rows["layer"].eq(0)
    return rows[whole].to_dict("records")[:1]


def gathered(results: CellResults) -> CellResult:
    """The tables of all models and parts, and what each part was run with, by model and part."""
    summaries: dict[str, Any] = {}
    for _, about in those(results, _PATCHED).values():
        summaries.setdefault(about["model"], about["parts"])
    return joined(results, _PATCHED), summaries


def found_in(
    tables: Tables, summaries: Mapping[str, Mapping[str, Any]]
) -> dict[tuple[str, str], Any]:
    """The sweep of each model and part, or its split, of what :func:`gathered` gives."""
    found: dict[tuple[str, str], Any] = {}
    parted = {name: table for name, table in tables.items() if "part" in table}
    for model, part, about in (
        (model, *pair) for model, parts in summaries.items() for pair in parts.items()
    ):
        own = {
            name: only(table, model=model, part=part).drop(columns=["model", "part"])
            for name, table in parted.items()
        }
        if part == SPLIT:
            found[model, part] = Decomposition(own["decomposition"], own["layers"], about)
        else:
            # One without controls has an empty table, without those of the others' distances.
            controls = own["controls"] if len(own.get("controls", ())) else pd.DataFrame()
            found[model, part] = Sweep(own["recovery"], own["steps"], controls, about)
    return found


def recovery_by_layer(found: Mapping[tuple[str, str], Any]) -> pd.DataFrame:
    """What the patches of all models and parts recover, layer by layer."""
    tables = [
        one.aggregate().assign(model=model, part=part)
        for (model, part), one in found.items()
        if part != SPLIT
    ]
    return pd.concat(tables, ignore_index=True) if tables else pd.DataFrame()


def chosen_of(ranked: pd.DataFrame, count: int) -> pd.DataFrame:
    """The examples of the highest mean KL, of each model so many; of equal ones the earlier.

    Args:
        ranked: A row a model and example: mean_kl; NaN where it could not be compared.
        count: How many; all where there are fewer.

    Returns:
        Their rows, the highest first, with rank, of (how many there were) and why.
    """
    ordered = ranked.dropna(subset=["mean_kl"]).sort_values(
        ["number", "mean_kl", "example"], ascending=[True, False, True]
    )
    groups = ordered.groupby("number")
    placed = ordered.assign(of=groups["example"].transform("size"), rank=groups.cumcount() + 1)
    best = placed[placed["rank"] <= count].reset_index(drop=True)
    by = "by the mean KL of the steps after the prefill, free protocol"
    return best.assign(
        why=[
            f"number {rank} of {of} {by}" for rank, of in zip(best["rank"], best["of"], strict=True)
        ]
    )
