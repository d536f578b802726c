"""Splits the difference between the paths into what earlier K and V carry and what this step's kernels add.

At every matched step three paths stand on the same tokens: the cached path, the recompute path, and one decode step of the
cached kind on the recompute path's own keys and values. The last two share their state and differ in this step's one-row
computation only (**fresh**); the first and the last share the one-row computation and differ in the state only
(**state**). As logits, and as residual streams, total = fresh + state; their norms and KL divergences need not add up.

The **null** control is a difference that no cache can explain: the recompute path against itself with a longer suffix,
which a causal model must not see.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from tqdm.auto import tqdm

from kvinterp import metrics
from kvinterp.errors import InputError, UnsupportedError, located
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.adapter import KVStore, Listener, Site
from kvinterp.models.threads import own_threads
from kvinterp.patching.lanes import Donor, RunnerLane, two_paths
from kvinterp.patching.patch import stored_sites
from kvinterp.patching.planted import Plant
from kvinterp.patching.side_by_side import check_finite
from kvinterp.paths import ExecutionPath
from kvinterp.paths.cache import PassThrough
from kvinterp.paths.runner import LOGITS, check_choice, encode, growing_store, listed
from kvinterp.policies import Identity
from kvinterp.provenance import provenance
from kvinterp.recording import whole_number

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
    model: Any,
    prompts: Any,
    *,
    max_new_tokens: int = 32,
    suffix: int = 8,
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
    plant: Plant | None = None,
    progress: str = "bar",
) -> Decomposition:
    """Splits the difference between cached decoding and recomputation at every matched step.

    Args:
        model: A model of any kind, or an adapter.
        prompts: One prompt or a list.
        max_new_tokens: Most steps; the tokens are those the cached path chooses greedily.
        suffix: Tokens put behind the prefix for the null control.
        cached: The cached path. Its policy on K and V and its cache's dtype belong to the state: the one row is computed
            without them.
        recompute: The recompute path.
        plant: A difference to plant in the cached path first, to check that it is told apart.
        progress: ``"bar"`` or ``"none"``.

    Raises:
        InputError: Something given does not fit.
        NonFiniteError: NaN or Inf appeared in the logits of an example.
        UnsupportedError: The model keeps more than keys and values (Mamba, Gated DeltaNet).
    """
    adapter = wrap(model)
    if not adapter.attention_only:
        raise UnsupportedError(
            f"{adapter.facts.architecture} keeps other state than keys and values, which cannot be split this way: "
            "use audit()."
        )
    if (whole_number(suffix) or 0) < 1:
        raise InputError(f"suffix={suffix!r} was given: expected a whole number of tokens of at least 1.")
    check_choice("progress", progress, ("bar", "none"))
    paths = two_paths(cached, recompute, "a decomposition")
    if plant is not None:
        plant.check(adapter)
    items, _ = listed(prompts)
    if not items:
        raise InputError("the list of prompts is empty: give at least one.")
    tokens = [encode(adapter, item, max_new_tokens + suffix) for item in items]
    steps: list[dict[str, Any]] = []
    layers: list[dict[str, Any]] = []
    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        for example, prompt in enumerate(
            tqdm(tokens, "decomposing", unit="prompt", disable=None if progress == "bar" else True)
        ):
            run = _Example(adapter, paths, prompt, max_new_tokens, suffix, plant)
            for step, logits, by_layer in run.steps():
                split = _split(logits)
                check_finite(torch.tensor(list(split.values()), dtype=torch.float64), f"example {example}, step {step}")
                steps.append({"example": example, "step": step, **split})
                layers += [{"example": example, "step": step, **row} for row in by_layer]
    about = {
        "paths": {"cached": str(paths[0]), "recompute": str(paths[1])},
        "suffix": suffix,
        "provenance": provenance(adapter, max_new_tokens=max_new_tokens),
    }
    return Decomposition(pd.DataFrame(steps), pd.DataFrame(layers), about)


class _Example:
    """One prompt, decomposed step by step."""

    def __init__(
        self,
        adapter: Adapter,
        paths: tuple[ExecutionPath, ExecutionPath],
        prompt: list[int],
        room: int,
        suffix: int,
        plant: Plant | None,
    ) -> None:
        self.adapter, self.prompt, self.room = adapter, prompt, room
        cached, self.recompute = paths
        # What is done to K and V, by a policy or a narrower cache, belongs to the state.
        self.one_row = dataclasses.replace(cached, policy=Identity(), cache_dtype=None)
        self.cached = cached if plant is None else plant.written(cached, len(prompt))
        self.plant = None if plant is None else plant.watcher()
        self.filler = (prompt * (suffix // len(prompt) + 1))[:suffix]
        self.layers = range(adapter.facts.layers)
        self.row_model = adapter.at(dtype_named(cached.dtype))
        self.whole_model = adapter.at(dtype_named(self.recompute.dtype))
        residual: list[Site] = [("resid_post", layer) for layer in self.layers]
        stored: list[Site] = [(site, layer) for site in stored_sites(adapter, "kv") for layer in self.layers]
        self.whole = Donor(self.whole_model, [*residual, *stored], len(prompt))
        self.seen = {
            name: Donor(model, residual, len(prompt))
            for name, model in (("cached", self.row_model), ("fresh", self.row_model), ("null", self.whole_model))
        }

    def steps(self) -> Iterator[tuple[int, dict[str, Tensor], list[dict[str, Any]]]]:
        """At every step the logits of the four paths and the rows of the table by layer."""
        planted = [] if self.plant is None else [self.plant]
        with contextlib.ExitStack() as stack:

            def lane(path: ExecutionPath, watchers: list[Any]) -> RunnerLane:
                return stack.enter_context(RunnerLane(self.adapter, path, self.prompt, self.room, watchers))

            cached = lane(self.cached, [*planted, self.seen["cached"]])
            recompute = lane(self.recompute, [self.whole])
            prefix, feed = list(self.prompt), None
            for step in range(self.room):
                logits = {"cached": cached.advance(feed), "recompute": recompute.advance(feed)}
                if feed is not None:
                    prefix.append(feed)
                logits["fresh"] = self._fresh(prefix) if step else logits["recompute"]
                logits["null"] = self._null(prefix)
                yield step, logits, self._by_layer(step, len(prefix))
                feed = int(logits["cached"].argmax())
                if feed in self.adapter.end_tokens:
                    break

    def _fresh(self, prefix: list[int]) -> Tensor:
        """One decode step of the cached kind on the keys and values the recompute path has just shown."""
        store = growing_store(self.row_model, self.one_row, 1, len(prefix), ())
        keys_site, values_site = stored_sites(self.adapter, "kv")
        for layer in self.layers:
            keys, values = (self.whole.window(site, layer)[1][:, :, :-1] for site in (keys_site, values_site))
            store.update(layer, keys, values)
        planted = [] if self.plant is None else [self.plant]
        logits = self._heard(self.row_model, self.one_row, prefix[-1:], store, [*planted, self.seen["fresh"]], len(prefix))
        logits = logits[:, -1]
        for watcher in planted:
            if LOGITS in watcher.listeners:
                changed = watcher.listeners[LOGITS](logits)
                logits = logits if changed is None else changed
        return logits[0]

    def _null(self, prefix: list[int]) -> Tensor:
        model = self.whole_model
        # The recompute path's own store, so that the suffix is all that differs.
        store = PassThrough(model.facts, self.recompute.policy, 1, model.dtype, model.device, ())
        tokens = [*prefix, *self.filler]
        return self._heard(model, self.recompute, tokens, store, [self.seen["null"]], len(tokens))[0, len(prefix) - 1]

    @torch.no_grad()
    def _heard(
        self, model: Adapter, path: ExecutionPath, tokens: list[int], store: KVStore, watchers: list[Any], end: int
    ) -> Tensor:
        kernels = path.kernels.mode(model)
        listeners: dict[Site, list[Listener]] = {}
        for watcher in (kernels, *watchers):
            for place, listener in watcher.listeners.items():
                listeners.setdefault(place, []).append(listener)
        for watcher in watchers:
            watcher.begin_step(end - len(self.prompt))
        places = [place for place in listeners if place != LOGITS]
        with model.attached(places), model.listening(listeners), kernels:
            return model.forward(torch.tensor([tokens], device=model.device), store)

    def _by_layer(self, step: int, length: int) -> list[dict[str, Any]]:
        def row(donor: Donor, layer: int) -> Tensor:
            start, tensor = donor.window("resid_post", layer)
            return tensor[0, length - 1 - start].double()

        rows = []
        for layer in self.layers:
            base, cached = row(self.whole, layer), row(self.seen["cached"], layer)
            fresh = row(self.seen["fresh"], layer) if step else base
            parts = {
                "total": cached - base,
                "fresh": fresh - base,
                "state": cached - fresh,
                "null": row(self.seen["null"], layer) - base,
            }
            norm = base.norm()
            rows.append({"layer": layer, **{name: float(part.norm() / norm) for name, part in parts.items()}})
        return rows


def _split(logits: dict[str, Tensor]) -> dict[str, float]:
    pairs = {
        "total": (logits["cached"], logits["recompute"]),
        "fresh": (logits["fresh"], logits["recompute"]),
        "state": (logits["cached"], logits["fresh"]),
        "null": (logits["null"], logits["recompute"]),
    }
    kl = {name: float(metrics.kl_divergence(a, b)) for name, (a, b) in pairs.items()}
    return kl | {f"{name}_l2": float((a.double() - b.double()).norm()) for name, (a, b) in pairs.items()}
