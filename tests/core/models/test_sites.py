"""A site is what its description says on every architecture, or is refused."""

import itertools

import pytest
import torch

import kvinterp as kv
from kvinterp.errors import UnsupportedError
from kvinterp.models import SITES
from kvinterp.models.sites import LAYOUTS

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT = {"vocab_size": 61, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
PLAIN = {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}

ARCHITECTURES = {
    "Granite": {"residual_multiplier": 0.3},
    "Glm4": {"head_dim": 6, "pad_token_id": 0},
    "Bloom": {"sizes": {"vocab_size": 61, "hidden_size": 24, "n_layer": 2, "n_head": 4}},
    "Mpt": {"sizes": {"vocab_size": 61, "d_model": 24, "n_heads": 4, "n_layers": 2, "max_seq_len": 64}},
    "CodeGen": {"sizes": {**GPT, "rotary_dim": 4}},
    "GPTBigCode": {"sizes": {**GPT, "multi_query": False}},
    "GptOss": {"head_dim": 10, "sliding_window": 5, **EXPERTS},
    "Llama4": {"config": "Llama4TextConfig", "head_dim": 12, "intermediate_size_mlp": 40, "num_local_experts": 2},
    "Qwen3": {"head_dim": 10},
    "Olmo2": {},
    "Gemma3": {"config": "Gemma3TextConfig", "head_dim": 10, "scale": 8.0, "query_pre_attn_scalar": 10},
    "OPT": {"sizes": {**PLAIN, "ffn_dim": 40, "word_embed_proj_dim": 24}},
    "Mixtral": {"head_dim": 10, **EXPERTS},
    "Falcon": {"sizes": {**PLAIN, "alibi": False, "multi_query": True, "new_decoder_architecture": False}},
}
REFUSED = {
    "Granite": {"attn_out", "mlp_out"},
    "Bloom": {"attn_out", "mlp_out"},
    "Mpt": {"attn_out", "mlp_out"},
    "CodeGen": {"q", "k", "v", "cache_k_pre"},
    "GPTBigCode": {"q", "k", "v", "cache_k_pre"},
    "GptOss": {"attn_scores", "pattern"},
    "Glm4": set(),
    "Llama4": set(),
    "Qwen3": set(),
    "Gemma3": set(),
    "Mixtral": set(),
    "Falcon": set(),
    "Olmo2": set(),
    "OPT": {"mlp_out", "resid_mid", "post"},
}


SUMS = ("Llama4", "Qwen3", "Mixtral")
"""Their output projection has no bias, and no norm follows it."""
BY_DEFAULT = ("Bloom", "CodeGen", "Gemma3", "GptOss", "Qwen3")
"""One of each reason for which a site was once another tensor."""


def recorded(model):
    """Every site that the model can give, of the prompt's forward, by site and layer."""
    adapter, shown, refused = kv.wrap(model), {}, set()
    for site in SITES:
        try:
            trace = kv.run(adapter, PROMPT, "recompute", record=site, positions="all", max_new_tokens=1)
        except UnsupportedError:
            refused.add(site)
        else:
            shown |= {place: kept[0].double() for place, kept in trace.records.items()}
    return adapter, shown, refused


def test_the_axes_count_what_the_table_says(tiny):
    """As many positions, heads and keys as there are, on a model with more query heads than KV heads."""
    adapter, shown, _ = recorded(tiny("Llama", hidden_size=40, num_attention_heads=4, num_key_value_heads=2))
    assert {site for site, _ in shown} == set(SITES) - {"router"}
    for (site, _), tensor in shown.items():
        layout, shape = LAYOUTS[site], (1, *tensor.shape)
        assert (len(shape), shape[layout.row_axis]) == (layout.dimensions, len(PROMPT)), site
        assert shape[layout.heads] == (adapter.facts.heads_of(site)[0] or 1), site
        assert not layout.keys or shape[layout.keys] == len(PROMPT), site


def close(a, b):
    return a.shape == b.shape and bool(((a - b).abs() <= 1e-4 * b.abs().max()).all())


@pytest.mark.parametrize(
    "stem", [stem if stem in BY_DEFAULT else pytest.param(stem, marks=pytest.mark.slow) for stem in ARCHITECTURES]
)
def test_sites_keep_the_identities_that_define_them(tiny, stem):
    """What attention returns was recorded as what it adds where it is scaled or normalised first (Granite, GLM 4) or has
    the residual stream in it (BLOOM, MPT); slices of a fused projection in another order as q, k and v (CodeGen,
    GPTBigCode); a sink as a key (GPT-OSS); a key before its norm as the key before RoPE (Qwen 3)."""
    adapter, shown, refused = recorded(tiny(stem, **ARCHITECTURES[stem]))
    assert refused >= REFUSED[stem]
    for layer in range(adapter.facts.layers):
        here = {site: tensor for (site, at), tensor in shown.items() if at == layer}
        assert here["resid_post"].shape == (len(PROMPT), adapter.facts.width)
        if {"attn_out", "resid_mid"} <= set(here):
            assert close(here["resid_pre"] + here["attn_out"], here["resid_mid"])
        if {"mlp_out", "resid_mid"} <= set(here):
            assert close(here["resid_mid"] + here["mlp_out"], here["resid_post"])
        if {"attn_out", "mlp_out"} <= set(here):
            assert close(here["resid_pre"] + here["attn_out"] + here["mlp_out"], here["resid_post"])
        assert here["cache_v"].shape[0] == adapter.facts.kv_heads
        if "v" in here:
            assert close(here["v"].transpose(0, 1), here["cache_v"])
        if "k" in here:
            assert close(here["k"].transpose(0, 1)[:, 0], here["cache_k"][:, 0] * _scale(here))
            assert torch.equal(here["k"].transpose(0, 1), here["cache_k_pre"])
        if {"result", "attn_out"} <= set(here) and stem in SUMS:
            assert close(here["result"].sum(1), here["attn_out"])
        if "post" in here:
            assert here["post"].shape[0] == len(PROMPT)
        if {"pattern", "z"} <= set(here):
            values = here["cache_v"].repeat_interleave(adapter.facts.query_heads // adapter.facts.kv_heads, 0)
            assert close(torch.einsum("hqk,hkd->qhd", here["pattern"], values), here["z"])


def _scale(here):
    """RoPE turns by nothing at position 0; Llama 4 normalises keys after it and YaRN scales them, in place."""
    before, after = here["k"].transpose(0, 1)[:, 0], here["cache_k"][:, 0]
    return before.norm(dim=-1, keepdim=True) / after.norm(dim=-1, keepdim=True)


def test_a_refusal_says_why_and_what_to_record(tiny):
    with pytest.raises(UnsupportedError, match="not what is added to the residual stream"):
        kv.run(tiny("Granite", **ARCHITECTURES["Granite"]), PROMPT, record="attn_out", max_new_tokens=1)
    with pytest.raises(UnsupportedError, match="attention sink"):
        kv.run(tiny("GptOss", **ARCHITECTURES["GptOss"]), PROMPT, record="pattern", max_new_tokens=1)


def test_the_check_is_made_once_and_no_hook_of_the_users_hears_it(tiny):
    model, heard = tiny("Llama"), []
    model.model.layers[0].register_forward_hook(lambda *_: heard.append(1))
    adapter = kv.wrap(model)
    for site in ("attn_out", "mlp_out", "v"):
        adapter.tap(site, 0)
    assert not heard
    first = adapter._checked
    assert first is not None
    kv.run(adapter, PROMPT, "recompute", record="attn_out", max_new_tokens=2, stop="length")
    assert len(heard) == 2
    assert adapter._checked is first
    assert adapter.at(torch.float64)._checked is first


def test_the_blocks_are_the_language_models(tiny):
    """LLaVA's vision encoder had as many blocks and came first, so that its blocks were hooked, and heard nothing."""
    import transformers

    vision = transformers.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=8, patch_size=4
    )
    text = tiny("Llama").config
    config = transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=60)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    assert type(kv.wrap(model).blocks[0]).__name__ == "LlamaDecoderLayer"
    compared = kv.compare(model, PROMPT, record="resid_post", max_new_tokens=3, stop="length", progress="none")
    assert len(compared.layers) == 6


def test_bridge_shows_keys_after_their_norm_and_refuses_what_never_fires(tiny):
    """TransformerLens' hook_k comes before Qwen 3's norm, and its hooks of what Granite adds hear only its own."""
    from kvinterp.models.bridge import build_bridge

    adapter, shown, refused = recorded(build_bridge(tiny("Qwen3", head_dim=10), "qwen"))
    # The bridge calls the gate of a gated MLP as a router is called.
    assert refused == {"router"}
    for layer, site in itertools.product(range(2), ("k", "cache_k_pre")):
        key = shown[site, layer].transpose(0, 1) if site == "k" else shown[site, layer]
        assert close(key[:, 0], shown["cache_k", layer][:, 0])
    assert adapter.kind == "bridge"
    with pytest.raises(UnsupportedError, match="scales what it adds"):
        kv.run(build_bridge(tiny("Granite", residual_multiplier=0.3), "granite"), PROMPT, record="attn_out")


@pytest.mark.hooked
def test_attention_only_models_have_no_mlp_site():
    """hook_mlp_out is there and never fires: records were empty, and a batch failed with "pop from empty list"."""
    from transformer_lens import HookedTransformer
    from transformer_lens.config.hooked_transformer_config import HookedTransformerConfig

    config = HookedTransformerConfig(
        d_model=32, d_head=8, n_heads=4, n_layers=2, n_ctx=64, d_vocab=61, attn_only=True, normalization_type="LN", seed=0,
        init_weights=True, device="cpu",
    )  # fmt: skip
    config.model_name = "attention-only"
    model = HookedTransformer(config)
    for site in ("mlp_out", "resid_mid"):
        with pytest.raises(UnsupportedError, match="attention and no MLP"):
            kv.run(model, PROMPT, record=site, max_new_tokens=1)
    assert len(kv.run(model, [PROMPT, PROMPT], batch_size=2, max_new_tokens=2)) == 2
