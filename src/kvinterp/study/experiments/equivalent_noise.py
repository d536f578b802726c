"""Measure the error of every policy on a model's real keys and values, and the noise it is equivalent to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import pandas as pd

from kvinterp.common.numbers import counted, listed, number
from kvinterp.common.result import Result
from kvinterp.data import load_prompts
from kvinterp.errors import InputError, NonFiniteError, UnsupportedError
from kvinterp.findings import Chart, Panel, finding, findings_of
from kvinterp.study.cells import Cell, joined, loaded
from kvinterp.study.experiments.base import Charts, OfModel, Parts
from kvinterp.study.experiments.options import argument, option, shared

if TYPE_CHECKING:
    from torch import Tensor

    from kvinterp.models import Adapter
    from kvinterp.policies import Policy

POLICIES = (
    *("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "hadamard+q8_0", "hadamard+q4_0", "int8", "int4"),
    *("kivi(bits=4,residual=32)", "kivi(bits=2,residual=32)", "fp8(format=e4m3)", "fp8(format=e5m2)", "truncate(4)"),
    *("uniform(-1,1)", "uniform(-1.5,1.5)", "uniform(0,2)", "uniform(-2,2)", "normal(0,0.25)", "normal(0,0.5)"),
)
"""What is asked about unless policies are given: formats, and the noise of the study of errors in the KV cache."""
PLACE = ("layer", "tensor", "kv_head")


@dataclasses.dataclass(frozen=True)
class EquivalentNoise(OfModel):
    """How large, how skewed and how heavy-tailed is the error of a policy on real K and V, and at how many bits?"""

    TABLES: ClassVar = ("equivalent_noise",)
    UNIT: ClassVar = "policies"

    model: str = argument("zoo:llama64-mini", "zoo:NAME, a transformers checkpoint folder, or a hub id.")
    policies: tuple[str, ...] = option(
        POLICIES, "A policy, such as q8_0 or normal(0,0.25); may be given several times.", flag="--policy"
    )
    prompts: str = shared("prompts")
    max_new_tokens: int = option(
        32, "How many tokens to decode after each prompt; their K and V are written one at a time.", min=1
    )

    def cells(self) -> list[Cell]:
        """A cell a policy; what it does not fit is said before any is measured."""
        (adapter,) = self.adapters()
        settings = {"model": self.model_settings(), "prompts": self.prompts, "max_new_tokens": self.max_new_tokens}
        return [
            Cell(f"policy-{number}", f"{__name__}:measured", {**settings, "policy": policy}, f"noise of {policy}")
            for number, policy in enumerate(map(str, usable(self.policies, adapter)))
        ]

    def reduce(self, parts: Parts) -> Result:
        """By policy, layer, tensor and head over all prompts; the summary has each policy's K and V as a whole."""
        from kvinterp.models.provenance import provenance

        (adapter,) = self.adapters()
        by_prompt = joined(parts)["table"]
        table = pooled(by_prompt, ["policy", *PLACE])
        wholes = pooled(by_prompt, ["policy", "tensor"])
        groups = by_prompt.groupby(["policy", "tensor"], sort=False)
        intervals = [_interval(groups.get_group(tuple(key))) for key in wholes[["policy", "tensor"]].to_numpy()]
        wholes[["low", "high"]] = pd.DataFrame(intervals, columns=["low", "high"])
        about = {
            "prompts": int(by_prompt["prompt"].nunique()),
            "max_new_tokens": self.max_new_tokens,
            "provenance": provenance(adapter),
        }
        # The smallest and the largest of a layer and head, of each policy and tensor.
        places = table.groupby(["policy", "tensor"], sort=False)["relative_rms"].agg(["min", "max"]).reset_index()
        of_policies = {"policies": wholes.to_dict("records"), "places": places.to_dict("records")}
        return Result({"equivalent_noise": table}, {**about, **of_policies})

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """The smallest and the largest error."""
        table = _smallest_first(result)
        last = table.iloc[-1]
        none = sorted(set(table["policy"]) - set(table.loc[table["relative_rms"] > 0, "policy"]))
        lines = [
            f"Of {counted(table['policy'].nunique(), 'policy')}, {last['policy']} makes the largest error: "
            f"{number(last['relative_rms'])} times the root mean square of {last['tensor']} "
            f"({counted(result.summary['prompts'], 'prompt')})."
        ] if last["relative_rms"] > 0 else []  # fmt: skip
        return [*lines, *([f"No error at all: {listed(none)}."] if none else [])]

    def findings(self, result: Result) -> pd.DataFrame:
        """Size, bias, flipped signs and zeros of the error of every policy on K and on V, smallest first."""
        rows, prompts = [], result.summary["prompts"]
        for row in _smallest_first(result).to_dict("records"):
            labels = {"policy": row["policy"], "tensor": row["tensor"]}
            rows.append(finding("root mean square of the error", row["relative_rms"], (row["low"], row["high"]), prompts,
                                measure="of the tensor's own", note=f"stored in {number(row['bits'])} bits",
                                **labels))  # fmt: skip
            if row["bias"]:
                rows.append(
                    finding("bias", row["bias"], n=prompts, measure="of the tensor's own root mean square", **labels)
                )
            for name, what in SHARES.items():
                if row[name] not in (0, 1):
                    rows.append(finding(what, row[name], n=prompts, measure="%", **labels))
        return findings_of(rows)

    def charts(self, result: Result) -> Charts:
        """Size, bias and flipped signs of the error of every policy, smallest first."""
        table = _smallest_first(result)
        places = result.tables["equivalent_noise"].groupby(["policy", "tensor"])
        table["line"] = [f"{row.policy} ({number(row.bits)} bits)" for row in table.itertuples()]
        panels = []
        for name, (label, scale) in QUANTITIES.items():
            ends = places[name].agg(["min", "max"]).set_axis(["low", "high"], axis=1).reset_index()
            rows = table.drop(columns=["low", "high"]).merge(ends, on=["policy", "tensor"])
            panels.append(Panel(rows, name, "line", "dots", color="tensor", label=label, scale=scale))
        return {"equivalent_noise": Chart("The error of each policy on K and V (lines: the layers and heads)", panels)}


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
    return table.iloc[np.lexsort((table["tensor"], table["policy"], largest))].reset_index(drop=True)


# One policy ------------------------------------------------------------------------------------------------------------


def usable(policies: Sequence[str], adapter: Adapter) -> list[Policy]:
    """The policies of some texts, each once, all of which a model can run.

    Raises:
        InputError: There are none, or one is none.
        UnsupportedError: One does not fit the model.
    """
    from kvinterp.policies import policy_named

    if not policies:
        raise InputError("the list of policies is empty: give at least one.")
    by_text = {str(policy): policy for policy in map(policy_named, policies)}
    for policy in by_text.values():
        policy.check(adapter.facts.layers)
        policy.start(adapter.facts)
    return list(by_text.values())


def bits_of(policy: Policy, adapter: Adapter, tensor: str, layer: int) -> float:
    """Bits of an element as a real implementation stores it; those of the model's dtype where no policy with a format acts."""
    from kvinterp.policies.base import Chain, Selective

    parts = policy.parts if isinstance(policy, Chain) else (policy,)
    acting = [one for one in parts if not isinstance(one, Selective) or one.applies_to(tensor, layer)]
    bits_of_parts = [bits for one in acting if (bits := one.bits_stored(tensor, adapter.facts.head_dim)) is not None]
    return float(bits_of_parts[-1] if bits_of_parts else 8 * adapter.dtype.itemsize)


def measured(model: Mapping[str, Any], prompts: str, policy: str, max_new_tokens: int) -> pd.DataFrame:
    """The sums of one policy, prompt by prompt."""
    from kvinterp.policies import policy_named

    return error_of_policy(loaded(model), load_prompts(prompts), policy_named(policy), max_new_tokens)


def error_of_policy(adapter: Adapter, prompts: Sequence[Any], policy: Policy, max_new_tokens: int) -> pd.DataFrame:
    """What a policy makes of the keys and values that a model computes without it.

    The prompt's rows are written at once and those of the decoded tokens one by one, as in decoding; what is then read is set
    beside what was written, so that the error is the policy's own and none that an error in an earlier layer brought along.
    Noise draws anew for every prompt.

    Args:
        adapter: The model.
        prompts: Prompts.
        policy: The policy.
        max_new_tokens: Greedy tokens behind each prompt.

    Returns:
        One row a prompt, layer, tensor and KV head: policy, bits, rows and rows_kept, which only differ where rows are let go
        of (the error is that of the others), and the sums of :data:`kvinterp.metrics.equivalent_noise.SUMS`.

    Raises:
        UnsupportedError: The policy chooses rows by what a model's attention shows.
    """
    import torch

    from kvinterp.metrics.equivalent_noise import SUMS, error_sums
    from kvinterp.study.behaviour.designs import reseeded

    if policy.sites:
        raise UnsupportedError(
            f"policy {policy} chooses rows by what it sees ({', '.join(policy.sites)}) and has no error of its own apart from "
            "a run: measure it with kvinterp study kv-error."
        )
    rows = []
    for index, prompt in enumerate(prompts):
        for layer, exact, read_last in _read_back(adapter, prompt, reseeded(policy, index), max_new_tokens):
            positions, read = read_last
            for tensor, x, y in zip(("K", "V"), exact, read, strict=True):
                rows_kept = (
                    x if positions is None else x.gather(2, positions[..., None].expand(*positions.shape, x.shape[3]))
                )
                sums = {name: values[0].tolist() for name, values in error_sums(rows_kept, y).items()}
                place = {"policy": str(policy), "bits": bits_of(policy, adapter, tensor.lower(), layer), "prompt": index}
                counts = {"rows": x.shape[2], "rows_kept": y.shape[2]}
                if not bool(torch.isfinite(y).all()):
                    raise NonFiniteError(
                        f"policy {policy} makes NaN or infinity of {tensor} in layer {layer}, in {y.dtype}, so "
                        "that its error has no size: give it a smaller amplitude or a larger scale, or --dtype float32."
                    )
                for head in range(x.shape[1]):
                    errors = {name: sums[name][head] for name in SUMS}
                    rows.append({**place, "layer": layer, "tensor": tensor, "kv_head": head, **counts, **errors})
    return pd.DataFrame(rows)


def _read_back(
    adapter: Adapter, prompt: Any, policy: Policy, steps: int
) -> Iterator[tuple[int, tuple[Tensor, Tensor], tuple[Tensor | None, tuple[Tensor, Tensor]]]]:
    """Each layer with its exact K and V, and the rows that are read in the end: which, and what."""
    import torch

    from kvinterp.models.inputs import encode
    from kvinterp.models.threads import own_threads
    from kvinterp.paths import run
    from kvinterp.paths.store import Growing, Store

    tokens = encode(adapter, prompt, steps)
    decoded = run(adapter, tokens, "cached", max_new_tokens=steps, stop="length").tokens
    keys = "cache_k" if adapter.facts.cached_keys_rotated else "cache_k_pre"
    record: dict[str, Any] = {"record": (keys, "cache_v"), "positions": "all", "max_new_tokens": 1}
    whole = run(adapter, [*tokens, *decoded[:-1]], "cached", **record).records
    exact = {
        layer: (whole[keys, layer][0][None], whole["cache_v", layer][0][None]) for layer in range(adapter.facts.layers)
    }
    length, last = len(tokens) + steps - 1, {}

    def listen(place: Any, k: Tensor, v: Tensor) -> None:
        last[place.layer] = (None if place.rows is None else place.rows.to(k.device)), (k, v)

    with torch.no_grad(), own_threads(adapter):
        store = Store(adapter.facts, policy, 1, adapter.dtype, adapter.device, [listen], Growing(length))
        for start, stop in [(0, len(tokens)), *((at, at + 1) for at in range(len(tokens), length))]:
            for layer, (k, v) in exact.items():
                store.update(layer, k[:, :, start:stop], v[:, :, start:stop])
            # What is read last is looked at before rows are let go of: the memory moves those that stay.
            if stop < length:
                store.settle()
    for layer, tensors in exact.items():
        yield layer, tensors, last[layer]


# Put together ----------------------------------------------------------------------------------------------------------


def pooled(by_prompt: pd.DataFrame, keys: Sequence[str]) -> pd.DataFrame:
    """The noise of the places that share some columns, from the sums of all their elements.

    Args:
        by_prompt: As :func:`error_of_policy` gives it.
        keys: Columns; the rest is put together.
    """
    from kvinterp.metrics.equivalent_noise import SUMS, noise_of_sums

    groups = by_prompt.groupby(list(keys), sort=False)
    sums = groups[[*SUMS, "rows", "rows_kept"]].sum()
    # Of places that store in several formats the mean over their elements.
    bits = (by_prompt["bits"] * by_prompt["elements"]).groupby([by_prompt[key] for key in keys], sort=False).sum()
    share_kept = (sums["rows_kept"] / sums["rows"]).rename("share_kept")
    return pd.concat([(bits / sums["elements"]).rename("bits"), share_kept, noise_of_sums(sums)], axis=1).reset_index()


def _interval(by_prompt: pd.DataFrame) -> tuple[float, float]:
    """The interval of relative_rms, over prompts."""
    from kvinterp import metrics

    sums = by_prompt.groupby("prompt")[["e2", "x2"]].sum()

    def rms(e2: Any, x2: Any) -> float:
        return float((e2.sum() / x2.sum()) ** 0.5)

    return metrics.clustered_interval(rms, sums.index.to_numpy(), sums["e2"].to_numpy(), sums["x2"].to_numpy())
