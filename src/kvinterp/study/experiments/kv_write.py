"""Measure K and V where they are written (root-cause experiment 3 of the FP16 paper).

One row computed alone is compared with the same row computed together with its prefix.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp.auditing.blocks import BlockHooks, BlockModel, referenced
from kvinterp.metrics import vector_errors
from kvinterp.models import wrap
from kvinterp.paths import kernels_named
from kvinterp.study.experiments.kit import (
    FEW,
    Adapter,
    Chart,
    Charts,
    InputError,
    OfModels,
    Panel,
    Result,
    Rows,
    each,
    encoded,
    listed,
    median_of,
    option,
)


class KvWrite(OfModels):
    """Does the difference originate where K and V are written?"""

    TABLES = ("kv_write",)

    most: int = option(FEW, "How many of the prompts to run.", min=1)

    def measure(self, adapter: Adapter) -> pd.DataFrame:
        """The error on a few prompts."""
        return kv_write_error(adapter, encoded(adapter, self.prompts, self.most))

    def headline(self, result: Result) -> list[str]:
        """Under which kernels K and V differ where they are written."""
        largest = result.tables["kv_write"].groupby("kernels", sort=False)["relative_error"].max()
        differ = [str(name) for name in largest.index[largest > 0]]
        end = f"differ where they are written under {listed(differ)}" if differ else "are equal under all kernels tried"
        return [f"K and V of a new token, computed alone and with its prefix, {end}."]

    def rows(self, result: Result) -> Rows:
        """The error of each kernel mode."""
        what = "median relative error of K and V, written alone against written with the prefix"
        groups = result.tables["kv_write"].groupby("kernels", sort=False)
        return [median_of(what, group["relative_error"], group["prompt"], kernels=name) for name, group in groups]

    def charts(self, result: Result) -> Charts:
        """The error by layer, a line a kernel mode."""
        mean = result.tables["kv_write"].groupby(["tensor", "kernels", "layer"], sort=False)["relative_error"].mean()
        title, label = "K and V of a new token, computed alone and with its prefix", "mean relative error"
        panel = Panel(mean.reset_index(), "layer", "relative_error", color="kernels", facet="tensor", label=label)
        return {"root_cause_kv_write": Chart(title, [panel])}


def kv_write_error(
    model: Any,
    prompts: Sequence[Sequence[int]],
    kernels: Sequence[str] = ("native", "split_k(4,float16)", "split_k(4,float32)", "batch_invariant"),
    steps: int = 8,
) -> pd.DataFrame:
    """Root-cause experiment 3: K and V of one new token, computed alone as a cached step does and jointly with the whole prefix.

    Both are given bitwise the same residual stream, so that what differs is born where the cache is written.

    Args:
        model: A model of any kind, in the dtype to be measured.
        prompts: Token ids; the last ``steps`` of each are the new tokens.
        kernels: Kernel modes to measure under.
        steps: New tokens a prompt.

    Returns:
        One row a kernel mode, prompt, position, layer and tensor: relative_error (worst head), ulp_mean, ulp_max,
        share_differing (of the numbers written).
    """
    adapter = wrap(model)
    rows = []
    for mode, (number, prompt) in each(list(itertools.product(kernels, enumerate(prompts))), "K and V,", "prompt"):
        if len(prompt) <= steps:
            raise InputError(f"prompt {number} has {len(prompt)} tokens: expected more than steps={steps}.")
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        with referenced(BlockModel(adapter, kernels_named(mode)), tokens) as hooks:
            for position, alone, jointly in _written(adapter, hooks, len(prompt) - steps):
                for (tensor, layer), written in alone.items():
                    errors = vector_errors(written, jointly[tensor, layer])
                    rows.append(
                        {
                            "kernels": mode,
                            "prompt": number,
                            "position": position,
                            "layer": layer,
                            "tensor": tensor.upper(),
                            "relative_error": float(errors["relative_error"].max()),
                            "ulp_mean": float(errors["ulp_mean"].mean()),
                            "ulp_max": float(errors["ulp_max"].max()),
                            "share_differing": float((written != jointly[tensor, layer]).double().mean()),
                        }
                    )
    return pd.DataFrame(rows)


Written = dict[tuple[str, int], Tensor]


def _written(adapter: Adapter, hooks: BlockHooks, prefill: int) -> Iterator[tuple[int, Written, Written]]:
    tensors: Written = {}
    places = list(itertools.product(("k", "v"), range(adapter.facts.layers)))

    def listener(place: tuple[str, int]) -> Callable[[Tensor], None]:
        return lambda tensor: tensors.__setitem__(place, tensor[0, -1].clone())

    with adapter.attached(places), adapter.listening({place: [listener(place)] for place in places}):
        _, cache = hooks.feed(0, prefill)
        for position in range(prefill, hooks.reference.tokens.shape[1]):
            _, cache = hooks.feed(position, position + 1, cache)
            alone = dict(tensors)
            hooks.recompute(position + 1)
            yield position, alone, dict(tensors)
