"""One path beside several: every pair has the numbers that it has alone, and the first path runs once."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp.comparison import PARTS, comparing
from kvinterp.comparison.findings import headline_of
from kvinterp.metrics.recovery import ONLY_THE_PREFILL
from kvinterp.paths import Runner

OTHERS = ["recompute[kernels=split_k(4,float16)]", "cached+int4", "recompute@float64"]


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load_model("zoo:gqa2-mini", kind="native")


@pytest.mark.slow
@pytest.mark.parametrize("protocol", ["matched", "free"])
def test_each_pair_has_the_numbers_it_has_alone(model: Any, protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the bit: in the free protocol a pair's text ends with either of its paths, whatever a third one does."""
    # Hot, and with many tokens that end a text: so the paths flip, and end at steps of their own.
    ends = torch.arange(0, model.facts.vocabulary, 4)
    monkeypatch.setattr(comparing, "end_tokens", lambda *_: ends)
    how = {"max_new_tokens": 6, "progress": "none", "protocol": protocol, "strategy": "top_k(100,30.0)"}
    asked = kv.load_prompts("arithmetic:2")
    found = kv.compare(model, asked, b=OTHERS, **how)
    assert [pair.provenance["paths"]["b"] for pair in found] == OTHERS
    for b in OTHERS:
        alone = kv.compare(model, asked, b=b, **how)
        assert found[b].provenance == alone.provenance
        for name in PARTS:
            pd.testing.assert_frame_equal(
                getattr(found[b], name), getattr(alone, name), check_exact=True, obj=f"{b} {name}"
            )
            table = getattr(found, name)
            mine = table[table["pair"] == b].drop(columns="pair").reset_index(drop=True)
            pd.testing.assert_frame_equal(mine, getattr(alone, name).reset_index(drop=True), check_dtype=False, obj=name)
    assert (found["cached+int4"].steps["kl"] > 0).any(), "a cache in four bits makes a difference by construction"


def test_the_first_path_runs_once(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[str] = []
    init = Runner.__init__

    def counted(self: Any, adapter: Any, path: Any, *given: Any, **more: Any) -> None:
        begun.append(str(path))
        init(self, adapter, path, *given, **more)

    monkeypatch.setattr(Runner, "__init__", counted)
    kv.compare(model, "1 + 1 =", b=OTHERS[:2], max_new_tokens=2, progress="none", record="")
    assert begun == ["cached", *OTHERS[:2]]


def test_where_nothing_was_decoded_equality_says_nothing_of_the_cache(model: Any) -> None:
    """A chat model ended a plain question at once, and the comparison said "bit for bit" without a word on why."""
    only = kv.compare(model, ["Tom has 3 apples."], max_new_tokens=1, record="", progress="none")
    assert "no token was decoded" in only.where()
    more = kv.compare(model, ["Tom has 3 apples."], max_new_tokens=3, stop="length", record="", progress="none")
    assert "no token was decoded" not in more.where()
    assert headline_of([only]) == [ONLY_THE_PREFILL]
    assert headline_of([more]) != [ONLY_THE_PREFILL]
