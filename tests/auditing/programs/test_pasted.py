"""The pasted lines of a wrong program: the number that they print is the verdict's, and a model without the fault prints rounding."""

from __future__ import annotations

import contextlib
import copy
import io

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvinterp as kv
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import WRONG
from kvinterp.auditing.programs.pasted import pasted
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.search import FIRST
from kvinterp.auditing.uses import uses_of

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip
WITHOUT = ("uncached", "spoil", "pack(", "flex_attention")
"""What no fault of a cache changes, and a kernel that takes long."""


class Other(LlamaForCausalLM):
    """Reads other tokens once its cache holds so many positions."""

    begins = 1

    def forward(
        self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, inputs_embeds=None,
        use_cache=None, logits_to_keep=0, **more,
    ):  # fmt: skip
        if past_key_values is not None and past_key_values.get_seq_length() >= self.begins:
            input_ids = None if input_ids is None else (input_ids + 1) % 99
            inputs_embeds = None if inputs_embeds is None else inputs_embeds.roll(1, -1)
        return super().forward(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache=use_cache,
            logits_to_keep=logits_to_keep, **more,
        )  # fmt: skip


class Growing(LlamaForCausalLM):
    """On a filled cache what it gives is off by more from column to column."""

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **more):
        filled = past_key_values is not None and past_key_values.get_seq_length() > 0
        out = super().forward(input_ids, attention_mask, position_ids, past_key_values, **more)
        columns = torch.arange(1.0, out.logits.shape[1] + 1)[:, None].to(out.logits)
        out.logits = out.logits * (1 + 1e-3 * columns * (out.logits > 0)) if filled else out.logits
        return out


def made(begins: int, kind: type = Other) -> ModelSubject:
    torch.manual_seed(0)
    model = kind(LlamaConfig(**SMALL)).eval()
    model.begins = begins
    return ModelSubject(kv.wrap(model))


def printed(lines: str, model: torch.nn.Module) -> str:
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(lines, {"model": copy.deepcopy(model)})
    return said.getvalue().strip()


@pytest.mark.parametrize(
    ("text", "begins"),
    [
        *(
            pytest.param(text, 1, marks=[pytest.mark.long] * ("compile(" in text))
            for text in FIRST
            if not any(word in text for word in WITHOUT)
        ),
        # Behind tokens that were generated the lines copy none of these.
        ("rows(0)+generate(4,3)+feed(2,1)", 6),
        ("rows(0+2)+generate(4,3)+feed(3)+generate(2,3)", 9),
        ("rows(0)+generate(4,3)+crop(2)+feed(3)", 3),
        ("rows(0+1)+generate(4,2)+reorder(1+0)+feed(2)", 5),
        ("rows(0)+generate(4,3)+fork(2)+feed(2)+generate(2,2,new)", 8),
        ("rows(0)+generate(4,3)+generate(2,6,beams)", 8),
        ("rows(0+0)+generate(4,3)+repeat(2)+feed(2)", 6),
    ],
)
def test_the_lines_print_the_number_of_the_verdict_and_rounding_without_the_fault(text, begins):
    """Beams were read by the returned row where the verdict reads `beam_indices`: 1.11 beside 0.0039, on sound models too."""
    subject = made(begins)
    run = Run(subject, program_named(text))
    run.word, run.why = run.run()
    if "does not offer" in run.why:
        pytest.skip(run.why)
    assert run.word == WRONG, (run.word, run.why)
    lines = pasted(run)
    assert lines, run.why
    assert printed(lines, subject.given.model) == f"{run.wrong.error:.3g}"
    assert f"off by {run.wrong.error:.3g} of" in str(run.wrong)
    subject.given.model.begins = 1_000
    try:
        assert float(printed(lines, subject.given.model)) < 1e-6
    finally:
        subject.given.model.begins = begins


def test_the_largest_error_is_shown_and_the_number_is_the_verdicts():
    """An error that grows with the column was withheld: its first wrong column showed less than half of its largest."""
    model = made(0, Growing).given.model
    shown = [check for check in uses_of(kv.wrap(model), programs=12) if check.status == WRONG]
    assert shown
    for check in shown:
        said = printed(check.lines, model)
        assert f"off by {said} of" in check.detail
        assert f"{check.error:.3g}" == said


@pytest.mark.parametrize("kind", ["hooked", "bridge"])
@pytest.mark.parametrize("text", ["rows(0)+generate(4,3)", "rows(0+0)+feed(4)+request(3)+feed(2,1)"])
def test_the_lines_of_transformer_lens_make_its_cache_and_hear_its_generate(kind, text):
    """A prompt was fed without a cache, so that what followed saw nothing of it, and generate() had no lines."""
    adapter, faulty = kv.load_model("zoo:gqa2-mini", kind=kind, dtype="float32"), []
    subject = ModelSubject(adapter)
    hook = "blocks.1.attn.hook_z"
    for model in (adapter.model, subject.model):
        model.hook_dict[hook].add_hook(lambda z, hook: z * (1.02 if z.shape[1] == 1 and faulty else 1.0))
    faulty.append("a decode step")
    run = Run(subject, program_named(text))
    run.word, run.why = run.run()
    assert run.word == WRONG, run.why
    lines = pasted(run)
    assert printed(lines, adapter.model) == f"{run.wrong.error:.3g}"
    faulty.clear()
    assert float(printed(lines, adapter.model)) < 1e-5


def test_a_fault_that_needs_an_earlier_request_prints_that_request_too():
    """A prefix cache handed out by reference: whoever pastes the program alone, into a new process, sees nothing."""
    weights = torch.randn(50, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    head = torch.randn(16, 50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def made(fault):
        stored = {}

        def step(ids, cache):
            key = tuple(map(tuple, ids.tolist()))
            if cache is None and key in stored and fault:
                return stored[key]
            state, count = cache or (torch.zeros(len(ids), 1, 16, dtype=torch.float64), torch.zeros(1, dtype=torch.float64))
            rows = weights[ids].cumsum(1) + state
            logits = (rows / (count + torch.arange(1, ids.shape[1] + 1)[None, :, None])).tanh() @ head
            if cache is None:
                stored[key] = logits, (rows[:, -1:].clone(), count + ids.shape[1])
                return stored[key]
            # The sum is kept in place.
            state.copy_(rows[:, -1:])
            count.add_(ids.shape[1])
            return logits, cache

        return step

    def full(ids):
        return (weights[ids].cumsum(1) / torch.arange(1, ids.shape[1] + 1)[None, :, None]).tanh() @ head

    verdict = kv.audit(full=full, step=made("fault"))
    (check,) = (check for check in verdict.checks if check.status == WRONG)
    assert check.name == "the same request again"
    assert "+again+" in check.program
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(check.lines, {"full": full, "step": made("fault")})
    assert f"off by {said.getvalue().strip()} of" in check.detail, "in a process that has served nothing yet"
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        exec(check.lines, {"full": full, "step": made("")})
    assert float(said.getvalue()) < 1e-12
    assert kv.audit(full=full, step=made("")).exit_code == 0


def test_a_forward_without_a_cache_that_is_wrong_has_lines_too():
    """The reference was off and the cache was not: a sentence said so, and no line showed it."""

    class Uncached(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, position_ids=None, use_cache=None, **more):
            if use_cache is False and attention_mask is not None:
                attention_mask = torch.ones_like(attention_mask)
            return super().forward(input_ids, attention_mask, position_ids, use_cache=use_cache, **more)

    subject = made(0, Uncached)
    run = Run(subject, program_named("rows(0+4)+feed(9)+feed(2,1)"))
    run.word, run.why = run.run()
    assert run.why.startswith("without a cache row 1 is off by")
    assert printed(pasted(run), subject.given.model) == f"{run.wrong.error:.3g}"
