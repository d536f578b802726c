"""Sweeps: the paper's protocol against a plain loop, recovery, the controls and their floor, and what is refused."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest
import torch

import kvinterp as kv
from kvinterp import metrics
from kvinterp.errors import InputError
from kvinterp.patching import PRESETS
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.planted import Planted
from kvinterp.paths import Runner
from support import PROMPT, Case, assert_bitwise, cases, hooks_of, plain_forward

pytestmark = pytest.mark.bits

STEPS = 5
OTHER = tuple((token * 7 + 5) % 97 for token in PROMPT)
HOOKED = Case("llama-mha", "hooked")
NATIVE = Case("llama-gqa", "native", "sdpa")
KINDS = [HOOKED, Case("gemma2", "hooked"), Case("llama-mha", "bridge"), NATIVE, Case("mistral-window", "native", "eager")]
SPLIT = {"cached": "cached[cache=bfloat16,kernels=split_k(2,float32)]"}
"""Makes the paths differ in every product and in K and V: on some processors both give the same bits by themselves."""
QUICK = {"max_new_tokens": STEPS, "controls": "none", "stop": "length", "progress": "none"}


def swept(model, prompts=PROMPT, site="resid_post", over="single", **more):
    return kv.sweep(model, prompts, site, over, **QUICK | more)


def recoveries(sweep, **where):
    table = sweep.recovery
    for column, value in where.items():
        table = table[table[column] == value]
    return table["recovery"].tolist()


# The paper's protocol --------------------------------------------------------------------------------------------------


def plain_free_run(model, prompt, steps, layers=(), donor_rows=None):
    """Every patched run decoded in full, as a user writes it with run_with_hooks: logits ``[step, vocab]``."""
    tokens, found = list(prompt), []
    for step in range(steps):
        hooks = []
        if step == 1:
            for layer in layers:

                def put(tensor, hook, layer=layer):
                    tensor[:, -1] = donor_rows[layer]
                    return tensor

                hooks.append((f"blocks.{layer}.hook_resid_post", put))
        with torch.no_grad():
            logits = model.run_with_hooks(torch.tensor([tokens]), fwd_hooks=hooks)[0, -1]
        found.append(logits)
        tokens.append(int(logits.argmax()))
    return torch.stack(found)


def plain_cached_run(model, prompt, steps):
    """The cached path's logits, and the newest row of every resid_post at its first one-token step."""
    from transformer_lens.cache.key_value_cache import TransformerLensKeyValueCache

    cache = TransformerLensKeyValueCache.init_cache(model.cfg, "cpu", 1)
    given, found, rows = torch.tensor([prompt]), [], {}
    for step in range(steps):

        def keep(tensor, hook):
            rows[hook.layer()] = tensor[0, -1].clone()

        hooks = [(f"blocks.{layer}.hook_resid_post", keep) for layer in range(model.cfg.n_layers)] if step == 1 else []
        with torch.no_grad():
            logits = model.run_with_hooks(
                given, fwd_hooks=hooks, past_kv_cache=cache, attention_mask=torch.ones_like(given)
            )[0, -1]
        found.append(logits)
        given = logits.argmax()[None, None]
    return torch.stack(found), rows


@pytest.mark.hooked
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("llama-mha", "float32"), ("gemma2", "float32"), ("zoo:mistral-mini", "float16"), ("rotary", "float32")],
)
def test_the_paper_preset_is_a_plain_loop_with_run_with_hooks(load, name, dtype):
    model = load(Case(name, "hooked"), dtype)
    layers = range(model.facts.layers)
    donor, rows = plain_cached_run(model.model, PROMPT, STEPS)
    base = plain_free_run(model.model, PROMPT, STEPS)
    single = [plain_free_run(model.model, PROMPT, STEPS, [layer], rows) for layer in layers]
    cumulative = [plain_free_run(model.model, PROMPT, STEPS, range(layer + 1), rows) for layer in layers]

    preset = {**PRESETS["paper"], "max_new_tokens": STEPS}
    sweep = kv.sweep(model, PROMPT, **preset, controls="none", logits="keep", stop="length", progress="none")
    expected = torch.stack([donor, base, *single, *cumulative], 1)
    assert_bitwise(sweep.logits[0], expected, "logits", ("step", "path", "vocab"))

    kl = metrics.kl_divergence(expected[:, :1].expand_as(expected), expected)[1:].mean(0)
    for found, wanted in zip(sweep.recovery.itertuples(), (1 - kl[2:] / kl[1]).tolist(), strict=True):
        assert found.recovery == pytest.approx(wanted, rel=1e-12, abs=1e-12) or (math.isnan(wanted) and not found.defined)
    assert sweep.recovery["sweep"].tolist() == ["single"] * len(layers) + ["cumulative"] * len(layers)
    assert sweep.recovery["layer"].tolist() == [*layers, *layers]
    assert set(sweep.recovery["step_set"]) == {"first"}
    assert set(sweep.recovery["steps"]) == {STEPS - 1}


# Recovery --------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
@cases([HOOKED, NATIVE])
def test_recovery_is_what_the_kept_logits_say(load, case, direction):
    model = load(case)
    for distance, measure in (
        ("kl", metrics.kl_divergence),
        ("l2", lambda a, b: (a.double() - b.double()).norm(dim=-1)),
        ("margin", lambda a, b: (metrics.logit_margin(a) - metrics.logit_margin(b)).abs()),
    ):
        sweep = swept(model, [PROMPT, OTHER], direction=direction, distance=distance, logits="keep", steps=(1, 3), **SPLIT)
        for example in (0, 1):
            logits = sweep.logits[example]
            assert logits.shape == (STEPS, 2 + model.facts.layers, model.facts.vocabulary)
            donor = logits[:, :1].expand(-1, logits.shape[1] - 1, -1)
            d = measure(donor, logits[:, 1:])[[1, 3]]
            rows = sweep.recovery[sweep.recovery["example"] == example]
            assert rows["d_before"].tolist() == pytest.approx([float(d[:, 0].mean())] * len(rows), rel=1e-12)
            assert rows["d_after"].tolist() == pytest.approx(d[:, 1:].mean(0).tolist(), rel=1e-12)
            assert rows["recovery"].tolist() == pytest.approx((1 - d[:, 1:].mean(0) / d[:, 0].mean()).tolist(), rel=1e-9)
            steps = sweep.steps[sweep.steps["example"] == example]
            assert steps["step"].tolist() == [1, 3] * len(rows)
            assert steps["d_after"].tolist() == pytest.approx(d[:, 1:].T.flatten().tolist(), rel=1e-12)
        assert (sweep.recovery["steps"] == 2).all()
        assert (sweep.recovery["first_step"] == 1).all()


@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
def test_recovery_is_undefined_where_the_unpatched_paths_are_bitwise_equal(load, direction):
    kernels = {path: f"{path}[kernels=batch_invariant]" for path in ("cached", "recompute")}
    model = load(Case("llama-gqa", "native", "eager"))
    sweep = swept(model, max_new_tokens=3, direction=direction, logits="keep", **kernels)
    assert_bitwise(sweep.logits[0][:, 0], sweep.logits[0][:, 1], "this test needs kernels under which the paths are equal")
    assert sweep.recovery["recovery"].isna().all()
    assert not sweep.recovery["defined"].any()
    assert (sweep.recovery["d_before"] == 0).all()
    assert sweep.steps["recovery"].isna().all()
    summary = sweep.summary()
    assert summary["examples_without_difference"] == 1
    assert summary["best"] is None
    assert summary["together"] == {}
    assert sweep.recovery["why"].str.startswith("the paths' logits are bitwise equal").all()
    assert sweep.aggregate()["defined"].tolist() == [0] * model.facts.layers


def test_the_best_place_is_not_decided_by_one_example():
    """An example whose paths hardly differ gave a recovery of -5700%, and by the mean the patch that changes nothing won."""
    from kvinterp.patching import Sweep

    rows = [
        {"sweep": "single", "site": "kv", "layer": layer, "head": -1, "positions": "all"}
        | {"example": example, "recovery": value, "defined": True, "d_before": 1.0, "equal": False, "why": ""}
        for layer, values in ((0, [0.0, 0.0, 0.0]), (1, [0.7, 0.8, -57.0]))
        for example, value in enumerate(values)
    ]
    summary = Sweep(pd.DataFrame(rows), pd.DataFrame(), pd.DataFrame(), {"provenance": {}}).summary()
    assert summary["best"]["layer"] == 1


# Controls --------------------------------------------------------------------------------------------------------------


def unembedding(model):
    """The last residual stream to logits, by the model's own modules, as the test's reader would call them."""
    if model.kind == "hooked":

        def head(resid):
            logits = model.model.unembed(model.model.ln_final(resid))
            cap = model.model.cfg.output_logits_soft_cap
            return cap * torch.tanh(logits / cap) if cap > 0 else logits

        return head
    source = model.source
    return lambda resid: source.lm_head(source.model.norm(resid))


@pytest.mark.each
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
@cases(KINDS)
def test_law_6_the_floor_is_exactly_the_unembeddings_own_difference(load, case, direction):
    """One row or many rows through the last norm and the unembedding, given the same residual stream."""
    model = load(case)
    giver, taker = ("cached", "recompute") if direction == "into-recompute" else ("recompute", "cached")
    # The same tokens in the sweep: it feeds the cached path's own choices, so the test's runs are fed those.
    sweep = swept(model, controls="quick", direction=direction, logits="keep", layers=[model.facts.layers - 1])
    fed = sweep.logits[0][:, 0 if giver == "cached" else 1].argmax(-1)[: STEPS - 1].tolist()
    traces = {
        path: kv.run(
            model, PROMPT, path, max_new_tokens=STEPS, continuation=fed, stop="length", record="resid_post",
            layers=[model.facts.layers - 1], positions="all", logits="keep",
        )
        for path in ("cached", "recompute")
    }  # fmt: skip
    head, after = unembedding(model), []
    last = ("resid_post", model.facts.layers - 1)
    with torch.no_grad():
        for step in range(1, STEPS):
            rows = traces[taker].records[last][step].clone()
            rows[-1] = traces[giver].records[last][step][-1]
            patched = head(rows[None])[0, -1]
            assert_bitwise(sweep.logits[0][step, 2], patched, f"patched logits at step {step}", ("vocab",))
            kl = float(metrics.kl_divergence(traces[giver].logits[step], patched))
            after.append((float((traces[giver].logits[step].double() - patched.double()).norm()), kl))
    floor = sweep.controls[sweep.controls["control"] == "floor"].iloc[0]
    assert (floor["d_after"], floor["d_after_kl"]) == pytest.approx(np.mean(after, 0), rel=1e-9, abs=1e-300)
    assert sweep.left("floor").get("l2", {"mean": floor["d_after"]})["mean"] == floor["d_after"]
    # resid_post is what is swept: its floor is what the control patches, to the bit.
    together = sweep.controls[sweep.controls["control"] == "together"].iloc[0]
    assert together["d_after"] == floor["d_after"]


@pytest.mark.slow
@pytest.mark.each
@pytest.mark.parametrize("protocol", ["matched", "free"])
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
@cases([HOOKED, NATIVE, Case("gemma2", "bridge")])
def test_controls_stand_beside_every_sweep(load, case, direction, protocol):
    model = load(case)
    plain_forward(model.model, torch.tensor([PROMPT]))  # A bridge hangs hooks of its own on its first forward.
    before = hooks_of(model.model)
    split = "cached[kernels=split_k(2,float32,linear,0)]"
    sweep = swept(model, layers=[0], controls="all", direction=direction, protocol=protocol, cached=split)
    controls = sweep.controls.set_index("control")
    assert list(controls.index) == [
        "self", "other-prompt", "floor", "all-positions", "together", "planted kv", "planted row", "planted unembedding",
    ]  # fmt: skip
    assert controls.loc["self", "d_after"] == controls.loc["self", "d_before"]
    assert controls.loc["self", "recovery"] == 0
    assert (controls.loc[["planted kv", "planted row", "planted unembedding"], "recovery"] > 0.99).all()
    if protocol == "matched":
        # Nothing is left but what later layers make anew of equal residual streams.
        assert controls.loc["all-positions", "recovery"] > 0.5
    assert hooks_of(model.model) == before


# Keys and values -------------------------------------------------------------------------------------------------------


@pytest.mark.each
@cases(KINDS)
def test_all_keys_and_values_put_back_recover_all_of_the_state(load, case):
    """A difference planted in the K and V that the cached path's prefill writes at layer 1, in float64.

    Into the cached path the patch of that layer alone undoes it at the first step. Into the recompute path the rows of
    earlier positions read the patched K and V too, as those of the prefill did not, so later layers' K and V of them
    have to be put back as well; at later steps so do the new tokens' own.
    """
    model = load(case)
    layers, planted = model.facts.layers, kv.Cached(Planted(1, until=len(PROMPT)), dtype="float64")
    settings = {"site": "kv", "cached": planted, "recompute": "recompute@float64", "positions": "earlier"}
    every = swept(model, over="cumulative", **settings)
    assert every.recovery["d_before"].min() > 0
    assert recoveries(every)[0] < 0.01
    assert recoveries(every)[-1] > 0.99
    assert layers == 2 or recoveries(every)[1] < 0.9
    onwards = recoveries(swept(model, over="cumulative-from", steps="first", **settings))
    assert min(onwards[:2]) > 0.99
    assert all(abs(value) < 0.01 for value in onwards[2:])
    single = recoveries(swept(model, steps="first", direction="into-cached", **settings))
    assert single[1] > 0.99
    assert all(abs(value) < 0.01 for layer, value in enumerate(single) if layer != 1)


@dataclasses.dataclass(frozen=True)
class InOnePlace(Planted):
    """A planted difference in positions 4 to 7 of KV head 1 only."""

    def write(self, keys, values, place):
        there = torch.zeros_like(keys, dtype=torch.bool)
        there[:, 1, 4:8] = True
        changed = super().write(keys, values, place)
        return torch.where(there, changed[0], keys), torch.where(there, changed[1], values)


@cases([HOOKED, NATIVE])
def test_sweeps_over_kv_heads_and_blocks_of_positions_name_the_place(load, case):
    """What is planted in one KV head, or one block of positions, only that head, or that block, recovers."""
    model = load(case)
    cached = kv.Cached(InOnePlace(1, until=len(PROMPT)), dtype="float64")
    settings = {"cached": cached, "recompute": "recompute@float64", "steps": "first", "direction": "into-cached"}
    heads = swept(model, site="kv", over="kv-heads", positions="earlier", **settings).recovery
    assert len(heads) == model.facts.layers * model.facts.kv_heads
    for row in heads.itertuples():
        assert (row.recovery > 0.99) if (row.layer, row.head) == (1, 1) else abs(row.recovery) < 0.01
    blocks = swept(model, site="kv", over="blocks", block=4, layers=[1], **settings).recovery
    assert blocks["positions"].tolist() == ["0:4", "4:8", "8:12", "12:16"]
    for row in blocks.itertuples():
        assert (row.recovery > 0.99) if row.positions == "4:8" else abs(row.recovery) < 0.01


@cases([HOOKED, NATIVE])
def test_a_cached_donor_gives_the_rows_of_every_step(load, case):
    """All positions of v, moved into the recompute path at a late step, are those the cached path wrote: cache_v itself."""
    model = load(case)
    # Not SPLIT: a bfloat16 cache keeps another V than the one that was computed.
    differs = {"cached": "cached[kernels=split_k(4,float16)]"}
    settings = {"layers": [1], "steps": (4,), "logits": "keep", "positions": "all", **differs}
    as_computed, as_stored = (swept(model, site=site, **settings).logits[0] for site in ("v", "cache_v"))
    assert_bitwise(as_computed, as_stored, "logits with v, or cached V, of all positions put in")
    newest = swept(model, site="v", **settings | {"positions": "newest"}).logits[0]
    assert not torch.equal(newest[4, 2], as_computed[4, 2])


@pytest.mark.each
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
@cases([HOOKED, Case("mistral-window", "native", "eager")])
def test_every_lane_is_the_patch_it_says(load, case, direction):
    """Each lane of each kind of sweep against its own patches, written out in full and run through the runner."""
    model = load(case)
    layers, giver, taker = range(model.facts.layers), *(("cached", "recompute")[:: 1 if "recompute" in direction else -1])
    for site, positions in (("resid_pre", "newest"), ("resid_post", "all"), ("attn_out", "newest"), ("kv", "earlier")):
        sweep = swept(model, PROMPT, site, "single,cumulative,cumulative-from", positions=positions, direction=direction,
                      logits="keep", max_new_tokens=3)  # fmt: skip
        fed = sweep.logits[0][:, 0 if giver == "cached" else 1].argmax(-1)[:-1].tolist()
        keys_site = "cache_k" if model.facts.cached_keys_rotated else "cache_k_pre"
        record = [keys_site, "cache_v"] if site == "kv" else site
        donor = kv.run(model, PROMPT, giver, max_new_tokens=3, continuation=fed, stop="length", record=record,
                       positions="all")  # fmt: skip
        wanted = [[x] for x in layers] + [range(x + 1) for x in layers] + [range(x, len(layers)) for x in layers]
        for lane, which in enumerate(wanted):
            patch = kv.Patch(site, tuple(which), positions=positions, donor=donor)
            found = []
            hook = PatchHook(model, [patch], prompt_length=len(PROMPT))
            with Runner(model, kv.path_named(taker), torch.tensor([PROMPT]), 3, [hook]) as runner:
                for step in range(3):
                    token = None if step == 0 else torch.tensor([fed[step - 1]])
                    found.append(runner.advance(token)[0].clone())
            assert_bitwise(sweep.logits[0][:, 2 + lane], torch.stack(found), f"{site} of layers {list(which)}")


# What is shared --------------------------------------------------------------------------------------------------------


@cases([HOOKED, Case("llama-mha", "bridge")])
def test_sweeps_together_are_the_sweeps_alone(load, case):
    model = load(case)
    together = swept(model, over="single,cumulative,cumulative-from", logits="keep")
    alone = [swept(model, over=name, logits="keep") for name in ("single", "cumulative", "cumulative-from")]
    assert together.recovery.equals(pd.concat([sweep.recovery for sweep in alone], ignore_index=True))
    logits = torch.cat([alone[0].logits[0][:, :2], *(sweep.logits[0][:, 2:] for sweep in alone)], 1)
    assert_bitwise(together.logits[0], logits, "logits", ("step", "path", "vocab"))
    assert together.provenance["work"]["forwards"] < sum(sweep.provenance["work"]["forwards"] for sweep in alone)


@cases([HOOKED])
def test_controls_change_nothing_beside_them(load, case):
    model = load(case)
    for direction in ("into-recompute", "into-cached"):
        bare, watched = (swept(model, direction=direction, controls=controls) for controls in ("none", "quick"))
        assert bare.recovery.equals(watched.recovery)
        assert bare.controls.empty


# What is refused -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"over": "layers"}, "unknown sweep 'layers'"),
        ({"over": "single,cumulativ"}, "did you mean 'cumulative'"),
        ({"over": "heads"}, "needs a site with heads, and 'resid_post' has none"),
        ({"direction": "both"}, "expected 'into-recompute' or 'into-cached'"),
        ({"distance": "js"}, "expected 'kl' or 'l2' or 'margin'"),
        ({"layers": [0, 3]}, "layer 3 does not exist"),
        ({"positions": (3, 9), "direction": "into-cached"}, "positions=(3, 9) of 'resid_post' patches nothing"),
        ({"positions": (40, 50)}, "position 40 does not exist: the shortest prompt has 12 tokens"),
        ({"steps": (9,)}, "patches nothing within max_new_tokens=5, where the last step is 4"),
        ({"steps": (0, 1), "cached": "cached[chunk=4]"}, "computes in pieces"),
        ({"recompute": "recompute[chunk=4]"}, "needs a cached and an unchunked recompute path"),
    ],
)
def test_a_sweep_that_cannot_be_is_refused_in_one_sentence(load, fields, said):
    with pytest.raises(kv.InputError) as error:
        swept(load(NATIVE if "cached" in fields or fields.get("layers") is None else HOOKED), **fields)
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@cases([NATIVE])
def test_the_logit_difference_of_two_answers_is_a_distance(load, case):
    """TransformerLens's logits_to_logit_diff of what the runs gave, worked out here from their logits."""
    model, answers = load(case), (7, 11)
    found = swept(model, distance="logit_difference", answers=answers, logits="keep", **SPLIT)
    logits = found.logits[0].double()
    apart = logits[..., answers[0]] - logits[..., answers[1]]
    assert (apart[1:, 0] != apart[1:, 1]).any(), "the split makes a difference by construction"
    for lane, row in enumerate(found.recovery.to_dict("records")):
        before, after = ((apart[1:, 0] - apart[1:, at]).abs().mean() for at in (1, 2 + lane))
        assert row["d_before"] == pytest.approx(float(before), rel=1e-12)
        assert row["d_after"] == pytest.approx(float(after), rel=1e-12, abs=1e-15)
    assert found.provenance["distances"] == ["logit_difference", "l2"]
    assert "logit difference" in " ".join(found.sentences())
    assert "logit difference" in found.figures()["recovery"].axes[0].get_ylabel()
    with pytest.raises(InputError, match="expected two answers of one token each"):
        swept(model, distance="logit_difference")


def test_what_a_patch_of_keys_alone_cannot_change_on_the_cached_path_is_said(load):
    """Defect: k recovered 0% and cache_k 84% of what a quantised cache changes, without a word why."""

    def said(site, direction="into-cached"):
        paths = {"cached": "cached+int4", "recompute": "recompute"}
        found = kv.sweep(
            load(NATIVE), PROMPT, site, "single", direction=direction, max_new_tokens=3, controls="none", **paths
        )
        return " ".join(found.sentences())

    assert "what it stored at earlier steps (the prompt's keys too) stays as it is" in said("k")
    assert "cache_k moves the keys that the cache holds and leaves its values as they are: kv moves both" in said("cache_k")
    assert "moves" not in said("kv")
    assert "moves" not in said("k", "into-recompute")
