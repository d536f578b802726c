"""The pattern that is derived beside SDPA: the kernel that runs stays, and what is shown is what it attends to."""

import itertools

import pytest
import torch
import transformers
from torch import nn

import kvinterp as kv
from kvinterp.models import hooks
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
    key = key.repeat_interleave(shared, 1)
    derived = derived_attention("pattern", query, key, given, causal, scale)
    assert_close(derived, shown, "pattern", ("batch", "head", "query", "key"), absolute=1e-14)
    newest = derived_attention("pattern", query, key, given, causal, scale, "newest")
    assert_close(newest, shown[:, :, -1:], "pattern", ("batch", "head", "query", "key"), absolute=1e-14)
    scores = derived_attention("attn_scores", query, key, given, causal, scale)
    assert_close(scores.softmax(-1).nan_to_num(0.0), shown, "scores", ("batch", "head", "query", "key"), absolute=1e-14)


def test_modes_and_autocast_around_it_do_not_reach_it():
    """Kernel modes replace products; a derived pattern computed with theirs would be the emulation's, not the keys'."""

    class Halved(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            made = func(*args, **(kwargs or {}))
            return made * 0.5 if func in (torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__) else made

    query, key = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 6, 4)
    wanted = derived_attention("attn_scores", query, key)
    with Halved(), torch.autocast("cpu", torch.bfloat16):
        assert_bitwise(derived_attention("attn_scores", query, key), wanted)


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


def test_its_difference_is_measured_head_by_head_and_called_derived(load, tmp_path):
    model = load(SDPA[0], "float16")
    paths = {"a": "cached[kernels=split_k(4,float16)]", "b": "recompute"}
    both = kv.compare(model, PROMPT, **paths, max_new_tokens=4, stop="length", progress="none")
    later = both.heads[both.heads["step"] > 0]
    assert len(later) == 3 * model.facts.layers * model.facts.query_heads
    assert (later["kl"] >= 0).all()
    assert (later["kl"] > 0).any()
    assert set(both.heads["pattern"]) == {"derived"}
    assert both.derived == ("pattern",)
    assert "derived beside a fused kernel" in both.where()
    trace = kv.run(model, PROMPT, record="pattern", max_new_tokens=2, logits="keep", stop="length")
    assert "pattern (derived)" in repr(trace)
    again = kv.Trace.load(trace.save(tmp_path))
    assert again.derived == ("pattern",)
    assert set(kv.compare_traces(again, trace).heads["pattern"]) == {"derived"}
    with kv.record(model.model, "pattern,resid_post") as seen:
        model.model(torch.tensor([PROMPT]))
    assert seen.derived == ("pattern",)
    assert "pattern (derived)" in repr(seen)
    page = kv.attention_comparison(model, PROMPT, step=2).page
    assert "derived beside it" in " ".join(page.sentences)


def test_eager_attention_that_was_asked_for_stays_and_is_recorded(load):
    model = load(Case("llama-gqa", "native", "eager"))
    both = kv.compare(model, PROMPT, record="pattern", max_new_tokens=2, progress="none")
    assert both.provenance["attention"] == "eager"
    assert both.derived == ()
    assert set(both.heads["pattern"]) == {"recorded"}
    assert "derived" not in both.where()
    assert "derived" not in " ".join(kv.attention_comparison(model, PROMPT, step=1).page.sentences)


def test_only_the_rows_that_are_kept_are_derived(load, monkeypatch):
    """A path that recomputes would otherwise derive the whole square at every step to keep one row of it."""
    model, seen = load(SDPA[0], "float16"), []

    def counted(*args):
        made = derived_attention(*args)
        seen.append(made.shape[-2])
        return made

    monkeypatch.setattr("kvinterp.models.hooks.derived_attention", counted)
    model.tap("pattern", 0)
    seen.clear()
    kv.compare(model, PROMPT, "recompute", "recompute", record="pattern", max_new_tokens=2, stop="length", progress="none")
    assert set(seen) == {1}
    seen.clear()
    kv.run(model, PROMPT, "recompute", record="pattern", positions="all", max_new_tokens=2, stop="length")
    assert set(seen) == {len(PROMPT), len(PROMPT) + 1}


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


def _sdpa():
    return transformers.AttentionInterface()["sdpa"]


def test_only_the_attention_function_is_looked_into_and_transformers_has_its_own_back(load, monkeypatch):
    """Of a module that asks transformers' interface no other call of torch comes by; what stood there stands there again."""
    adapter, before, calls = load(SDPA[0]), _sdpa(), []
    heard = hooks.Functions.__torch_function__

    def counted(self, func, *given):
        calls.append(func)
        return heard(self, func, *given)

    monkeypatch.setattr(hooks.Functions, "__torch_function__", counted)
    with kv.record(adapter, "pattern") as recorder:
        assert _sdpa() is not before
        adapter.model(torch.tensor([PROMPT]))
    assert _sdpa() is before
    assert len(recorder["pattern", 0]) == 1
    assert nn.functional.scaled_dot_product_attention in calls
    assert nn.functional.linear not in calls


def test_it_is_given_back_after_an_error_and_what_a_user_put_there_stays(load):
    adapter, before = load(SDPA[0]), _sdpa()
    with pytest.raises(ZeroDivisionError), kv.record(adapter, "pattern"):
        raise ZeroDivisionError
    assert _sdpa() is before

    def own(*given, **named):
        return before(*given, **named)

    try:
        with kv.record(adapter, "pattern"):
            adapter.model(torch.tensor([PROMPT]))
            transformers.AttentionInterface.register("sdpa", own)
        assert _sdpa() is own
    finally:
        transformers.AttentionInterface.register("sdpa", before)


def test_a_function_of_a_users_that_keeps_ours_does_not_show_twice(load):
    adapter, before = load(SDPA[0]), _sdpa()
    try:
        with kv.record(adapter, "pattern") as first:
            ours = _sdpa()
            transformers.AttentionInterface.register("sdpa", lambda *given, **named: ours(*given, **named))
            adapter.model(torch.tensor([PROMPT]))
        with kv.record(adapter, "pattern") as second:
            adapter.model(torch.tensor([PROMPT]))
        assert_bitwise(first["pattern", 0][0], second["pattern", 0][0])
    finally:
        transformers.AttentionInterface.register("sdpa", before)


def test_a_module_that_calls_sdpa_itself_shows_the_same_pattern(load, monkeypatch):
    adapter = load(SDPA[0])
    asked = kv.run(adapter, PROMPT, "recompute", max_new_tokens=2, record="pattern")
    assert hooks._asks_interface(adapter.blocks[0].self_attn)
    monkeypatch.setattr(hooks, "_asks_interface", lambda module: False)
    itself = kv.run(adapter, PROMPT, "recompute", max_new_tokens=2, record="pattern")
    for place, rows in asked.records.items():
        for one, other in zip(rows, itself.records[place], strict=True):
            assert_bitwise(one, other)
