"""Ablations give what a plain loop of TransformerLens or of torch's hooks gives, at every site; bad ones are one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvinterp as kv
from kvinterp.patching.hook import PatchHook
from kvinterp.paths import Runner
from support import PROMPT, Case, assert_bitwise, cases, plain_forward

HOOKED = Case("llama-gqa", "hooked")
NATIVE = [Case("llama-gqa", "native", "eager"), Case("gpt2", "native", "sdpa"), Case("zoo:mistral-mini", "native", "sdpa")]
OTHERS = [[5, 9, 33, 71, 2], [8, 1, 60, 17, 44, 9, 71, 26, 3]]
"""Two prompts of other lengths."""
SEED, LAYER = 7, 1
NAMES = {
    **{site: f"hook_{site}" for site in ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")},
    **{site: f"attn.hook_{site}" for site in ("q", "k", "v", "z")},
}
"""The sites in TransformerLens's words."""


@pytest.mark.each
@pytest.mark.hooked
@pytest.mark.parametrize("site", NAMES)
def test_zeros_are_those_of_a_loop_with_run_with_hooks(load: Any, site: str) -> None:
    adapter = load(HOOKED)
    model, hook = adapter.model, f"blocks.{LAYER}.{NAMES[site]}"
    heads = (1,) if site in ("q", "k", "v", "z") else None

    def put(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        changed = tensor.clone()
        (changed[:, 3:8] if heads is None else changed[:, 3:8, 1]).zero_()
        return changed

    # Two prompts at once: an ablation, unlike a trace, fits any batch.
    tokens = torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        expected = model.run_with_hooks(tokens, fwd_hooks=[(hook, put)])
    patch = kv.Patch(site, (LAYER,), heads, (3, 8), donor="zero")
    with kv.patched(model, patch):
        found = plain_forward(model, tokens)
    assert not torch.equal(expected, plain_forward(model, tokens)), (
        "the ablation changes nothing here: the test shows nothing"
    )
    assert_bitwise(found, expected, f"logits with {site} set to zero")


@cases(NATIVE)
def test_zeros_are_those_of_plain_torch_hooks(load: Any, case: Case) -> None:
    adapter = load(case)
    model, tokens = adapter.model, torch.tensor([PROMPT])
    block = adapter.blocks[LAYER]

    def put(_: Any, __: Any, out: Any) -> Any:
        new = torch.zeros_like(out[0] if isinstance(out, tuple) else out)
        return (new, *out[1:]) if isinstance(out, tuple) else new

    handle = block.register_forward_hook(put)
    expected = plain_forward(model, tokens)
    handle.remove()
    with kv.patched(model, kv.Patch("resid_post", (LAYER,), positions="all", donor="zero")):
        assert_bitwise(plain_forward(model, tokens), expected, "logits with the stream set to zero")


@cases([Case("llama-gqa", "native", "eager"), HOOKED])
@pytest.mark.parametrize("site", ["cache_v", "kv"])
def test_a_cache_set_to_zero_is_what_a_user_gets_who_zeroes_it(load: Any, case: Case, site: str) -> None:
    adapter = load(case)
    patch = kv.Patch(site, (LAYER,), positions="earlier", steps="first", donor="zero")
    row = torch.tensor([PROMPT])
    with Runner(adapter, kv.path_named("cached"), row, 2, [PatchHook(adapter, [patch], prompt_length=len(PROMPT))]) as run:
        run.advance()
        found = run.advance(torch.tensor([7]))[0]
    assert_bitwise(found, _with_a_zeroed_cache(adapter, row, site), "logits after the step")


@torch.no_grad()
def _with_a_zeroed_cache(adapter: Any, row: torch.Tensor, site: str) -> torch.Tensor:
    if adapter.kind == "hooked":
        from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

        cache = TransformerLensKeyValueCache.init_cache(adapter.model.cfg, "cpu", 1)
        adapter.model(row, past_kv_cache=cache, attention_mask=torch.ones_like(row))
        entry = cache.entries[LAYER]
        for tensor in (entry.past_values, entry.past_keys)[: 1 + (site == "kv")]:
            tensor.zero_()
        new = torch.tensor([[7]])
        return adapter.model(new, past_kv_cache=cache, attention_mask=torch.ones_like(new))[0, -1]
    out = adapter.model(row, use_cache=True)
    layer = out.past_key_values.layers[LAYER]
    for tensor in (layer.values, layer.keys)[: 1 + (site == "kv")]:
        tensor.zero_()
    return adapter.model(torch.tensor([[7]]), past_key_values=out.past_key_values, use_cache=True).logits[0, -1]


def test_what_is_no_donor_is_one_sentence() -> None:
    with pytest.raises(kv.InputError, match="donor='mean' was given: expected a trace"):
        kv.Patch("z", donor="mean")
