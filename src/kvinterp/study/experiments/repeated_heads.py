"""Compare a model with itself when K and V heads are repeated: fewer query heads per KV head, the same function.

The FP16 paper (arXiv 2604.15409) infers the effect of grouped-query attention from three models that also differ in
everything else. Here the weights that make K and V are repeated until fewer query heads share a KV head, or none do. On
paper every number the model computes stays the same, and both models get the same tokens, so whatever changes between
them is due to the ratio.
"""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.numbers import counted
from kvinterp.common.progress import each
from kvinterp.common.result import Result
from kvinterp.comparison import Comparison, compare, failures_kept
from kvinterp.comparison.by_layer import pairs_of
from kvinterp.data import load_prompts
from kvinterp.errors import UnsupportedError
from kvinterp.findings import Chart, Panel, finding, median_of
from kvinterp.models import Adapter, load_model, wrap
from kvinterp.paths import run
from kvinterp.study.cells import Cell, loaded
from kvinterp.study.experiments.base import Charts, Rows, Tables
from kvinterp.study.experiments.of_models import OfModels, shown_sites
from kvinterp.study.experiments.options import option

TRUTH = "recompute@float64"
CHANGE, ALIKE = "median change of the RMS logit difference, heads repeated most less as they are", "every measure alike"
MEASURED = ("rms_logit", "mean_kl", "relative_l2", "pattern_kl")
PAIRS = {
    **{
        kernels: (f"cached[kernels={kernels}]", f"recompute[kernels={kernels}]")
        for kernels in ("native", "split_k(8,float16)")
    },
    "native+normal(0,0.01)": ("cached+normal(0,0.01)", "cached"),
}
"""The machine's own kernels, under which paths may be equal, and ones that differ by construction: heads that repeat the
same weights repeat the same rounding, so that these ask nothing of sharing. And a cache with errors that are drawn for each KV
head, beside one without: query heads that share a head share its error, and repeated heads have errors of their own."""


@dataclasses.dataclass(frozen=True)
class RepeatedHeads(OfModels):
    """Does it matter how many query heads share a KV head, where nothing else changes?"""

    STEPS: ClassVar = ("steps",)
    TABLES: ClassVar = ("repeated_heads",)

    def headline(self, result: Result) -> list[str]:
        """Whether the ratio of query heads to KV heads changes the difference between the paths."""
        rows = [row for row in self.rows(result.tables) if row["finding"] == CHANGE]
        alike = sum(row["verdict"] == ALIKE for row in rows)
        if not rows:
            return ["No model has query heads that share a KV head: there is nothing to repeat."]
        return [
            f"With K and V heads repeated, so that fewer query heads share one, every measure is the same number at every ratio "
            f"in {alike} of {counted(len(rows), 'case')} (a case is a model under some kernels)."
        ]

    def rows(self, tables: Tables) -> Rows:
        """What repeating the heads changes, and how nearly the copies compute the same in float64."""
        rows = []
        for (model, kernels), mine in tables["repeated_heads"].groupby(["model", "kernels"], sort=False):
            by = {name: mine.pivot(index="id", columns="repeated", values=name) for name in MEASURED}
            equal = all(not (wide.sub(wide[1], axis=0).abs() > 0).any(axis=None) for wide in by.values())
            rms = by["rms_logit"]
            rows.append(median_of(CHANGE, rms[rms.columns.max()] - rms[1], verdict=ALIKE if equal else "", model=model,
                                  kernels=kernels))  # fmt: skip
            for count, each_ratio in mine.groupby("query_heads_per_kv_head"):
                rows.append(median_of("median RMS logit difference of the paths", each_ratio["rms_logit"], each_ratio["id"],
                                      model=model, kernels=kernels, query_heads_per_kv_head=count))  # fmt: skip
        for model, mine in tables["repeated_heads"].groupby("model", sort=False):
            rows.append(finding("largest difference of a float64 logit between a copy and the model",
                                mine["float64_difference"].max(), n=mine["id"].nunique(), model=model))  # fmt: skip
        return rows

    def charts(self, result: Result) -> Charts:
        """How far apart the paths are at each ratio."""
        groups = result.tables["repeated_heads"].groupby(["kernels", "model", "query_heads_per_kv_head"], sort=False)
        panel = Panel(groups["rms_logit"].mean().reset_index().sort_values("query_heads_per_kv_head"), "query_heads_per_kv_head",
                      "rms_logit", color="model", facet="kernels", xscale="doubling", xlabel="query heads a KV head",
                      label="RMS logit difference\n(mean over prompts)")  # fmt: skip
        return {"root_cause_repeated_heads": Chart("A model beside itself with K and V heads repeated", [panel])}

    most: int = option(4, "How many of the prompts to run.", min=1)
    steps: int = option(12, "The most tokens to decode per prompt.", min=2)

    def cells(self) -> list[Cell]:
        """A cell a model some of whose query heads share a KV head."""
        return [
            dataclasses.replace(cell, told=f"K and V heads of {adapter.facts.name} repeated")
            for cell, adapter in zip(super().cells(), self.adapters(), strict=True)
            if adapter.facts.query_heads > adapter.facts.kv_heads
        ]


def measured(model: Mapping[str, Any], prompts: str, most: int, steps: int) -> pd.DataFrame:
    """The table of one model and its repetitions."""
    facts = loaded(model).facts
    sharing = facts.query_heads // facts.kv_heads
    times = [count for count in range(2, sharing + 1) if sharing % count == 0]
    # The copies are this cell's alone: kept as models are, they would push others out.
    copies = {1: loaded(model), **{count: with_repeated_heads(**model, times=count) for count in times}}
    return repeated_heads(copies, load_prompts(prompts)[:most], steps)


def repeated_heads(copies: Mapping[int, Adapter], prompts: Any, steps: int) -> pd.DataFrame:
    """How far apart the paths are in a model and in itself with repeated heads, on the tokens that the first one chooses.

    Args:
        copies: The model by 1, and by how often its K and V heads are repeated.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        steps: Most steps.

    Returns:
        One row a copy, kernel mode (behind a plus: the errors in the cache) and prompt: model, repeated,
        query_heads_per_kv_head, id, steps, differing_steps (of the steps after the prefill), rms_logit, mean_kl, relative_l2
        (resid_post of the last layer), pattern_kl, within and across (mean correlation of head errors in and across the KV groups
        of the model as it was), float64_difference (largest of the prompt's logits between the copy and the model, in float64).
    """
    original, rows = copies[1], []
    sharing = original.facts.query_heads // original.facts.kv_heads
    sites = shown_sites(original)
    for prompt in each(prompts, "copies with more KV heads,", "prompt"):
        whole = {times: run(adapter, prompt, TRUTH, max_new_tokens=1, logits="keep") for times, adapter in copies.items()}
        exact = {times: torch.as_tensor(trace.logits) for times, trace in whole.items()}
        for kernels, pair in PAIRS.items():
            fed: list[int] | None = None
            for times, adapter in copies.items():
                found = compare(
                    adapter,
                    [prompt],
                    *pair,
                    max_new_tokens=steps,
                    continuation=fed,
                    record=sites,
                    progress="none",
                    done=failures_kept,
                )
                fed = found.steps["token_a"].tolist()[:-1] if fed is None else fed
                rows.append(
                    {
                        "model": original.facts.name,
                        "repeated": times,
                        "query_heads_per_kv_head": sharing // times,
                        "kernels": kernels,
                        "id": str(found.examples["id"].iloc[0]) if len(found.examples) else str(prompt),
                        **_numbers(found, sharing),
                        "float64_difference": float((exact[times] - exact[1]).abs().max()),
                    }
                )
    return pd.DataFrame(rows)


def _numbers(found: Comparison, sharing: int) -> dict[str, float]:
    steps, layers, heads = (table[table["step"] > 0] for table in (found.steps, found.layers, found.heads))
    pairs = pairs_of(heads, sharing).groupby("kind")["r"].mean()
    return {
        "steps": len(steps),
        "differing_steps": int((steps["max_abs_logit"] > 0).sum()),
        "rms_logit": float((steps["rms_logit"] ** 2).mean() ** 0.5),
        "mean_kl": float(steps["kl"].mean()),
        "relative_l2": float(layers.loc[layers["layer"] == layers["layer"].max(), "relative_l2"].mean()),
        "pattern_kl": float(heads["kl"].mean()),
        "within": float(pairs.get("within", float("nan"))),
        "across": float(pairs.get("across", float("nan"))),
    }


# The model -------------------------------------------------------------------------------------------------------------


def with_repeated_heads(name: str, times: int, **settings: Any) -> Adapter:
    """A model whose K and V heads are repeated, so that as many fewer query heads share one; what it computes is the same.

    Its checkpoint is written anew in a temporary folder, so that every kind of model is made as it always is.

    Args:
        name: As for :func:`kvinterp.load_model`.
        times: How often; the query heads that share a KV head must be a multiple.
        settings: What else that takes.

    Raises:
        UnsupportedError: K and V are not made by ``k_proj`` and ``v_proj`` of as many heads, or that is no multiple.
    """
    from safetensors.torch import save_file

    source = load_model(name, **{**settings, "kind": "native", "device": "cpu"})
    facts = source.facts
    if (facts.query_heads // facts.kv_heads) % times:
        raise UnsupportedError(
            f"{facts.query_heads // facts.kv_heads} query heads of {name} share a KV head, which {times} does not divide: "
            "repeat them as often as a divisor of it."
        )
    state, seen, repeated = dict[str, Tensor](), set[int](), 0
    for key, tensor in source.model.state_dict().items():
        if tensor.data_ptr() in seen:
            continue  # Tied to what was written before, and tied again as it is loaded.
        seen.add(tensor.data_ptr())
        state[key] = tensor.contiguous()
        if key.rpartition(".")[0].endswith((".k_proj", ".v_proj")):
            heads = tensor.unflatten(0, (facts.kv_heads, -1))
            state[key] = heads.repeat_interleave(times, 0).flatten(0, 1).contiguous()
            repeated += key.endswith(".weight")
    if repeated != 2 * facts.layers:
        raise UnsupportedError(
            f"{name} makes K and V by other weights than a k_proj and a v_proj a layer, so they cannot be repeated here."
        )
    with tempfile.TemporaryDirectory(prefix="kvinterp-") as folder:
        save_file(state, Path(folder) / "model.safetensors", {"format": "pt"})
        model: Any = source.model
        for part in (model.config, model.generation_config, source.tokenizer):
            if part is not None:
                part.save_pretrained(folder)
        place = Path(folder) / "config.json"
        config = json.loads(place.read_text(encoding="utf-8"))
        place.write_text(json.dumps({**config, "num_key_value_heads": facts.kv_heads * times}), encoding="utf-8")
        adapter = load_model(folder, **settings)
    return wrap(adapter.model, adapter.tokenizer, f"{name}, K and V heads repeated {times} times")
