"""Faults of a cache's update, planted in transformers' own code for the length of one test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


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


def key_wrong_by_a_thousandth(store: Any, k: Any, v: Any, cache: Any, decoding: bool) -> Any:
    return store(k * 1.001 if decoding else k, v)
