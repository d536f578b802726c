"""Long generations: windows of their positions, parts on disk, and what is saved, each held against the whole in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvinterp as kv
from kvinterp.recording import around, parts
from support import assert_bitwise

PROMPTS = [[3, 17, 44, 9, 71, 26, 58, 5, 33], [90, 12, 64, 8]]
SITES = "resid_post,z,pattern,attn_scores"
NEW = 7


@pytest.fixture(scope="module")
def model() -> Any:
    return kv.load_model("zoo:gqa2-mini", kind="native", dtype="float32", attention="eager")


def texts_of(model: Any, **how: Any) -> list[kv.Generation]:
    how = {"max_new_tokens": NEW, "batch_size": 2, **how}
    return kv.generated(model, PROMPTS, SITES, [0, 3], **how)


@pytest.fixture(scope="module")
def whole(model: Any) -> list[kv.Generation]:
    return texts_of(model)


def rows_at(text: kv.Generation, place: tuple[str, int], positions: list[int]) -> torch.Tensor:
    axis = 1 if place[0] in ("pattern", "attn_scores") else 0
    return text[place].index_select(axis, torch.tensor(positions, dtype=torch.long))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("window", ["generated", "last(3)", "last(99)", "every(4)", [0, 2, 10], range(6, 8)])
def test_a_window_has_the_rows_of_the_whole(model: Any, window: Any, cached: bool) -> None:
    """By the text's own positions, in a batch whose rows have pads in front; with a cache and without."""
    options = {} if cached else {"use_cache": False}
    for whole, text in zip(texts_of(model, **options), texts_of(model, positions=window, **options), strict=True):
        count, cut = len(whole.positions), len(whole.prompt)
        if isinstance(window, str):
            name, _, number = window.rstrip(")").partition("(")
            wanted = {
                "generated": range(cut, count),
                "last": range(max(count - int(number or 0), 0), count),
                "every": range(0, count, int(number or 1)),
            }[name]
        else:
            wanted = [position for position in window if position < count]
        assert list(text.positions) == list(wanted)
        assert text.tokens == whole.tokens
        for place in text.records:
            assert_bitwise(text[place], rows_at(whole, place, list(wanted)), str(place))
        if window != "last(99)":
            with pytest.raises(kv.InputError, match="record positions='all'"):
                text.cache()


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("count", [1, 3, 6])
def test_the_last_positions_of_a_text_that_ends_before_the_others_are_its_own(
    model: Any, whole: Any, cached: bool, count: int
) -> None:
    ends = whole[1].tokens[2]
    assert ends not in whole[0].tokens
    assert ends not in whole[1].tokens[:2]
    how = {"eos_token_id": ends, "pad_token_id": 0, **({} if cached else {"use_cache": False})}
    for all_of_it, text in zip(texts_of(model, **how), texts_of(model, positions=f"last({count})", **how), strict=True):
        wanted = list(all_of_it.positions)[-count:]
        assert list(text.positions) == wanted
        for hook_point in text.records:
            assert_bitwise(text[hook_point], rows_at(all_of_it, hook_point, wanted), str(hook_point))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("distance", [0, 1, 3])
def test_around_tokens(
    model: Any,
    whole: list[kv.Generation],
    cached: bool,
    distance: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Positions near a token of the prompt, one that is written, and the last, which is never fed; rows of both texts."""
    given = {PROMPTS[0][2], whole[0].tokens[2], whole[1].tokens[-1]}
    window = f"around({distance}, {', '.join(map(str, given))})"
    options = {} if cached else {"use_cache": False}
    expected = texts_of(model, **options)
    monkeypatch.setattr(around, "PART", 2**14)
    for how in ({}, {"into": tmp_path / "parts"}):
        texts = texts_of(model, positions=window, **options, **how)
        for other, text in zip(expected, texts, strict=True):
            near = {
                at + by for at, token in enumerate(other.text) if token in given for by in range(-distance, distance + 1)
            }
            wanted = sorted(near & set(other.positions))
            assert list(text.positions) == wanted
            assert len(wanted) < len(other.positions)
            for place in text.records:
                assert_bitwise(text[place], rows_at(other, place, wanted), str(place))


def test_rows_around_no_token_are_let_go_of(model: Any, whole: list[kv.Generation]) -> None:
    """What is held does not grow with the text: the prompt's rows are of its given token, too."""
    held = {}
    for count in (10, 40):
        length = {"max_new_tokens": count, "min_new_tokens": count}
        with kv.record(model, "resid_post", positions=f"around(1, {PROMPTS[0][2]})") as seen, torch.no_grad():
            model.generate(torch.tensor(PROMPTS[:1]), torch.ones(1, 9, dtype=torch.long), length)
        (text,) = seen.texts()
        near = {at + by for at, token in enumerate(text.text) if token == PROMPTS[0][2] for by in (-1, 0, 1)}
        row = 4 * model.facts.width * model.facts.layers
        # The newest rows are undecided.
        assert seen.kept_bytes <= (len(near) + 2) * row
        held[count] = len(near)
    assert held[10] >= 3


def test_only_the_last_rows_are_held(model: Any) -> None:
    """What leaves the window leaves memory."""
    with kv.record(model, "resid_post", positions="last(4)") as seen, torch.no_grad():
        model.generate(torch.tensor(PROMPTS[:1]), torch.ones(1, 9, dtype=torch.long), {"max_new_tokens": 20})
    row = 4 * model.facts.width
    assert seen.kept_bytes == 4 * row * model.facts.layers
    assert len(seen.texts()[0].positions) == 4
    # A tensor a step for what was let go of kept pieces of it: 64 rows grew with the text's length.
    gone = [id(tensor) for tensors in seen.kept.values() for tensor in tensors if not tensor.numel()]
    assert len(set(gone)) == model.facts.layers < len(gone)


def test_small_tensors_share_blocks(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A long run grew by 4 times what it recorded: its small tensors lay between buffers that grow with the cache."""

    def blocks(recorder: Any) -> dict[int, int]:
        storages = [tensor.untyped_storage() for tensors in recorder.kept.values() for tensor in tensors]
        return {storage.data_ptr(): storage.nbytes() for storage in storages if storage.nbytes()}

    length = {"max_new_tokens": 60, "min_new_tokens": 60}

    def run(**how: Any) -> Any:
        with kv.record(model, SITES, positions="all", **how) as seen, torch.no_grad():
            model.generate(torch.tensor(PROMPTS[:1]), torch.ones(1, 9, dtype=torch.long), length)
        return seen

    monkeypatch.setattr(parts, "BLOCK", 2**16)
    in_memory = run()
    assert sum(blocks(in_memory).values()) < 2 * in_memory.kept_bytes
    small = [tensor for tensors in in_memory.kept.values() for tensor in tensors if tensor.nbytes <= 2**12]
    assert len({tensor.untyped_storage().data_ptr() for tensor in small}) < len(small) / 8
    monkeypatch.setattr(around, "PART", 2**16)
    assert sum(blocks(run(into=tmp_path / "parts")).values()) < 2**18 < in_memory.kept_bytes


def test_what_has_a_graph_is_no_view_of_a_block() -> None:
    """What is recorded of two forwards can be differentiated: written into a block, both would share one graph."""
    model = kv.load_model("zoo:gqa2-mini", kind="native", dtype="float32")
    weight = model.model.model.layers[1].mlp.down_proj.weight.requires_grad_()
    texts = [torch.tensor([PROMPTS[0]]), torch.tensor([PROMPTS[0][::-1]])]
    expected = []
    for ids in texts:
        streams = model.model(ids, output_hidden_states=True).hidden_states
        expected.append(torch.autograd.grad(streams[2].square().sum(), weight)[0])
    with kv.record(model, "resid_post", layers=[1], positions="all") as seen:
        for ids in texts:
            model.model(ids)
    for rows, gradient in zip(seen.kept["resid_post", 1], expected, strict=True):
        assert_bitwise(torch.autograd.grad(rows.square().sum(), weight)[0], gradient)


def test_parts_on_disk(model: Any, whole: list[kv.Generation], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every tensor has the bits of the run in memory, and no more than a part is held."""
    monkeypatch.setattr(around, "PART", 2**14)
    texts = texts_of(model, into=tmp_path / "parts")
    files = sorted((tmp_path / "parts" / "batch-0000").iterdir())
    assert len(files) > 1
    for text, other in zip(texts, whole, strict=True):
        for place in other.records:
            assert_bitwise(text[place], other[place], str(place))
    with kv.record(model, "resid_post", positions="all", into=tmp_path / "mine") as seen, torch.no_grad():
        model.generate(
            torch.tensor(PROMPTS[:1]), torch.ones(1, 9, dtype=torch.long), {"max_new_tokens": 40, "min_new_tokens": 40}
        )
    one = 4 * model.facts.width * model.facts.layers
    assert seen.kept_bytes <= 2**14 + one
    assert len(seen.texts()[0].positions) == 48
    with pytest.raises(kv.InputError, match="take it from texts"):
        seen["resid_post", 0]
    with pytest.raises(kv.InputError, match="is not empty"):
        texts_of(model, into=tmp_path / "parts")


def test_what_is_saved_is_read_again(model: Any, tmp_path: Path) -> None:
    (text,) = kv.generated(model, PROMPTS[0], SITES, [0, 3], max_new_tokens=NEW, logits="keep", positions="every(2)")
    read = kv.Generation.load(text.save(tmp_path / "text"), model)
    assert kv.load(tmp_path / "text").tokens == text.tokens
    assert (read.text, read.positions, read.path, read.derived) == (text.text, text.positions, text.path, text.derived)
    assert list(read.records) == list(text.records)
    for place in text.records:
        assert_bitwise(read[place], text[place], str(place))
    assert read.logits is not None
    assert text.logits is not None
    assert_bitwise(read.logits, text.logits)
    (tmp_path / "text" / "generation.json").write_text("{}", encoding="utf-8")
    with pytest.raises(kv.InputError, match="holds no readable generation"):
        kv.Generation.load(tmp_path / "text")
    with pytest.raises(kv.InputError, match=r"holds no generation\.json"):
        kv.Generation.load(tmp_path)


@pytest.mark.parametrize("window", ["newest", "last(0)", "first(3)", "around(3)", "around(x, 3)", [], [-3], 4])
def test_what_is_no_window(model: Any, window: Any) -> None:
    with pytest.raises(kv.InputError, match="positions="):
        kv.generated(model, PROMPTS[0], positions=window)
