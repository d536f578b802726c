"""Decoders that spare work, and the null of the recompute path: held to the runners they stand for."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from kvinterp.comparison import compare_examples
from kvinterp.paths import Runner
from kvinterp.paths.decoders import Memory, Suffixed
from support import PROMPT, Case

PATHS = "cached[kernels={0}]", "recompute[kernels={0}]"


def compared(adapter: Any, decoders: Any = (Runner, Runner), kernels: str = "split_k(8,float16)", **how: Any) -> Any:
    settings = {"max_new_tokens": 12, "stop": "length", **how}
    return compare_examples(
        adapter, [list(PROMPT)], *(path.format(kernels) for path in PATHS), decoders=decoders, **settings
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["native", pytest.param("hooked", marks=pytest.mark.long)])
def test_what_is_remembered_is_what_would_be_computed(load: Any, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = load(Case("zoo:gqa2-mini", kind), "float16")
    decodes = [
        {"strategy": "greedy"},
        {"strategy": "top_p(1.0,1.5)", "seed": 1},
        {"strategy": "top_p(1.0,1.5)", "seed": 1, "protocol": "free"},
        {"strategy": "top_p(1.0,0.7)", "seed": 2},
    ]
    plain = [compared(adapter, **each) for each in decodes]
    steps, advance = [0], Runner.advance

    def counted(self: Runner, tokens: Any = None) -> Any:
        steps[0] += 1
        return advance(self, tokens)

    monkeypatch.setattr(Runner, "advance", counted)
    memory = Memory()
    spared = [compared(adapter, (memory.decoder, memory.decoder), **each) for each in decodes]
    for one, other in zip(plain, spared, strict=True):
        pd.testing.assert_frame_equal(one.steps, other.steps)
        pd.testing.assert_frame_equal(one.examples, other.examples)
        assert one.provenance["caches"] == other.provenance["caches"]
    assert plain[0].steps["token_a"].tolist() != plain[1].steps["token_a"].tolist()
    assert steps[0] < 2 * sum(len(each.steps) for each in plain)
    again = steps[0]
    compared(adapter, (memory.decoder, memory.decoder), **decodes[1])
    assert steps[0] == again, "nothing is computed a second time"


def test_a_suffix_changes_rounding_and_nothing_else(load: Any) -> None:
    def difference(dtype: str, kernels: str) -> float:
        adapter = load(Case("zoo:gqa2-mini", "native"), dtype)
        path = f"recompute[kernels={kernels}]"
        how: dict[str, Any] = {"max_new_tokens": 8, "stop": "length", "decoders": (Runner, Suffixed)}
        found = compare_examples(adapter, [list(PROMPT)], path, path, **how)
        return float(found.steps["max_abs_logit"].max())

    assert difference("float64", "native") < 1e-9
    assert difference("float16", "batch_invariant") == 0
