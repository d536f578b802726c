"""The spine end to end: what the issue asks to be shown of models, paths, recorder, comparison and bad input."""

import numpy as np
import pytest
import torch

import kvinterp as kv
from kvinterp.comparison import compare_examples
from kvinterp.models import zoo
from kvinterp.paths import strategy_named
from kvinterp.paths.sampling import uniforms
from kvinterp.paths.store import Growing, Store
from support import Case, has_hooked_transformer

pytestmark = pytest.mark.bits

PROMPT = "Question: Leo shares 4 balls among 2 friends. How many balls does each friend get?\nAnswer:"


HOOKED_KINDS = ["hooked", "bridge", "native"] if has_hooked_transformer() else ["bridge", "native"]


@pytest.fixture(scope="module")
def model():
    return kv.load_model("zoo:mistral-mini", kind="native", device="cpu")


# Models --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[] if n in ("mqa-mini", "gemma2-mini") else pytest.mark.long) for n in zoo.names()]
)
def test_every_kind_agrees_with_transformers_eager_in_float32(name):
    """Relative to the largest logit, 1e-5: the bound of the issue, on all three families."""
    tokens = torch.randint(4, 500, (1, 60), generator=torch.Generator().manual_seed(0))
    reference = kv.load_model(f"zoo:{name}", kind="native", dtype="float32", attention="eager", device="cpu").model
    with torch.no_grad():
        wanted = reference(tokens).logits
        for kind in HOOKED_KINDS:
            given = kv.load_model(f"zoo:{name}", kind=kind, dtype="float32", device="cpu").forward(tokens)
            assert (given - wanted).abs().max() / wanted.abs().max() < 1e-5, kind


def test_wrap_takes_what_the_user_has(model):
    assert kv.wrap(model) is model
    assert kv.wrap(model.model, model.tokenizer).kind == "native"
    assert kv.wrap(kv.load_model("zoo:mistral-mini", kind="bridge", device="cpu").model).kind == "bridge"
    with pytest.raises(kv.InputError, match="cannot wrap a dict"):
        kv.wrap({})


def test_a_cast_model_keeps_its_rope_frequencies(model):
    """model.to(float16) rounds them, which from_pretrained(dtype=float16) does not do."""
    cast = kv.load_model("zoo:mistral-mini", kind="native", dtype="float32", device="cpu").at(torch.float16)
    frequencies = {n: b for n, b in cast.model.named_buffers() if "inv_freq" in n}
    assert frequencies
    assert all(b.dtype == torch.float32 for b in frequencies.values())


# Recorder ------------------------------------------------------------------------------------------------------------


def test_kinds_show_the_same_activations():
    """Every site of every kind in float32, all positions of the prefill, against native eager."""
    reference = kv.load_model("zoo:gemma2-mini", kind="native", dtype="float32", attention="eager", device="cpu")
    sites = "resid_pre,resid_mid,resid_post,attn_out,mlp_out,q,k,v,z,pattern,cache_k,cache_k_pre,cache_v"
    wanted = kv.run(reference, PROMPT, "recompute", max_new_tokens=1, record=sites, positions="all")
    for kind in [k for k in HOOKED_KINDS if k != "native"]:
        other = kv.load_model("zoo:gemma2-mini", kind=kind, dtype="float32", device="cpu")
        shown = kv.run(other, PROMPT, "recompute", max_new_tokens=1, record=sites, positions="all")
        for place, tensors in wanted.records.items():
            a, b = tensors[0], shown.records[place][0]
            assert a.shape == b.shape, (kind, place)
            assert (a - b).abs().max() / a.abs().max() < 2e-5, (kind, place)


def test_trace_saves_and_loads(model, tmp_path):
    trace = kv.run(model, PROMPT, "cached", max_new_tokens=4, record="resid_post,kv", positions="all", logits="keep")
    again = kv.Trace.load(trace.save(tmp_path / "trace"))
    assert again.tokens == trace.tokens
    assert torch.equal(again.logits, trace.logits)
    for place, kept in trace.records.items():
        assert all(torch.equal(a, b) for a, b in zip(kept, again.records[place], strict=True))
    (tmp_path / "trace" / "trace.safetensors").write_bytes(b"cut off")
    with pytest.raises(kv.InputError, match="trace"):
        kv.Trace.load(tmp_path / "trace")


# Paths ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["top_k(5,0.7)", "top_p(0.8,1.3)"])
def test_sampling_draws_from_its_distribution(text):
    """The share of each token over evenly spread random numbers is its probability, to one part in the number of draws."""
    strategy = strategy_named(text)
    logits = torch.randn(1, 20, generator=torch.Generator().manual_seed(3)) * 2
    draws = 4000
    spread = (torch.arange(draws) + 0.5) / draws
    counts = torch.bincount(strategy.choose(logits.expand(draws, -1), spread), minlength=20) / draws
    assert (counts - strategy.distribution(logits.double())[0]).abs().max() <= 1 / draws
    assert str(strategy_named(str(strategy))) == str(strategy)


@pytest.mark.parametrize(
    "strategy", [kv.TopK(10**6), kv.TopK(5, 0.123456789), kv.TopP(1 / 3, 1e6), kv.TopP(0.95, 2.0), kv.TopK(1, 1e-7)]
)
def test_a_strategy_is_read_back_from_its_text(strategy):
    """Six digits were kept of every value, and a million became 1e+06, which is no whole number."""
    assert strategy_named(str(strategy)) == strategy
    assert str(strategy_named("top_p(0.95,0.8)")) == "top_p(0.95,0.8)"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: kv.ExecutionPath("cache"), "did you mean 'cached'"),
        (lambda: kv.ExecutionPath("recompute", cache_dtype="float16"), "keeps no cache"),
        (lambda: kv.path_named(None), "path=None was given"),
        (lambda: kv.path_named("cached[policy=int8]"), r"a policy stands behind the brackets, as in 'cached\+int8'\."),
        (lambda: kv.path_named("cached[q8_0,chunk=4]@float64"), r"as in 'cached\[chunk=4\]\+q8_0@float64'\."),
        (
            lambda: kv.path_named("recompute[dtype=float32]"),
            "a dtype stands behind the brackets, as in 'recompute@float32'",
        ),
        (lambda: kv.path_named("cached[policy=nonsense]"), "is unknown: expected chunk=N"),
        (lambda: kv.path_named("cached[chunk=²]"), "expected a whole number of at least 1, in tokens"),
        (lambda: strategy_named(None), "strategy=None was given"),
    ],
)
def test_paths_that_are_none(make, said):
    """ExecutionPath("cache") ran the recompute path, and nothing said so."""
    with pytest.raises(kv.InputError, match=said):
        make()


def test_random_numbers_do_not_depend_on_the_batch():
    assert torch.equal(uniforms(1, 5, 8)[:4], uniforms(1, 5, 4))
    assert not torch.equal(uniforms(1, 5, 8), uniforms(1, 6, 8))


def test_the_store_gives_what_transformers_sliding_layer_gives(model):
    from transformers.cache_utils import DynamicSlidingWindowLayer

    facts = kv.load_model("zoo:gemma2-mini", kind="native", device="cpu").facts
    theirs = DynamicSlidingWindowLayer(sliding_window=8)
    ours = Store(facts, kv.policy_named("identity"), 1, torch.float32, torch.device("cpu"), [], Growing(40))
    generator = torch.Generator().manual_seed(0)
    for new in (12, 1, 1, 5, 1):
        keys, values = (torch.randn(1, facts.kv_heads, new, facts.head_dim, generator=generator) for _ in range(2))
        wanted, given = theirs.update(keys, values), ours.update(0, keys, values, 8)
        assert all(torch.equal(a, b) for a, b in zip(wanted, given, strict=True))


def test_a_chunked_prefill_agrees_in_float64(model):
    whole, chunked = (kv.run(model, PROMPT, p, max_new_tokens=4, logits="keep") for p in
                      ("cached@float64", "cached[chunk=5]@float64"))  # fmt: skip
    assert whole.tokens == chunked.tokens
    assert (whole.logits - chunked.logits).abs().max() < 1e-12


def test_a_prompt_may_fill_the_context(load):
    """The last token that is decided is not fed, so it needs no position: one too few was allowed."""
    model = load(Case("llama-gqa", "native"))
    context = model.facts.context
    assert len(kv.run(model, [5] * context, max_new_tokens=1, stop="length").tokens) == 1
    assert len(kv.run(model, [[5] * (context - 1)] * 2, max_new_tokens=2, stop="length", batch_size=2)) == 2
    for length, steps in ((context + 1, 1), (context, 2)):
        with pytest.raises(kv.InputError, match="more than the context"):
            kv.run(model, [5] * length, max_new_tokens=steps)


# Comparison ----------------------------------------------------------------------------------------------------------


def test_the_tables_are_what_the_traces_say():
    """Every kind of number derived again from kept tensors."""
    adapter = kv.load_model("zoo:gemma2-mini", kind="bridge", device="cpu")
    tokens = adapter.encode(PROMPT)
    both = kv.compare(adapter, tokens, max_new_tokens=14, stop="length", cache_errors="whole", progress="none")
    fed = both.steps["token_a"].tolist()
    keep = {"record": "resid_post,pattern,kv", "positions": "all", "logits": "keep", "stop": "length", "max_new_tokens": 14}
    a, b = (kv.run(adapter, tokens, path, continuation=fed, **keep) for path in ("cached", "recompute"))
    step, layer = 12, 2
    p, q = (t.logits[step].double().log_softmax(-1) for t in (a, b))
    assert both.steps.loc[step, "kl"] == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-12)
    x, y = (t.records["resid_post", layer][step][-1].double() for t in (a, b))
    drift = both.layers.query("step == @step and layer == @layer")["relative_l2"].item()
    assert drift == pytest.approx(float((x - y).norm() / y.norm()), rel=1e-9)
    x, y = (t.records["cache_v", layer][step].double() for t in (a, b))
    short = min(x.shape[1], y.shape[1])
    x, y = x[:, -short:], y[:, -short:]
    wanted = (x - y).norm(dim=-1) / y.norm(dim=-1)
    table = both.kv.query("step == @step and layer == @layer and tensor == 'V'").sort_values(["kv_head", "position"])
    np.testing.assert_allclose(table["relative_error"].to_numpy(), wanted.flatten().numpy(), rtol=1e-9)
    assert table["position"].max() == len(tokens) + step - 1
    x, y = (t.records["pattern", layer][step][:, -1].double() for t in (a, b))
    short = min(x.shape[-1], y.shape[-1])
    assert both.heads.query("step == @step and layer == @layer")["kl"].max() >= 0
    assert x.shape[-1] != 0
    assert short


def test_free_protocol_splits_kl_at_the_flip(model):
    """Top-p at a high temperature with an FP16 path against a quantised-looking one: force flips by another dtype."""
    both = kv.compare(model, kv.load_prompts("arithmetic:3"), b="recompute@bfloat16", protocol="free",
                      strategy="top_p(0.99,3.0)", max_new_tokens=12, stop="length", record="", progress="none")  # fmt: skip
    flips = both.examples["flip_index"].dropna()
    assert len(flips), "the strategy was chosen so that bfloat16 flips a token"
    for example, row in both.examples.set_index("example").iterrows():
        steps = both.steps[both.steps["example"] == example]
        if not np.isnan(row["flip_index"]):
            assert steps["token_a"].iloc[int(row["flip_index"])] != steps["token_b"].iloc[int(row["flip_index"])]
            before = steps[steps["step"] <= row["flip_index"]]["kl"]
            assert row["mean_kl_before_flip"] == pytest.approx(before.mean())


def test_unlike_comparisons_are_not_joined(model):
    a = kv.compare(model, PROMPT, max_new_tokens=2, record="", progress="none")
    b = kv.compare(model, PROMPT, b="recompute@float32", max_new_tokens=2, record="", progress="none")
    with pytest.raises(kv.InputError, match="different paths"):
        kv.Comparison.joined([a, b])


def test_nan_is_named_by_layer_and_step_and_the_rest_goes_on(tmp_path):
    """Token 77's embedding overflows: only the prompt that holds it fails, in every verb."""
    adapter = kv.load_model("zoo:mistral-mini", kind="native", device="cpu")
    adapter.model.lm_head.weight = torch.nn.Parameter(adapter.model.lm_head.weight.detach().clone())
    with torch.no_grad():
        adapter.model.get_input_embeddings().weight[77] = torch.inf
    good, bad = [5, 6, 7, 8], [5, 77, 7, 8]
    with pytest.raises(kv.NonFiniteError, match=r"layer 0 at step 0 in float16"):
        kv.run(adapter, bad, max_new_tokens=2)
    traces = kv.run(adapter, [bad, good], max_new_tokens=2, stop="length")
    assert traces[0].failure
    assert not traces[1].failure
    both = kv.compare(adapter, [bad, good], max_new_tokens=2, stop="length", progress="none")
    assert both.failures["example"].tolist() == [0]
    assert set(both.steps["example"]) == {1}


def test_where_no_prompt_can_be_compared_it_is_an_error():
    """A stream that overflows float16, as Gemma 3's does, gave "0 steps of 0 prompts"; the reason stood in failures alone."""
    adapter = kv.load_model("zoo:mistral-mini", kind="native", device="cpu")
    prompts, how = [[5, 6, 7, 8], [9, 10, 11]], {"max_new_tokens": 2, "stop": "length", "progress": "none"}
    with torch.no_grad():
        adapter.model.model.layers[2].mlp.down_proj.weight.mul_(6e4)
    said = (
        r"Inf first appeared in mlp_out of layer 2 at step 0 in float16: use a dtype with a wider range, such as dtype='b"
    )
    with pytest.raises(
        kv.NonFiniteError, match=f"none of the 2 prompts can be compared; the first, '0': path cached: {said}"
    ):
        kv.compare(adapter, prompts, **how)
    with pytest.raises(kv.NonFiniteError, match=f"prompt '0': path cached: {said}"):
        kv.compare(adapter, prompts[0], **how)
    # Studies list them in their tables.
    found = compare_examples(adapter, prompts, **how)
    assert (len(found.steps), len(found.failures)) == (0, 2)
    both = kv.compare(adapter, prompts[0], "cached@float32", "recompute@float32", **how)
    assert len(both.steps) == 2


# Bad input -----------------------------------------------------------------------------------------------------------


def test_sites_layers_heads_and_prompts_that_do_not_exist(model):
    for options, said in (
        ({"record": "resid_pots"}, "resid_post"),
        ({"record": "v", "layers": [9]}, "layer 9"),
        ({"record": "v", "kv_heads": [9]}, "KV head 9"),
    ):
        with pytest.raises(kv.InputError, match=said):
            kv.run(model, PROMPT, max_new_tokens=1, **options)
    with pytest.raises(kv.InputError, match="context"):
        kv.run(model, [5] * 1020, max_new_tokens=10)
    with pytest.raises(kv.InputError, match="token id 9999"):
        kv.run(model, [9999], max_new_tokens=1)


# The package ---------------------------------------------------------------------------------------------------------


def test_every_name_of_the_package_is_there():
    """That importing it imports nothing heavy is tests/test_cli.py's."""
    for name in kv.__all__:
        assert getattr(kv, name) is not None
