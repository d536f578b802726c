"""The recompute path's two shortcuts, remembered prefixes and resumed runs, give the bits of the long way round."""

import pytest
import torch

import kvinterp as kv
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.recompute import PureRecompute
from support import PROMPT, Case, assert_bitwise, cases, plain_forward

pytestmark = pytest.mark.bits

OTHER = tuple((token * 7 + 5) % 97 for token in PROMPT)
"""As long as PROMPT, with other tokens: what is taken from it changes the logits."""

RESIDUAL = ("resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out")
HEADED = ("q", "k", "v", "z")
KINDS = [
    Case("llama-gqa", "hooked"),
    Case("gemma2", "hooked"),
    Case("rotary", "hooked"),
    Case("standard", "hooked"),
    Case("llama-mha", "bridge"),
    Case("mistral-window", "bridge"),
    Case("llama-gqa", "native", "sdpa"),
    Case("mistral-window", "native", "eager"),
]


def donor_of(model, record, path="recompute", **more):
    return kv.run(model, OTHER, path, max_new_tokens=1, stop="length", record=record, positions="all", **more)


def rows(positions):
    return slice(len(PROMPT) - 1, None) if positions == "newest" else slice(None)


def swapped(tensor, taken, span, head_dims=0):
    """What a user's hook does: the donor's rows in place of the forward's own, heads flattened if the model has them so."""
    new = tensor.clone()
    if head_dims and tensor.dim() == 3:
        taken = taken.flatten(-2)
    new[:, span] = taken[span]
    return new


def plain_hooked(model, tokens, site, layer, taken, span):
    """The forward a user would write with TransformerLens' own hooks, on a HookedTransformer or a bridge."""
    inside = site in ("q", "k", "v", "z", "pattern")
    name = f"blocks.{layer}.{'attn.' if inside else ''}hook_{site}"

    def hook(tensor, hook):
        if site == "pattern":
            new = tensor.clone()
            new[:, :, span] = taken[:, span]
            return new
        return swapped(tensor, taken, span, inside)

    with torch.no_grad():
        return model.run_with_hooks(tokens, fwd_hooks=[(name, hook)])[0, -1]


def plain_native(model, tokens, site, layer, taken, span):
    """The forward a user would write with torch's module hooks, on a Llama or Mistral."""
    block = model.model.layers[layer]
    module, side = {
        "resid_pre": (block, "input"),
        "resid_post": (block, "output"),
        "attn_out": (block.self_attn, "output"),
        "mlp_out": (block.mlp, "output"),
        "q": (block.self_attn.q_proj, "output"),
        "k": (block.self_attn.k_proj, "output"),
        "v": (block.self_attn.v_proj, "output"),
        "z": (block.self_attn.o_proj, "input"),
    }[site]

    def before(_, args, kwargs):
        if args:
            return (swapped(args[0], taken, span, site == "z"), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": swapped(kwargs["hidden_states"], taken, span, site == "z")}

    def after(_, __, output):
        if isinstance(output, tuple):
            return (swapped(output[0], taken, span), *output[1:])
        return swapped(output, taken, span, site in HEADED)

    handle = (
        module.register_forward_pre_hook(before, with_kwargs=True)
        if side == "input"
        else module.register_forward_hook(after)
    )
    try:
        with torch.no_grad():
            return model(tokens).logits[0, -1]
    finally:
        handle.remove()


def plain_mid(adapter, tokens, layer, taken, span):
    """The second half of a transformers block made by hand from the patched stream between attention and MLP.

    No hook can do this, TransformerLens' own on a bridge either: the stream goes around the norm that shows it.
    """
    block, seen = adapter.blocks[layer], []
    norm = getattr(block, "pre_feedforward_layernorm", block.post_attention_layernorm)

    def after(_, __, output):
        mid = swapped(seen[0], taken, span)
        added = block.mlp(norm(mid))
        if hasattr(block, "post_feedforward_layernorm"):
            added = block.post_feedforward_layernorm(added)
        return (mid + added, *output[1:]) if isinstance(output, tuple) else mid + added

    handles = [norm.register_forward_pre_hook(lambda _, args: seen.append(args[0])), block.register_forward_hook(after)]
    try:
        return plain_forward(adapter.model, tokens)[0, -1]
    finally:
        for handle in handles:
            handle.remove()


@cases([*KINDS, Case("gemma2", "bridge"), Case("gemma2", "native", "eager")])
@pytest.mark.parametrize("positions", ["newest", "all"])
def test_resumed_runs_give_the_bits_of_a_full_run_with_hooks(load, case, positions):
    model = load(case)
    sites = [*RESIDUAL, *HEADED, *(["pattern"] if case.kind == "hooked" else [])]
    donor = donor_of(model, sites)
    pure = PureRecompute(model, kv.Recompute())
    unpatched = pure.capture(PROMPT)
    plain = plain_native if case.kind == "native" else plain_hooked
    if case == Case("gemma2", "native", "eager"):
        sites = ["resid_mid"]  # plain_native knows the Llama family's blocks only.
    for site in sites:
        for layer in range(model.facts.layers):
            patch = kv.Patch(site, (layer,), positions=positions, steps=(0,), donor=donor)
            hook = PatchHook(model, [patch])
            resumed = pure.patched(PROMPT, 0, hook)
            taken = donor.records[site, layer][0]
            if site == "resid_mid" and case.kind != "hooked":
                expected = plain_mid(model, torch.tensor([PROMPT]), layer, taken, rows(positions))
            else:
                expected = plain(model.model, torch.tensor([PROMPT]), site, layer, taken, rows(positions))
            assert_bitwise(resumed, expected, f"logits with {site} of layer {layer} patched", ("vocab",))
            assert not torch.equal(resumed, unpatched), f"the patch of {site} at layer {layer} changed nothing"


@cases(KINDS)
def test_resumed_runs_with_patched_keys_and_values_give_the_bits_of_the_long_way_round(load, case):
    """For HookedTransformer K and V are hooks of its own; for transformers, what a user's cache hands to attention."""
    model = load(case)
    keys_site = "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"
    donor = donor_of(model, [keys_site, "cache_v"])
    pure = PureRecompute(model, kv.Recompute())
    unpatched = pure.capture(PROMPT)
    for layer in range(model.facts.layers):
        hook = PatchHook(model, [kv.Patch("kv", (layer,), positions="all", steps=(0,), donor=donor)])
        resumed = pure.patched(PROMPT, 0, hook)
        taken = [donor.records[site, layer][0] for site in (keys_site, "cache_v")]
        expected = with_keys_and_values(model, layer, *taken)
        assert_bitwise(resumed, expected, f"logits with K and V of layer {layer} patched", ("vocab",))
        assert not torch.equal(resumed, unpatched)


def with_keys_and_values(model, layer, keys, values):
    tokens = torch.tensor([PROMPT])
    if model.kind == "hooked":
        hooks = [
            (f"blocks.{layer}.attn.hook_{name}", lambda tensor, hook, new=new: new.transpose(0, 1)[None].clone())
            for name, new in (("k", keys), ("v", values))
        ]
        with torch.no_grad():
            return model.model.run_with_hooks(tokens, fwd_hooks=hooks)[0, -1]
    from transformers import DynamicCache

    class Swapping(DynamicCache):
        def update(self, key_states, value_states, layer_idx, *args, **kwargs):
            own = super().update(key_states, value_states, layer_idx, *args, **kwargs)
            return (keys[None].clone(), values[None].clone()) if layer_idx == layer else own

    with torch.no_grad():
        out = model.model(tokens, past_key_values=Swapping(config=model.source.config), use_cache=True)
    return getattr(out, "logits", out)[0, -1]


@cases(KINDS)
def test_remembered_prefixes_give_the_bits_of_a_run(load, case):
    model = load(case, "float16")
    trace = kv.run(model, PROMPT, "recompute", max_new_tokens=4, stop="length", logits="keep")
    pure = PureRecompute(model, kv.Recompute())
    prefixes = [(*PROMPT, *trace.fed[:step]) for step in range(4)]
    for step, prefix in enumerate(prefixes):
        assert_bitwise(pure.logits(prefix), trace.logits[step], f"logits of step {step}", ("vocab",))
        assert_bitwise(pure.capture(prefix), trace.logits[step], f"captured logits of step {step}", ("vocab",))
    done = pure.forwards
    assert_bitwise(pure.logits(prefixes[1]), trace.logits[1], "logits asked for again", ("vocab",))
    assert pure.forwards == done, "a remembered prefix was computed again"


@cases(KINDS)
@pytest.mark.parametrize("positions", ["newest", "all"])
def test_a_cumulative_patch_of_the_stream_is_the_patch_of_its_last_layer(load, case, positions):
    """Why a cumulative sweep into the recompute path cannot say more than its last layer, which is all sweep() runs."""
    model = load(case)
    layers = model.facts.layers
    donor = donor_of(model, [*RESIDUAL])
    pure = PureRecompute(model, kv.Recompute())
    pure.capture(PROMPT)

    def patched(site, which):
        patch = kv.Patch(site, tuple(which), positions=positions, steps=(0,), donor=donor)
        return pure.patched(PROMPT, 0, PatchHook(model, [patch]))

    for site in ("resid_pre", "resid_mid", "resid_post"):
        for layer in range(layers):
            assert_bitwise(patched(site, range(layer + 1)), patched(site, [layer]), f"{site} from 0 to {layer}", ("vocab",))
            assert_bitwise(
                patched(site, range(layer, layers)), patched(site, [layers - 1]), f"{site} from {layer} on", ("vocab",)
            )
    # Not so for what is only added to the stream.
    assert not torch.equal(patched("attn_out", range(layers)), patched("attn_out", [layers - 1]))
