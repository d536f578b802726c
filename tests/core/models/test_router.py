"""The router's logits: what a plain loop of transformers computes, in every architecture and kind."""

import pytest
import torch

import kvinterp as kv
from kvinterp.errors import UnsupportedError
from kvinterp.models.bridge import build_bridge
from routed import CONFIGS, EXPERTS, LAYERS, PROMPT, built, router
from support import assert_bitwise

STEPS = 4
HOW = {"max_new_tokens": STEPS, "stop": "length"}
WITHIN = {"rtol": 2.0**-17, "atol": 2.0**-17}
"""Of two kinds of model: routers and GPT-OSS's attention compute in float32 inside, whatever the model is in."""
architectures = pytest.mark.parametrize("name", CONFIGS)


def plain(model, path):
    """What every router returns for the newest token, step by step, in a loop as users write it."""
    seen = {}
    handles = [
        router(model, layer).register_forward_hook(lambda _, __, output, at=layer: seen.__setitem__(at, output))
        for layer in LAYERS[next(n for n in CONFIGS if type(model.config).__name__ == type(CONFIGS[n]()).__name__)]
    ]
    steps, tokens, cache = [], list(PROMPT), None
    try:
        for step in range(STEPS):
            fed = tokens if path == "recompute" or not step else tokens[-1:]
            with torch.no_grad():
                output = model(input_ids=torch.tensor([fed]), past_key_values=cache, use_cache=path == "cached")
            cache = output.past_key_values if path == "cached" else None
            tokens.append(int(output.logits[0, -1].argmax()))
            steps.append({layer: [part[-1] for part in found] for layer, found in seen.items()})
    finally:
        for handle in handles:
            handle.remove()
    return steps


@architectures
@pytest.mark.bits
@pytest.mark.parametrize("path", ["cached", "recompute"])
def test_the_logits_are_those_of_a_plain_loop_to_the_bit(name, path):
    model = built(name, torch.float32)
    steps = plain(model, path)
    trace = kv.run(kv.wrap(model), PROMPT, path, record="router", **HOW)
    assert sorted({layer for _, layer in trace.records}) == LAYERS[name]
    for step, found in enumerate(steps):
        for layer, (logits, *_) in found.items():
            assert_bitwise(trace["router", layer][step], logits, f"router logits of layer {layer} at step {step}")
            assert trace["router", layer].shape == (STEPS, EXPERTS[name])


@architectures
def test_a_bridge_shows_the_same_and_all_positions_are_there(name):
    model = built(name)
    native = kv.run(kv.wrap(model), PROMPT, "recompute", record="router", positions="all", **HOW)
    bridge = kv.wrap(build_bridge(built(name), name))
    trace = kv.run(bridge, PROMPT, "recompute", record="router", positions="all", **HOW)
    assert trace.records.keys() == native.records.keys()
    for layer in LAYERS[name]:
        for step in range(STEPS):
            ours, theirs = (each.records["router", layer][step] for each in (trace, native))
            assert ours.shape == (len(PROMPT) + step, EXPERTS[name])
            torch.testing.assert_close(ours, theirs, **WITHIN)


@architectures
@pytest.mark.bits
def test_recording_and_putting_back_ones_own_logits_change_no_bit(name):
    model = kv.wrap(built(name, torch.float32))
    bare = kv.run(model, PROMPT, "recompute", **HOW)
    donor = kv.run(model, PROMPT, "recompute", record="router", positions="all", max_new_tokens=1)
    tokens = torch.tensor([PROMPT])
    with torch.no_grad():
        own = model.model(input_ids=tokens).logits
        with kv.patched(model, kv.Patch("router", tuple(LAYERS[name]), positions="all", steps=(0,), donor=donor)):
            assert_bitwise(model.model(input_ids=tokens).logits, own, "router")
    assert bare.tokens[0] == donor.tokens[0]


def test_what_has_no_router_says_so():
    dense = kv.load_model("zoo:gqa2-mini", kind="native")
    with pytest.raises(UnsupportedError, match="layer 0 of LlamaForCausalLM has no router that chooses experts"):
        kv.run(dense, "1 + 1 =", record="router")
    model = built("deepseek-v3")
    with pytest.raises(UnsupportedError, match="layer 0 of DeepseekV3ForCausalLM has no router"):
        kv.run(kv.wrap(model), PROMPT, record="router", layers=[0])


@pytest.mark.parametrize("name", ["mixtral", "deepseek-v3"])
def test_routers_are_compared_as_any_vector(name):
    layers = kv.compare(kv.wrap(built(name)), [PROMPT], record="router,mlp_out", max_new_tokens=2, progress="none").layers
    assert set(layers.loc[layers["site"] == "router", "layer"]) == {*LAYERS[name]}
    assert layers["l2"].notna().all()
