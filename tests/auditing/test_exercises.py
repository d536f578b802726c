"""What an audit exercises: every clean architecture passes or says why not, every planted bug fails the check it is meant for."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from architectures import NAMES, build, some
from test_blind_spots import in_attention, small

from kvinterp.auditing import exercises
from kvinterp.auditing.blocks import prompts_for
from kvinterp.auditing.exercises import CHECKS, Check, exercise
from kvinterp.auditing.lengths import LAST
from kvinterp.models import load_model, wrap

pytestmark = pytest.mark.slow

STEPS = 3


def run(
    model: Any, dtype: torch.dtype = torch.float64, only: Sequence[str] = tuple(CHECKS), **more: Any
) -> dict[str, Check]:
    """Runs the checks, or some of them: each begins anew, whatever ran before it."""
    adapter = wrap(model)
    if adapter.dtype != dtype:
        adapter = adapter.cast(dtype)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exercises, "CHECKS", {name: CHECKS[name] for name in only})
        found = exercise(adapter, prompts_for(adapter, 2, 80), **{"steps": STEPS, **more})
    assert all(one.detail.endswith(".") for one in found)
    return {one.name: one for one in found}


SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.12,
}


def mistral(window: int) -> Any:
    return small("Mistral", **SIZES, max_position_embeddings=2048, sliding_window=window)


# Clean models ----------------------------------------------------------------------------------------------------------

RECURRENT = ("mamba", "mamba2", "bamba", "falcon_h1", "jamba", "qwen3_5")
WINDOWED = ("mistral", "gemma2", "gemma3", "gpt_oss")
CHUNKED = ("mamba2", "bamba", "falcon_h1")
BEGINS_ANEW = ("mamba", "jamba")
NO_REPEAT = (*RECURRENT, "lfm2")
NO_STATIC = ("mamba", "falcon_h1")
OFF = {
    # It counts columns where it is given no positions, with a cache and without one.
    "gpt2": {"left padding, mask alone": "off without a cache too"},
    # Without a cache its positions do not matter; with one a decode step numbers its token otherwise than the prompt was.
    "bamba": {"left padding, mask alone": "failed"},
    # In float64 a mask changes its decode steps, and no other forward.
    "mamba": {"mask and positions given": "failed"},
}
"""What is wrong in transformers itself, each seen in a plain loop too."""


def not_to_be_run(name: str) -> set[str]:
    """The checks that cannot be run on an architecture, each for a reason that the test knows."""
    missing = {"quantised cache", "RoPE switch"}
    missing |= {"context end"} if wrap(build(name)).facts.context > LAST else set()
    missing |= set() if name in WINDOWED else {"window"}
    missing |= set() if name in CHUNKED else {"long prompt"}
    missing |= {"crop and go on"} if name in RECURRENT else set()
    missing |= {"rows repeated and selected"} if name in NO_REPEAT else set()
    missing |= {"several chunks"} if name in BEGINS_ANEW else set()
    missing |= set() if "position_ids" in wrap(build(name)).takes else {"left padding, mask alone"}
    return missing | ({"StaticCache"} if name in NO_STATIC else set())


@pytest.mark.parametrize(
    "dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.long)], ids=["float64", "float32"]
)
@pytest.mark.parametrize("name", some(NAMES, ("gemma2", "gpt2", "mixtral", "mamba2", "falcon_h1")))
def test_a_clean_model_passes_every_check_it_can_run(name: str, dtype: torch.dtype) -> None:
    found = run(build(name), dtype)
    assert set(found) == set(CHECKS)
    wrong = {one.name: one.status for one in found.values() if one.status not in ("passed", "not run")}
    assert wrong == OFF.get(name, {})
    assert {one.name for one in found.values() if one.status == "not run"} == not_to_be_run(name)
    for one in found.values():
        assert (one.error is None) == (one.status == "not run")


@functools.cache
def clean(make: Callable[[], Any], only: tuple[str, ...]) -> dict[str, Check]:
    return run(make(), only=only)


# Planted bugs ----------------------------------------------------------------------------------------------------------


def in_model(change: Callable[[int, int, dict[str, Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes what Llama's decoder is called with; ``change`` gets the new tokens, those cached, the arguments."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from transformers.models.llama.modeling_llama import LlamaModel

        original = LlamaModel.forward

        def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
            cache = kwargs.get("past_key_values")
            if cache is not None:
                change(input_ids.shape[1], int(cache.get_seq_length()), kwargs)
            return original(self, input_ids, **kwargs)

        patch.setattr(LlamaModel, "forward", forward)

    return plant


def mask_ignored(new: int, past: int, kwargs: dict[str, Any]) -> None:
    if new == 1 and kwargs.get("attention_mask") is not None and kwargs["attention_mask"].dim() == 2:
        kwargs["attention_mask"] = torch.ones_like(kwargs["attention_mask"])


def positions_with_pads(new: int, past: int, kwargs: dict[str, Any]) -> None:
    if new == 1 and past:
        kwargs["position_ids"] = (
            torch.full_like(kwargs["position_ids"], past) if kwargs.get("position_ids") is not None else None
        )


def in_prepare(change: Callable[[dict[str, Any]], None]) -> Callable[[pytest.MonkeyPatch], None]:
    """Changes what ``prepare_inputs_for_generation`` of a Llama returns for a decode step."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        from transformers import LlamaForCausalLM

        original = LlamaForCausalLM.prepare_inputs_for_generation

        def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
            made = original(self, *args, **kwargs)
            if made["input_ids"].shape[1] == 1 and made.get("past_key_values") is not None:
                change(made)
            return made

        patch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", prepare)

    return plant


def position_off_by_one(made: dict[str, Any]) -> None:
    if made.get("position_ids") is not None:
        made["position_ids"] = made["position_ids"] + 1


def mask_dropped(made: dict[str, Any]) -> None:
    made["attention_mask"] = None


def rows_mixed(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer

    original = DynamicLayer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        k, v = original(self, keys, values, *args, **kwargs)
        return (k[[0] * len(k)], v) if keys.shape[2] == 1 else (k, v)

    patch.setattr(DynamicLayer, "update", update)


def zeroed_when_full(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    original = Layer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        k, v = original(self, keys, values, *args, **kwargs)
        return (torch.zeros_like(k), v) if keys.shape[2] == 1 and self.cumulative_length > self.sliding_window else (k, v)

    patch.setattr(Layer, "update", update)


def ring_of_one_too_few(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    original = Layer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, keys, values, *args, **kwargs)
        if keys.shape[2] == 1 and self.cumulative_length > self.sliding_window:
            # The newest key lands where the one before it stood, in what attention reads too, which is the same memory.
            self.keys[:, :, -2] = self.keys[:, :, -1]
        return made

    patch.setattr(Layer, "update", update)


def stale_key(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer

    original = DynamicLayer.crop

    def crop(self: Any, count: int) -> None:
        stale = self.keys[..., count : count + 1 or None, :].clone() if count else None
        original(self, count)
        if stale is not None:
            self.keys = torch.cat([self.keys[..., :-1, :], stale], -2)

    patch.setattr(DynamicLayer, "crop", crop)


def forgets_a_layer(method: str) -> Callable[[pytest.MonkeyPatch], None]:
    def plant(patch: pytest.MonkeyPatch) -> None:
        from transformers.cache_utils import Cache

        def reorder(self: Any, rows: Any) -> None:
            for n, layer in enumerate(self.layers):
                if n != 1:
                    getattr(layer, method)(rows)

        patch.setattr(Cache, method, reorder)

    return plant


def reorders_nothing(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import Cache

    patch.setattr(Cache, "reorder_cache", lambda self, rows: None)


def tiled(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer

    def repeat(self: Any, repeats: int) -> None:
        self.keys = self.keys.repeat(repeats, 1, 1, 1)
        self.values = self.values.repeat(repeats, 1, 1, 1)

    patch.setattr(DynamicLayer, "batch_repeat_interleave", repeat)


def one_slot_off(patch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import StaticLayer

    original = StaticLayer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        if keys.shape[2] > 1:
            return original(self, keys, values, *args, **kwargs)
        self.cumulative_length.add_(1)
        made = original(self, keys, values, *args, **kwargs)
        self.cumulative_length.sub_(1)
        return made

    patch.setattr(StaticLayer, "update", update)


def empty_slots_read(patch: pytest.MonkeyPatch) -> None:
    """The mask of a decode step lets every slot of a static cache be read, filled or not."""
    from transformers.cache_utils import StaticCache
    from transformers.models.llama.modeling_llama import LlamaAttention

    original = LlamaAttention.forward

    def forward(self: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        if isinstance(kwargs.get("past_key_values"), StaticCache) and hidden_states.shape[1] == 1:
            kwargs["attention_mask"] = None
        return original(self, hidden_states, *args, **kwargs)

    patch.setattr(LlamaAttention, "forward", forward)


def third_chunk(patch: pytest.MonkeyPatch) -> None:
    def change(new: int, past: int, kwargs: dict[str, Any]) -> None:
        if new > 1 and past >= 14:
            kwargs["attention_mask"] = torch.ones(1, 1, new, past + new, dtype=torch.bool)

    in_attention(patch, change, 1)


def state_after_a_chunk(patch: pytest.MonkeyPatch) -> None:
    from transformers import Mamba2ForCausalLM

    original = Mamba2ForCausalLM.forward

    def forward(self: Any, input_ids: Any = None, **kwargs: Any) -> Any:
        out = original(self, input_ids, **kwargs)
        if out.cache_params is not None and input_ids.shape[1] > self.config.chunk_size:
            for state in out.cache_params.layers[1].recurrent_states.values():
                state.mul_(1.01)
        return out

    patch.setattr(Mamba2ForCausalLM, "forward", forward)


@dataclasses.dataclass(frozen=True)
class Plant:
    """A bug, the model it is planted in, the check that must find it, what it must say, and the first wrong position."""

    name: str
    make: Callable[[], Any]
    plant: Callable[[pytest.MonkeyPatch], None]
    check: str
    hint: str
    step: int | None = None
    also: tuple[str, ...] = ()


llama, mamba2 = functools.partial(build, "llama"), functools.partial(build, "mamba2")
short, long = functools.partial(mistral, 24), functools.partial(mistral, 600)
PADDED = ("generate(), left padding",)

PLANTS = [
    Plant("mask ignored", llama, in_model(mask_ignored), "left padding", "the attention mask is ignored in decode", 9, PADDED),
    Plant("pads counted", llama, in_model(positions_with_pads), "left padding", "positions ignore the padding", 9, PADDED),
    Plant(
        "mask dropped", llama, in_prepare(mask_dropped), "left padding",
        "prepare_inputs_for_generation drops the attention mask in decode", 9, PADDED,
    ),
    Plant(
        "generate's positions", llama, in_prepare(position_off_by_one), "generate()",
        "prepare_inputs_for_generation gives position 10 to the token at position 9, and the forward is right when it is told "
        "so", 9, PADDED,
    ),
    Plant("rows mixed", llama, rows_mixed, "batch", "a row reads another row's cache", 9),
    Plant("rows mixed, padded", llama, rows_mixed, "left padding", "a row reads another row's cache", 9),
    Plant("long window zeroed", long, zeroed_when_full, "window", "the cache of a window is wrong once it is full", 600),
    Plant("short window zeroed", short, zeroed_when_full, "window", "the cache of a window is wrong once it is full", 24),
    Plant("ring", short, ring_of_one_too_few, "window", "the cache of a window is wrong once it is full", 24),
    Plant("crop", llama, stale_key, "crop and go on", "crop() leaves keys, values or a length behind", 10),
    Plant(
        "reorder", llama, forgets_a_layer("reorder_cache"), "beams reordered",
        "reorder_cache moves some of the cache's tensors only", 10,
    ),
    Plant("no reorder", llama, reorders_nothing, "beams reordered", "reorder_cache leaves the rows where they were", 10),
    Plant(
        "tiled", llama, tiled, "rows repeated and selected",
        "batch_repeat_interleave or batch_select_indices gives other rows than those asked for", 10,
    ),
    Plant("static slot", llama, one_slot_off, "StaticCache", "slots are written or read at the wrong place", 9),
    Plant("static room", llama, empty_slots_read, "StaticCache", "empty slots are read", 9),
    Plant("third chunk", llama, third_chunk, "several chunks", "the mask or the positions of chunk 3 of 5 are wrong", 14),
    Plant("long prompt", mamba2, state_after_a_chunk, "long prompt", "a prompt's last chunk leaves a wrong state", 33),
]  # fmt: skip


@pytest.mark.parametrize("case", PLANTS, ids=lambda case: case.name)
def test_a_planted_bug_fails_the_check_it_is_meant_for(case: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = (case.check, *case.also)
    before = clean(case.make, asked)
    assert before[case.check].status == "passed", before[case.check]
    with monkeypatch.context() as patch:
        case.plant(patch)
        found = run(case.make(), only=asked)
    one = found[case.check]
    assert (one.status, one.hint) == ("failed", case.hint), one
    assert one.step == case.step, one
    for other in case.also:
        assert found[other].status == "failed", found[other]


# Edges -----------------------------------------------------------------------------------------------------------------


def test_the_model_is_left_as_it_was() -> None:
    model = build("llama")
    adapter = wrap(model)
    model.train()
    hooks = [(m, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()]
    config, generation = model.config.to_dict(), model.generation_config.to_dict()
    names, state = set(vars(model)), torch.get_rng_state()
    exercise(adapter, prompts_for(adapter, 2, 80))
    assert all(m.training for m in model.modules())
    assert [(m, len(m._forward_hooks), len(m._forward_pre_hooks)) for m in model.modules()] == hooks
    assert (model.config.to_dict(), model.generation_config.to_dict()) == (config, generation)
    assert set(vars(model)) == names
    assert torch.equal(torch.get_rng_state(), state)


def test_what_plain_decoding_gets_wrong_is_no_failure_of_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicLayer

    original = DynamicLayer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        k, v = original(self, keys, values, *args, **kwargs)
        return (k * 1.5, v) if keys.shape[2] == 1 else (k, v)

    monkeypatch.setattr(DynamicLayer, "update", update)
    found = run(build("llama"), only=("batch", "left padding", "several chunks", "crop and go on", "StaticCache"))
    assert (found["batch"].status, found["StaticCache"].status) == ("cannot tell", "passed")
    assert "plain decoding is off too" in found["batch"].detail
    assert not [one for one in found.values() if one.status == "failed"]


def test_logits_that_no_token_moves_pass_nothing() -> None:
    model = build("llama")
    model.lm_head.weight.zero_()
    assert not [one for one in run(model).values() if one.status in ("passed", "failed")]


def test_a_generate_that_cannot_be_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")

    def refuses(*args: Any, **kwargs: Any) -> Any:
        raise ValueError("no generation today")

    monkeypatch.setattr(type(model), "generate", refuses)
    found = run(model, only=("generate()", "batch"))
    assert (found["generate()"].status, found["batch"].status) == ("off without a cache too", "passed")
    assert "ValueError: no generation today" in found["generate()"].detail


def _crashes(*_: Any, **__: Any) -> None:
    torch.zeros(2) @ torch.zeros(3)


def test_what_a_use_raises_is_a_crash_a_refusal_or_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollback of a sliding window raised a RuntimeError of torch's, and the audit passed: "cannot tell"."""
    from transformers.cache_utils import DynamicCache, DynamicSlidingWindowLayer

    from kvinterp.auditing import bench

    def found(name: str, model: Any) -> Check:
        return run(model, only=(name,))[name]

    with monkeypatch.context() as patch:
        patch.setattr(DynamicCache, "reorder_cache", _crashes)
        one = found("beams reordered", build("llama"))
        assert (one.status, "test_exercises.py" in one.detail) == ("failed", True), one
    with monkeypatch.context() as patch:
        patch.setattr(DynamicSlidingWindowLayer, "activate_past_recording", lambda layer: None)
        one = found("crop and go on", mistral(12))
        assert (one.status, "`crop` was called, but" in one.detail) == ("refused", True), one
    with monkeypatch.context() as patch:
        model = build("llama").double()
        patch.setattr(model.lm_head, "forward", lambda rows: _crashes() if len(rows) > 1 else rows @ model.lm_head.weight.T)
        assert found("batch", model).status == "off without a cache too"
    with monkeypatch.context() as patch:
        patch.delattr(bench, "Recomputation")
        with pytest.raises(bench.OwnError, match="kvinterp itself raised NameError"):
            found("batch", build("llama"))


def test_logits_of_other_rows_than_were_fed_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    """RWKV gives three tokens of each row for one of three rows, in which nothing can be compared."""
    model = build("llama").double()
    head = model.lm_head.forward
    mixes = lambda rows: head(rows.expand(-1, len(rows), -1) if rows.shape[:2] == (3, 1) else rows)  # noqa: E731
    monkeypatch.setattr(model.lm_head, "forward", mixes)
    one = run(model, only=("batch",))["batch"]
    assert (one.status, "3 rows of 1 tokens on the cache gives logits of 3 rows of 3" in one.detail) == ("failed", True), (
        one
    )


@pytest.mark.parametrize("plan", ["verified(3)", "beams(3)"])
def test_a_crash_under_a_call_plan_fails(plan: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import DynamicCache

    for method in ("crop", "reorder_cache"):
        monkeypatch.setattr(DynamicCache, method, _crashes)
    (one,) = (one for one in run(build("llama"), only=(), calls=[plan]).values())
    assert (one.status, one.error) == ("failed", None), one


def test_a_mask_alone_is_tried_as_people_call_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions that the audit gave itself hid that GPT-2 counts pads; a cache that alone does so is a bug."""
    name = "left padding, mask alone"
    one = run(build("gpt2"), only=(name,))[name]
    assert one.status == "off without a cache too"
    assert "right with positions given" in one.detail
    assert "right under generate(), which gives positions" in one.detail
    assert (one.error or 0.0) > 0.01
    before = clean(functools.partial(build, "opt"), (name,))[name]
    assert before.status == "passed", before
    from transformers.models.opt.modeling_opt import OPTLearnedPositionalEmbedding as Embedding

    original = Embedding.forward

    def forward(self: Any, attention_mask: Any, past_key_values_length: int = 0, position_ids: Any = None) -> Any:
        if past_key_values_length and position_ids is not None:
            position_ids = torch.full_like(position_ids, past_key_values_length)
        return original(self, attention_mask, past_key_values_length, position_ids)

    monkeypatch.setattr(Embedding, "forward", forward)
    planted = run(build("opt"), only=(name,))[name]
    assert (planted.status, planted.step) == ("failed", 9), planted


@pytest.mark.hooked
@pytest.mark.parametrize(("kind", "status"), [("standard", "failed"), ("rotary", "passed")])
def test_transformer_lenss_own_generate_is_tried(kind: str, status: str) -> None:
    """With learned positions TransformerLens 3.9 numbers the newest row by all rows and the cache together."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    more: dict[str, Any] = {"act_fn": "gelu", "initializer_range": 0.3, "seed": 0, "positional_embedding_type": kind}
    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_mlp": 64, "d_vocab": 60}
    model = HookedTransformer(HookedTransformerConfig(**sizes, **more, **({"rotary_dim": 8} if kind == "rotary" else {})))
    one = run(model.eval(), only=("generate()",))["generate()"]
    assert one.status == status, one
    said = "generate() gives position 18 to the token at position 9, and the forward is right when it is told so"
    assert one.hint == (said if status == "failed" else "")


def test_a_window_that_is_too_long_is_said_not_to_be_reached() -> None:
    found = run(mistral(4096), only=("window",))
    assert found["window"].status == "not run"
    assert "more than the model's context of 2048" in found["window"].detail


def test_a_quantised_cache_is_tried_when_thorough(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformers.cache_utils import Fp8QuantizedLayer

    quantised: dict[str, Any] = {"only": ("quantised cache",), "thorough": True}
    found = run(build("llama"), **quantised)
    assert found["quantised cache (fp8)"].status == "passed"
    assert all(found[f"quantised cache ({name})"].status in ("passed", "not run") for name in ("quanto", "hqq"))
    original = Fp8QuantizedLayer.update

    def update(self: Any, keys: Any, values: Any, *args: Any, **kwargs: Any) -> Any:
        original(self, keys, values, *args, **kwargs)
        return self._dequantize(self._quantized_keys), self._dequantize(self._quantized_values)

    monkeypatch.setattr(Fp8QuantizedLayer, "update", update)
    one = run(build("llama"), **quantised)["quantised cache (fp8)"]
    assert (one.status, one.hint) == ("failed", "the first forward reads quantised keys and values already")


def test_what_fails_on_a_hooked_model_is_placed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys that are wrong where several are appended to the second layer's cache: that layer is named, not the first."""
    from transformer_lens.cache.key_value_cache_entry import TransformerLensKeyValueCacheEntry as Entry

    original, calls = Entry.append, itertools.count()
    adapter = load_model("zoo:gqa2-mini", kind="hooked", dtype="float64")

    def append(self: Any, keys: Any, values: Any) -> Any:
        several = self.past_keys.shape[1] > 0 and keys.shape[1] > 1
        wrong = several and next(calls) % adapter.facts.layers == 1
        return original(self, keys * 1.05 if wrong else keys, values)

    monkeypatch.setattr(Entry, "append", append)
    monkeypatch.setattr(exercises, "CHECKS", {"several chunks": CHECKS["several chunks"]})
    (found,) = exercise(adapter, prompts_for(adapter, 2, 80))
    assert (found.status, found.layer) == ("failed", 1), found


def test_other_kinds_say_what_cannot_be_run() -> None:
    from kvinterp.models.bridge import build_bridge

    found = run(build_bridge(build("llama"), "llama"))
    ran = {
        "mask and positions given",
        "left padding, mask alone",
        "generate()",
        "generate(), left padding",
        "prompt of one token",
        "context end",
        "batch",
        "several chunks",
        "crop and go on",
        "beams reordered",
        "rows repeated and selected",
    }
    assert {name for name, one in found.items() if one.status == "passed"} == ran
    assert all(one.status == "not run" for name, one in found.items() if name not in ran)


@pytest.mark.parametrize("name", ["olmoe", pytest.param("llama", marks=pytest.mark.long)])
def test_sixteen_bits_never_fail_for_rounding(name: str) -> None:
    found = run(build(name), torch.bfloat16)
    assert not [one for one in found.values() if one.status == "failed"]


# Edges, and the dtype that serves ----------------------------------------------------------------------------------------

ROPES: dict[str, dict[str, Any]] = {
    "dynamic": {"factor": 4.0},
    "longrope": {
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "short_factor": [1.0] * 6,
        "long_factor": [4.0] * 6,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
}


@pytest.mark.parametrize("kind", ROPES)
def test_a_switch_of_rope_is_crossed_where_it_is_near(kind: str) -> None:
    """Beyond it a recomputation turns old keys by other frequencies than those on the cache have; yarn has one set."""
    rope = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[kind]}
    model = functools.partial(small, "Llama", **SIZES, max_position_embeddings=256, rope_parameters=rope)
    reached = run(model(), only=["RoPE switch"])["RoPE switch"]
    assert reached.status == ("passed" if kind == "yarn" else "failed"), reached.detail
    if kind != "yarn":
        assert (reached.layer, reached.tensor, reached.step) == (0, "K", 256 if kind == "dynamic" else 64)
        assert reached.hint.endswith("under generate())")
    far = small(
        "Llama", **SIZES, max_position_embeddings=1024, rope_parameters={**rope, "original_max_position_embeddings": 1024}
    )
    told = run(far, only=["RoPE switch"])["RoPE switch"]
    assert (told.status, told.hint) == ("not run", "--reach")


def test_the_end_of_the_context_is_reached_where_it_is_near() -> None:
    assert run(small("Llama", **SIZES, max_position_embeddings=256), only=["context end"])["context end"].status == "passed"
    far = functools.partial(small, "Llama", **SIZES, max_position_embeddings=1024)
    told = run(far(), only=["context end"])["context end"]
    assert (told.status, told.hint) == ("not run", "--reach")
    assert run(far(), only=["context end"], reach="yes")["context end"].status == "passed"


def test_a_caches_own_crop_is_used() -> None:
    """One whose layers have none was said to have no crop()."""
    from transformers import DynamicCache

    from kvinterp.models.transformers_cache import refusal

    class Layer:
        pass

    class Whole(DynamicCache):
        def crop(self, tokens_to_remove: int) -> None:
            pass

    own, plain = Whole(), DynamicCache()
    own.layers, plain.layers = [Layer()], [Layer()]
    assert refusal(own, "crop") == ""
    assert "has no crop()" in refusal(plain, "crop")


def _pads_seen_in_16_bits(model: Any) -> Any:
    """A kernel that is there in 16 bits alone, and forgets the mask of the pads when it decodes."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **more: Any) -> Any:
        forgets = query.dtype == torch.bfloat16 and query.shape[-2] == 1
        return sdpa_attention_forward(module, query, key, value, None if forgets else mask, **more)

    AttentionInterface.register("forgets_in_16_bits", attention)
    AttentionMaskInterface.register("forgets_in_16_bits", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model.set_attn_implementation("forgets_in_16_bits")
    return model


def test_what_fails_only_where_the_model_serves_is_seen() -> None:
    from kvinterp.auditing import audit

    model = _pads_seen_in_16_bits(small("Llama", **SIZES, max_position_embeddings=256)).to(torch.bfloat16)
    found = audit(model, lengths=(5,), steps=2, rungs=("bfloat16", "float64"), sweep="no")
    padding = next(check for check in found.checks if check.name == "left padding")
    assert padding.status == "failed"
    assert padding.detail.startswith("in bfloat16, ")
    assert found.verdict == "bug"


def test_kernels_that_are_coarse_in_16_bits_fail_no_exercise() -> None:
    """What an exercise shows in 16 bits, and a fixed order takes away, is a kernel's."""
    found = {one.name: one for one in exercises.served([_check("passed")], [_check("failed", 1e-3)], "float16")}
    assert found["batch"].status == "failed"
    gone = exercises._of_the_order(_check("failed", 1e-3), _check("passed"), 16.0)
    assert gone.status == "passed"
    assert exercises._of_the_order(_check("failed", 1.0), _check("passed"), 16.0).status == "failed"
    assert exercises._of_the_order(_check("failed", 1e-3), _check("failed"), 16.0).status == "failed"
    assert exercises._of_the_order(_check("failed", 1e-3), None, 16.0).status == "failed"


def _check(status: str, error: float = 1e-5) -> Check:
    return Check("batch", status, "three prompts.", error, 1e-5)
