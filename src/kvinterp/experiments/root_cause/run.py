"""All of the root-cause experiments on some models, resumable."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pandas as pd

from kvinterp.errors import InputError
from kvinterp.experiments.root_cause.flips import correlations_of, flips_of, seeds_of
from kvinterp.experiments.root_cause.ladder import precision_ladder
from kvinterp.experiments.root_cause.planted import gqa_spread, propagation
from kvinterp.experiments.root_cause.sums import accumulation_error
from kvinterp.experiments.root_cause.written import kv_write_error
from kvinterp.inputs import encode
from kvinterp.models import wrap
from kvinterp.provenance import provenance

__all__ = ["TABLES", "root_cause"]

TABLES = ("accumulation", "propagation", "kv_write", "flips", "correlations", "ladder", "gqa")
"""The names of its tables."""


def root_cause(
    models: Sequence[Any],
    prompts: Any,
    flip_kernels: str = "split_k(8,float16)",
    flip_strategy: str = "top_p(1.0,2.0)",
    flip_steps: int = 48,
    flip_seeds: Sequence[int] = (0, 1, 2),
    ladder_prompts: int = 6,
    ladder_steps: int = 16,
    progress: Callable[[str], None] | None = None,
    keep: Callable[[str, Callable[[], pd.DataFrame]], pd.DataFrame] | None = None,
) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
    """Runs every experiment on every model.

    Args:
        models: Adapters or models, their weights in float16; those that differ only in how many query heads share a KV head
            give the grouped-query table.
        prompts: Prompts, as :func:`kvinterp.compare` takes them.
        flip_kernels: The kernel mode under which flips are looked for, beside the machine's own.
        flip_strategy: The strategy under which they are looked for, beside greedy.
        flip_steps: Most steps of each there.
        flip_seeds: Seeds of the sampled decodes, each decoding every prompt once; a greedy decode needs none.
        ladder_prompts: How many of the prompts go up the ladder, whose slow rungs cost the most.
        ladder_steps: Most steps of each there.
        progress: Told what runs next.
        keep: Given the name of a table and what makes it, returns the table; :meth:`kvinterp.results.Parts.made` reads one
            that an interrupted run had finished.

    Returns:
        The tables accumulation, propagation, kv_write, flips, correlations, ladder and gqa (each with a column ``model``
        where it has one; correlations have ``all`` beside each model), and the provenance of each model.
    """
    tell, keep = progress or (lambda _: None), keep or (lambda _, make: make())
    adapters = [wrap(model) for model in models]
    if not adapters:
        raise InputError("the list of models is empty: give at least one.")
    if not flip_seeds:
        raise InputError("flip_seeds is empty: give at least one seed.")
    widths = sorted({a.facts.head_dim for a in adapters} | {64, 128, 256})
    tell("sums of growing length")
    parts: dict[str, list[pd.DataFrame]] = {
        "accumulation": [keep("accumulation", partial(accumulation_error, head_dims=widths))]
    }
    for number, adapter in enumerate(adapters):
        name, ids = adapter.facts.name, [encode(adapter, prompt, 1) for prompt in prompts[:4]]
        runs = {
            "propagation": partial(propagation, adapter, ids),
            "kv_write": partial(kv_write_error, adapter, ids),
            "ladder": partial(precision_ladder, adapter, prompts[:ladder_prompts], max_new_tokens=ladder_steps),
        }
        for what, run in runs.items():
            tell(f"{what} of {name}")
            parts.setdefault(what, []).append(keep(f"{what}-{number}", run).assign(model=name))
        settings = itertools.product(*map(dict.fromkeys, (("native", flip_kernels), ("greedy", flip_strategy))))
        for turn, (kernels, strategy) in enumerate(settings):
            tell(f"flips of {name}, {kernels} kernels, {strategy}")
            seeded = [
                keep(
                    f"flips-{number}-{turn}-{seed}",
                    partial(flips_of, adapter, prompts, kernels, strategy, flip_steps, seed=seed),
                )
                for seed in seeds_of(strategy, flip_seeds)
            ]
            examples = pd.concat(seeded, ignore_index=True)
            for what, table in (("flips", examples), ("correlations", correlations_of(examples))):
                parts.setdefault(what, []).append(table.assign(model=name, kernels=kernels, strategy=strategy))
    if len(adapters) > 1:
        pooled = pd.concat(parts["flips"], ignore_index=True)
        for (kernels, strategy), group in pooled.groupby(["kernels", "strategy"], sort=False):
            table = correlations_of(group).assign(model="all", kernels=kernels, strategy=strategy)
            parts["correlations"].append(table)
    tell("grouped-query attention")
    alike = [a for a in adapters if a.facts.width == adapters[0].facts.width and not any(a.facts.windows)]
    parts["gqa"] = [gqa_spread(alike, [encode(alike[0], prompt, 1) for prompt in prompts[:4]])] if alike else []
    tables = {what: pd.concat(frames, ignore_index=True) for what, frames in parts.items() if frames}
    return tables, {
        adapter.facts.name: provenance(adapter, flip_kernels=flip_kernels, flip_strategy=flip_strategy)
        for adapter in adapters
    }
