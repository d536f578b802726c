"""What record and patched say when they heard nothing, and what they leave behind: errors, copies, compiled code."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import kvinterp as kv
from support import (
    PROMPT,
    Case,
    assert_bitwise,
    cases,
    hooks_of,
    nothing_left,
    plain_forward,
)

KINDS = [Case("llama-gqa", "hooked"), Case("llama-gqa", "bridge"), Case("llama-gqa", "native", "eager")]
TOKENS = torch.tensor([PROMPT])
OTHER = torch.tensor([PROMPT[::-1]])
SITES = "resid_pre,resid_post,z"


# Silence ---------------------------------------------------------------------------------------------------------------


@cases(KINDS)
def test_what_heard_nothing_or_moved_nothing_says_why(load: Any, case: Case) -> None:
    adapter = load(case)
    model = adapter.model
    donor = kv.run(adapter, PROMPT, "recompute", record="resid_post", positions="all", max_new_tokens=3, stop="length")

    def patch(**more: Any) -> kv.Patch:
        return kv.Patch("resid_post", (0,), donor=donor, **more)

    with torch.no_grad(), nothing_left(model):
        with (
            pytest.raises(kv.InputError, match=r"kv.record heard nothing: no forward of .* ran in it"),
            kv.record(model, SITES),
        ):
            pass
        with pytest.raises(kv.InputError, match=r"changed nothing: no forward of .* ran in it"), kv.patched(model, patch()):
            pass
        for steps, said in (
            ((2,), r"it is for steps=\(2,\), and 1 forward ran, step 0:"),
            ("first", "it is for step 1, and"),
        ):
            with pytest.raises(kv.InputError, match=said), kv.patched(model, patch(steps=steps)):
                model(TOKENS)
        with pytest.raises(kv.InputError, match="donor trace did not record step 3"), kv.patched(model, patch()):
            for step in range(4):
                model(torch.tensor([[*PROMPT, *PROMPT[:step]]]))
        # A patch beside one that moves something is not silent either.
        beside = [patch(), patch(steps=(1,))]
        with pytest.raises(kv.InputError, match="by the patch of 'resid_post'"), kv.patched(model, beside):
            model(TOKENS)
        with pytest.raises(ZeroDivisionError), kv.record(model, SITES), kv.patched(model, patch()):
            raise ZeroDivisionError
        copied = copy.deepcopy(model)
        with pytest.raises(kv.InputError, match="a copy of it"), kv.record(model, SITES):
            copied(TOKENS)
        with pytest.raises(kv.InputError, match="a run in another dtype"), kv.record(model, SITES):
            kv.run(model, PROMPT, "cached@float64", max_new_tokens=1)


# Errors ----------------------------------------------------------------------------------------------------------------


@cases(KINDS)
@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["inside a block", "behind the blocks"])
def test_a_forward_that_was_cut_off_is_no_step(load: Any, case: Case, error: type[BaseException], where: str) -> None:
    adapter = load(case)
    model, armed = adapter.model, [False]
    if where == "behind the blocks" and error is KeyboardInterrupt:
        pytest.skip("torch tells no hook of it: the blocks ran, so the forward is a step")
    inside = getattr(list(adapter.blocks)[1], "mlp", None)
    head = model.unembed if case.kind == "hooked" else adapter.source.get_output_embeddings()

    def fault(*_: Any) -> None:
        if armed[0]:
            raise error("planted")

    # Its step 1 is the third forward: the second, which has no step, would need a donor of as many positions.
    donor = kv.run(adapter, PROMPT[:-1], "recompute", record="resid_post", positions="all", max_new_tokens=2, stop="length")
    patch = kv.Patch("resid_post", (0,), positions="all", steps=(1,), donor=donor)
    with torch.no_grad(), nothing_left(model):
        handle = (inside if where == "inside a block" else head).register_forward_pre_hook(fault)
        with kv.patched(model, patch) as hook, kv.record(model, SITES, positions="all") as seen:
            model(TOKENS[:, :5])
            armed[0] = True
            with pytest.raises(error):
                # The model's own call would notice by itself.
                (model.forward if where == "inside a block" else model)(OTHER)
            armed[0] = False
            moved = hook.moved[0]
            model(TOKENS)
            assert hook.moved[0] == moved + 1
        handle.remove()
    assert seen.recorded_steps == [0, 1]
    assert [tensor.shape[1] for tensor in seen.kept["resid_post", 1]] == [5, 12]
    assert {len(kept) for kept in seen.kept.values()} == {2}


# Contexts and copies ----------------------------------------------------------------------------------------------------


@cases(KINDS)
@pytest.mark.parametrize("same", ["one adapter", "the bare model"])
def test_contexts_left_in_the_wrong_order(load: Any, case: Case, same: str) -> None:
    """The one that was left last went deaf, and the one that was left first went on listening."""
    adapter = load(case)
    model = adapter if same == "one adapter" else adapter.model
    bare = adapter.model
    with torch.no_grad(), nothing_left(bare):
        first, second = kv.record(model, SITES), kv.record(model, "resid_post,mlp_out")
        one, other = first.__enter__(), second.__enter__()
        bare(TOKENS)
        first.__exit__(None, None, None)
        bare(OTHER)
        second.__exit__(None, None, None)
        bare(TOKENS)
    assert [len(kept) for kept in one.kept.values()] == [1] * len(one.kept)
    assert [len(kept) for kept in other.kept.values()] == [2] * len(other.kept)
    assert_bitwise(one.kept["resid_post", 1][0], other.kept["resid_post", 1][0], "resid_post as both heard it")


@cases(KINDS)
def test_a_deep_copy_inside_is_another_model(load: Any, case: Case) -> None:
    adapter = load(case)
    model = adapter.model
    donor = kv.run(adapter, PROMPT[::-1], "recompute", record="resid_post", positions="all", max_new_tokens=1)
    with torch.no_grad(), nothing_left(model):
        plain, before = plain_forward(model, TOKENS), hooks_of(copy.deepcopy(model))
        with kv.patched(model, kv.Patch("resid_post", (0,), donor=donor)), kv.record(model, SITES) as seen:
            copied = copy.deepcopy(model)
            assert_bitwise(plain_forward(copied, TOKENS), plain, "logits of the copy")
            assert not torch.equal(plain_forward(model, TOKENS), plain)
        assert len(seen.kept["resid_post", 0]) == 1
        assert {place: len(kept) for place, kept in hooks_of(copied).items()} == {
            place: len(kept) for place, kept in before.items()
        }


# What cannot be heard --------------------------------------------------------------------------------------------------


@pytest.fixture
def fresh(checkpoint: Any) -> Any:
    """A native model of this test's own, which it may compile and train; Dynamo forgets it."""
    model = kv.load_model(str(checkpoint("llama-gqa")), kind="native", dtype="float32", device="cpu").model
    torch._dynamo.reset()
    yield model
    torch._dynamo.reset()


USES = [
    lambda model: kv.run(model, PROMPT, max_new_tokens=1),
    lambda model: kv.compare(model, [list(PROMPT)], max_new_tokens=2, progress="none"),
    lambda model: recording(model, model),
]


def recording(model: Any, called: Any) -> kv.recording.Recorder:
    with torch.no_grad(), kv.record(model, SITES) as seen:
        called(TOKENS)
    return seen


@pytest.mark.parametrize("part", ["", "model.layers.1.self_attn"])
def test_training_mode_after_wrap_is_a_sentence(fresh: Any, part: str) -> None:
    """Dropout was reported as a difference of paths."""
    adapter = kv.wrap(fresh)
    fresh.get_submodule(part).train()
    if part:
        fresh.get_submodule(part).attention_dropout = 0.5
    for use in (*USES[:2], lambda model: recording(model, model.model)):
        with pytest.raises(kv.InputError, match="is in training mode"):
            use(adapter)
    fresh.eval()
    kv.run(adapter, PROMPT, max_new_tokens=1)
