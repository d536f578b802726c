"""Measure the error of every policy on a model's real keys and values, and the noise it is
equivalent to.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp.commands.kit import (
    Adapter,
    Cell,
    CellResults,
    Chart,
    Charts,
    OfModel,
    Panel,
    Result,
    Rows,
    counted,
    finding_from,
    joined,
    listed,
    metrics,
    model,
    number,
    option,
    shared,
)
from kvinterp.errors import NonFiniteError, UnsupportedError
from kvinterp.findings import UNKNOWN
from kvinterp.metrics.equivalent_noise import SUMS, error_sums, noise_of_sums
from kvinterp.models.inputs import encode
from kvinterp.models.threads import own_threads
from kvinterp.papers.behaviour.designs import reseeded
from kvinterp.paths import run
from kvinterp.paths.store import Growing, Store
from kvinterp.policies import Policy, policy_named
from kvinterp.policies.size import bits_at

POLICIES = (
    *("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "hadamard+q8_0", "hadamard+q4_0", "int8", "int4"),
    *(
        "kivi(bits=4,residual=32)",
        "kivi(bits=2,residual=32)",
        "fp8(format=e4m3)",
        "fp8(format=e5m2)",
        "truncate(4)",
    ),
    *(
        "uniform(-1,1)",
        "uniform(-1.5,1.5)",
        "uniform(0,2)",
        "uniform(-2,2)",
        "normal(0,0.25)",
        "normal(0,0.5)",
    ),
)
"""What is asked about unless policies are given: formats, and the noise of the study of errors in
the KV cache.
"""
PLACE = ("layer", "tensor", "kv_head")
_WHOLE = ["policy", "tensor"]
"""Those of one policy on K, or on V, in all layers and heads."""


class EquivalentNoise(OfModel):
    """How large, how skewed and how heavy-tailed is the error of a policy on real K and V, and at
    how many bits?
    """

    model: str = model("zoo:llama64-mini")
    policies: tuple[str, ...] = option(
        POLICIES,
        "A policy, such as q8_0 or normal(0,0.25); may be given several times.",
        flag="--policy",
        empty="refused",
    )
    prompts: str = shared("prompts")
    max_new_tokens: int = option(
        32,
        "How many tokens to decode after each prompt; their K and V are written one at a time.",
        min=1,
    )

    def cells(self) -> list[Cell]:
        """A cell a policy; what it does not fit is said before any is measured."""
        policies = {str(policy): policy for policy in map(policy_named, self.policies)}
        for policy in policies.values():
            policy.start(self.adapter().facts)
        return [
            Cell(f"policy-{number}", self.measured, {"policy": text})
            for number, text in enumerate(policies)
        ]

    def measured(self, policy: str) -> pd.DataFrame:
        """The sums of one policy, prompt by prompt."""
        return error_of_policy(
            self.adapter(), self.prompt_list, policy_named(policy), self.max_new_tokens
        )

    def reduce(self, results: CellResults) -> Result:
        """By policy, layer, tensor and head over all prompts; the summary has each policy's K and V
        as a whole.
        """
        by_prompt = joined(results)["table"]
        table, wholes = pooled(by_prompt, ["policy", *PLACE]), pooled(by_prompt, _WHOLE)
        intervals = [_interval(group) for _, group in by_prompt.groupby(_WHOLE, sort=False)]
        wholes[["low", "high"]] = pd.DataFrame(intervals)
        # The smallest and the largest of a layer and head, of each policy and tensor.
        ranges = table.groupby(_WHOLE, sort=False)["relative_rms"].agg(["min", "max"]).reset_index()
        summary = {
            "prompts": int(by_prompt["prompt"].nunique()),
            "max_new_tokens": self.max_new_tokens,
            "provenance": self.provenances(),
            "policies": wholes.to_dict("records"),
            "places": ranges.to_dict("records"),
        }
        return Result({"equivalent_noise": table}, summary)

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """The smallest and the largest error."""
        table = _smallest_first(result)
        last, lines = table.iloc[-1], []
        if last["relative_rms"] > 0:
            lines.append(
                f"Of {counted(table['policy'].nunique(), 'policy')}, {last['policy']} makes the largest error: "
                f"{number(last['relative_rms'])} times the root mean square of {last['tensor']} "
                f"({counted(result.summary['prompts'], 'prompt')})."
            )
        largest = table.groupby("policy")["relative_rms"].max()
        if none := list(largest.index[~(largest > 0)]):
            lines.append(f"No error at all: {listed(none)}.")
        return lines

    def rows(self, result: Result) -> Rows:
        """Size, bias, flipped signs and zeros of the error of every policy on K and on V, smallest
        first.
        """
        prompts = result.summary["prompts"]
        for row in _smallest_first(result).to_dict("records"):
            of_error = functools.partial(finding_from, row, by=_WHOLE, n=prompts)
            yield of_error("root mean square of the error", "relative_rms", measure="of the tensor's own",
                           note=f"stored in {number(row['bits'])} bits")  # fmt: skip
            known = functools.partial(of_error, ends=UNKNOWN)
            if row["bias"]:
                yield known("bias", "bias", measure="of the tensor's own root mean square")
            yield from (
                known(what, name, measure="%")
                for name, what in SHARES.items()
                if row[name] not in (0, 1)
            )

    def charts(self, result: Result) -> Charts:
        """Size, bias and flipped signs of the error of every policy, smallest first."""
        table = _smallest_first(result)
        groups = result.tables["equivalent_noise"].groupby(_WHOLE)
        table["line"] = table["policy"] + " (" + table["bits"].map(number) + " bits)"
        panels = []
        for name, (label, scale) in QUANTITIES.items():
            ends = groups[name].agg(low="min", high="max").reset_index()
            rows = table.drop(columns=["low", "high"]).merge(ends, on=_WHOLE)
            panels.append(
                Panel(rows, name, "line", "dots", color="tensor", label=label, scale=scale)
            )
        return {
            "equivalent_noise": Chart(
                "The error of each policy on K and V (lines: the layers and heads)", panels
            )
        }


SHARES = {"sign_flips": "signs flipped", "zeroed": "values made 0", "share_kept": "rows kept"}
QUANTITIES = {
    "relative_rms": ("root mean square of the error, relative to that of K or V", "zero"),
    "bias": ("mean of the error, relative to the same", "linear"),
    "sign_flips": ("share of signs flipped", "linear"),
}


def _smallest_first(result: Result) -> pd.DataFrame:
    """The policies' K and V as a whole."""
    table = pd.DataFrame(result.summary["policies"])
    largest = table.groupby("policy")["relative_rms"].transform("max")
    return (
        table.assign(largest=largest)
        .sort_values(["largest", *_WHOLE], ignore_index=True)
        .drop(columns="largest")
    )


# One policy ---------------------------------------------------------------------------------------


def error_of_policy(
    adapter: Adapter, prompts: Sequence[Any], policy: Policy, max_new_tokens: int
) -> pd.DataFrame:
    """What a policy makes of the keys and values that a model computes without it.

    The prompt's rows are written at once and those of the decoded tokens one by one, as in
    decoding; what is then read is set beside what was written, so that the error is the policy's
    own and none that an error in an earlier layer brought along. Noise draws anew for every prompt.

    Args:
        adapter: The model.
        prompts: Prompts.
        policy: The policy.
        max_new_tokens: Greedy tokens behind each prompt.

    Returns:
        One row a prompt, layer, tensor and KV head: policy, bits, rows and rows_kept, which only
        differ where rows are let go of (the error is that of the others), and the sums of
        :data:`kvinterp.metrics.equivalent_noise.SUMS`.

    Raises:
        UnsupportedError: The policy chooses rows by what a model's attention shows.
    """
    if policy.sites:
        raise UnsupportedError(
            f"policy {policy} chooses rows by what it sees ({', '.join(policy.sites)}) and has no error of its own apart from "
            "a run: measure it with kvinterp study kv-error."
        )
    tables = []
    for index, prompt in enumerate(prompts):
        for layer, exact, positions, read in _read_back(
            adapter, prompt, reseeded(policy, index), max_new_tokens
        ):
            for tensor, x, y in zip("KV", exact, read, strict=True):
                if not bool(y.isfinite().all()):
                    raise NonFiniteError(
                        f"policy {policy} makes NaN or infinity of {tensor} in layer {layer}, in {y.dtype}, so "
                        "that its error has no size: give it a smaller amplitude or a larger scale, or --dtype float32."
                    )
                kept = x if positions is None else x.gather(2, positions[..., None].expand_as(y))
                tables.append(pd.DataFrame({
                    "policy": str(policy),
                    "bits": bits_at(policy, adapter.facts, 8 * adapter.dtype.itemsize, tensor.lower(), layer),
                    "prompt": index,
                    "layer": layer,
                    "tensor": tensor,
                    "kv_head": range(x.shape[1]),
                    "rows": x.shape[2],
                    "rows_kept": y.shape[2],
                    **{name: values[0].cpu() for name, values in error_sums(kept, y).items()},
                }))  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def _read_back(
    adapter: Adapter, prompt: Any, policy: Policy, steps: int
) -> Iterator[tuple[int, tuple[Tensor, Tensor], Tensor | None, tuple[Tensor, Tensor]]]:
    """Each layer with its exact K and V, and the rows that are read in the end: which, and what."""
    tokens = encode(adapter, prompt, steps)
    decoded = run(adapter, tokens, "cached", max_new_tokens=steps, stop="length").tokens
    sites = "cache_k" if adapter.facts.cached_keys_rotated else "cache_k_pre", "cache_v"
    whole = run(
        adapter, [*tokens, *decoded[:-1]], "cached", record=sites, positions="all", max_new_tokens=1
    ).records
    exact = [
        tuple(whole[site, layer][0][None] for site in sites)
        for layer in range(adapter.facts.layers)
    ]
    length, last = len(tokens) + steps - 1, {}

    def listen(cache_rows: Any, k: Tensor, v: Tensor) -> None:
        last[cache_rows.layer] = (
            (None if cache_rows.positions_left is None else cache_rows.positions_left.to(k.device)),
            (k, v),
        )

    with torch.no_grad(), own_threads(adapter):
        store = Store(
            adapter.facts, policy, 1, adapter.dtype, adapter.device, [listen], Growing(length)
        )
        for start, stop in [(0, len(tokens)), *((at, at + 1) for at in range(len(tokens), length))]:
            for layer, (k, v) in enumerate(exact):
                store.update(layer, k[:, :, start:stop], v[:, :, start:stop])
            # What is read last is looked at before rows are let go of: the memory moves those that
            # stay.
            if stop < length:
                store.settle()
    for layer, (k, v) in enumerate(exact):
        yield layer, (k, v), *last[layer]


# Put together -------------------------------------------------------------------------------------


def pooled(by_prompt: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The noise of the places that share some columns, from the sums of all their elements.

    Args:
        by_prompt: As :func:`error_of_policy` gives it.
        keys: Columns; the rest is put together.
    """
    groups = by_prompt.groupby(list(keys), sort=False)
    sums = groups[[*SUMS, "rows", "rows_kept"]].sum()
    # Places that store in several formats have the mean over their elements.
    bits = (
        (by_prompt["bits"] * by_prompt["elements"])
        .groupby([by_prompt[key] for key in keys], sort=False)
        .sum()
    )
    share_kept = (sums["rows_kept"] / sums["rows"]).rename("share_kept")
    return pd.concat(
        [(bits / sums["elements"]).rename("bits"), share_kept, noise_of_sums(sums)], axis=1
    ).reset_index()


def _interval(by_prompt: pd.DataFrame) -> metrics.Interval:
    """The interval of relative_rms, over prompts."""
    sums = by_prompt.groupby("prompt")[["e2", "x2"]].sum()
    return metrics.clustered_interval(
        lambda e2, x2: (e2.sum() / x2.sum()) ** 0.5, sums.index.to_numpy(), *sums.to_numpy().T
    )
