"""What kvinterp's two loops compute is, to the bit, what a plain loop over the bare model computes for the same tokens.

The plain loops are written here from each library's own documentation and share nothing with kvinterp. All of them go
past the sliding windows: the tiny models' is 8 and the prompt 12, gemma2-mini's is 32 and its prompt 30.
"""

import pytest
import torch

import kvinterp as kv
from plain import FED, plain_steps, prefixes
from support import CASES, PROMPT, Case, assert_bitwise, cases

pytestmark = pytest.mark.bits

STEPS = len(FED) + 1


def prompt_of(case):
    return list(PROMPT) + [(11 * i) % 90 + 4 for i in range(18)] if "gemma2-mini" in case.model else list(PROMPT)


def plain_bridge(model, prompt):
    """A bridge's loop: its output holds no cache, so it is given transformers' own."""
    from transformers import DynamicCache

    cache = DynamicCache(config=model.original_model.config)
    yield model(prompt, past_key_values=cache, use_cache=True)[:, -1]
    for token in FED:
        yield model(torch.full((len(prompt), 1), token), past_key_values=cache, use_cache=True)[:, -1]


def plain_hooked(model, prompt):
    """TransformerLens' loop with its own cache; without a tokenizer it must be given a mask."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    cache = TransformerLensKeyValueCache.init_cache(model.cfg, model.cfg.device, len(prompt))
    for tokens in (prompt, *(torch.full((len(prompt), 1), token) for token in FED)):
        yield model(tokens, past_kv_cache=cache, attention_mask=torch.ones_like(tokens))[:, -1]


def plain_recompute(case, model, prompt):
    """The whole prefix at every step, without a cache."""
    for tokens in prefixes(prompt):
        if case.kind == "native":
            yield model(tokens, use_cache=False).logits[:, -1]
        elif case.kind == "bridge":
            yield model(tokens, use_cache=False)[:, -1]
        else:
            yield model(tokens, attention_mask=torch.ones_like(tokens))[:, -1]


def plain_loops(case, model, prompt):
    cached = {"native": plain_steps, "bridge": plain_bridge, "hooked": plain_hooked}[case.kind]
    with torch.no_grad():
        return (
            torch.cat([row.clone() for row in cached(model, prompt)]),
            torch.cat([row.clone() for row in plain_recompute(case, model, prompt)]),
        )


def textbook_kl(a, b):
    """KL(softmax a || softmax b) in nats, written as in a textbook, in float64."""
    log_p, log_q = a.double().log_softmax(-1), b.double().log_softmax(-1)
    return (log_p.exp() * (log_p - log_q)).sum(-1)


@cases()
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_logits_are_those_of_a_plain_loop_to_the_bit(load, case, dtype):
    adapter, prompt = load(case, dtype), prompt_of(case)
    cached, recomputed = plain_loops(case, adapter.model, torch.tensor([prompt]))
    settings = {"max_new_tokens": STEPS, "continuation": FED, "stop": "length", "logits": "keep"}
    for path, plain in (("cached", cached), ("recompute", recomputed)):
        assert_bitwise(kv.run(adapter, prompt, path, **settings).logits, plain, f"logits, {path}", ("step", "vocab"))
    steps = kv.compare(
        adapter, prompt, max_new_tokens=STEPS, continuation=FED, stop="length", record="", progress="none"
    ).steps
    kl = torch.tensor(steps["kl"].to_numpy())
    wanted = textbook_kl(cached, recomputed)
    assert bool(((kl - wanted).abs() <= torch.maximum(torch.tensor(1e-12), 1e-6 * wanted.abs())).all()), (kl, wanted)
    largest = (cached.double() - recomputed.double()).abs().amax(-1)
    assert steps["max_abs_logit"].tolist() == largest.tolist()


@cases()
def test_a_batch_has_the_bits_of_a_plain_loop_over_the_batch(load, case):
    """Straight through the runner, which no check of the batch's bits can send back to one prompt at a time.

    The two loops need not agree at step 0 here: transformers' eager attention reads contiguous keys in a prefill that fills
    a cache and strided ones in one without, and for a batch some processors' products add up the two differently.
    """
    adapter = load(case)
    batch = torch.tensor([prompt_of(case), prompt_of(case)[::-1], [token + 1 for token in prompt_of(case)]])
    with torch.no_grad():
        cached = {"native": plain_steps, "bridge": plain_bridge, "hooked": plain_hooked}[case.kind]
        loops = {"cached": cached(adapter.model, batch), "recompute": plain_recompute(case, adapter.model, batch)}
        for path, loop in loops.items():
            with kv.paths.Runner(adapter, kv.path_named(path), batch, STEPS) as runner:
                for step, plain in enumerate(loop):
                    feed = None if step == 0 else torch.full((len(batch),), FED[step - 1])
                    assert_bitwise(runner.advance(feed), plain, f"logits of {path} at step {step}", ("batch", "vocab"))


def test_a_plain_loop_under_split_k_differs_and_is_still_what_kvinterp_computes(load):
    """So that the equalities above are not those of a model whose two paths are the same anyway."""
    case = Case("zoo:mistral-mini", "native", "sdpa")
    adapter, prompt = load(case), prompt_of(case)
    mode = kv.paths.SplitK(2, "float32").mode(adapter)
    rows = []
    # Without layers the mode need not know which one runs, and is entered as the runner enters it, once a forward.
    loop = plain_steps(adapter.model, torch.tensor([prompt]))
    for _ in range(STEPS):
        with torch.no_grad(), mode:
            rows.append(next(loop).clone())
    _, recomputed = plain_loops(case, adapter.model, torch.tensor([prompt]))
    split, settings = torch.cat(rows), {"max_new_tokens": STEPS, "continuation": FED, "stop": "length", "logits": "keep"}
    assert_bitwise(kv.run(adapter, prompt, "cached[kernels=split_k(2,float32)]", **settings).logits, split, "logits")
    assert bool((split != recomputed).any(-1)[1:].all()), "step 0 has many rows on both paths, the others one"


@pytest.mark.hooked
@pytest.mark.parametrize("case", [c for c in CASES if c.kind == "hooked"], ids=str)
def test_the_explicit_mask_changes_no_bits_of_a_hooked_transformer(load, case):
    """kvinterp gives both paths an all-ones mask, which takes another code path than none: here the bits are the same."""
    model = load(case).model
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        assert_bitwise(model(tokens, attention_mask=torch.ones_like(tokens)), model(tokens), "logits")
