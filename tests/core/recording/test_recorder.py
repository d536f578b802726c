"""What is kept of forwards: of chunks, of forwards that were cut off, and of what a user asks for by number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import kvinterp as kv
from kvinterp.models import Adapter
from support import PROMPT, TINY_WINDOW, Case

pytestmark = pytest.mark.bits

WINDOW = Case("mistral-window", "native", "eager")
SHORT = {"max_new_tokens": 3, "stop": "length"}


@pytest.fixture(scope="module")
def model(load: Callable[..., Adapter]) -> Adapter:
    return load(WINDOW)


# Chunks ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("site", ["pattern", "attn_scores"])
@pytest.mark.parametrize("path", ["cached[chunk=5]", "cached[chunk=3]", "recompute[chunk=5]"])
def test_chunks_of_a_sliding_window_stand_at_their_own_keys(model: Adapter, path: str, site: str) -> None:
    """A chunk's rows were put at the left edge: the last query seemed to read keys that its window had let go of."""
    options = {"record": site, "positions": "all", "continuation": PROMPT[:2], **SHORT}
    chunked = kv.run(model, PROMPT, path, **options)
    whole = kv.run(model, PROMPT, path.partition("[")[0], **options)
    for layer in range(model.facts.layers):
        found, wanted = chunked.records[site, layer][0], whole.records[site, layer][0]
        assert found.shape == wanted.shape
        reads = (found if site == "pattern" else found.softmax(-1)) > 0
        for query in range(len(PROMPT)):
            first = max(query - TINY_WINDOW + 1, 0)
            assert reads[0, query].nonzero().flatten().tolist() == list(range(first, query + 1)), (layer, query)
        seen = wanted > -1e30
        assert torch.allclose(found[seen], wanted[seen], atol=1e-5)


def test_a_recorder_is_read_as_a_mapping_and_from_the_last_layer(model: Adapter) -> None:
    with kv.record(model, "resid_post,z", positions=-1) as seen, torch.no_grad():
        model.forward(torch.tensor([PROMPT]))
    last = model.facts.layers - 1
    assert len(seen) == len(seen.keys()) == 2 * model.facts.layers
    assert all(torch.equal(value, seen[place]) for place, value in seen.items())
    assert len(seen.values()) == len(seen)
    assert torch.equal(seen["resid_post", -1], seen["resid_post", last])
    assert ("resid_post", -1) in seen
    assert ("resid_post", -model.facts.layers - 1) not in seen
    with pytest.raises(kv.InputError, match="expected 'newest', 'all', 'generated'"):
        kv.record(model, "resid_post", positions=5).__enter__()


# Forwards that were cut off ----------------------------------------------------------------------------------------------


# What is asked for by number -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"heads": []}, "an empty list of query heads was given"),
        ({"kv_heads": []}, "an empty list of KV heads was given"),
        ({"heads": [True]}, "query head True does not exist"),
        ({"steps": [-1]}, "step -1 does not exist"),
        ({"layers": [0.5]}, "layer 0.5 does not exist"),
    ],
)
def test_numbers_that_do_not_exist(model: Adapter, options: dict[str, Any], said: str) -> None:
    recorder = kv.recording.Recorder.__init__
    with pytest.raises(kv.InputError, match=said):
        getattr(recorder, "__wrapped__", recorder)(object.__new__(kv.recording.Recorder), model, "pattern", **options)


# Traces ------------------------------------------------------------------------------------------------------------------


# Rows with padding ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["native", pytest.param("hooked", marks=pytest.mark.hooked)])
def test_left_padded_rows_without_a_mask_are_recorded_with_a_warning(
    kind: str, load: Callable[..., Adapter], caplog: pytest.LogCaptureFixture
) -> None:
    """Three rows that the adapter itself had padded were recorded without a word, the padding read as text."""
    model = load(Case("zoo:gqa2-mini", kind, "sdpa" if kind == "native" else None))
    rows = model.to_tokens(["2 + 2 =", "Question: Ben has 3 pens.", "1"])
    mask, pad = (rows != model.tokenizer.pad_token_id).long(), model.tokenizer.pad_token_id

    def said(*args: torch.Tensor, **more: Any) -> list[str]:
        caplog.clear()
        with torch.no_grad(), kv.record(model.model, "resid_post"):
            model.model(*args, **more)
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]

    assert said(rows, attention_mask=mask) == []
    assert said(rows[1:2]) == [], "a row without padding"
    assert said(torch.cat([rows[1:2], rows[1:2]])) == [], "each row begins as every text does"
    if kind == "hooked":
        assert said(rows) == [], "TransformerLens makes the mask itself where its tokenizer pads on the left"
        return
    assert said(rows, mask) == []
    (sentence,) = said(rows)
    assert f"2 of 3 rows begin with the pad token {pad} and the forward was given no attention_mask" in sentence
    (sentence,) = said(input_ids=rows[2:])
    assert "the row begins with the pad token" in sentence
