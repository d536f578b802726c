"""What our own ways give: logits and log-probs of a text, by a model that is changed as a way says."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kvinterp.engines import routers
from kvinterp.engines.ways import TILE, Way, joined
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.hooks import Functions
from kvinterp.paths.model_cache import own_store
from kvinterp.paths.path import path_named
from kvinterp.policies import CacheRows, policy_named

PRODUCTS = (nn.functional.linear, torch.addmm, torch.matmul, Tensor.matmul, Tensor.__matmul__)
"""The functions that multiply matrices in a model's code, of which each adds up many terms."""


@contextlib.contextmanager
def changed(model: nn.Module, prompt: int, way: Way) -> Iterator[bool]:
    """The model with what a way changes of it, and whether it has what is changed."""
    values = [] if way.attributes is None else [*way.attributes(model)]
    before = [(owner, name, getattr(owner, name)) for owner, name, _ in values]
    handles = [] if way.hooks is None else [*way.hooks(model, prompt)]
    try:
        for each in values:
            setattr(*each)
        yield bool(values or handles) or (way.attributes is None and way.hooks is None)
    finally:
        for each in before:
            setattr(*each)
        for handle in handles:
            handle.remove()


def _summed_in_float32(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Makes a product of 16 bits as accelerators do, summed in float32 and rounded once; on most
    processors that also takes less time than their own.
    """
    if func not in PRODUCTS or args[0].dtype not in (torch.float16, torch.bfloat16):
        return NotImplemented
    wide = [value.float() if isinstance(value, Tensor) else value for value in args]
    named = {
        name: value.float() if isinstance(value, Tensor) else value
        for name, value in kwargs.items()
    }
    return func(*wide, **named).to(args[0].dtype)


@torch.no_grad()
def logits_of(adapter: Adapter, ids: Sequence[int], prompt: int, way: Way) -> Tensor | None:
    """``[position, vocabulary]``: row t is of the token behind position t. None: nothing to change.

    They are given in float32, of which engines make log-probs, but in float64 where all is.

    Args:
        adapter: The model.
        ids: The text.
        prompt: How many of them are the prompt.
        way: How it is computed.
    """
    if way.tiled:
        first, rest = (
            logits_of(adapter, ids, prompt, dataclasses.replace(part, dtype=way.dtype))
            for part in way.tiled
        )
        # Row t is of the token at t + 1, which a prompt of t + 1 rows was asked for.
        return (
            None
            if first is None or rest is None
            else torch.cat([first[: TILE - 1], rest[TILE - 1 :]])
        )
    model = adapter.at(dtype_named(way.dtype))
    tokens = torch.tensor([ids], device=model.device)
    if way.routed:
        way = dataclasses.replace(
            way,
            hooks=joined(
                way.hooks, routers.replayed(routers.chosen_in(adapter, way.routed, tokens))
            ),
        )
    inner, bos = 0 < prompt < len(ids), getattr(adapter.tokenizer, "bos_token_id", None)
    with Functions(_summed_in_float32), changed(model.model, prompt, way) as there:
        if not there or (
            not inner
            and (way.prefix or way.fed == "apart" or (way.older and way.older[1] == "prompt"))
        ):
            return None
        if way.fed == "begun" and (bos in (None, ids[0]) or len(ids) == adapter.facts.context):
            return None
        if way.prefix and not (model.plain and model.attention_only):
            return None
        head, rest = tokens[:, :prompt], tokens[:, prompt:]
        if way.older is not None:
            logits = _by_older(
                model, way.older[0].at(dtype_named(way.dtype)), way.older[1], head, rest
            )
        elif way.path:
            path = path_named(way.path)
            pieces = [head, rest] if path.prefill == "exact" and inner else [tokens]
            store = own_store(model, path, 1, pieces[0].shape[1], len(ids) - pieces[0].shape[1], ())
            logits = torch.cat([model.forward(piece, store) for piece in pieces], 1)
        elif way.prefix:
            policy, cache = (
                policy_named(way.prefix).start(model.facts),
                {model.cache_name: model.new_cache()},
            )
            before = model.model(head, **cache).logits
            for layer, cached in enumerate(cache[model.cache_name].layers):
                cache_rows = CacheRows(layer, 0, prompt, True, prompt=prompt)
                cached.keys, cached.values = policy.read(
                    *policy.write(cached.keys, cached.values, cache_rows), cache_rows
                )
            logits = torch.cat([before, model.model(rest, **cache).logits], 1)
        elif way.fed == "apart":
            logits = torch.cat([model.forward(head), model.forward(rest)], 1)
        elif way.fed == "headless":
            logits = nn.functional.pad(model.forward(tokens[:, 1:]), (0, 0, 1, 0), value=torch.nan)
        elif way.fed == "begun":
            logits = model.forward(torch.cat([tokens.new_tensor([[bos]]), tokens], 1))[:, 1:]
        else:
            logits = model.forward(tokens.repeat(2, 1) if way.fed == "twice" else tokens)
    return logits[0].to(torch.float64 if way.dtype == "float64" else torch.float32)


def _by_older(model: Adapter, older: Adapter, which: str, head: Tensor, rest: Tensor) -> Tensor:
    """``[row, position, vocabulary]``: a text by other weights, or what is behind a prompt by ours,
    on a cache of theirs.
    """
    if which == "all":
        return older.forward(torch.cat([head, rest], 1))
    cache = {older.cache_name: older.new_cache()}
    before = older.model(head, **cache).logits
    return torch.cat([before, model.model(rest, **cache).logits], 1)


def own_row(adapter: Adapter, ids: Sequence[int], prompt: int, way: Way) -> np.ndarray | None:
    """``[position]``, the log-prob of each id given those before it, NaN for the first; None where
    this model has no such way.
    """
    try:
        rows = logits_of(adapter, ids, prompt, way)
    except (InputError, UnsupportedError):
        # This model cannot be run so: heads too narrow for a policy's blocks, say.
        return None
    if rows is None:
        return None
    index = torch.tensor(list(ids[1:]), device=rows.device)[:, None]
    own = rows[:-1].log_softmax(-1).gather(1, index)[:, 0].double().cpu().numpy()
    behind = np.pad(own, abs(way.shift) + 1, constant_values=np.nan)
    return behind[abs(way.shift) + way.shift :][: len(ids)]
