"""Prompts of several lengths, as users of TransformerLens give them to its own ``generate()``: as texts, or padded and no mask.

Pads that nothing hides become context, and the shorter text changes: none of it was tried, and the audit passed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

import kvinterp as kv
from kvinterp.auditing.programs import search
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import PLAIN, RIGHT, WRONG
from kvinterp.auditing.programs.search import OF_TRANSFORMER_LENS, run_program
from kvinterp.models.transformer_lens_api import unequal
from support import Case, bare_hooked_transformer

pytestmark = pytest.mark.hooked


def _tokenizer(side: str = "left") -> Any:
    words = Tokenizer(models.WordLevel({f"t{n}": n for n in range(97)}, unk_token="t3"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    names = {"pad_token": "t0", "bos_token": "t1", "eos_token": "t2", "unk_token": "t3"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side=side, **names)


def _model(tokenizer: Any = None, positions: str = "rotary") -> Any:
    model = bare_hooked_transformer(positions)
    model.tokenizer, model.cfg.tokenizer_prepends_bos = tokenizer, False
    return model


def _ran(model: Any, text: str) -> Any:
    with torch.no_grad():
        return run_program(ModelSubject(kv.wrap(model)), program_named(text))


@pytest.mark.parametrize("text", OF_TRANSFORMER_LENS)
@pytest.mark.parametrize("positions", ["rotary", "standard"])
def test_pads_that_it_finds_are_hidden(text: str, positions: str) -> None:
    one = _ran(_model(_tokenizer(), positions), text)
    assert one.word == RIGHT, one.why
    assert any(use.startswith("generate() of") and use.endswith("left padding") for use in one.uses)


@pytest.mark.parametrize("tokenizer", [None, _tokenizer("right")])
def test_pads_that_it_does_not_find_are_context_without_a_cache_too(tokenizer: Any) -> None:
    """Without a tokenizer no token is a pad; and one that pads on the right finds none on the left."""
    one = _ran(_model(tokenizer), OF_TRANSFORMER_LENS[1])
    assert one.word == PLAIN
    assert "generate(use_past_kv_cache=False) is off" in one.why


def test_a_bridge_is_given_them_too(load: Any) -> None:
    """A bridge hides pads where it is told a mask, and where it is told none it looks for none."""
    model = load(Case("llama-gqa", "bridge")).model
    assert _ran(model, "rows(0+4)+generate(9,3)").word == RIGHT
    assert _ran(model, OF_TRANSFORMER_LENS[1]).word == PLAIN


def test_a_cache_that_forgets_the_pads_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    from transformer_lens import HookedTransformer

    own = HookedTransformer.forward

    def forward(self: Any, given: Any, *args: Any, **more: Any) -> Any:
        cache = more.get("past_kv_cache")
        if cache is not None and cache[0].past_keys.shape[1]:
            more["attention_mask"] = torch.ones_like(more["attention_mask"])
            cache.previous_attention_mask = torch.ones_like(cache.previous_attention_mask)
        return own(self, given, *args, **more)

    monkeypatch.setattr(HookedTransformer, "forward", forward)
    one = _ran(_model(_tokenizer()), OF_TRANSFORMER_LENS[0])
    assert one.word == WRONG
    assert "off by" in one.why


def test_texts_are_read_as_the_model_reads_them() -> None:
    texts, rows, pad = unequal(_model(_tokenizer()), [[5, 6], [7, 8, 9]], "texts")
    assert texts == ["t5 t6", "t7 t8 t9"]
    assert (rows, pad) == ([[1, 5, 6], [1, 7, 8, 9]], 0)
    assert unequal(_model(_tokenizer()), [[5, 6]], "padded")[1] == [[1, 6]]
    assert unequal(_model(), [[5, 6]], "padded")[1] == [[5, 6]]


def test_an_audit_tries_them_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """They come behind what is tried first of any model, of which a few stand for all here."""
    monkeypatch.setattr(search, "FIRST", search.FIRST[:3])
    few: dict[str, Any] = {"rungs": ("float32",), "lengths": (5,), "steps": 1, "sweep": "no", "programs": 9}
    said = str(kv.audit(_model(), **few))
    assert "generate() of padded tokens without a mask" in said.partition("off without a cache too: ")[2]
