"""What the tests of the judge share: one model, and its rows, which are its slow part."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import kvinterp as kv
from kvinterp.engines import ours as engine_ours


@pytest.fixture(scope="module")
def model() -> Any:
    """The model that most files are judged against; a file of tests with its own overrides it."""
    return kv.load_model("zoo:llama64-mini", kind="native", dtype="float32")


@pytest.fixture(scope="session", autouse=True)
def each_way_of_a_text_is_computed_once() -> Iterator[None]:
    """The judge's tests judge few texts many times; what our own model gives of a text along a way is the same each time."""
    compute, known = engine_ours.own_row, dict[Any, Any]()

    def once(adapter: Any, ids: Any, prompt: int, way: Any) -> Any:
        key = (adapter.facts.name, adapter.dtype, tuple(ids), prompt, way.name, way.size, way.dtype)
        if key not in known:
            known[key] = compute(adapter, ids, prompt, way)
        return known[key]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_ours, "own_row", once)
        yield
