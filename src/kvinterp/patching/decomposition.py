"""Splits the difference between the paths into what earlier K and V carry and what this step's kernels add.

At every matched step three paths stand on the same tokens: the cached path, the recompute path, and one decode step of the
cached kind on the recompute path's own keys and values. The last two share their state and differ in this step's one-row
computation only (**fresh**); the first and the last share the one-row computation and differ in the state only (**state**).
The **null** control is a difference that no cache can explain: the recompute path against itself with a longer suffix, which a
causal model must not see.
"""

from __future__ import annotations

import contextlib
import dataclasses
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvinterp import metrics
from kvinterp.data import Prompt
from kvinterp.errors import InputError, UnsupportedError, located
from kvinterp.models import Adapter, wrap
from kvinterp.models.adapter import Site
from kvinterp.patching.lanes import Donor, RunnerLane
from kvinterp.patching.patch import stored_sites
from kvinterp.paths import Cached, Recompute
from kvinterp.paths.runner import encode, growing_store
from kvinterp.provenance import provenance

__all__ = ["Decomposition", "decompose"]


@dataclasses.dataclass
class Decomposition:
    """The split at every step, in nats, and layer by layer.

    Attributes:
        steps: One row an example and step: total, fresh, state, null (KL against the recompute path for total, fresh and
            null; against the cached path for state), and the same as the L2 distance of the logits (total_l2, ...).
        layers: One row an example, step and layer: the L2 distance of resid_post for total, fresh, state and null, relative
            to the recompute path's norm.
        about: Provenance.
    """

    steps: pd.DataFrame
    layers: pd.DataFrame
    about: dict[str, Any]

    def summary(self) -> dict[str, Any]:
        """Means over every step of every example."""
        means = self.steps.drop(columns=["example", "step"]).mean()
        return {
            **{name: float(value) for name, value in means.items()},
            "examples": int(self.steps["example"].nunique()),
            "steps": len(self.steps),
            **self.about,
        }


def decompose(
    model: Any, prompts: Any, *, max_new_tokens: int = 32, suffix: int = 8, progress: str = "bar"
) -> Decomposition:
    """Splits the difference between cached decoding and recomputation at every matched step.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        max_new_tokens: Most steps; the tokens are those the cached path chooses greedily.
        suffix: Tokens put behind the prefix for the null control.
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: Something given does not fit.
        UnsupportedError: The model keeps more than keys and values (Mamba, Gated DeltaNet).
    """
    adapter = wrap(model)
    if not adapter.attention_only:
        raise UnsupportedError(
            f"{adapter.facts.architecture} keeps other state than keys and values, which cannot be split this way: use audit()."
        )
    if not isinstance(suffix, int) or suffix < 1:
        raise InputError(f"suffix={suffix!r} was given: expected a whole number of tokens of at least 1.")
    single = isinstance(prompts, str | Prompt) or (len(prompts) > 0 and isinstance(prompts[0], int))
    items = [prompts] if single else list(prompts)
    if not items:
        raise InputError("the list of prompts is empty: give at least one.")
    tokens = [encode(adapter, item, max_new_tokens + suffix) for item in items]
    steps: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    with located(f"model {adapter.facts.name}"):
        for example, prompt in enumerate(
            tqdm(tokens, "decomposing", unit="prompt", disable=None if progress == "bar" else True)
        ):
            _one(adapter, example, prompt, max_new_tokens, suffix, steps, layers)
    about = {"suffix": suffix, "provenance": provenance(adapter, max_new_tokens=max_new_tokens)}
    return Decomposition(pd.DataFrame(steps), pd.DataFrame(layers), about)


def _one(
    adapter: Adapter,
    example: int,
    prompt: list[int],
    room: int,
    suffix: int,
    steps: list[dict[str, Any]],
    layers: list[dict[str, Any]],
) -> None:
    count = adapter.facts.layers
    residual: list[Site] = [("resid_post", layer) for layer in range(count)]
    stored: list[Site] = [(site, layer) for site in stored_sites(adapter, "kv") for layer in range(count)]
    seen = {name: Donor(adapter, residual, len(prompt)) for name in ("cached", "null", "fresh")}
    whole = Donor(adapter, [*residual, *stored], len(prompt))
    filler = (prompt * (suffix // len(prompt) + 1))[:suffix]
    with contextlib.ExitStack() as stack:
        cached = stack.enter_context(RunnerLane(adapter, Cached(), prompt, room, [seen["cached"]]))
        recompute = stack.enter_context(RunnerLane(adapter, Recompute(), prompt, room, [whole]))
        stack.enter_context(adapter.attached([*seen["fresh"].places, *seen["null"].places]))
        prefix, feed = list(prompt), None
        for step in range(room):
            logits = {"cached": cached.advance(feed), "recompute": recompute.advance(feed)}
            if feed is not None:
                prefix.append(feed)
            logits["fresh"] = _one_row(adapter, prefix, whole, seen["fresh"]) if step else logits["recompute"]
            logits["null"] = _with_suffix(adapter, [*prefix, *filler], len(prefix), seen["null"])
            steps.append({"example": example, "step": step, **_split(logits)})
            layers += _by_layer(example, step, count, whole, seen, len(prefix))
            feed = int(logits["cached"].argmax())
            if feed in adapter.end_tokens:
                break


def _split(logits: dict[str, Tensor]) -> dict[str, float]:
    pairs = {
        "total": (logits["cached"], logits["recompute"]),
        "fresh": (logits["fresh"], logits["recompute"]),
        "state": (logits["cached"], logits["fresh"]),
        "null": (logits["null"], logits["recompute"]),
    }
    kl = {name: float(metrics.kl_divergence(a, b)) for name, (a, b) in pairs.items()}
    return kl | {f"{name}_l2": float((a.double() - b.double()).norm()) for name, (a, b) in pairs.items()}


def _one_row(adapter: Adapter, prefix: list[int], whole: Donor, seen: Donor) -> Tensor:
    """One decode step of the cached kind on the keys and values the recompute path has just shown."""
    store = growing_store(adapter, Cached(), 1, len(prefix), ())
    keys_site, values_site = stored_sites(adapter, "kv")
    for layer in range(adapter.facts.layers):
        keys, values = whole.window(keys_site, layer)[1], whole.window(values_site, layer)[1]
        store.update(layer, keys[:, :, :-1], values[:, :, :-1])
    return _heard(adapter, torch.tensor([prefix[-1:]], device=adapter.device), store, seen, len(prefix))[0, -1]


def _with_suffix(adapter: Adapter, tokens: list[int], length: int, seen: Donor) -> Tensor:
    row = torch.tensor([tokens], device=adapter.device)
    return _heard(adapter, row, None, seen, len(tokens))[0, length - 1]


@torch.no_grad()
def _heard(adapter: Adapter, tokens: Tensor, store: Any, seen: Donor, end: int) -> Tensor:
    seen.begin_step(end - seen.prompt_length)
    with adapter.listening({place: [heard] for place, heard in seen.listeners.items()}):
        return adapter.forward(tokens, store)


def _by_layer(
    example: int, step: int, layers: int, whole: Donor, seen: dict[str, Donor], length: int
) -> list[dict[str, Any]]:
    def row(donor: Donor, layer: int) -> Tensor:
        start, tensor = donor.window("resid_post", layer)
        return tensor[0, length - 1 - start].double()

    rows = []
    for layer in range(layers):
        base = row(whole, layer)
        cached = row(seen["cached"], layer)
        fresh = row(seen["fresh"], layer) if step else base
        parts = {
            "total": cached - base,
            "fresh": fresh - base,
            "state": cached - fresh,
            "null": row(seen["null"], layer) - base,
        }
        norm = base.norm()
        rows.append(
            {"example": example, "step": step, "layer": layer, **{n: float(d.norm() / norm) for n, d in parts.items()}}
        )
    return rows
