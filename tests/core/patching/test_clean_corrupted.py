"""Clean into corrupted: the numbers of TransformerLens's own patching and of a plain loop of torch's hooks, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvinterp as kv
from kvinterp import metrics
from kvinterp.patching.distances import DISTANCES
from support import PROMPT, Case, assert_bitwise, cases, plain_forward

HOOKED, NATIVE = Case("llama-gqa", "hooked"), Case("llama-gqa", "native", "sdpa")
CLEAN = tuple(70 if at in (3, 4) else token for at, token in enumerate(PROMPT))
PAIR = (11, 23)


def difference(logits: torch.Tensor) -> torch.Tensor:
    return (logits[..., PAIR[0]].double() - logits[..., PAIR[1]].double()).squeeze()


@pytest.mark.hooked
@pytest.mark.parametrize(
    ("site", "over", "theirs"),
    [
        ("resid_pre", "positions", "get_act_patch_resid_pre"),
        ("attn_out", "positions", "get_act_patch_attn_out"),
        ("mlp_out", "positions", "get_act_patch_mlp_out"),
        ("z", "heads", "get_act_patch_attn_head_out_all_pos"),
        ("q", "heads", "get_act_patch_attn_head_q_all_pos"),
    ],
)
def test_the_numbers_are_those_of_transformer_lens(load: Any, site: str, over: str, theirs: str) -> None:
    from transformer_lens import patching

    adapter = load(HOOKED)
    model, clean, corrupted = adapter.model, torch.tensor([CLEAN]), torch.tensor([PROMPT])
    with torch.no_grad():
        logits, cache = model.run_with_cache(clean)
        expected = getattr(patching, theirs)(model, corrupted, cache, lambda out: difference(out[:, -1]))
    found = kv.activation_patching(
        adapter, CLEAN, PROMPT, site, over, distance="logit_difference", answers=PAIR, progress="none"
    )
    assert_bitwise(found.values.float(), expected, f"logit differences, {site} over {over}", ("layer", "column"))
    ends = difference(logits[:, -1]), difference(plain_forward(model, corrupted)[:, -1])
    assert (found.clean, found.corrupted) == tuple(map(float, ends))
    torch.testing.assert_close(found.recovery, (found.values - ends[1]) / (ends[0] - ends[1]), rtol=1e-12, atol=1e-12)


@cases([NATIVE, Case("gpt2", "native", "eager")])
@pytest.mark.parametrize("distance", ["kl", "l2"])
def test_the_numbers_are_those_of_plain_torch_hooks(load: Any, case: Case, distance: str) -> None:
    adapter = load(case)
    model, kept, block = adapter.model, {}, 3

    def stream(out: Any) -> torch.Tensor:
        return out[0] if isinstance(out, tuple) else out

    def with_hook(layer: int, hook: Any, tokens: Any) -> torch.Tensor:
        handle = adapter.blocks[layer].register_forward_hook(hook)
        try:
            return plain_forward(model, torch.tensor([tokens]))[0, -1]
        finally:
            handle.remove()

    for layer in range(2):
        clean = with_hook(layer, lambda _, __, out, at=layer: kept.update({at: stream(out)}), CLEAN)
    rows = []
    for layer in range(2):
        for start in range(0, len(PROMPT), block):

            def put(_: Any, __: Any, out: Any, at: Any = (layer, start)) -> Any:
                new = stream(out).clone()
                new[:, at[1] : at[1] + block] = kept[at[0]][:, at[1] : at[1] + block]
                return (new, *out[1:]) if isinstance(out, tuple) else new

            rows.append(DISTANCES[distance](clean, with_hook(layer, put, PROMPT)).double())
    before = DISTANCES[distance](clean, plain_forward(model, torch.tensor([PROMPT]))[0, -1]).double()
    found = kv.activation_patching(adapter, CLEAN, PROMPT, "resid_post", distance=distance, block=block, progress="none")
    assert_bitwise(found.values, torch.stack(rows).reshape(2, -1), f"{distance} of every patch", ("layer", "block"))
    assert (found.clean, found.corrupted) == (0.0, float(before))
    assert_bitwise(found.recovery, metrics.recovery(before.expand_as(found.values), found.values), "recovery")
    assert list(found.frame.columns) == ["layer", "start", "stop", "text", "value", "recovery", "unchanged"]
    assert len(found.frame) == found.values.numel()
    assert found.differ == [3, 4]


@cases([HOOKED, NATIVE])
def test_everything_moved_is_the_clean_prompt_and_causality_is_kept(load: Any, case: Case) -> None:
    adapter = load(case)
    stream = kv.activation_patching(adapter, CLEAN, PROMPT, "resid_pre", block=len(PROMPT), progress="none")
    assert (stream.recovery[0] == 1).all(), "the whole stream entering block 0"
    by_position = kv.activation_patching(adapter, CLEAN, PROMPT, "resid_pre", progress="none")
    assert (by_position.recovery[0, :3] == 0).all(), "before the first token that differs there is nothing to bring"
    for site in ("kv", "v"):
        heads = kv.activation_patching(adapter, CLEAN, PROMPT, site, "heads", layers=(1,), progress="none")
        assert heads.frame["head"].tolist() == [0, 1]
        assert list(heads.frame.columns) == ["layer", "head", "value", "recovery", "unchanged"]
        assert (heads.values != heads.corrupted).all()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"corrupted": PROMPT[:-1]}, "one prompt has 12 tokens and the other 11, and positions are matched by number"),
        ({"corrupted": CLEAN}, "both prompts have the same tokens"),
        ({"site": "resid_pots"}, "did you mean 'resid_post'"),
        ({"over": "heads"}, "needs a site with heads"),
        ({"distance": "logit_difference"}, "expected two answers of one token each"),
    ],
)
def test_what_cannot_be_patched_is_one_sentence(load: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(kv.InputError) as error:
        kv.activation_patching(load(NATIVE), **{"clean": CLEAN, "corrupted": PROMPT, "progress": "none", **given})
    assert said in str(error.value)
    assert "\n" not in str(error.value)
