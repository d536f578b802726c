"""What the root-cause study measures: dot products, one rounded block, K and V where they are
written, precisions, KV heads.

They are the FP16 paper's root cause falsification (arXiv 2604.15409, section 5.2), which argues
that FP16 sums taken in another order are the cause of the divergence: four of the five that it
numbers there, on any model, each with the control that tells the possible readings apart, and one
about grouped-query attention. What comes out of one prompt or one seed is a row of its own, so that
every mean has its interval.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.auditing.blocks import BlockModel, referenced
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.common.progress import each
from kvinterp.comparison import compare_examples
from kvinterp.errors import InputError
from kvinterp.findings import only
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.threads import own_threads
from kvinterp.paths import kernels_named

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
"""Dtype and kernel mode of each rung: precision changes down the first four, the order of additions
in the others.

No mode adds in 16 bits throughout: ``batch_invariant`` and the machine's own matrix products add in
float32 and round once. A fixed order that makes the paths equal shows that the order of additions
matters, not that sums kept in FP16 do."""


GROWTH = {"l2": "l2_growth", "relative_l2": "relative_growth"}
"""Measures of drift, the paper's and the same over the length of the stream, and the column of each
over that at the source.
"""


HookPoint = tuple[str, int]
"""A site and a layer."""


@contextlib.contextmanager
def hearing(
    adapter: Adapter,
    hook_points: Iterable[HookPoint],
    planted: Mapping[HookPoint, Callable[[Tensor], Tensor]] = MappingProxyType({}),
) -> Iterator[dict[HookPoint, Tensor]]:
    """Within it the newest position of what a model computes at some hook points is noted, by hook point.

    Args:
        adapter: The model.
        hook_points: Sites and layers.
        planted: What a tensor is turned into at a hook point, at every position, before the model goes
            on with it.
    """
    seen: dict[HookPoint, Tensor] = {}

    def hear(tensor: Tensor, hook_point: HookPoint) -> Tensor | None:
        new = planted[hook_point](tensor) if hook_point in planted else None
        seen[hook_point] = (tensor if new is None else new)[0, -1].clone()
        return new

    listeners = {
        hook_point: [functools.partial(hear, hook_point=hook_point)]
        for hook_point in (*hook_points, *planted)
    }
    with adapter.attached(list(listeners)), adapter.listening(listeners):
        yield seen


@torch.no_grad()
def newest_at(
    adapter: Adapter, tokens: Tensor, *hook_points: Any
) -> tuple[dict[HookPoint, Tensor], Tensor]:
    """What one forward of token ids ``[1, position]`` computes at some hook points, see :func:`hearing`,
    and its logits.
    """
    with own_threads(adapter), hearing(adapter, *hook_points) as seen:
        logits = adapter.forward(tokens)[0, -1]
    return seen, logits


def accumulation_error(
    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    head_dims: Sequence[int] = (16, 64, 128, 256),
    accumulate: Sequence[str] = ("float16", "bfloat16", "float32"),
    samples: int = 64,
    seeds: Sequence[int] = range(16),
) -> pd.DataFrame:
    """Root-cause experiment 1: relative error of the dot products of attention, one term added
    after another, against length.

    The paper reports it flat in the sequence length. Attention has two sums: a score adds over the
    head's width, which a longer sequence does not change, and the value product adds over the
    positions. And an error is relative to something: to the magnitudes that were added, or to their
    sum, which cancellation makes smaller the more terms there are. The operands are the same 16-bit
    numbers for every accumulator, so that what is measured is the sum's own rounding.

    Args:
        lengths: Numbers of positions.
        head_dims: Widths of a head, over which a score adds.
        accumulate: The dtypes running sums are rounded to.
        samples: Dot products of each seed.
        seeds: Seed the operands, standard normal; attention's weights are the softmax of standard
            normal scores. The same operands are given to every accumulator, and several seeds say
            how much of a difference is the operands' luck.

    Returns:
        One row a product (scores for every head_dim, values), length, accumulator and seed: terms,
        mean_relative and std_relative (to the sum of the terms' magnitudes), relative_to_result
        (median), in_unit_roundoffs (of mean_relative).
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    tables = []
    for head_dim, length in each(
        list(itertools.product([*head_dims, None], lengths)), "adding up,", "sum"
    ):
        product, terms = ("values", length) if head_dim is None else ("scores", head_dim)
        operands = [torch.randn(2, samples, terms, generator=generator) for generator in generators]
        # Every seed's sums side by side: what is added up one after another is as many terms, not
        # as many seeds.
        a, b = torch.cat(operands, dim=1)
        a = torch.softmax(a, -1) if product == "values" else a
        a, b = a.half().double(), b.half().double()
        exact, size = (a * b).sum(-1), (a * b).abs().sum(-1)
        for name in accumulate:
            dtype: Any = dtype_named(name)
            error = (_added_up(a, b, dtype) - exact).abs()
            relative, to_result = (
                (error / over).view(-1, samples) for over in (size, exact.abs().clamp(min=1e-12))
            )
            tables.append(pd.DataFrame({
                "product": product,
                "length": length,
                "head_dim": head_dim,
                "accumulate": name,
                "seed": seeds,
                "terms": terms,
                "mean_relative": relative.mean(1),
                "std_relative": [float(row.std()) for row in relative],
                "relative_to_result": to_result.median(1).values,
                "in_unit_roundoffs": relative.mean(1) / unit_roundoff(dtype),
            }).astype({"head_dim": "Int64"}))  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def _added_up(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(a.shape[0], dtype=dtype)
    for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True):
        # The product of two 16-bit numbers is exact in float64: one rounding for the product, one
        # for the sum.
        total = (total.double() + (x * y).to(dtype).double()).to(dtype)
    return total.double()


def propagation(
    model: Any, prompts: Sequence[Sequence[int]], sources: Sequence[int] | None = None
) -> pd.DataFrame:
    """Root-cause experiment 2: one block's output rounded to float16 once, the rest in float64, and
    how far off later blocks are.

    Args:
        model: A model of any kind; it is run in float64.
        prompts: Token ids.
        sources: The blocks, one at a time. Default: all.

    Returns:
        One row a prompt, source and layer: l2 and relative_l2 of the residual stream at the newest
        position (the paper's measure is the absolute one; a stream that grows makes the other
        smaller), and l2_growth and relative_growth, each over that at the source (NaN where the
        rounding changed nothing there).
    """
    adapter = wrap(model).at(torch.float64)
    count = adapter.facts.layers
    hook_points = [("resid_post", layer) for layer in range(count)]
    rows = []
    for number, prompt in enumerate(each(prompts, "rounding one layer,", "prompt")):
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        clean, _ = newest_at(adapter, tokens, hook_points)
        for source in range(count) if sources is None else sources:
            noisy, _ = newest_at(
                adapter,
                tokens,
                hook_points,
                {hook_points[source]: lambda x: x.to(torch.float16).to(x.dtype)},
            )
            for hook_point in hook_points[source:]:
                drift = metrics.residual_drift(noisy[hook_point][None], clean[hook_point][None])
                rows.append(
                    (number, source, hook_point[1], *(float(drift[name]) for name in GROWTH))
                )
    table = pd.DataFrame(rows, columns=["prompt", "source", "layer", *GROWTH])
    for name, growth in GROWTH.items():
        at_source = table.groupby(["prompt", "source"])[name].transform("first")
        table[growth] = table[name] / at_source.where(at_source > 0)
    return table


def kv_write_error(
    model: Any,
    prompts: Sequence[Sequence[int]],
    kernels: Sequence[str] = (
        "native",
        "split_k(4,float16)",
        "split_k(4,float32)",
        "batch_invariant",
    ),
    steps: int = 8,
) -> pd.DataFrame:
    """Root-cause experiment 3: K and V of one new token, computed alone as a cached step does and
    jointly with the whole prefix.

    Both are given bitwise the same residual stream, so that what differs is born where the cache is
    written.

    Args:
        model: A model of any kind, in the dtype to be measured.
        prompts: Token ids; the last ``steps`` of each are the new tokens.
        kernels: Kernel modes to measure under.
        steps: New tokens a prompt.

    Returns:
        One row a kernel mode, prompt, position, layer and tensor: relative_error (worst head),
        ulp_mean, ulp_max, share_differing (of the numbers written).
    """
    adapter = wrap(model)
    rows = []
    for mode, (number, prompt) in each(
        list(itertools.product(kernels, enumerate(prompts))), "K and V,", "prompt"
    ):
        if len(prompt) <= steps:
            raise InputError(
                f"prompt {number} has {len(prompt)} tokens: expected more than steps={steps}."
            )
        tokens = torch.tensor([list(prompt)], device=adapter.device)
        hook_points, prefill = (
            itertools.product(("k", "v"), range(adapter.facts.layers)),
            len(prompt) - steps,
        )
        block = BlockModel(adapter, kernels_named(mode))
        with referenced(block, tokens) as hooks, hearing(adapter, hook_points) as tensors:
            _, cache = hooks.feed(0, prefill)
            for position in range(prefill, len(prompt)):
                _, cache = hooks.feed(position, position + 1, cache)
                alone = dict(tensors)
                hooks.recompute(position + 1)
                for (tensor, layer), written in alone.items():
                    jointly = tensors[tensor, layer]
                    errors = metrics.vector_errors(written, jointly)
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
                            "share_differing": float((written != jointly).double().mean()),
                        }
                    )
    return pd.DataFrame(rows)


def precision_ladder(
    model: Any,
    prompts: Any,
    rungs: Sequence[tuple[str, str]] = LADDER,
    max_new_tokens: int = 32,
) -> pd.DataFrame:
    """Root-cause experiment 5: the full pipeline in every precision and under every order of
    additions.

    Args:
        model: A model of any kind whose weights are in float16.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        rungs: Dtype and kernel mode of each rung.
        max_new_tokens: Most steps.

    Returns:
        One row a rung and prompt: flipped, mean_kl, mean_kl_before_flip (with the step of the flip
        itself), rms_logit (mean over steps), max_abs_logit, bitwise_equal_steps, steps,
        kl_over_squared_logit (mean_kl over the mean of rms_logit squared). A prompt that could not
        be compared has ``failed`` and no numbers.
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
            steps = only(result.steps, example=example["example"])
            largest, squared = steps["max_abs_logit"], (steps["rms_logit"] ** 2).mean()
            numbers = {
                "flipped": not np.isnan(example["flip_index"]),
                **{name: example[name] for name in ("mean_kl", "mean_kl_before_flip")},
                "rms_logit": steps["rms_logit"].mean(),
                "max_abs_logit": largest.max(),
                "bitwise_equal_steps": (largest == 0).sum(),
                "steps": len(steps),
                "kl_over_squared_logit": example["mean_kl"] / squared if squared else np.nan,
            }
            rows.append({**rung, "id": example["id"], "failed": False, **numbers})
        rows += [{**rung, "id": failed, "failed": True} for failed in result.failures["id"]]
    return pd.DataFrame(rows)


def gqa_spread(
    models: Sequence[Any],
    prompts: Sequence[Sequence[int]],
    layer: int = 1,
    error: float = 2.0**-11,
    positions: Sequence[int] = (-1, -4, -8),
) -> pd.DataFrame:
    """The same relative error planted in one KV head's entry, and how far it spreads through the
    heads that share it.

    Everything is computed in float64, so that the planted error (default: one float16 unit
    roundoff) is the only one.

    Args:
        models: Models that differ in how many query heads share a KV head.
        prompts: Token ids, the same for every model.
        layer: Where it is planted.
        error: Its size relative to the entry.
        positions: The cache positions it is planted at, one at a time, counted from the newest.

    Returns:
        One row a model, prompt, tensor, KV head and position: query_heads_per_kv_head,
        heads_touched, share_touched, head_error (mean relative error of z in the touched heads),
        attn_out, resid_post (relative L2, at the planted layer), final (relative L2 of the last
        residual stream), kl (nats).
    """
    rows = []
    for model in models:
        adapter = wrap(model).at(torch.float64)
        facts = adapter.facts
        hook_points: dict[str, HookPoint] = {
            name: (name, layer) for name in ("z", "attn_out", "resid_post")
        }
        hook_points["final"] = ("resid_post", facts.layers - 1)
        for number, prompt in enumerate(
            each(prompts, f"planting errors in {facts.name},", "prompt")
        ):
            tokens = torch.tensor([list(prompt)], device=adapter.device)
            clean, logits = newest_at(adapter, tokens, hook_points.values())
            for tensor, head, position in itertools.product(
                ("k", "v"), range(facts.kv_heads), positions
            ):
                noise = {
                    (tensor, layer): functools.partial(
                        _planted, head=head, position=position, error=error
                    )
                }
                noisy, changed = newest_at(adapter, tokens, hook_points.values(), noise)
                off = metrics.vector_errors(noisy["z", layer], clean["z", layer])["relative_error"]
                touched = off > 0
                drifts = {
                    name: float(
                        metrics.residual_drift(noisy[hook_point][None], clean[hook_point][None])[
                            "relative_l2"
                        ]
                    )
                    for name, hook_point in hook_points.items()
                    if name != "z"
                }
                rows.append(
                    {
                        "model": facts.name,
                        "query_heads_per_kv_head": facts.query_heads // facts.kv_heads,
                        "prompt": number,
                        "tensor": tensor.upper(),
                        "kv_head": head,
                        "position": position,
                        "heads_touched": int(touched.sum()),
                        "share_touched": float(touched.double().mean()),
                        "head_error": float(off[touched].mean()) if touched.any() else 0.0,
                        **drifts,
                        "kl": float(metrics.kl_divergence(logits, changed)),
                    }
                )
    return pd.DataFrame(rows)


def _planted(tensor: Tensor, head: int, position: int, error: float) -> Tensor:
    planted = tensor.clone()
    planted[:, position, head] *= 1 + error
    return planted
