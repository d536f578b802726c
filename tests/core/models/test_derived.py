"""The pattern that is derived beside SDPA: the kernel that runs stays, and what is shown is what it attends to."""

import itertools

import pytest
import torch
import transformers
from torch import nn

import kvinterp as kv
from kvinterp.models.derived import derived_attention
from kvinterp.models.load import wrap
from support import Case, assert_bitwise, assert_close, cases

PROMPT = [3, 5, 7, 9, 2, 4, 8, 10, 6, 1, 3, 7]
SDPA = [Case(name, "native", "sdpa") for name in ("llama-gqa", "mistral-window")]
FLOAT32 = 2.0**-23
"""One unit in the last place of a float32 between 1 and 2."""

ARCHITECTURES = {
    "Qwen3": {"head_dim": 10},
    "Mistral": {"sliding_window": 5},
    "Gemma3": {"config": "Gemma3TextConfig", "head_dim": 10, "scale": 8.0, "query_pre_attn_scalar": 7},
    "Falcon": {
        "sizes": {"vocab_size": 61, "hidden_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4},
        "multi_query": True,
        "new_decoder_architecture": False,
        "alibi": True,
    },
}


# What the kernel was given ---------------------------------------------------------------------------------------------

MASKS = {
    "none": None,
    "causal": "causal",
    "window": torch.ones(5, 9, dtype=torch.bool).tril(4).triu(1),
    "added": torch.randn(5, 9, generator=torch.Generator().manual_seed(1)).double(),
    "by head": torch.rand(2, 4, 5, 9, generator=torch.Generator().manual_seed(2)) > 0.4,
    "one row for all": torch.tensor([[True] * 6 + [False] * 3]),
    "a row that reads nothing": torch.cat([torch.ones(4, 9), torch.zeros(1, 9)]).bool(),
}


@pytest.mark.parametrize(("mask", "scale", "shared"), itertools.product(MASKS, (None, 0.7), (1, 2)))
def test_values_that_are_the_identity_make_the_kernel_show_its_pattern(mask, scale, shared):
    """With one value a key that is 1 at that key alone, what SDPA returns is its pattern."""
    made = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 5, 8, generator=made, dtype=torch.float64)
    key = torch.randn(2, 4 // shared, 9, 8, generator=made, dtype=torch.float64)
    causal, given = MASKS[mask] == "causal", None if MASKS[mask] == "causal" else MASKS[mask]
    shown = nn.functional.scaled_dot_product_attention(
        query,
        key,
        torch.eye(9).double().expand(2, 4 // shared, 9, 9),
        given,
        is_causal=causal,
        scale=scale,
        enable_gqa=shared > 1,
    )
    derived = derived_attention("pattern", query, key, given, causal, scale)
    assert_close(derived, shown, "pattern", ("batch", "head", "query", "key"), absolute=1e-14)
    newest = derived_attention("pattern", query, key, given, causal, scale, "newest")
    assert_close(newest, shown[:, :, -1:], "pattern", ("batch", "head", "query", "key"), absolute=1e-14)
    scores = derived_attention("attn_scores", query, key, given, causal, scale)
    assert_close(scores.softmax(-1).nan_to_num(0.0), shown, "scores", ("batch", "head", "query", "key"), absolute=1e-14)


# On a model ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stem", ARCHITECTURES)
def test_what_the_heads_read_is_the_derived_pattern_times_the_values(tiny, stem):
    """In float64, along both paths and at every position: windows, norms on queries, ALiBi, shared KV heads, own scales."""
    adapter = kv.wrap(tiny(stem, attention="sdpa", **ARCHITECTURES[stem]).double())
    # transformers' ALiBi counts the positions of the prompt alone, which a static cache has more of.
    static = () if ARCHITECTURES[stem].get("alibi") else ("cached[cache=static]",)
    for path in ("recompute", "cached", *static):
        trace = kv.run(adapter, PROMPT, path, record="pattern,z,cache_v", positions="all", max_new_tokens=3, stop="length")
        assert trace.derived == ("pattern",)
        for layer, step in itertools.product(range(adapter.facts.layers), range(3)):
            pattern, z, values = (trace.records[site, layer][step] for site in ("pattern", "z", "cache_v"))
            values = values.repeat_interleave(adapter.facts.query_heads // adapter.facts.kv_heads, 0)
            read = torch.einsum("hqk,hkd->qhd", pattern, values[:, -pattern.shape[-1] :])
            assert_close(read, z, f"z along {path}", ("query", "head", "dimension"), absolute=1e-13 * z.abs().max().item())


@cases(SDPA)
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_the_kernel_that_runs_stays(load, case, dtype):
    """Asking for the pattern brought eager attention, and with it took away the difference that was looked for."""
    model = load(case, dtype)
    asked = {"max_new_tokens": 5, "stop": "length", "progress": "none"}
    bare, shown = (kv.compare(model, PROMPT, record=record, **asked) for record in ("", "pattern"))
    assert shown.provenance["attention"] == "sdpa"
    assert bare.steps.equals(shown.steps)
    for path in ("cached", "recompute"):
        runs = [kv.run(model, PROMPT, path, max_new_tokens=5, stop="length", logits="keep", **more)
                for more in ({}, {"record": "pattern"}, {"record": "pattern,attn_scores", "positions": "all"})]  # fmt: skip
        for run in runs[1:]:
            assert_bitwise(run.logits, runs[0].logits)


@cases(SDPA)
def test_a_derived_pattern_is_eagers_to_rounding(load, case):
    """Eager attention rounds every product, its scores and its softmax to float32; nothing of it is more than that."""
    eager = load(Case(case.model, "native", "eager"), "float32")
    asked = {"max_new_tokens": 4, "stop": "length", "record": "pattern", "positions": "all"}
    for path in ("recompute", "cached"):
        own = kv.run(eager, PROMPT, path, **asked)
        derived = kv.run(load(case, "float32"), PROMPT, path, continuation=own.fed, **asked)
        exact = kv.run(load(case, "float64"), PROMPT, path, continuation=own.fed, **asked)
        assert (own.derived, derived.derived) == ((), ("pattern",))
        for place, kept in own.records.items():
            for a, b, c in zip(derived.records[place], kept, exact.records[place], strict=True):
                assert a.dtype == torch.float32
                assert c.dtype == torch.float64
                assert_close(a, b, "pattern", ("head", "query", "key"), absolute=256 * FLOAT32)
                assert_close(a.double(), c, "pattern", ("head", "query", "key"), absolute=256 * FLOAT32)


def test_where_it_cannot_be_derived_or_patched_a_sentence_says_so(load):
    with pytest.raises(kv.UnsupportedError, match=r"cannot be patched under attention 'sdpa'.*attention='eager'"):
        kv.sweep(load(SDPA[0]), PROMPT, site="pattern", over="heads", max_new_tokens=2, progress="none")
    config = transformers.LlamaConfig(
        vocab_size=61, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        attn_implementation="flex_attention",
    )  # fmt: skip
    model = wrap(transformers.LlamaForCausalLM(config).eval())
    with pytest.raises(kv.UnsupportedError, match=r"cannot be derived under attention 'flex_attention'.*attention='sdpa'"):
        kv.run(model, PROMPT, record="pattern", max_new_tokens=1)


# transformers' own seam ------------------------------------------------------------------------------------------------
