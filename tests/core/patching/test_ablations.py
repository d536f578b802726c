"""Ablations give what a plain loop of TransformerLens or of torch's hooks gives, at every site; bad ones are one sentence."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvinterp as kv
from kvinterp.common.draws import draws
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


def given(name: str, model: Any, site: str) -> Any:
    makers = {
        "zero": lambda: "zero",
        "mean": lambda: kv.mean_donor(model, OTHERS, site),
        "resample": lambda: kv.resample_donor(model, OTHERS, site, seed=SEED),
    }
    return makers[name]()


def replaced(name: str, tensor: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """What an ablation makes of a tensor ``[batch, position, ...]``, by hand; the pool is ``[row, ...]``."""
    if name == "zero":
        return torch.zeros_like(tensor)
    if name == "mean":
        return pool.double().mean(0).to(tensor).expand_as(tensor).contiguous()
    rows = [int(draws((SEED, 0), 1, (0, position, 0, 0))[0] * len(pool)) for position in range(tensor.shape[1])]
    return pool[rows][None].expand_as(tensor).contiguous()


@pytest.mark.each
@pytest.mark.hooked
@pytest.mark.parametrize("site", NAMES)
@pytest.mark.parametrize("name", ["zero", "mean", "resample"])
def test_ablations_are_those_of_a_loop_with_run_with_hooks(load: Any, name: str, site: str) -> None:
    adapter = load(HOOKED)
    model, hook = adapter.model, f"blocks.{LAYER}.{NAMES[site]}"
    heads = (1,) if site in ("q", "k", "v", "z") else None
    with torch.no_grad():
        pool = torch.cat([model.run_with_cache(torch.tensor([tokens]))[1][hook][0] for tokens in OTHERS])

    def put(tensor: torch.Tensor, hook: Any) -> torch.Tensor:
        new, changed = replaced(name, tensor, pool), tensor.clone()
        changed[:, 3:8] = new[:, 3:8] if heads is None else changed[:, 3:8]
        if heads is not None:
            changed[:, 3:8, 1] = new[:, 3:8, 1]
        return changed

    # Two prompts at once: an ablation, unlike a trace, fits any batch.
    tokens = torch.tensor([PROMPT, PROMPT[::-1]])
    with torch.no_grad():
        expected = model.run_with_hooks(tokens, fwd_hooks=[(hook, put)])
    patch = kv.Patch(site, (LAYER,), heads, (3, 8), donor=given(name, adapter, site))
    with kv.patched(model, patch):
        found = plain_forward(model, tokens)
    assert not torch.equal(expected, plain_forward(model, tokens)), (
        "the ablation changes nothing here: the test shows nothing"
    )
    assert_bitwise(found, expected, f"logits with {site} ablated by {name}")


@cases(NATIVE)
@pytest.mark.parametrize("name", ["zero", "mean", "resample"])
def test_ablations_are_those_of_plain_torch_hooks(load: Any, case: Case, name: str) -> None:
    adapter = load(case)
    model, tokens = adapter.model, torch.tensor([PROMPT])
    block = adapter.blocks[LAYER]
    kept: list[torch.Tensor] = []
    handle = block.register_forward_hook(lambda _, __, out: kept.append((out[0] if isinstance(out, tuple) else out)[0]))
    for other in OTHERS:
        plain_forward(model, torch.tensor([other]))
    handle.remove()

    def put(_: Any, __: Any, out: Any) -> Any:
        new = replaced(name, out[0] if isinstance(out, tuple) else out, torch.cat(kept))
        return (new, *out[1:]) if isinstance(out, tuple) else new

    handle = block.register_forward_hook(put)
    expected = plain_forward(model, tokens)
    handle.remove()
    with kv.patched(model, kv.Patch("resid_post", (LAYER,), positions="all", donor=given(name, adapter, "resid_post"))):
        assert_bitwise(plain_forward(model, tokens), expected, f"logits with the stream ablated by {name}")


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


def test_a_draw_is_its_positions_own() -> None:
    donor = kv.patching.Ablation("resample", {("k", 0): torch.arange(50.0)[:, None]}, seed=3)
    whole = donor.rows("k", 0, 0, torch.zeros(1, 12, 1))
    assert_bitwise(donor.rows("k", 0, 5, torch.zeros(1, 4, 1)), whole[:, 5:9], "rows drawn a few at a time")
    other = kv.patching.Ablation("resample", donor.pool, seed=4)
    assert not torch.equal(other.rows("k", 0, 0, torch.zeros(1, 12, 1)), whole)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda model: kv.Patch("z", donor="mean"), "donor='mean' was given: expected a trace"),
        (lambda model: kv.mean_donor(model, OTHERS, "pattern"), "ablate it with donor='zero'"),
        (lambda model: kv.mean_donor(model, OTHERS, "resid_pots"), "did you mean 'resid_post'"),
        (lambda model: kv.mean_donor(model, OTHERS, "k", first=9), "first=9 leaves no position"),
    ],
)
def test_what_cannot_be_ablated_is_one_sentence(load: Any, make: Any, said: str) -> None:
    with pytest.raises((kv.InputError, kv.UnsupportedError)) as error:
        make(load(NATIVE[0]))
    assert said in str(error.value)
    assert "\n" not in str(error.value)
