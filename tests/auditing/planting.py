"""Faults of a cache's update, planted in transformers' own code for the length of one test, and an audit that is quick."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from kvinterp.auditing.audit import audit


def on_update(change: Callable[[Any, Any, Any, int, bool], Any], layer: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes what one layer's cache is given or gives; ``change`` gets store, keys, values, layer, and if it is decoding."""
    from transformers.cache_utils import Cache

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = Cache.update

        def update(self: Any, keys: Any, values: Any, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
            def store(k: Any, v: Any, at: int = layer_idx) -> Any:
                return original(self, k, v, at, *args, **kwargs)

            return change(store, keys, values, self, keys.shape[2] == 1) if layer_idx == layer else store(keys, values)

        patch.setattr(Cache, "update", update)

    return plant


def quick(model: Any, prompts: Any = None, **more: Any) -> Any:
    """An audit of one length in two precisions, without programs."""
    prompt = torch.randint(3, 131, (40,), generator=torch.Generator().manual_seed(5)).tolist()
    choices = {"lengths": (9,), "steps": 2, "sweep": "no", "rungs": ("float32", "float64"), "checks": "none", **more}
    return audit(model, [prompt] if prompts is None else prompts, **choices)


def key_wrong_by_a_thousandth(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    return store(k * 1.001 if decoding else k, v)
