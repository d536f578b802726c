"""Programs of paths: another way for the tokens to reach the model, and the same numbers where its code is right."""

from __future__ import annotations

import contextlib
import threading
from typing import ClassVar

import pytest
import torch
from bank.bugs_paths import generate_positions
from bank.calls import FAULTS, fed
from transformers import DynamicCache

import kvinterp as kv
from kvinterp.auditing.programs.names import NAMES, OPERATIONS
from kvinterp.paths import Runner
from kvinterp.recording import PathHook

PROMPT = "3+4=7\n5+2=7\n1+1="
PLANS = [
    "padded(left,5)",
    "padded(right,3)",
    "batched(4)",
    "forked(4)",
    "beams(3)",
    "verified(3)",
    "generate",
    "assisted(3)",
]
PROGRAMS = [
    "rows(3)+feed(9,4)+feed(4)+crop(2)+feed(1)",
    "rows(2+0+1,own=1)+feed(7)+select(1+2)+feed(1)+reorder(1+0)+feed(1)+repeat(2)+feed(1)+join+feed(1)",
    "rows(0)+feed(5)+fork(2)+request(4)+feed(3)+draft(2)+feed(1)",
    "rows(0)+feed(4)+generate(3,2,new)+feed(2)",
    "rows(0+2)+feed(9,behind=0+3)+feed(4,0,0+1)",
    "rows(0,told=all)+generate(8,12,lookup)",
]
"""Each operation, within the prompt of a path or behind it."""
TOGETHER = ["padded(left,5)+static", "verified(2)+chunked(5)", "beams(2)+chunked(3)"]
OPTIONS = {"chunked(4)": "chunk=4", "static": "cache=static", "static(64)+beams(2)": "call=beams(2),cache=static(64)"}
RUN = {"compiled"}
"""Plans that are a name for another option, and such as say how forwards are run: what they may not change is tried below."""
SHORT = {"max_new_tokens": 6, "stop": "length", "progress": "none"}
SITES = "resid_post,pattern,kv"
CACHES = ("forked", "beams", "verified", "batched")
KINDS = ["native", "bridge", "hooked"]


@pytest.fixture(scope="module")
def native():
    return kv.load_model("zoo:gqa2-mini", dtype="float64", kind="native")


def apart(found: kv.Comparison) -> float:
    """The largest difference of any logit and of any recorded site."""
    return max(
        found.steps["max_abs_logit"].max(), found.layers["relative_l2"].max(), found.kv_steps["relative_error"].max()
    )


AUDITS_ALONE = {"again", "pack", "spoil", "tree"}
"""Operations that a path refuses in a sentence."""


def test_every_plan_is_tried_here():
    assert {plan.split("(")[0] for plan in [*PLANS, *OPTIONS]} | RUN == set(NAMES)
    tried = {step.split("(")[0] for program in PROGRAMS for step in program.split("+") if step[0].isalpha()}
    assert set(OPERATIONS) - {"compile"} - AUDITS_ALONE <= tried


@pytest.mark.hooked
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_shows_what_the_prompt_alone_shows(plan, kind):
    model = kv.load_model("zoo:gqa2-mini", dtype="float64", kind=kind)
    if plan.startswith(("padded", "generate", "assisted")) and kind != "native":
        with pytest.raises(kv.UnsupportedError, match="load the model with kind='native'"):
            kv.run(model, PROMPT, f"cached[call={plan}]", max_new_tokens=2)
        return
    found = kv.compare(model, [PROMPT], a=f"cached[call={plan}]", b="cached", record=SITES, **SHORT)
    # A bridge's chunks are off by more than float64's rounding, plan or no plan.
    assert apart(found) < (1e-4 if kind == "bridge" and plan.startswith("forked") else 1e-9)
    assert found.provenance["witness"]["a"]
    assert "not exercised" not in found.provenance["witness"]["a"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_within_the_prompt_shows_what_the_prompt_alone_shows(native, program):
    found = kv.compare(native, [PROMPT], a=f"cached[call={program}]", b="cached", record=SITES, **SHORT)
    assert apart(found) < 1e-9
    assert "not exercised" not in found.provenance["witness"]["a"]


@pytest.mark.parametrize("rows", ["padded(left,5)", "padded(right,3)", "batched(4)", "rows(0+4)", "rows(3+0,own=1)"])
def test_two_full_forwards_in_different_batches_are_compared(native, rows):
    """The trainer's question: the same text among other rows, without any cache."""
    found = kv.compare(native, [PROMPT], a=f"recompute[call={rows}]", b="recompute", record="resid_post,pattern", **SHORT)
    assert max(found.steps["max_abs_logit"].max(), found.layers["relative_l2"].max()) < 1e-9
    assert found.provenance["witness"]["a"]


@pytest.mark.bits
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("plan", [*PLANS, *TOGETHER])
def test_with_one_order_of_additions_not_a_bit_differs(plan, dtype):
    model = kv.load_model("zoo:gqa2-mini", dtype=dtype, kind="native")
    fixed = "kernels=batch_invariant"
    found = kv.compare(model, [PROMPT], a=f"cached[call={plan},{fixed}]", b=f"cached[{fixed}]", record=SITES, **SHORT)
    assert apart(found) == 0


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_against_itself_is_bitwise_zero(native, plan):
    path = f"cached[call={plan}]"
    assert apart(kv.compare(native, [PROMPT], a=path, b=f"cached[call={plan},prefill=stored]", record=SITES, **SHORT)) == 0
    assert str(kv.path_named(path)) == path


@pytest.mark.bits
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_is_the_plain_loop_to_the_bit(side):
    model = kv.load_model("zoo:gqa2-mini", dtype="float32", kind="native")
    trace = kv.run(model, PROMPT, f"cached[call=padded({side},4)]", max_new_tokens=5, stop="length", logits="keep")
    ids, pads = torch.tensor([trace.prompt]), 4
    filler, ones = ((ids[:, :1] + 1) % model.facts.vocabulary).expand(1, pads), torch.ones_like(ids)
    parts = [(filler, torch.zeros_like(filler)), (ids, ones)][:: 1 if side == "left" else -1]
    tokens, mask = (torch.cat(part, 1) for part in zip(*parts, strict=True))
    cache, at, logits = DynamicCache(config=model.model.config), -1 if side == "left" else ids.shape[1] - 1, []
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        for token in (*trace.fed, None):
            made = model.model(
                input_ids=tokens, attention_mask=mask, position_ids=positions, past_key_values=cache, use_cache=True
            ).logits
            logits.append(made[0, at])
            if token is not None:
                tokens, at = torch.tensor([[token]]), -1
                mask = torch.cat([mask, torch.ones_like(tokens)], 1)
                positions = mask.sum(-1, keepdim=True) - 1
    assert torch.equal(torch.stack(logits), trace.logits)


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if "padded" in fault.plan])
def test_a_planted_fault_of_padding_is_seen_and_the_plain_path_is_clean(fault, monkeypatch):
    model = kv.load_model("zoo:gqa2-mini", dtype="float64", kind="native")
    model = kv.wrap(FAULTS[fault].plant(model.model, monkeypatch), tokenizer=model.tokenizer)
    found = kv.compare(model, [PROMPT], a="cached[call=padded(left,5)]", b="recompute", record=SITES, **SHORT)
    assert apart(found) > 1e-6
    assert apart(kv.compare(model, [PROMPT], a="cached", b="recompute", record=SITES, **SHORT)) < 1e-9


@pytest.mark.parametrize("fault", [name for name, fault in FAULTS.items() if fault.plan.partition("(")[0] in CACHES])
def test_a_planted_fault_of_a_cache_is_seen(fault, native, monkeypatch):
    plan = FAULTS[fault].plan
    FAULTS[fault].plant(native.model, monkeypatch)
    with contextlib.suppress(RuntimeError, IndexError):
        # Rows that do not fit fail in the model, which is seen too.
        found = kv.compare(native, [PROMPT], a=f"cached[call={plan}]", b="cached", record="", **SHORT)
        assert found.steps["max_abs_logit"].max() > 1e-6


def _later(given):
    return given["past_key_values"].get_seq_length() > 0


def _others(given, wrong):
    """Other tokens where something is wrong."""
    return {**given, "input_ids": (given["input_ids"] + 1) % 99} if wrong else given


def _restarted(given):
    ids = given["input_ids"]
    return {**given, "position_ids": torch.zeros_like(ids)} if ids.shape[1] > 1 and _later(given) else given


def _left_behind(grows):
    """What a batch that grew, or another request, leaves on a module."""
    seen = {"rows": 0, "prompts": 0, "grew": False}

    def change(given):
        rows = len(given["input_ids"])
        seen["prompts"] += not _later(given)
        seen["grew"] |= _later(given) and 0 < seen["rows"] < rows
        seen["rows"] = rows if _later(given) else seen["rows"]
        return _others(given, _later(given) and (seen["grew"] if grows else seen["prompts"] > 1))

    return fed(change)


def _stays(*_, **__):
    return None


OPERATION_FAULTS = {
    "feed(4)+feed(4)": lambda: fed(_restarted),
    "feed(4)+feed(6,behind=3)": lambda: fed(lambda given: {**given, "attention_mask": None}),
    "feed(4)+crop(2)": ("crop", _stays),
    "feed(4)+draft(2)": ("crop", _stays),
    "feed(4)+reorder(1+0)": ("reorder_cache", _stays),
    "feed(4)+select(1+0)": ("batch_select_indices", _stays),
    "feed(4)+repeat(2)": ("batch_repeat_interleave", _stays),
    "feed(4)+fork(2)": ("__deepcopy__", lambda cache, memo: cache),
    "feed(4)+feed(1)+join": lambda: _left_behind(grows=True),
    "feed(4)+request(5)": lambda: _left_behind(grows=False),
    "generate(9,2)": lambda: fed(lambda given: _others(given, given.get("position_ids") is not None)),
}
"""Each operation, and what goes wrong in it alone."""


@pytest.mark.parametrize("steps", OPERATION_FAULTS)
def test_a_fault_in_each_operation_is_seen_by_compare(steps, monkeypatch):
    model = kv.load_model("zoo:gqa2-mini", dtype="float64", kind="native")
    fault = OPERATION_FAULTS[steps]
    rows = "rows(0+0)" if any(name in steps for name in ("reorder", "select", "repeat", "join")) else "rows(0)"
    if isinstance(fault, tuple):
        monkeypatch.setattr(DynamicCache, *fault, raising=False)
    else:
        model = kv.wrap(fault()(model.model, monkeypatch), tokenizer=model.tokenizer)
    with contextlib.suppress(RuntimeError, IndexError, ValueError):
        # Rows that do not fit fail in the model, which is seen too.
        found = kv.compare(model, [PROMPT], a=f"cached[call={rows}+{steps}]", b="cached", record="", **SHORT)
        assert found.steps["max_abs_logit"].max() > 1e-6


def test_each_operation_has_a_fault_that_is_tried():
    """Checks of types under pytest break the graphs of a path: that of ``compile`` is in ``tests/auditing/programs``."""
    tried = {step.split("(")[0] for steps in OPERATION_FAULTS for step in steps.split("+") if step[0].isalpha()}
    assert tried == set(OPERATIONS) - {"compile"} - AUDITS_ALONE


def test_a_planted_fault_of_what_generate_prepares_is_seen(monkeypatch):
    """generate() gives its prompt a mask, which some processors' kernels add up otherwise: the sound model shows by how much."""
    model = kv.load_model("zoo:gqa2-mini", dtype="float64", kind="native")

    def off():
        paths = {"a": "cached[call=generate]", "b": "cached", "record": ""}
        found = kv.compare(kv.wrap(model.model, tokenizer=model.tokenizer), [PROMPT], **paths, **SHORT)
        return found.steps.set_index("step")["max_abs_logit"]

    sound = off()
    generate_positions(model.model, monkeypatch)
    planted = off()
    assert sound.max() < 1e-12
    assert planted[0] == sound[0], "the prompt's own forward is the same, to the bit"
    assert (planted[1:] > 1e-6).all()


def test_a_generate_that_is_cut_off_leaves_no_thread_and_no_forward(native):
    given, before = torch.tensor([[1, 2, 3]]), threading.active_count()
    for steps in (0, 1):
        with Runner(native, kv.path_named("cached[call=generate]"), given, 4) as runner:
            for token in [None, *[torch.tensor([5])] * steps]:
                runner.advance(token)
    assert threading.active_count() == before
    assert "forward" not in vars(native.model)


def test_what_a_hook_returns_is_put_into_the_rows_that_it_saw(native):
    given = kv.run(native, PROMPT, "cached", record="resid_post", positions="all", max_new_tokens=2, stop="length")

    class Doubled(PathHook):
        listeners: ClassVar = {("resid_post", 0): lambda tensor: 2 * tensor}

    def logits(path):
        tokens = torch.tensor([given.prompt])
        with Runner(native, kv.path_named(path), tokens, 2, [Doubled()]) as runner:
            return torch.cat([runner.advance(), runner.advance(tokens[:, 3])])

    plain = logits("cached")
    for plan in PLANS[:-1]:
        assert (logits(f"cached[call={plan}]") - plain).abs().max() < 1e-9, plan
    assert (plain[0] - kv.run(native, PROMPT, "cached", max_new_tokens=1, logits="keep").logits[0]).abs().max() > 1e-3


class Rolled(DynamicCache):
    """A cache that keeps the values of layer 1 a row too far where a prompt comes with pads."""

    def __init__(self, config):
        super().__init__(config=config)

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        given = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if layer_idx == 1 and key_states.shape[2] > 1 and torch.equal(key_states[:, :, 0], key_states[:, :, 1]):
            self.layers[1].values = value_states.roll(1, 2)
        return given


@pytest.mark.parametrize("direction", ["into-cached"])
def test_a_fault_behind_pads_is_located_by_moving_keys_and_then_values(native, direction):
    given = {"direction": direction, "max_new_tokens": 4, "stop": "length", "progress": "none", "controls": "none"}
    shares = {}
    for site in ("cache_k", "cache_v"):
        path = kv.Cached(cache=Rolled, call="padded(left,5)")
        table = kv.sweep(native, PROMPT, site, cached=path, steps="every", **given).aggregate()
        shares[site] = table[table["sweep"] == "single"].set_index("layer")["mean"]
    assert shares["cache_v"].idxmax() == 1
    assert shares["cache_v"][1] > 0.99
    assert shares["cache_v"].drop(1).abs().max() < 0.5
    assert shares["cache_k"].abs().max() < 0.5


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("recompute[call=beams(3)]", "which it cannot drive"),
        ("cached[call=forkd]", "did you mean 'forked'"),
        ("cached[call=feed(3)]", "unknown program"),
        ("cached[call=rows(0)+feed(3)+crop(4)]", "takes back 1 columns more"),
        ("cached[call=rows(0)+feed(-3)]", "width of feed"),
        ("cached[call=rows(0,own=1)]", "own"),
        ("cached[call=rows(0,cache=bare)+feed(3)]", "audits alone make"),
        ("recompute[call=rows(0)+feed(9)]", "give the rows alone"),
        ("cached[call=padded(left,0)]", "pads"),
        ("cached[call=beams(1)]", "from 2 to 1000"),
        ("cached[call=verified(3)]+q8_0", "moves rows under it"),
        ("cached[call=padded(left,3),refresh=2]", "leave one out"),
        ("recompute[call=static]", "keeps no cache"),
    ],
)
def test_what_does_not_go_together_is_one_sentence(path, said):
    with pytest.raises(kv.InputError, match=said):
        kv.path_named(path)


def test_a_prompt_shorter_than_a_prefix_is_refused_before_anything_runs(native):
    with pytest.raises(kv.InputError, match="give a longer prompt, or forked"):
        kv.run(native, PROMPT, "cached[call=forked(400)]")


def test_steps_of_accepted_drafts_are_shown_with_their_own_rows(native):
    """A right draft was fed anew, so that a step was never shown with rows of another."""
    tokens = [*range(30, 46)], [33, 34, 35, 7, 31, 32, 9, 8]
    given = {"continuation": tokens[1], "record": SITES, "logits": "keep"}
    one, other = (kv.run(native, tokens[0], path, **given) for path in ("cached[call=verified(3)]", "cached"))
    assert one.provenance["witness"]["drafts accepted"] >= 3
    assert (one.logits - other.logits).abs().max() < 1e-9
    assert one.steps == other.steps
    for place, kept in one.records.items():
        for mine, theirs in zip(kept, other.records[place], strict=True):
            assert mine.shape == theirs.shape
            assert (mine - theirs).abs().max() < 1e-9


def test_what_was_not_exercised_is_said(native, caplog):
    trace = kv.run(native, PROMPT, "cached[call=beams(2)]", max_new_tokens=1)
    assert trace.provenance["witness"]["not exercised"] == 1
    assert "no row was moved" in caplog.text
