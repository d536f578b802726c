"""Each operation of a program: right on a sound model, and wrong where a fault is planted that its own use of the cache shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import kvinterp as kv
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import OPERATIONS, program_named
from kvinterp.auditing.programs.outcome import RIGHT, WRONG
from kvinterp.auditing.programs.search import run_program

SMALL = {
    "vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "initializer_range": 0.15, "pad_token_id": 0, "eos_token_id": None,
}  # fmt: skip


class Planted(LlamaForCausalLM):
    """A Llama whose forward shifts its newest positions, or goes wrong otherwise, where a use asks for it."""

    fault = ""
    before: Any = None

    def forward(self, input_ids=None, attention_mask=None, position_ids=None, past_key_values=None, **more):
        filled = 0 if past_key_values is None else past_key_values.get_seq_length()
        rows, width = input_ids.shape
        after = torch.arange(width)[None].expand(rows, -1) + filled
        cached = more.get("use_cache") is not False
        shifted = {
            "feed": filled and width > 1,
            "generate": filled and position_ids is not None,
            "compile": torch.compiler.is_compiling(),
            # A request that came in between, or this one before, left something on the model.
            "request": filled and self.before is not None and self.before[1] == 5,
            "again": not filled and cached and self.before is not None and torch.equal(input_ids, self.before[0]),
            "join": filled and self.before is not None and rows > self.before[2],
        }
        if shifted.get(self.fault):
            position_ids = after + 1
        if self.fault == "pack" and position_ids is not None and bool((position_ids.diff() < 0).any()):
            position_ids = after
        if self.fault == "tree" and attention_mask is not None and attention_mask.dim() == 4 and cached:
            position_ids = after
        if not filled and cached and self.fault in ("request", "again", "join"):
            self.before = input_ids, width, rows
        if self.fault == "spoil" and past_key_values is not None:
            past_key_values.tokens = torch.cat([getattr(past_key_values, "tokens", input_ids[:, :0]), input_ids], 1)
            out = super().forward(input_ids, past_key_values=past_key_values, **more)
            out.logits = super().forward(past_key_values.tokens, use_cache=False).logits[:, -width:]
            return out
        return super().forward(input_ids, attention_mask, position_ids, past_key_values, **more)


def stays(cache: DynamicCache, *given: Any) -> None:
    """Nothing is done."""


def tiled(cache: DynamicCache, times: int) -> None:
    """The rows one after the other, and that again, instead of each row so often."""
    for layer in cache.layers:
        layer.keys, layer.values = (held.repeat(times, 1, 1, 1) for held in (layer.keys, layer.values))


def shared(cache: DynamicCache, known: Any) -> DynamicCache:
    """A copy that holds the same layers."""
    twin = DynamicCache()
    twin.layers = cache.layers
    return twin


PROGRAMS = {
    "feed": "rows(0)+feed(6)+feed(3)",
    "crop": "rows(0)+feed(6)+feed(3,1)+crop(2)+feed(2,1)",
    "draft": "rows(0)+feed(6)+draft(3)+draft(3)+draft(3)+feed(2,1)",
    "reorder": "rows(0+0+0)+feed(6)+reorder(2+0+1)+feed(2,1)",
    "select": "rows(0+0+0)+feed(6)+select(2+0+1)+feed(2,1)",
    "repeat": "rows(0+0)+feed(6)+repeat(2)+feed(2,1)",
    "join": "rows(0)+feed(6)+join()+feed(2,1)",
    "fork": "rows(0)+feed(6)+fork(2)+feed(2,1)",
    "request": "rows(0)+feed(6)+request(5)+feed(2,1)",
    "again": "rows(0)+feed(6)+again()+feed(6)+feed(2,1)",
    "reset": "rows(0)+reset(7)+feed(6)+feed(2,1)",
    "generate": "rows(0)+generate(6,3)",
    "compile": "rows(0)+feed(6)+compile(eager)+feed(2,1)",
    "pack": "rows(0)+pack(5+3)+feed(2)",
    "tree": "rows(0)+feed(6)+tree(2+3)+feed(2,1)",
    "spoil": "rows(0)+feed(6)+spoil()+feed(2,1)",
}
METHODS: dict[str, tuple[str, Callable[..., Any]]] = {
    "crop": ("crop", stays),
    "draft": ("crop", stays),
    "reorder": ("reorder_cache", stays),
    "select": ("batch_select_indices", stays),
    "repeat": ("batch_repeat_interleave", tiled),
    "fork": ("__deepcopy__", shared),
    "reset": ("reset", stays),
}
"""Of a cache rather than of the model: which of its methods does what instead."""


def planted(fault: str) -> ModelSubject:
    torch.manual_seed(0)
    model = Planted(LlamaConfig(**SMALL)).eval()
    subject = ModelSubject(kv.wrap(model))
    subject.model.fault = fault
    return subject


def test_every_operation_has_a_program_here():
    assert set(PROGRAMS) == set(OPERATIONS)


@pytest.mark.parametrize("operation", PROGRAMS)
def test_an_operation_is_right_on_a_sound_model_and_wrong_where_it_is_planted(operation, monkeypatch):
    sound = run_program(planted(""), program_named(PROGRAMS[operation]))
    assert (sound.word, sound.why) == (RIGHT, "")
    assert sound.uses
    if operation in METHODS:
        monkeypatch.setattr(DynamicCache, *METHODS[operation], raising=False)
    faulty = run_program(planted(operation), program_named(PROGRAMS[operation]))
    assert faulty.word == WRONG, faulty.why
    assert "raises" not in faulty.why


@pytest.mark.parametrize(
    "program", ["rows(2)+feed(1)+spoil()", "rows(2)+feed(2)+spoil()+feed(1)", "rows(1)+feed(2)+spoil()"]
)
def test_a_cache_that_holds_pads_alone_need_not_be_read(program):
    """A shrunk program said of a sound cache that it was not read."""
    assert run_program(planted(""), program_named(program)).word != WRONG
