"""Programs of a cache: what a sound model gives is right, a planted fault is found, shrunk, placed and shown in plain Python."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import random

import pytest
import torch
from transformers import (
    DynamicCache,
    FalconH1Config,
    FalconH1ForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
)
from transformers.cache_utils import Cache
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama import modeling_llama

import kvinterp as kv
import kvinterp.auditing.programs.search as search_file
from kvinterp.auditing import uses
from kvinterp.auditing.checks import NUMBERS
from kvinterp.auditing.programs.first_difference import placed
from kvinterp.auditing.programs.function_subject import FunctionSubject
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import OPERATIONS, program_named, programs_named
from kvinterp.auditing.programs.outcome import PLAIN, RIGHT, WRONG
from kvinterp.auditing.programs.pasted import pasted
from kvinterp.auditing.programs.program import Program, Rows
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.search import FIRST, run_program, sample_program, search, smaller
from kvinterp.auditing.uses import FEWER_BITS, uses_of
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.testing import CacheInconsistency, assert_cache_consistent

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


class Planted(LlamaForCausalLM):
    """A Llama whose forward does one thing wrong."""

    fault = ""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **more):
        filled = past_key_values is not None and past_key_values.get_seq_length() > 0
        width = input_ids.shape[1]
        if self.fault == "later pads" and filled and width > 1 and attention_mask is not None:
            attention_mask = attention_mask.clone()
            attention_mask[:, past_key_values.get_seq_length() :] = 1
        if self.fault == "chunk" and filled and width > 1 and position_ids is None:
            position_ids = torch.arange(width)[None].expand_as(input_ids)
        if self.fault in ("step", "everything") and filled and width == 1:
            input_ids = (input_ids + 1) % 99
        if self.fault == "everything" and attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        if self.fault == "late" and filled and width == 1 and position_ids is not None:
            position_ids = position_ids + 1
        if self.fault == "crash" and filled and width == 3:
            return super().forward(input_ids, attention_mask[:, :1].view(7, 7))
        if self.fault == "compiled" and torch.compiler.is_compiling():
            input_ids = (input_ids + 1) % 99
        if self.fault == "compiled cast" and torch.compiler.is_compiling():
            out = super().forward(input_ids, attention_mask, position_ids, past_key_values, **more)
            out.logits = out.logits.to(torch.bfloat16).to(out.logits.dtype)
            return out
        if self.fault == "uncached pads" and more.get("use_cache") is False and attention_mask is not None:
            attention_mask = torch.ones_like(attention_mask)
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **more)


def planted(fault: str) -> ModelSubject:
    torch.manual_seed(0)
    model = Planted(LlamaConfig(**SMALL)).eval()
    model.fault = fault
    return ModelSubject(kv.wrap(model))


@pytest.fixture(scope="module")
def sound() -> ModelSubject:
    return planted("")


def test_every_use_of_a_sound_model_is_right(sound):
    """Rounding is 1e-15, the limit is its root, and each use that the model offers was tried."""
    found = search(sound, len(FIRST) + 12, 120)
    assert not found.wrong, found.wrong[0].why
    assert found.worst < 1e-12 < sound.limit < 1e-6
    assert {
        "decode step",
        "several chunks",
        "left padding",
        "crop and go on",
        "reorder_cache",
        "StaticCache",
        "fork",
    } <= set(found.right)
    assert {"generate() on a filled cache, given the whole text", "beam search", "assisted decoding"} <= set(found.right)


@pytest.mark.parametrize(
    ("fault", "least", "use"),
    [
        ("later pads", 2, "left padding, in a later part"),
        ("chunk", 2, "several chunks"),
        ("step", 2, "decode step"),
        ("crash", 2, "several chunks"),
    ],
)
def test_a_planted_fault_is_shrunk_to_its_operations_and_shown_in_plain_python(fault, least, use):
    subject = planted(fault)
    found = search(subject, 60, 60, faults=1)
    one = found.wrong[0]
    assert len(one.program.steps) <= least
    text = pasted(one)
    assert len(text.splitlines()) <= 12
    if fault == "crash":
        assert "raises" in one.why
        return
    assert one.use == use, one.program
    said = io.StringIO()
    with contextlib.redirect_stdout(said), subject.running():
        exec(text, {"model": subject.model})
    assert float(said.getvalue()) > subject.limit
    assert all(
        Run(subject, less).run()[0] != WRONG for less in smaller(one.program) if len(less.steps) < len(one.program.steps)
    )


def test_what_is_tried_first_is_tried_whatever_else_is_wrong():
    """Behind four faults a search ended, and of beams it said neither word: mamba's beams were not found."""
    subject = planted("everything")
    found = search(subject, len(FIRST), 60, faults=1)
    assert found.ran >= len([text for text in FIRST if subject.offers(program_named(text).rows)])
    assert len(found.wrong) > 1


def test_beams_that_do_not_move_the_cache_are_seen_whatever_the_tokens(monkeypatch):
    """One row of four tokens showed it in four draws of ten: its beams hardly changed places."""
    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(LlamaForCausalLM(LlamaConfig(**SMALL)).eval()))
    monkeypatch.setattr(DynamicCache, "reorder_cache", lambda self, rows: None)
    program = next(program_named(text) for text in FIRST if "beams" in text)
    words = [Run(subject, dataclasses.replace(program, rows=dataclasses.replace(program.rows, seed=seed))).run()[0]
             for seed in range(10)]  # fmt: skip
    assert words.count(WRONG) >= 9


def test_what_a_longer_text_gives_fails_nothing():
    """Its rows are taken where they agree; where they do not, a row's own text decides."""
    torch.manual_seed(0)
    subject = ModelSubject(kv.wrap(LlamaForCausalLM(LlamaConfig(**SMALL)).eval()))
    long = [text for text in subject._alone if len(text) > 20]
    subject._alone |= {text: subject._alone[text] + 1 for text in long}
    assert long
    for text in ("rows(0)+feed(9)+feed(3,1)", "rows(0+2)+feed(5)+feed(2,1)"):
        assert Run(subject, program_named(text)).run()[0] == RIGHT


def test_generate_without_a_cache_is_held_against_the_plain_forward():
    """A loop that feeds the last token alone although nothing is kept: with the cache all is right."""

    class Last(LlamaForCausalLM):
        def prepare_inputs_for_generation(self, input_ids, is_first_iteration=False, **given):
            made = super().prepare_inputs_for_generation(input_ids, is_first_iteration=is_first_iteration, **given)
            if not is_first_iteration and given.get("past_key_values") is None:
                made |= {name: made[name][:, -1:] for name in ("input_ids", "position_ids")}
            return made

    torch.manual_seed(0)
    found = search(ModelSubject(kv.wrap(Last(LlamaConfig(**SMALL)).eval())), len(FIRST), 60)
    assert [one.use for one in found.wrong] == ["generate() without a cache"], found.wrong


def test_a_forward_that_keeps_something_of_the_call_before_is_said_to():
    """It was said not to read its text from left to right."""
    calls, weights = [], torch.randn(99, 99, generator=torch.Generator().manual_seed(0))

    def full(ids):
        calls.append(ids)
        return weights[ids].cumsum(1) * len(calls)

    with pytest.raises(UnsupportedError, match="when the same text is given twice"):
        kv.audit(full=full, step=lambda ids, cache: (full(ids), ids))


def test_a_forward_without_a_cache_that_is_wrong_where_the_cached_one_is_right_is_said():
    word, why = Run(planted("uncached pads"), program_named("rows(0+4)+feed(9)+feed(2,1)")).run()
    assert word == WRONG
    assert "without a cache" in why


def test_what_is_off_without_a_cache_too_is_no_fault_of_the_cache():
    """Learned positions under the mask alone are counted with the pads, with a cache and without one."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(vocab_size=99, n_embd=32, n_layer=2, n_head=4, n_positions=64, initializer_range=0.2)
    )
    subject = ModelSubject(kv.wrap(model.eval()))
    assert Run(subject, program_named("rows(0+4,told=mask_alone)+feed(9)+feed(2,1)")).run()[0] == PLAIN
    assert Run(subject, program_named("rows(0+4)+feed(9)+feed(2,1)")).run()[0] == RIGHT


def test_rows_of_a_hybrid_are_held_against_each_rows_own_tokens():
    """The cache of Falcon-H1 selects rows of its keys and values and leaves its states where they are: nothing excuses that."""
    torch.manual_seed(0)
    config = FalconH1Config(
        **SMALL, mamba_d_ssm=32, mamba_n_heads=4, mamba_d_head=8, mamba_d_state=8, mamba_n_groups=1, head_dim=8
    )
    subject = ModelSubject(kv.wrap(FalconH1ForCausalLM(config).eval()))
    words = {
        text: Run(subject, program_named(text)).run()[0]
        for text in ("rows(0+0)+feed(5)+feed(2,1)", "rows(0+0)+feed(5)+reorder(1+0)+feed(2,1)")
    }
    assert set(words.values()) == {RIGHT}


def test_a_place_is_the_first_tensor_that_parts():
    subject = planted("")
    layer = subject.model.model.layers[1].self_attn
    own = layer.o_proj.forward

    def off(rows):
        return own(rows) * (1.01 if rows.shape[1] == 1 else 1.0)

    layer.o_proj.forward = off
    place = placed(subject, program_named("rows(0)+feed(5)+feed(1)"))
    assert place is not None
    assert (place.layer, place.module, place.column) == (1, "model.layers.1.self_attn.o_proj", 5)
    assert place.tensor.startswith("output of")


def test_positions_are_placed_in_what_the_first_block_makes_of_them():
    """From the second forward on the module that makes them, in no block, was taken for what comes behind the blocks."""
    place = placed(planted("late"), program_named("rows(0)+generate(5,3,whole)"))
    assert (place.layer, place.tensor) in [(0, "Q"), (0, "K")]


def test_embeddings_of_other_tokens_than_were_fed_are_placed():
    """The model is fed the text's tokens and embeds others: that is its fault, and no other text."""
    place = placed(planted("step"), program_named("rows(0)+feed(5)+feed(1)"))
    assert (place.layer, place.tensor, place.column) == (0, "input of model.layers.0", 5)


def test_queries_that_are_rotated_too_far_are_placed(monkeypatch):
    """mlx-lm#1699: the projections are right, and what attention is given is not."""
    rotate = modeling_llama.apply_rotary_pos_emb

    def too_far(q, k, cos, sin, *more, **options):
        far, near = rotate(q, k, cos, sin, *more, **options)
        return (far if q.shape[2] > 1 else q), near

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", too_far)
    place = placed(planted(""), program_named("rows(0)+feed(5)+feed(1)"))
    assert place is not None
    assert (place.layer, place.tensor, place.column) == (0, "Q", 5)


@pytest.mark.parametrize(
    "program", ["rows(0)+feed(5)+feed(1)", "rows(0+3)+feed(7)+feed(1)", "rows(0,cache=static)+feed(5)+feed(1)"]
)
def test_keys_that_attention_is_given_and_no_cache_gave_are_placed(monkeypatch, program):
    """What the cache returns is right, and what is made of it is not."""

    def smaller_keys(module, query, key, *more, **options):
        decodes = query.shape[2] == 1 < key.shape[2]
        return sdpa_attention_forward(module, query, 0.9 * key if decodes else key, *more, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", smaller_keys)
    place = placed(planted(""), program_named(program))
    assert place is not None
    assert (place.layer, place.tensor) == (0, "K")


@pytest.mark.parametrize("program", ["rows(3)+feed(7)+feed(1)", "rows(3,told=mask_alone)+feed(7)+feed(1)"])
def test_an_attention_that_sees_the_pads_is_placed_though_keys_are_turned_otherwise(monkeypatch, program):
    """Of a row whose mask alone is told all keys are turned by other angles, which changes nothing."""

    def sees_all(module, query, key, value, mask, **options):
        return sdpa_attention_forward(module, query, key, value, None if query.shape[2] == 1 else mask, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", sees_all)
    place = placed(planted(""), program_named(program))
    assert place is not None
    assert (place.layer, place.tensor, place.module) == (0, "attention output", "model.layers.0.self_attn.o_proj")


def test_what_the_head_makes_and_what_a_convolution_keeps_have_their_names():
    subject = planted("")
    own = subject.model.lm_head.forward
    subject.model.lm_head.forward = lambda rows: own(rows) * (1.01 if rows.shape[1] == 1 else 1.0)
    place = placed(subject, program_named("rows(0)+feed(5)+feed(1)"))
    assert place is not None
    assert (place.layer, place.tensor) == (3, "logits")
    torch.manual_seed(0)
    model = Lfm2ForCausalLM(Lfm2Config(**SMALL, layer_types=["conv", "full_attention", "conv"])).eval()
    subject, kept = ModelSubject(kv.wrap(model)), Cache.update_conv_state

    def stale(cache, state, *given, **more):
        made = kept(cache, state, *given, **more)
        return made if state.shape[-1] != 3 else torch.cat([0 * made[..., :-3], made[..., -3:]], -1)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Cache, "update_conv_state", stale)
        place = placed(subject, program_named("rows(0)+feed(5)+feed(3)"))
    assert place is not None
    assert (place.layer, place.tensor) == (0, "convolution state")


def test_a_window_is_crossed_and_keys_that_are_read_are_placed():
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=8)).eval()
    subject = ModelSubject(kv.wrap(model))
    assert Run(subject, program_named("rows(0+3)+feed(7)+feed(6,1)")).run()[0] == RIGHT


def test_the_text_form_says_everything():
    """A program that is read from its text is the same, and draws the same tokens."""
    draw = random.Random(3)

    class Any(FunctionSubject):
        def __init__(self):
            self.rows, self.caches, self.sizes, self.special = 3, ("own", "static"), ((7,), (7, 9)), frozenset()

    for beyond in ("no", "yes"):
        for _ in range(50):
            program = sample_program(draw, Any(), beyond)
            assert program_named(str(program)) == program
    assert {step.split("(")[0] for text in FIRST for step in text.split("+") if step[0].isalpha()} - {"rows"} >= set(
        OPERATIONS
    ) - {"compile", "draft", "join"}
    with pytest.raises(InputError, match="rows"):
        program_named("feed(3)")
    with pytest.raises(InputError, match="told"):
        program_named("rows(0,told=nothing)+feed(3)")


def test_a_name_is_written_as_a_program_of_the_prompt_it_is_given():
    (one,) = programs_named("padded(left,6)+chunked(4)")
    assert one == program_named("rows(6)+feed(23,4)+feed(8,1)")
    assert programs_named("rows(0)+feed(3)") == [Program(Rows((0,)), program_named("rows(0)+feed(3)").steps)]
    (right,) = programs_named("padded(right,3)")
    assert right == program_named("rows(0,beyond=yes)+feed(20,behind=3)+feed(8,1)")
    with pytest.raises(InputError, match="unknown program 'padde'"):
        programs_named("padde(3)")


@pytest.mark.parametrize(
    "name", ["padded(right,3)", "batched(3)", "forked(3)", "verified(3)", "beams", "assisted(2)", "compiled(eager)"]
)
def test_a_name_is_right_on_a_sound_model_and_was_tried(sound, name):
    (program,) = programs_named(name)
    run = Run(sound, program)
    assert run.run() == (RIGHT, "")
    assert run.worst < 1e-12
    wanted = {
        "padded(right,3)": "pads within a text",
        "batched(3)": "rows that join",
        "verified(3)": "drafts checked",
        "beams": "reorder_cache",
        "compiled(eager)": "compiled",
    }
    assert wanted.get(name, "decode step") in run.uses


def test_a_fault_of_compiled_code_is_seen():
    """Checks of types under pytest break the graphs of a path, so that an audit's program shows it."""
    subject = planted("compiled")
    assert Run(subject, program_named("rows(0)+feed(5)+feed(2,1)")).run()[0] == RIGHT
    assert Run(subject, program_named("rows(0)+compile(eager)+feed(5)+feed(2,1)")).run()[0] == WRONG
    assert "forward" not in vars(subject.model)


@pytest.mark.slow
def test_a_cast_in_compiled_code_is_seen_where_it_was_asked_for():
    """Casts are lifted from most programs: those that were asked for run with casts to 16 bits too."""
    checks = uses_of(planted("compiled cast").given, programs=1, given=programs_named("compiled(eager)"))
    check = next(check for check in checks if check.name == "compiled")
    assert (check.status, check.hint) == (WRONG, FEWER_BITS)
    assert "+compile(eager)+" in check.program, "a smaller program of another backend is another program"
    assert "torch.compile(model.forward, backend='eager')" in check.lines


def test_what_names_no_type_of_16_bits_is_not_run_again_with_casts(monkeypatch):
    """Programs with casts to 16 bits are run again only if an operation named such a type, compiled code's too."""
    plain, cast = planted(""), planted("compiled cast")
    for subject in (plain, cast):
        assert run_program(subject, program_named("rows(0)+feed(5)+feed(1)")).word == RIGHT
        assert not subject.sixteen_met
        assert run_program(subject, program_named("rows(0)+feed(5)+compile(eager)+feed(1)")).word == RIGHT
    assert (plain.sixteen_met, cast.sixteen_met) == (set(), {torch.bfloat16})
    narrow = []
    monkeypatch.setattr(uses, "_narrow", lambda *_: narrow.append("run") or [])
    monkeypatch.setattr(uses, "FIRST", FIRST[:2])
    monkeypatch.setattr(search_file, "FIRST", FIRST[:2])
    spent: dict[str, float] = {}
    assert uses_of(plain.given, 2, spent=spent)
    assert not narrow
    # Where the seconds went.
    assert spent["tried first"] > 0
    assert uses_of(plain.given, 1)
    assert narrow, "a program that was cut off may run in it"
    narrow.clear()
    assert uses_of(cast.given, 3, given=programs_named("compiled(eager)"))
    assert narrow


def test_a_quick_search_tries_each_use_once_and_ends_with_the_first_that_is_wrong(sound):
    """Nothing is compiled or drawn; a fault among the first ten ends it there, and seconds cut it off."""
    quick = {"faults": 1, "breadth": "quick"}
    found = search(sound, 500, 120, **quick)
    assert (found.wrong, found.cut) == ([], [])
    assert "compiled" not in found.right
    offered = [text for text in FIRST if sound.offers(program_named(text).rows) and "compile" not in text]
    assert found.ran == len(offered) > 50
    found = search(planted("chunk"), 500, 120, **quick)
    assert [one.use for one in found.wrong] == ["several chunks"]
    assert found.ran <= 10
    found = search(sound, 500, 1e-9, **quick)
    assert found.cut
    assert found.ran == 0


def test_the_helper_raises_with_a_program_before_any_precision_is_run():
    """The plainest uses come first; what is allowed may be read from the precisions alone, so that they are run then."""
    sound, wrong = (planted(fault).given.source for fault in ("", "chunk"))
    verdict = assert_cache_consistent(sound, lengths=(5,), steps=1)
    assert any(check.name == "beam search" for check in verdict.checks)
    with pytest.raises(CacheInconsistency, match="no precisions: a program of the cache is wrong") as raised:
        assert_cache_consistent(wrong)
    assert raised.value.verdict.verdict == "bug"
    assert [check.name for check in raised.value.verdict.checks if check.status == WRONG] == ["several chunks"]
    with pytest.raises(CacheInconsistency, match="Prompts of 5 tokens"):
        assert_cache_consistent(wrong, lengths=(5,), steps=1, allow=("hidden-cast",))


def test_anybodys_own_forward_and_step_are_asked():
    """A model of a few lines that numbers each cached step from 0 again fails; without that it passes."""

    class Own(torch.nn.Module):
        def __init__(self, fault: bool) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.fault, self.token, self.place = fault, torch.nn.Embedding(50, 16), torch.nn.Embedding(64, 16)
            self.mix, self.head = torch.nn.Linear(16, 16), torch.nn.Linear(16, 50)

        def forward(self, ids, cache=None):
            start = 0 if cache is None or self.fault else cache.shape[1]
            rows = self.token(ids) + self.place(torch.arange(start, start + ids.shape[1]))
            kept = rows if cache is None else torch.cat([cache, rows], 1)
            means = kept.cumsum(1) / torch.arange(1, kept.shape[1] + 1)[:, None]
            return self.head(torch.tanh(self.mix(means[:, -ids.shape[1] :]))), kept

    for fault, code in ((False, 0), (True, 1)):
        model = Own(fault).eval()
        verdict = kv.audit(
            full=lambda ids, model=model: model(ids)[0], step=lambda ids, cache, model=model: model(ids, cache), programs=30
        )
        assert verdict.exit_code == code, str(verdict)
        assert ("full(torch.tensor" in str(verdict)) == fault
    with pytest.raises(InputError, match="full=f, step=g"):
        kv.audit(full=lambda ids: ids)
    with pytest.raises(InputError, match=r"step returned a Tensor of shape .* expected a pair"):
        kv.audit(full=lambda ids: torch.eye(64)[ids], step=lambda ids, cache: torch.eye(64)[ids])


def test_a_model_is_left_as_it_was(sound):
    """Programs generate, crop and reorder; the weights, the config and the hooks of the user's model stay."""
    model = LlamaForCausalLM(LlamaConfig(**SMALL)).eval()
    before = (
        {name: value.clone() for name, value in model.state_dict().items()},
        repr(model.config),
        repr(model.generation_config),
    )
    search(ModelSubject(kv.wrap(model)), 10, 20)
    assert all(torch.equal(value, before[0][name]) for name, value in model.state_dict().items())
    assert (repr(model.config), repr(model.generation_config)) == before[1:]
    assert not model._forward_hooks
    assert next(model.parameters()).dtype == torch.float32


def test_a_module_of_ones_own_is_asked_as_it_is():
    """A module whose forward takes ids and a cache and returns logits and the cache needs no functions."""

    class Sums(torch.nn.Module):
        fault = False

        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.token, self.head = torch.nn.Embedding(50, 16), torch.nn.Linear(16, 50)

        def forward(self, ids, cache=None):
            rows = self.token(ids)
            kept = rows if cache is None else torch.cat([cache, rows], 1)
            sums = kept.cumsum(1)[:, -ids.shape[1] :] if not (self.fault and cache is not None) else rows
            return self.head(torch.tanh(sums)), kept

    model = Sums()
    assert kv.audit(model, programs=26).exit_code == 0
    model.fault = True
    assert kv.audit(model, programs=26).exit_code == 1


def test_an_encoder_decoder_is_asked_behind_what_its_encoder_read():
    from transformers import T5Config, T5ForConditionalGeneration

    torch.manual_seed(0)
    config = T5Config(vocab_size=99, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0)
    verdict = kv.audit(T5ForConditionalGeneration(config), programs=20)
    assert verdict.exit_code == 0, str(verdict)
    assert "behind 24 + 17 + 11 encoded positions" in str(verdict)
    assert max(check.error for check in verdict.checks if check.error is not None) < 1e-12


def test_a_prompt_with_more_than_text_is_gone_on_from():
    """The first forward of every text gets the inputs; what it leaves on the model is each program's own."""
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    torch.manual_seed(0)
    text = {
        **SMALL,
        "head_dim": 8,
        "rope_parameters": {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4},
    }
    vision = {
        "depth": 2, "hidden_size": 16, "intermediate_size": 32, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2,
        "temporal_patch_size": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    images = {"image_token_id": 90, "vision_start_token_id": 91, "vision_end_token_id": 92, "video_token_id": 93}
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision, **images)).eval()
    ids = torch.tensor([[5, 6, 91, 90, 92, 7, 8, 9]])
    inputs = {
        "pixel_values": torch.randn(4, 96),
        "image_grid_thw": torch.tensor([[1, 2, 2]]),
        "mm_token_type_ids": (ids == 90).int(),
    }
    verdict = kv.audit(model, [ids[0].tolist()], inputs=inputs, programs=20)
    assert {check.name: check.status for check in verdict.checks}.get("decode step") == RIGHT, str(verdict)
    assert verdict.exit_code == 0
    assert model.model.rope_deltas is None
    with pytest.raises(InputError, match="one prompt"):
        kv.audit(model, inputs=inputs)


@pytest.mark.hooked
def test_a_hooked_transformer_and_its_own_generate_are_tried():
    """Every program on one was "refused", under a PASS: kvinterp asked for a transformers config, of which it has none."""
    from transformer_lens import HookedTransformer, HookedTransformerConfig

    torch.manual_seed(0)
    sizes = {"n_layers": 2, "d_model": 32, "n_ctx": 64, "d_head": 8, "n_heads": 4, "d_mlp": 48, "d_vocab": 99}
    config = HookedTransformerConfig(**sizes, act_fn="gelu", positional_embedding_type="rotary", rotary_dim=8)
    adapter = kv.wrap(HookedTransformer(config).eval())
    checks = uses_of(adapter, 16, 20.0, 0, [], "no", lambda _: None)
    right = {check.name for check in checks if check.status == RIGHT}
    assert {"prompt", "decode step", "batch"} <= right, [(check.name, check.status, check.detail) for check in checks]
    assert any("generate()" in check.name for check in checks)
    assert not [check for check in checks if "kvinterp" in check.detail and "transformer_lens_api" not in check.detail]


def test_what_is_wrong_over_an_edge_that_the_config_names_is_called_by_it():
    """transformers' Phi3 takes other frequencies from 32 positions on, and keys in the cache keep the old ones."""
    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "original_max_position_embeddings": 32, "factor": 8.0}
    rope |= {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [2.0, 4.0, 6.0, 8.0]}
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Phi3Config(
        vocab_size=99, num_key_value_heads=2, max_position_embeddings=256, original_max_position_embeddings=32,
        rope_parameters=rope, pad_token_id=0, initializer_range=0.3, **sizes,
    )  # fmt: skip
    checks = uses_of(kv.wrap(Phi3ForCausalLM(config).eval()), programs=4)
    wrong = [check.name for check in checks if check.status == WRONG]
    assert wrong, checks
    assert all("over the longrope RoPE that switches at 32" in name for name in wrong)


def test_what_is_wrong_in_float64_too_is_laid_to_no_cast():
    """Of a program that float64 had no time for the audit said that a cast to 16 bits made it wrong."""
    (check,) = (check for check in uses_of(planted("chunk").given, programs=1) if check.status == WRONG)
    assert check.name == "several chunks"
    assert "16 bits" not in check.detail
    assert check.hint == NUMBERS


class LateByOne(LlamaForCausalLM):
    """Numbers cached tokens one too far where nobody tells it their positions."""

    off = 1

    def forward(self, input_ids=None, past_key_values=None, position_ids=None, **given):
        length = 0 if past_key_values is None else past_key_values.get_seq_length()
        if length and position_ids is None:
            position_ids = torch.arange(length + self.off, length + self.off + input_ids.shape[1])[None]
        elif length:
            position_ids = position_ids + self.always
        return super().forward(input_ids, past_key_values=past_key_values, position_ids=position_ids, **given)


@pytest.mark.parametrize("always", [0, 1])
def test_that_positions_are_left_out_is_said_where_telling_them_mends_it(always):
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = LateByOne(
        LlamaConfig(vocab_size=99, num_key_value_heads=2, initializer_range=0.3, pad_token_id=0, **sizes)
    ).eval()
    model.always = always
    check = next(check for check in uses_of(kv.wrap(model), programs=4) if check.status == WRONG)
    assert check.name == "decode step"
    assert check.hint == ("" if always else NUMBERS)
