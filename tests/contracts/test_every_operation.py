"""Every operation of a program runs through the one interpreter, on every kind of thing that programs run on.

An operation is one file in ``auditing/programs/operations``; this test finds it there, so that a new one which works on one kind
of subject alone, and breaks on another instead of saying that it is not offered, fails here.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch
from transformers import BartConfig, BartForConditionalGeneration, DynamicCache

import kvinterp as kv
from kvinterp.auditing.own_dtype import distance_of
from kvinterp.auditing.programs.function_subject import FunctionSubject
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import OPERATIONS
from kvinterp.auditing.programs.operations.compile import Compile
from kvinterp.auditing.programs.operations.feed import Feed
from kvinterp.auditing.programs.operations.fork import Reset
from kvinterp.auditing.programs.operations.rows import Join
from kvinterp.auditing.programs.outcome import REFUSED, RIGHT
from kvinterp.auditing.programs.program import Operation, Program, Rows
from kvinterp.auditing.programs.search import run_program
from kvinterp.auditing.programs.sourced import EncoderDecoderSubject
from kvinterp.auditing.programs.subject import Subject
from kvinterp.models.cache_kinds import cache_named

DRAWS = 6


def native(kind: str = "native", cache: type | None = None) -> Subject:
    adapter = kv.load_model("zoo:gqa2-mini", dtype="float64", kind=kind)
    return ModelSubject(adapter, kind=None if cache is None else cache_named(cache))


def functions() -> Subject:
    model = kv.load_model("zoo:gqa2-mini", dtype="float64", kind="native").model

    def step(ids, cache):
        out = model(ids, past_key_values=cache, use_cache=True)
        return out.logits, out.past_key_values

    return FunctionSubject(lambda ids: model(ids, use_cache=False).logits, step)


def encoder_decoder() -> Subject:
    torch.manual_seed(0)
    sizes = {"vocab_size": 97, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "init_std": 0.3}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    config = BartConfig(**sizes, **heads, max_position_embeddings=64, forced_eos_token_id=None)
    return EncoderDecoderSubject(BartForConditionalGeneration(config).eval())


SUBJECTS: dict[str, Callable[[], Subject]] = {
    "native": native,
    "native on a given cache": lambda: native(cache=DynamicCache),
    "hooked": lambda: native("hooked"),
    "bridge": lambda: native("bridge"),
    "two functions": functions,
    "encoder-decoder": encoder_decoder,
}
EVERYWHERE = {"feed", "fork", "request", "again"}
"""What needs no method of a library's cache, and no way of calling a model but with ids."""


def made(kind: type[Operation], draw: random.Random, rows: int, subject: Subject) -> Operation:
    """One of this kind, drawn as an audit draws it; those that are not drawn have no number."""
    return {Compile: Compile("eager"), Join: Join()}.get(kind) or kind.sample(draw, rows, subject, "no")


@pytest.mark.parametrize("name", SUBJECTS)
def test_every_operation_runs_or_says_that_it_is_not_offered(name, monkeypatch):
    subject, done = SUBJECTS[name](), set()
    for operation, kind in OPERATIONS.items():
        do = kind.do

        def counted(step, run, operation=operation, do=do):
            done.add(operation)
            do(step, run)

        monkeypatch.setattr(kind, "do", counted)
        drawn = dict[str, Program]()
        for n in range(DRAWS):
            draw, rows = random.Random(n), 1 + n % 2 * (subject.rows > 1)
            before = () if kind is Reset else (Feed(6),)  # Only at the beginning a cache is empty.
            program = Program(Rows((0,) * rows), (*before, made(kind, draw, rows, subject), Feed(2, 1)))
            drawn[str(program)] = program
        for program in drawn.values():  # One that is drawn twice computes the same twice.
            run = run_program(subject, program)
            assert run.word in (RIGHT, REFUSED), (str(program), run.why)
            assert run.word == RIGHT or run.why
        monkeypatch.setattr(kind, "do", do)
    assert done >= (set(OPERATIONS) if name == "native" else EVERYWHERE)


@pytest.mark.hooked
@pytest.mark.parametrize("name", SUBJECTS)
def test_what_is_not_judged_is_heard_on_every_kind(name):
    """The figures of --calls come from the same interpreter."""
    subject = SUBJECTS[name]()
    found = distance_of(subject, Program(Rows((0,) * min(2, subject.rows)), (Feed(6), Feed(3, 1))))
    assert (found.word, found.why, found.dtype) == (RIGHT, "", "float64")
    assert found.tokens == 9 * min(2, subject.rows)
    assert found.logits < 1e-12 > found.null
    assert found.changed == 0
