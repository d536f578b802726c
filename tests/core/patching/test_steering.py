"""Steering by positions of the text: the same with and without a cache, on the three kinds, and what was not steered is said."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import kvinterp as kv
from support import assert_bitwise, assert_close, nothing_left

NEW = 6
PROMPTS = ([3, 17, 44, 9, 71, 26, 58, 5], [90, 12, 64, 8, 33])
KINDS = [
    pytest.param(kind, marks=[pytest.mark.hooked] if kind == "hooked" else []) for kind in ("native", "hooked", "bridge")
]
PLACES: dict[Any, tuple[str, list[int]]] = {
    "all": ("(8 of 8 of the prompt, 5 of 5 generated", list(range(13))),
    "prompt": ("(8 of 8 of the prompt, 0 of 5 generated", list(range(8))),
    "generated": ("(0 of 8 of the prompt, 5 of 5 generated", list(range(8, 13))),
    (2, 7, 9): ("(2 of 8 of the prompt, 1 of 5 generated", [2, 7, 9]),
}


@pytest.fixture(scope="module", params=KINDS)
def model(request: Any) -> Any:
    return kv.load_model("zoo:gqa2-mini", kind=request.param, dtype="float64")


@pytest.fixture(scope="module")
def native() -> Any:
    return kv.load_model("zoo:gqa2-mini", dtype="float64")


def vector(adapter: Any) -> torch.Tensor:
    return 3 * torch.linspace(-1, 1, adapter.facts.width, dtype=torch.float64).roll(11)


def batch(*prompts: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
    return ids, torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])


def generate(adapter: Any, *prompts: list[int], cache: bool = True, **options: Any) -> torch.Tensor:
    ids, mask = batch(*prompts)
    if adapter.kind == "native":
        how = {"do_sample": False, "min_new_tokens": NEW, "pad_token_id": 0, "use_cache": cache, **options}
        return adapter.model.generate(ids, attention_mask=mask, max_new_tokens=NEW, **how)
    how = {"do_sample": False, "stop_at_eos": False, "return_type": "tokens", "verbose": False, "prepend_bos": False}
    given = {} if bool(mask.all()) else {"attention_mask": mask}
    return adapter.model.generate(ids, max_new_tokens=NEW, use_past_kv_cache=cache, **how, **given)


@pytest.mark.parametrize("positions", PLACES, ids=str)
def test_the_text_is_the_same_with_and_without_a_cache(model: Any, positions: Any) -> None:
    prompts = PROMPTS[:1] if model.kind == "hooked" else PROMPTS
    said, where = PLACES[positions]
    texts = []
    for cache in (True, False):
        with nothing_left(model.model), kv.steer(model.model, vector(model), 1, positions) as steering:
            texts.append(generate(model, *prompts, cache=cache))
        assert steering.where()[0] == where
        if len(prompts) == 1:
            assert said in str(steering)
        elif isinstance(positions, str):
            # Three columns of the second row are pads.
            assert steering.where()[1] == [at - 3 for at in where if at >= 3]
    assert torch.equal(*texts)
    assert not torch.equal(texts[0], generate(model, *prompts)), "the vector changed no token: the test shows nothing"


@pytest.mark.parametrize("positions", ["all", "generated"])
def test_what_a_row_is_fed_after_its_end_is_none_of_its_text(native: Any, positions: str) -> None:
    """A row of a batch that ended is fed fillers; they were counted among the positions that were steered."""
    free = {"min_new_tokens": 0, "eos_token_id": -1}
    with kv.steer(native, vector(native), 1, positions):
        whole = generate(native, *PROMPTS, **free)[:, -NEW:]
    # A token that the first row writes before its last, and the second does not write.
    ends = next(int(token) for token in whole[0, : NEW - 2] if token not in whole[1])
    count = whole[0].tolist().index(ends)
    with kv.steer(native, vector(native), 1, positions) as steering:
        generate(native, *PROMPTS, min_new_tokens=0, eos_token_id=ends)
    first = 0 if positions == "all" else 8
    assert steering.where() == [list(range(first, 8 + count)), list(range(max(first - 3, 0), 5 + NEW - 1))]
    assert f"{count + NEW - 1} of {count + NEW - 1} generated" in str(steering)


@pytest.mark.parametrize(
    "options", [{}, {"cache_implementation": "static"}, {"prefill_chunk_size": 3}, {"do_sample": True}, {"prompt_lookup_num_tokens": 2}],
    ids=str,
)  # fmt: skip
def test_steering_every_position_is_a_plain_hook_to_the_bit(native: Any, options: dict[str, Any]) -> None:
    """And what was computed twice, or was a rejected draft, is counted once."""

    @contextlib.contextmanager
    def hooked() -> Iterator[None]:
        block = native.model.model.layers[1]
        handle = block.register_forward_hook(lambda _, __, output: output + vector(native))
        yield
        handle.remove()

    logits = []
    for context in (hooked(), kv.steer(native, vector(native), 1)):
        torch.manual_seed(0)
        with context as steering:
            made = generate(native, PROMPTS[0], return_dict_in_generate=True, output_logits=True, **options)
        logits.append(torch.stack(made.logits))
    assert_bitwise(*logits, "logits")
    assert steering.where()[0][:13] == list(range(13))


def test_heads_are_steered_by_a_vector_of_a_head_or_of_each(native: Any) -> None:
    tokens, each = batch(PROMPTS[0])[0], torch.zeros(native.facts.query_heads, native.facts.head_dim, dtype=torch.float64)
    each[1] += 1
    seen = []
    for value in (each, each[1]):
        with (
            kv.steer(native, value, site="blocks.2.attn.hook_z", positions=5),
            kv.record(native, "z", 2, positions="all") as z,
        ):
            native.model(tokens)
        seen.append(z["z", 2])
    with kv.record(native, "z", 2, positions="all") as z:
        native.model(tokens)
    assert (seen[0] != z["z", 2]).nonzero()[:, 1:3].unique(dim=0).tolist() == [[5, 1]]
    assert (seen[1] != z["z", 2]).nonzero()[:, 1].unique().tolist() == [5]


def test_positions_that_a_cache_held_or_no_text_has_are_warned_of(native: Any, caplog: pytest.LogCaptureFixture) -> None:
    ids = batch(PROMPTS[0])[0]
    cache = native.model(ids, use_cache=True).past_key_values
    with kv.steer(native, vector(native), 1) as steering:
        native.model(ids[:, :1], past_key_values=cache)
    assert "positions 0 to 7 were not steered: a cache held them before kv.steer was opened" in caplog.text
    assert "at 1 of 1 position of 1 text (0 of 0 of the prompt, 1 of 1 generated)" in str(steering)
    caplog.clear()
    with kv.steer(native, vector(native), [1, 2], [3, 40]):
        native.model(ids)
    assert "position 40 was not steered: no text has so many positions; the longest has 8" in caplog.text
    caplog.clear()
    with kv.steer(native, vector(native), 1) as steering:
        for tokens in (ids, ids[:, :4], ids[:, :5]):
            native.model(tokens)
    assert steering.where() == [list(range(8)), list(range(5))], "two texts, the second of which grew by a token"
    assert not caplog.text


@pytest.mark.parametrize("takes", ["takes rows", "takes none"])
@pytest.mark.parametrize("positions", [*PLACES, (2, 9, 40)], ids=str)
def test_positions_are_those_of_the_text_where_a_cache_is_not_read(
    takes: str, positions: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A cache that takes no row was six texts of one position each, all of the prompt; nothing generated was steered."""
    from transformers import DynamicCache

    bridge, keep = kv.load_model("zoo:gqa2-mini", kind="bridge", dtype="float64"), DynamicCache.update

    def update(self: Any, keys: Any, values: Any, *rest: Any, **more: Any) -> Any:
        if takes == "takes rows":
            keep(self, keys, values, *rest, **more)
        return keys, values

    monkeypatch.setattr(DynamicCache, "update", update)
    # What such a model writes soon ends in end tokens, behind which no position is of the text.
    monkeypatch.setattr(type(bridge), "end_tokens", ())
    added, seen = vector(bridge), PLACES.get(positions, ("", [2, 9]))[1]
    with pytest.warns(kv.CacheNotReadWarning), kv.steer(bridge, added, 1, positions) as steering:
        generate(bridge, PROMPTS[0])
    assert steering.where() == [seen]
    assert "of 13 positions of 1 text" in str(steering)
    if takes == "takes none" and positions == "generated":
        streams = []
        for context in (kv.steer(bridge, added, 1, positions), contextlib.nullcontext()):
            with kv.record(bridge, "resid_post", 1, positions="all") as recorded, context:
                generate(bridge, PROMPTS[0])
            streams.append(recorded.kept["resid_post", 1])
        assert torch.equal(streams[0][0], streams[1][0])
        # The first token that was written; the next ones are others.
        assert_close(streams[0][1][0, 0], streams[1][1][0, 0] + added, absolute=1e-12)
    missed = "position 40 was not steered: no text has so many positions; the longest has 13"
    assert (missed in caplog.text) == (positions == (2, 9, 40))
    assert caplog.text.count("not steered") == (positions == (2, 9, 40))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"positions": "newest"}, "expected 'all' or 'prompt' or 'generated'"),
        ({"positions": [-1]}, "expected 'all', 'prompt', 'generated', or positions from 0"),
        ({"positions": 40}, r"added nothing: positions=\[40\] were named, and the longest text in it has 8"),
        ({"positions": "generated"}, "added nothing"),
        ({"layer": None}, "no layer was given"),
        ({"site": "pattern"}, "has no vector at each position"),
        ({"vector": torch.ones(3)}, r"of shape \(3,\) was given for resid_post, whose rows have the shape"),
        ({"vector": [1, 2]}, "expected finite real numbers"),
    ],
)
def test_what_cannot_be_steered_is_refused(native: Any, given: dict[str, Any], said: str) -> None:
    how = {"vector": vector(native), "layer": 1, **given}
    with pytest.raises(kv.InputError, match=said), nothing_left(native.model), kv.steer(native, **how):
        native.model(batch(PROMPTS[0])[0])


@pytest.mark.parametrize("cache", [True, False])
def test_a_function_that_changes_the_newest_row_alone_is_warned_of(
    native: Any, cache: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """With positions='all' nothing said that the prompt's rows were left as they are, which a cache keeps."""

    def newest(stream: torch.Tensor) -> None:
        stream[:, -1] += vector(native)

    for function, warned in ((newest, True), (lambda stream: stream + vector(native), False)):
        caplog.clear()
        with kv.patched(native, kv.Patch("resid_post", (1,), positions="all", donor=function)):
            generate(native, PROMPTS[0], cache=cache)
        assert ("moves the newest position of each forward alone, and leaves positions 0 to 6" in caplog.text) == warned
