"""Uses that others test: embeddings, masks of one's own, several texts in one forward, what a forward is asked for, attention
kinds, sampling, and a cache that nobody reads. Each has a fault that no other use shows, which is found, shrunk and shown.
"""

from __future__ import annotations

import contextlib
import io

import pytest
import torch
from transformers import DynamicCache, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import kvinterp as kv
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import OPERATIONS, program_named
from kvinterp.auditing.programs.outcome import PLAIN, REFUSED, RIGHT, WRONG
from kvinterp.auditing.programs.pasted import pasted
from kvinterp.auditing.programs.program import ASKS, ATTENTION, FED, MASKS, Rows
from kvinterp.auditing.programs.search import FIRST, run_program, search, shrink
from kvinterp.auditing.programs.subject import apart

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


class Planted(LlamaForCausalLM):
    """A Llama whose forward does one thing wrong where the cache holds something."""

    fault, sampling = "", False

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        output_attentions=None, logits_to_keep=0, **more,
    ):  # fmt: skip
        fed = input_ids if inputs_embeds is None else inputs_embeds
        filled = past_key_values is not None and past_key_values.get_seq_length() > 0
        square = attention_mask is not None and attention_mask.dim() == 4
        after = torch.arange(fed.shape[1])[None] + (past_key_values.get_seq_length() if filled else 0)
        kept = logits_to_keep
        if self.fault == "pack" and position_ids is not None and bool((position_ids.diff() < 0).any()):
            attention_mask = torch.ones(fed.shape[:2])
        if not filled:
            pass
        elif (self.fault == "chunk" and fed.shape[1] > 1) or (self.fault == "embeds" and inputs_embeds is not None):
            position_ids = torch.arange(fed.shape[1])[None]
        elif self.fault in ("bool_mask", "float_mask") and square:
            if attention_mask.is_floating_point() == (self.fault == "float_mask"):
                attention_mask = None
        elif self.fault == "tree" and square:
            position_ids = after.expand(fed.shape[:2])
        elif self.fault == "attentions" and output_attentions:
            position_ids = after + 1
        elif self.fault == "crashes":
            return self.nothing
        elif self.fault == "last" and isinstance(kept, int) and kept > 1:
            kept = slice(-kept - 1, -1) if fed.shape[1] > kept else kept
        elif self.fault == "some" and isinstance(kept, torch.Tensor):
            kept = (kept - 1).clamp(min=0)
        elif self.fault == self.config._attn_implementation:
            position_ids = after + 1
        elif self.fault == "sampled" and self.sampling:
            position_ids = position_ids + 1
        out = super().forward(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, logits_to_keep=0, **more
        )
        rows = kept if not isinstance(kept, int) else slice(-kept, None)
        out.logits = out.logits[:, rows]
        return out

    def generate(self, *given, **more):
        self.sampling = more.get("do_sample", getattr(more.get("generation_config"), "do_sample", False))
        if self.fault == "beside" and given[0] is not None:
            more.pop("inputs_embeds", None)
        try:
            return super().generate(*given, **more)
        finally:
            self.sampling = False


class Recomputes(LlamaForCausalLM):
    """Keeps the tokens beside keys and values that it never reads."""

    def forward(self, input_ids=None, past_key_values=None, use_cache=None, **more):
        out = super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache, **more)
        if out.past_key_values is not None:
            before = getattr(out.past_key_values, "tokens", input_ids[:, :0])
            out.past_key_values.tokens = torch.cat([before, input_ids], 1)
            out.logits = super().forward(out.past_key_values.tokens, use_cache=False).logits[:, -input_ids.shape[1] :]
        return out


def subject_of(fault: str, kind: type = Planted) -> ModelSubject:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**SMALL)).eval()
    model.fault = fault
    return ModelSubject(kv.wrap(model))


@pytest.fixture(scope="module")
def sound() -> ModelSubject:
    return subject_of("")


NEW = [text for text in FIRST if program_named(text).rows.ways or any(
    word in text for word in ("tree", "pack", "spoil", "sampled", "beside")
)]  # fmt: skip


@pytest.mark.parametrize("text", NEW)
def test_each_is_right_on_a_sound_model_and_was_tried(sound, text):
    run = run_program(sound, program_named(text))
    if not sound.offers(run.program.rows):
        assert run.word == REFUSED
        assert "fed=types" in text or "attention=sdpa" in text
        return
    assert (run.word, run.why) == (RIGHT, "")
    assert 0 < run.worst < 1e-12
    assert len(run.uses) >= 1
    named = run.program.rows.ways.split(", ")
    assert all(any(name in use for use in run.uses) for name in named), run.uses


FAULTS = {
    "embeds": ("fed=embeds", "rows(0,fed=embeds)+feed(6)+feed(3)+feed(2,1)", "embeddings on a filled cache"),
    "beside": ("beside", "rows(0+2)+generate(5,3,beside)", "generate() from embeddings beside other ids"),
    "bool_mask": ("told=bool_mask", "rows(0+3,told=bool_mask)+feed(6)+feed(3)+feed(2,1)", "boolean 4D mask on a filled cache"),
    "float_mask": ("told=float_mask", "rows(0+3,told=float_mask)+feed(6)+feed(3)+feed(2,1)", "additive 4D mask on a filled cache"),
    "tree": ("tree(", "rows(0+3)+feed(6)+tree(2+3)+feed(2,1)", "several ways to go on in one forward"),
    "pack": ("pack(", "rows(0)+pack(5+3+4)+feed(2)", "texts packed in one row"),
    "attentions": ("asks=attentions", "rows(0+3,asks=attentions)+feed(6)+feed(3)+generate(2,3)", "output_attentions"),
    "last": ("asks=last", "rows(0+3,asks=last)+feed(6)+feed(4)+feed(2,1)", "logits_to_keep on a filled cache"),
    "some": ("asks=some", "rows(0+3,asks=some)+feed(6)+feed(4)+feed(2,1)", "logits_to_keep, chosen columns on a filled cache"),
    "eager": ("attention=eager", "rows(0+3,attention=eager)+feed(6)+feed(3)+generate(2,3)", "eager attention"),
    "sampled": ("sampled", "rows(0)+generate(5,4,sampled)", "sampling"),
}  # fmt: skip


PLAINLY = (
    "rows(0+4+1)+feed(9)+feed(3,1)",
    "rows(0)+feed(17,5)+feed(2,1)",
    "rows(0+4+1)+generate(9,3)",
    "rows(0)+feed(6)+feed(3,1)+crop(2)+feed(3,1)",
)
"""Where none of these faults is: fed singly and in chunks, behind pads, by generate(), cropped."""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_of_one_use_is_found_shrunk_and_shown(fault):
    subject, (holds, text, use) = subject_of(fault), FAULTS[fault]
    assert {run_program(subject, program_named(text)).word for text in PLAINLY} == {RIGHT}
    one = run_program(subject, program_named(text))
    assert one.word == WRONG, one.why
    one = shrink(subject, one, 5)
    assert holds in str(one.program)
    assert use in one.use
    said = io.StringIO()
    with contextlib.redirect_stdout(said), torch.no_grad():
        exec(pasted(one), {"model": subject.model})
    assert float(said.getvalue()) > subject.limit


def test_a_fault_of_every_way_of_calling_is_said_of_the_plain_one_alone():
    """Of a model that is wrong in chunks embeddings, masks and logits_to_keep were said to be wrong too, each by itself."""
    first = [program_named(text) for text in FIRST if program_named(text).rows.ways or text.endswith("(17,5)+feed(2,1)")]
    found = search(subject_of("chunk"), len(first), 60, given=first, faults=1)
    assert found.ran > 9
    assert found.wrong
    assert not any(one.program.rows.ways for one in found.wrong), [str(one.program) for one in found.wrong]


@pytest.mark.parametrize("heeds", [True, False])
def test_texts_are_packed_where_attention_heeds_a_mask(monkeypatch, heeds):
    """A Llama whose user put long convolutions in attention's place mixes what stands in a row, and promises no packing."""

    def attend(module, query, key, value, mask, **options):
        return sdpa_attention_forward(module, query, key, value, mask if heeds else None, **options)

    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS._local_mapping, "sdpa", attend)
    assert subject_of("").packs is heeds


def test_sampled_drafts_that_are_wrong_are_seen():
    assert run_program(subject_of("sampled"), program_named("rows(0)+generate(5,6,sampled_assistant)")).word == WRONG


def test_flex_attention_runs_uncompiled_and_the_models_own_is_put_back():
    """In float64 and without a compiler; on a CPU its compiled kernel takes neither, and its import alone takes seconds."""
    from transformers.integrations.flex_attention import WrappedFlexAttention

    subject, compiles, kept = subject_of("flex_attention"), torch.compile, WrappedFlexAttention._instance
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "compile", lambda *given, **more: pytest.fail("something was compiled"))
        never = torch.compile
        assert run_program(subject, program_named("rows(0,attention=flex_attention)+feed(6)+feed(2,1)")).word == WRONG
        assert torch.compile is never
    assert torch.compile is compiles
    assert WrappedFlexAttention._instance is kept
    assert subject.model.config._attn_implementation == "sdpa"


@pytest.mark.parametrize(("attention", "word"), [("flex_attention", REFUSED), ("own", WRONG)])
def test_a_part_of_a_users_own_need_not_take_every_attention(attention, word):
    """An attention that reads ``mask.dtype`` breaks under flex attention, which nobody had set."""
    program = program_named(f"rows(0,attention={attention})+feed(6)+generate(3,3)")
    one = run_program(subject_of("crashes"), program)
    assert (one.word, "AttributeError" in one.why) == (word, True)


def test_a_cache_that_is_not_read_is_seen_whatever_else_is_right():
    subject = subject_of("", Recomputes)
    assert run_program(subject, program_named("rows(0)+feed(6)+feed(3)+feed(2,1)")).word == RIGHT
    one = shrink(subject, run_program(subject, program_named("rows(0)+feed(6)+spoil()+feed(2,1)")), 5)
    assert (one.word, one.use) == (WRONG, "the cache is read")
    assert str(one.program).endswith("+spoil")
    said = io.StringIO()
    with contextlib.redirect_stdout(said), torch.no_grad():
        exec(pasted(one), {"model": subject.model})
    assert said.getvalue().strip() == "True"


class Keyless(LlamaForCausalLM):
    """A Llama that writes nothing into the cache that it is given, and hands it back."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, use_cache=None, **more):
        out = super().forward(input_ids, None, position_ids, use_cache=False, **more)
        out.past_key_values = (
            DynamicCache(config=self.config) if past_key_values is None and use_cache is not False else past_key_values
        )
        return out


def test_a_cache_that_stays_empty_is_the_models_fault_and_not_ours():
    """A bridge of TransformerLens under transformers 5.24: rows that join it met layers without tensors, and we raised."""
    subject = subject_of("", Keyless)
    for program in ("rows(0+0)+feed(6)+join+feed(2,1)", "rows(0+0)+feed(6)+reorder(2)+crop(2)+feed(2,1)"):
        assert run_program(subject, program_named(program)).word == WRONG


class Typed(GPT2LMHeadModel):
    """A GPT-2 that leaves the types of tokens out once the cache holds something."""

    fault = ""

    def forward(self, input_ids=None, past_key_values=None, token_type_ids=None, **more):
        if self.fault and past_key_values is not None and past_key_values.get_seq_length():
            token_type_ids = None
        return super().forward(input_ids, past_key_values=past_key_values, token_type_ids=token_type_ids, **more)


@pytest.mark.parametrize("fault", ["", "types"])
def test_token_types_are_fed_and_left_out_types_are_seen(fault):
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    model = Typed(GPT2Config(**sizes, bos_token_id=None, eos_token_id=None)).eval()
    model.fault = fault
    subject = ModelSubject(kv.wrap(model))
    one = run_program(subject, program_named("rows(0+3,fed=types)+feed(6)+feed(3)+feed(2,1)"))
    assert one.word == (WRONG if fault else RIGHT), one.why
    if fault:
        one = shrink(subject, one, 5)
        assert "fed=types" in str(one.program)
        assert "token_type_ids=" in pasted(one)


class BothWays(GPT2LMHeadModel):
    """A GPT-2 whose tokens of type 1 read the next one too where it is of type 1, as the tokens of an image do."""

    def forward(self, input_ids=None, token_type_ids=None, **more):
        out = super().forward(input_ids, token_type_ids=token_type_ids, **more)
        if token_type_ids is not None:
            both = (token_type_ids[:, :-1] * token_type_ids[:, 1:])[..., None]
            out.logits = torch.cat([out.logits[:, :-1] + both * out.logits[:, 1:], out.logits[:, -1:]], 1)
        return out


def test_types_that_are_read_in_both_directions_are_no_use_of_a_cache():
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    for kind, offered in ((GPT2LMHeadModel, True), (BothWays, False)):
        subject = ModelSubject(kv.wrap(kind(GPT2Config(**sizes)).eval()))
        assert ("types" in subject.choices["fed"]) == offered


def test_a_cache_that_holds_more_than_its_layers_takes_no_rows_of_another():
    """MiniMaxCache has its recurrent states beside the layers: joined by our lines alone it raised, as if the model were wrong."""

    class More(DynamicCache):
        def __init__(self):
            super().__init__()
            self.states = []

    class Own(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, use_cache=None, **more):
            past_key_values = More() if past_key_values is None and use_cache is not False else past_key_values
            return super().forward(input_ids, past_key_values=past_key_values, use_cache=use_cache, **more)

    torch.manual_seed(0)
    run = run_program(
        ModelSubject(kv.wrap(Own(LlamaConfig(**SMALL)).eval())), program_named("rows(0+0)+feed(6)+join+feed(2,1)")
    )
    assert run.word == RIGHT, run.why
    assert "rows that join" not in run.uses


class OneRow(LlamaForCausalLM):
    """A Llama whose generate() breaks on several rows, with and without a cache."""

    def prepare_inputs_for_generation(self, input_ids, **kwargs):
        return super().prepare_inputs_for_generation(input_ids, **kwargs) | ({} if len(input_ids) == 1 else {}["rows"])


@pytest.mark.parametrize("how", ["ends", "beams", "static"])
def test_what_breaks_without_a_cache_too_is_no_fault_of_the_cache(how):
    """Before its program ran, generate() was asked which token ends a row; what it raised there was the cache's fault."""
    run = run_program(subject_of("", OneRow), program_named(f"rows(0+0)+generate(3,3,{how})"))
    assert run.word == PLAIN, (run.word, run.why)


def test_a_fault_is_not_shrunk_until_rounding_hides_it(sound):
    """Of a fault that grows with the text the smallest program that is wrong at all was shown."""

    class Grows(LlamaForCausalLM):
        def forward(self, input_ids=None, past_key_values=None, **more):
            held = 0 if past_key_values is None else past_key_values.get_seq_length()
            out = super().forward(input_ids, past_key_values=past_key_values, **more)
            if held:
                out.logits = out.logits * (1 + torch.arange(out.logits.shape[-1]) % 2 * 10.0 ** (held / 2 - 8))
            return out

    subject = subject_of("", Grows)
    one = run_program(subject, program_named("rows(0)+feed(11)+feed(1)"))
    small = shrink(subject, one, 5)
    assert one.wrong.error > 1e-3
    assert subject.limit < 1e-6 < small.wrong.error
    assert small.program.columns < one.program.columns


def test_other_types_are_another_text(sound):
    """What is right with types is no longer what is right without: each has its own plain forwards."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.2}
    subject = ModelSubject(kv.wrap(GPT2LMHeadModel(GPT2Config(**sizes)).eval()))
    plain = subject.alone([7, 8, 9])
    with subject.called_as(Rows((0,), fed="types")):
        assert apart(subject.alone([7, 8, 9]), plain) > 1e-3
    assert torch.equal(subject.alone([7, 8, 9]), plain)


def test_what_a_model_does_not_offer_is_refused_in_a_sentence(sound):
    run = run_program(sound, program_named("rows(0,fed=types)+feed(6)"))
    assert (run.word, run.why) == (REFUSED, "this model does not offer rows(0,fed=types)")
    assert "offloaded" not in sound.caches


def test_a_tree_behind_pads_that_were_counted_is_left_out(sound):
    """Given the mask alone a forward numbers columns, and the tree numbers tokens: a sound model was said to be wrong."""
    run = run_program(sound, program_named("rows(0+3,told=mask_alone)+feed(6)+tree(2+3)+feed(2,1)"))
    assert run.word == RIGHT, run.why
    assert not any("several ways" in use for use in run.uses)


def test_every_choice_has_a_first_program():
    """What is offered is tried in every audit, at least once each."""
    rows = [program_named(text).rows for text in FIRST]
    for name, choices in {"told": MASKS, "fed": FED, "asks": set(ASKS) - {"hidden"}, "attention": ATTENTION}.items():
        assert set(choices) <= {getattr(one, name) for one in rows}
    words = {str(type(step).__name__).lower() for text in FIRST for step in program_named(text).steps}
    assert set(OPERATIONS) - words <= {"draft", "join"}
