"""Compare the paths in several precisions and orders of additions, one change at a time.

This is root-cause experiment 5 of the FP16 paper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.comparison import Comparison
from kvinterp.models import dtype_named
from kvinterp.study.experiments.kit import (
    Adapter,
    Chart,
    Charts,
    OfModels,
    Panel,
    Result,
    Rows,
    compare_examples,
    counted,
    each,
    listed,
    load_prompts,
    median_of,
    only,
    option,
)

LADDER = (
    ("float16", "native"),
    ("bfloat16", "native"),
    ("float32", "native"),
    ("float64", "native"),
    ("float16", "batch_invariant"),
    ("float32", "batch_invariant"),
    ("float16", "split_k(4,float16)"),
    ("float16", "split_k(4,float32)"),
    ("float16", "layer_cast"),
)
"""Dtype and kernel mode of each rung: precision changes down the first four, the order of additions in the others.

No mode adds in 16 bits throughout: ``batch_invariant`` and the machine's own matrix products add in float32 and round once.
A fixed order that makes the paths equal shows that the order of additions matters, not that sums kept in FP16 do."""


class Ladder(OfModels):
    """Is it the precision, or the order of additions?"""

    STEPS = ("steps",)
    TABLES = ("ladder",)

    most: int = option(6, "How many of the prompts to run. Some precisions and orders of additions are slow.", min=1)
    steps: int = option(16, "The most tokens to decode per prompt.", min=1)

    def measure(self, adapter: Adapter) -> pd.DataFrame:
        """Every rung on a few prompts."""
        return precision_ladder(adapter, load_prompts(self.prompts)[: self.most], max_new_tokens=self.steps)

    def headline(self, result: Result) -> list[str]:
        """Whether one fixed order of additions leaves a difference where the machine's kernels make one."""
        table = result.tables["ladder"]
        compared, failed = _compared(table), int(table["failed"].sum())
        fixed, native = (
            only(compared, kernels=kernels).groupby("dtype", sort=False)["max_abs_logit"].max()
            for kernels in ("batch_invariant", "native")
        )
        differ = native[native > 0]
        gone = [dtype for dtype, left in fixed.items() if left == 0 and dtype in differ]
        if differ.empty:
            line = "With the machine's kernels the paths gave the same logits in every dtype: no cause can be taken away."
        elif gone:
            # Both add in float32 or wider and round once.
            line = (
                f"One fixed order of additions leaves no difference in {listed(gone)}, where the machine's kernels make one: "
                "the order is the cause here. No kernel tried adds in float16 throughout, so this says nothing of sums kept in "
                "float16."
            )
        else:
            left = "leaves a difference too" if (fixed > 0).any() else "was tried in no dtype in which they differ"
            line = (
                f"The machine's kernels make a difference in {listed(list(differ.index))}; one fixed order of additions "
                f"{left}."
            )
        return [line, *([f"{counted(failed, 'run')} could not be compared."] if failed else [])]

    def rows(self, result: Result) -> Rows:
        """The logit difference on every rung."""
        by = _compared(result.tables["ladder"]).groupby(["dtype", "kernels", "model"], sort=False)
        what = "median RMS logit difference"
        return [
            median_of(what, group["rms_logit"], group["id"], model=model, dtype=dtype, kernels=kernels)
            for (dtype, kernels, model), group in by
        ]

    def charts(self, result: Result) -> Charts:
        """Logit error and KL on every rung."""
        table = result.tables["ladder"]
        table = table.assign(rung=table["dtype"] + ", " + table["kernels"])
        labels = {"rms_logit": "RMS logit difference, a mark a prompt", "mean_kl": "mean KL (nats), a mark a prompt"}
        rows = [
            Panel(table.dropna(subset=[column]), column, "rung", "dots", color="model", label=label)
            for column, label in labels.items()
        ]
        return {"root_cause_ladder": Chart("Precision, and the order in which kernels add", rows)}


def _compared(table: pd.DataFrame) -> pd.DataFrame:
    return table[~table["failed"].astype(bool)]


def precision_ladder(
    model: Any,
    prompts: Any,
    rungs: Sequence[tuple[str, str]] = LADDER,
    max_new_tokens: int = 32,
) -> pd.DataFrame:
    """Root-cause experiment 5: the full pipeline in every precision and under every order of additions.

    Args:
        model: A model of any kind whose weights are in float16.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        rungs: Dtype and kernel mode of each rung.
        max_new_tokens: Most steps.

    Returns:
        One row a rung and prompt: flipped, mean_kl, mean_kl_before_flip (with the step of the flip itself),
        rms_logit (mean over steps), max_abs_logit, bitwise_equal_steps, steps, kl_over_squared_logit (mean_kl over the mean
        of rms_logit squared). A prompt that could not be compared has ``failed`` and no numbers.
    """
    rows = []
    for dtype, kernels in each(rungs, "ladder,", "rung"):
        tail = f"[kernels={kernels}]@{dtype}"
        paths = f"cached{tail}", f"recompute{tail}"
        result = compare_examples(model, prompts, *paths, max_new_tokens=max_new_tokens)
        rung = {
            "dtype": dtype,
            "kernels": kernels,
            "protocol": "matched",
            "unit_roundoff": unit_roundoff(dtype_named(dtype)),  # type: ignore[arg-type]
        }
        for example in result.examples.to_dict("records"):
            rows.append({**rung, "id": example["id"], "failed": False, **_numbers(result, example)})
        rows += [{**rung, "id": failed, "failed": True} for failed in result.failures["id"]]
    return pd.DataFrame(rows)


def _numbers(result: Comparison, example: Mapping[str, Any]) -> dict[str, Any]:
    steps = only(result.steps, example=example["example"])
    largest, squared = steps["max_abs_logit"], (steps["rms_logit"] ** 2).mean()
    return {
        "flipped": not np.isnan(example["flip_index"]),
        **{name: example[name] for name in ("mean_kl", "mean_kl_before_flip")},
        "rms_logit": steps["rms_logit"].mean(),
        "max_abs_logit": largest.max(),
        "bitwise_equal_steps": (largest == 0).sum(),
        "steps": len(steps),
        "kl_over_squared_logit": example["mean_kl"] / squared if squared else np.nan,
    }
