"""Which cache a path runs on: the model's own to the bit (law 10), any other by name, and ours only where it was checked."""

import logging

import pytest
import torch
import transformers
from transformers import DynamicCache, StaticCache

import kvinterp as kv
from kvinterp.paths.store import Growing
from plain import FED, check_law_10, forced_run
from support import PROMPT, assert_bitwise

DTYPES = ("float16", "bfloat16", "float32")
STEPS = len(FED) + 1
HEADS = {"MHA": (4, 4), "GQA": (4, 2), "MQA": (4, 1)}
SIZES = {"vocab_size": 97, "num_hidden_layers": 2, "max_position_embeddings": 96, "initializer_range": 0.15}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
ARCHITECTURES = {
    "Qwen2": {"hidden_size": 24, "intermediate_size": 40},
    "Qwen3": {"hidden_size": 24, "intermediate_size": 40, "head_dim": 10},
    "Mistral": {"hidden_size": 24, "intermediate_size": 40, "sliding_window": 8, "head_dim": 14},
    "Gemma2": {"hidden_size": 24, "intermediate_size": 40, "sliding_window": 8, "head_dim": 10},
    "Gemma3Text": {"hidden_size": 24, "intermediate_size": 40, "sliding_window": 8, "head_dim": 10},
    "GPTNeoX": {"hidden_size": 24, "intermediate_size": 40, "rotary_pct": 1.0},
    "Falcon": {"hidden_size": 24, "multi_query": True, "alibi": False, "new_decoder_architecture": False},
    "Olmo2": {"hidden_size": 24, "intermediate_size": 40},
    "Mixtral": {"hidden_size": 24, "intermediate_size": 40, **EXPERTS},
    "MiniMax": {"hidden_size": 24, "intermediate_size": 40, "head_dim": 6, "block_size": 8, **EXPERTS},
    "OPT": {"hidden_size": 24, "ffn_dim": 40, "word_embed_proj_dim": 24},
    "Cohere": {"hidden_size": 24, "intermediate_size": 40},
    # It turns half a head, and transformers turns pairs of numbers: of six it would turn three, and fails by itself.
    "Phi": {"hidden_size": 32, "intermediate_size": 40},
}


def made(stem, attention="sdpa", dtype="float32", heads=(4, 2), **more):
    config_class = getattr(transformers, f"{stem}Config")
    given = {**SIZES, "num_attention_heads": heads[0], "num_key_value_heads": heads[1], **more}
    config = config_class(**given)
    config._attn_implementation = attention
    torch.manual_seed(1)
    stem = stem.removesuffix("Text")
    return getattr(transformers, f"{stem}ForCausalLM")(config).eval().to(getattr(torch, dtype))


def llama(**more):
    return made("Llama", **{"hidden_size": 24, "intermediate_size": 40, **more})


# Law 10 ----------------------------------------------------------------------------------------------------------------


@pytest.mark.pairs
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("head_dim", [6, 10])
@pytest.mark.parametrize("heads", HEADS)
def test_law_10_holds_for_odd_shapes(heads, head_dim, attention, dtype):
    """A preallocated cache hands attention other strides: with six numbers a head, MHA and SDPA in float32 the products
    were then added in another order on a processor with AVX-512."""
    check_law_10(llama(head_dim=head_dim, attention=attention, dtype=dtype, heads=HEADS[heads]), PROMPT)


@pytest.mark.each
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("stem", ARCHITECTURES)
def test_law_10_holds_for_architectures(stem, dtype):
    attention = "eager" if stem == "Gemma2" else "sdpa"
    check_law_10(made(stem, attention, dtype, (4, 4) if stem == "OPT" else (4, 2), **ARCHITECTURES[stem]), PROMPT)


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("stem", ["Llama", "Mistral", "Gemma2"])
def test_a_static_cache_has_the_bits_of_its_own_plain_loop(stem, attention):
    if stem == "Gemma2" and attention == "sdpa":
        attention = "eager"
    model = made(stem, attention, **{"hidden_size": 24, "intermediate_size": 40, **ARCHITECTURES.get(stem, {})})
    for path, room in (("cached[cache=static]", len(PROMPT) + STEPS), ("cached[cache=static(40)]", 40)):
        check_law_10(model, PROMPT, path, lambda room=room: StaticCache(config=model.config, max_cache_len=room))


# The preallocated store ------------------------------------------------------------------------------------------------


@pytest.fixture
def unequal(monkeypatch):
    """A preallocated store that gives other bits, as it does where a kernel minds the strides."""
    append = Growing.append

    def other(self, layer, keys, values, window=None):
        keys, values = append(self, layer, keys, values, window)
        return keys, values * (1 + 2**-20)

    monkeypatch.setattr(Growing, "append", other)


def test_a_preallocated_store_of_other_bits_is_not_used_silently(unequal, caplog):
    model = llama()
    wanted = forced_run(model, "cached")
    with caplog.at_level(logging.WARNING, logger="kvinterp"):
        given = forced_run(model, "cached[cache=preallocated]")
    assert_bitwise(given.logits, wanted.logits, "logits")
    assert given.provenance["cache"] == "DynamicCache (preallocated gave other bits)"
    assert "does not give the bits of DynamicCache" in caplog.text
    compared = kv.compare(model, list(PROMPT), "cached[cache=preallocated]", "cached", max_new_tokens=3, progress="none")
    assert compared.provenance["caches"] == {"a": "DynamicCache (preallocated gave other bits)", "b": "DynamicCache"}
    assert compared.summary()["provenance"]["caches"] == compared.provenance["caches"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_preallocated_store_gives_the_bits_of_the_own_cache_or_is_left(dtype):
    """On a processor whose kernels mind the strides one branch holds, on others the other."""
    for model in (llama(dtype=dtype, heads=(4, 4)), made("Mistral", dtype=dtype, **ARCHITECTURES["Mistral"])):
        own, ours = forced_run(model, "cached"), forced_run(model, "cached[cache=preallocated]")
        assert_bitwise(ours.logits, own.logits, "logits")
        assert own.provenance["cache"] == "DynamicCache"
        assert ours.provenance["cache"] in (
            "preallocated (checked: the bits of DynamicCache)", "DynamicCache (preallocated gave other bits)"
        )  # fmt: skip


# Caches by name --------------------------------------------------------------------------------------------------------


def zero_argument_cache():
    return DynamicCache()


@pytest.mark.parametrize(
    "factory",
    [
        DynamicCache,
        zero_argument_cache,
        lambda: DynamicCache(),
        lambda config: DynamicCache(config=config),
        lambda settings: DynamicCache(config=settings),
    ],
)
def test_a_class_or_function_makes_the_cache(factory):
    model = llama()
    given = forced_run(model, kv.Cached(cache=factory))
    assert_bitwise(given.logits, forced_run(model, "cached").logits, "logits")
    assert given.provenance["cache"] == "DynamicCache"


def test_quantos_cache_has_the_bits_of_its_own_plain_loop_and_says_where_its_groups_do_not_fit():
    """Defect: groups of 64 numbers that the prompt's keys do not fill were a traceback."""
    pytest.importorskip("optimum.quanto")
    model = llama(head_dim=16)
    for bits in (4, 2):
        check_law_10(model, PROMPT, f"cached[cache=quantized({bits})]",
                     lambda bits=bits: transformers.QuantizedCache("quanto", model.config, nbits=bits))  # fmt: skip
    said = r"a QuantizedCache cannot keep 11 positions of 2 KV heads of 16 numbers \(Group size \(64\) must be a divisor of \(352\)\)"
    with pytest.raises(kv.UnsupportedError, match=said):
        kv.run(model, list(PROMPT[:11]), "cached[cache=quantized(4)]", max_new_tokens=3)


@pytest.mark.cuda
def test_an_offloaded_cache_has_the_bits_of_its_own_plain_loop():
    model = llama().to("cuda")
    check_law_10(model, PROMPT, "cached[cache=offloaded]", lambda: DynamicCache(config=model.config, offloading=True))
    with pytest.raises(kv.UnsupportedError, match="lets go of rows, and an offloaded cache cannot"):
        forced_run(model, "cached[cache=offloaded]+sinks(2,4)")


# Comparing and patching ------------------------------------------------------------------------------------------------
