"""``result``, ``post`` and ``embed``: what TransformerLens shows under these names, on every kind and both paths."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import kvinterp as kv
from support import PROMPT, Case, assert_bitwise, assert_close, cases, plain_forward

SITES = "result,post,embed"
KINDS = [
    Case(model, *kind) for model in ("llama-gqa", "gemma2") for kind in (("hooked",), ("bridge",), ("native", "eager"))
]
KINDS += [Case("gpt2", "bridge"), Case("gpt2", "native", "eager"), Case("standard", "hooked")]
HOOKED = Case("llama-gqa", "hooked")
CLEAN = tuple(70 if at in (3, 4) else token for at, token in enumerate(PROMPT))


def rows(*prompts: tuple[int, ...]) -> torch.Tensor:
    return torch.tensor(prompts)


def seen_in(adapter: Any, tokens: torch.Tensor, sites: str = SITES) -> Any:
    with kv.record(adapter.model, sites, positions="all") as seen:
        plain_forward(adapter.model, tokens)
    return seen


def modules(adapter: Any) -> tuple[Any, Any, Any]:
    """The output projection and the down projection of layer 1, and the embedding, of a model of transformers."""
    source, block = adapter.source, adapter.blocks[1]
    attention = next(getattr(block, name) for name in ("self_attn", "attn") if hasattr(block, name))
    output, down = (
        next(getattr(part, name) for name in names if hasattr(part, name))
        for part, names in ((attention, ("o_proj", "c_proj")), (block.mlp, ("down_proj", "c_proj")))
    )
    return output, down, source.get_input_embeddings()


# What is recorded ----------------------------------------------------------------------------------------------------------


@pytest.mark.hooked
@pytest.mark.parametrize("name", ["llama-gqa", "gemma2", "standard"])
def test_a_hooked_transformer_shows_what_run_with_cache_shows(load: Any, name: str) -> None:
    """Neurons and embeddings to the bit. TransformerLens multiplies and sums where it makes results: rounding apart."""
    adapter, tokens = load(Case(name, "hooked"), "float64"), rows(PROMPT, CLEAN)
    seen, model = seen_in(adapter, tokens), adapter.model
    model.cfg.use_attn_result = True
    try:
        with torch.no_grad():
            _, cache = model.run_with_cache(tokens)
    finally:
        model.cfg.use_attn_result = False
    with torch.no_grad():
        _, plain = model.run_with_cache(tokens)
    for layer in range(adapter.facts.layers):
        assert_bitwise(seen["post", layer], plain["post", layer], "neurons")
        assert_close(seen["result", layer], cache["result", layer], "results", relative=1e-12)
    assert_bitwise(seen["hook_embed"], plain["hook_embed"], "embeddings")
    assert seen.to_activation_cache()["embed"].shape == plain["embed"].shape


@cases(KINDS)
def test_each_is_what_its_module_reads_or_gives(load: Any, case: Case) -> None:
    adapter, tokens = load(case, "float64"), rows(PROMPT, CLEAN)
    seen, facts = seen_in(adapter, tokens, f"{SITES},z"), adapter.facts
    assert seen["result", 1].shape == (2, len(PROMPT), facts.query_heads, facts.width)
    assert set(seen.kept) == {("embed", 0), *((site, layer) for site in ("result", "post", "z") for layer in range(2))}
    if case.kind == "hooked":
        return
    output, down, embedding = modules(adapter)
    kept: dict[Any, Any] = {}
    handles = [
        module.register_forward_hook(lambda module, given, out: kept.update({module: (given[0], out)}))
        for module in (output, down, embedding)
    ]
    plain_forward(adapter.model, tokens)
    for handle in handles:
        handle.remove()
    bias = 0 if getattr(output, "bias", None) is None else output.bias
    assert_close(seen["result", 1].sum(2) + bias, kept[output][1], "results", relative=1e-12)
    alone = torch.zeros_like(seen["z", 1])
    alone[:, :, 2] = seen["z", 1][:, :, 2]
    assert_close(seen["result", 1][:, :, 2] + bias, output(alone.flatten(2)).detach(), "head 2", relative=1e-12)
    assert_bitwise(seen["post", 1], kept[down][0], "neurons")
    assert_bitwise(seen["embed", 0], kept[embedding][1], "embeddings")


# What is patched -----------------------------------------------------------------------------------------------------------


@cases(KINDS)
def test_the_clean_prompt_s_embeddings_make_the_clean_prompt_s_logits(load: Any, case: Case) -> None:
    adapter, corrupted = load(case), rows(PROMPT)
    clean = seen_in(adapter, rows(CLEAN))["embed", 0]
    with kv.patched(adapter.model, kv.Patch("embed", positions=(3, 5), donor=clean)):
        patched = plain_forward(adapter.model, corrupted)
    assert_bitwise(patched, plain_forward(adapter.model, rows(CLEAN)), "logits")
    found = kv.activation_patching(adapter, CLEAN, PROMPT, "embed", progress="none")
    assert found.frame["layer"].unique().tolist() == [0]
    assert bool((found.values[0, [0, 5, 11]] == found.corrupted).all())
    resid = kv.activation_patching(adapter, CLEAN, PROMPT, "resid_pre", layers=0, progress="none")
    assert torch.equal(found.values, resid.values)


@pytest.mark.hooked
@pytest.mark.parametrize("site", ["post", "embed"])
def test_a_patch_is_transformer_lens_s_own(load: Any, site: str) -> None:
    """``generic_activation_patch`` of neurons and embeddings, position by position, to the bit."""
    from transformer_lens import patching

    adapter, clean, corrupted = load(HOOKED), rows(CLEAN), rows(PROMPT)

    def metric(logits: torch.Tensor) -> torch.Tensor:
        return logits[0, -1, 11] - logits[0, -1, 23]

    with torch.no_grad():
        _, cache = adapter.model.run_with_cache(clean)
        if site == "post":
            setter, axes = patching.layer_pos_patch_setter, ["layer", "pos"]
            patch = functools.partial(patching.generic_activation_patch, activation_name=site, index_axis_names=axes)
            expected = patch(adapter.model, corrupted, cache, metric, patch_setter=setter)
        else:
            expected = torch.stack([_embedded(adapter.model, corrupted, cache, at, metric) for at in range(len(PROMPT))])[
                None
            ]
    found = kv.activation_patching(adapter, CLEAN, PROMPT, site, distance=metric, progress="none")
    assert_bitwise(found.values.float(), expected, site, ("layer", "position"))


def _embedded(model: Any, corrupted: torch.Tensor, cache: Any, at: int, metric: Any) -> torch.Tensor:
    def put(embed: torch.Tensor, hook: Any) -> torch.Tensor:
        embed[:, at] = cache[hook.name][:, at]
        return embed

    return metric(model.run_with_hooks(corrupted, fwd_hooks=[("hook_embed", put)]))


# Passes, which begin at the embedding where it is heard ----------------------------------------------------------------------
