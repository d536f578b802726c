"""How else than plainly a model's forward may be called: asked of its forward without a cache, by
running it so once.

What it refuses, or computes otherwise, is not offered, and no program calls it so.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from kvinterp.auditing.programs.program import ATTENTION, MASKS, Rows
from kvinterp.auditing.programs.subject import apart
from kvinterp.models.transformers_api import flex_uncompiled, looks_for_packed_texts

if TYPE_CHECKING:
    from kvinterp.auditing.programs.model_subject import ModelSubject

MASKED = 8
"""Tokens in front of a text that its mask hides, where it is asked whether attention heeds it."""


def offered_choices(subject: ModelSubject) -> dict[str, tuple[str, ...]]:
    """The choices of :class:`~kvinterp.auditing.programs.program.Rows` that a model offers, by field:
    what its signature has, what it does not refuse, and where it reads the mask.
    """
    # How else a forward is called is the model's own affair, whatever cache it is given.
    if not subject.native or subject.kind is not None:
        return {}
    text = subject.tokens[: min(7, subject.max_columns)]
    takes, ids, known = subject.adapter.takes, subject.tensor([text]), Rows((0,))

    def runs(**choice: Any) -> Tensor | None:
        rows, model_kwargs, given, pads = dataclasses.replace(known, **choice), {}, ids, 0
        if "told" in choice:
            # Behind pads, which a state does not read from such a mask.
            given, pads = subject.tensor([[*text[:2], *text]]), 2
            mask = torch.ones_like(given)
            mask[:, :pads] = 0
            model_kwargs = rows.model_kwargs(mask, given.shape[1], True, takes, subject.offset)
        try:
            with subject.running(), subject.called_as(rows):
                return subject.plain_as_called(given, **model_kwargs)[0, pads:]
        except Exception:  # It does not offer that.
            return None

    def right(made: Tensor | None) -> bool:
        return made is not None and apart(made, subject.alone(text)) <= subject.limit

    found: dict[str, tuple[str, ...]] = {}
    if "attention_mask" in takes and subject.offset is not None:
        found["told"] = tuple(name for name in MASKS if right(runs(told=name)))
    fed = ["embeds"] if "inputs_embeds" in takes and runs(fed="embeds") is not None else []
    if "token_type_ids" in takes and runs(fed="types") is not None:
        fed += ["types"] if _types_are_causal(subject) else []
    asks = [name for name in ("hidden", "attentions") if runs(asks=name) is not None]
    asks += ["last", "some"] if "logits_to_keep" in takes else []
    own = getattr(subject.adapter.config, "_attn_implementation", None)
    kinds = [
        name for name in ATTENTION if name not in ("own", own) and _attends(subject.model, name)
    ]
    return found | {
        "fed": tuple(fed), "asks": tuple(asks), "attention": tuple(name for name in kinds if right(runs(attention=name))),
    }  # fmt: skip


def _types_are_causal(subject: ModelSubject) -> bool:
    """Whether what token types tell of a position is told by what came before it: not so where a run
    of one type is read in both directions, as the tokens of an image are.
    """
    kinds = (
        [t for t in subject.tokens if t % subject.token_types == kind]
        for kind in range(subject.token_types)
    )
    text = [token for kind in kinds for token in kind[:2]][: subject.max_columns]
    with subject.running(), subject.called_as(Rows((0,), fed="types")):
        whole = subject.plain(subject.tensor([text]))[0]
        begins = (subject.plain(subject.tensor([text[:end]]))[0] for end in range(1, len(text)))
        return all(apart(begin, whole[: len(begin)]) <= subject.limit for begin in begins)


def _attends(model: Any, name: str) -> bool:
    """Whether the model's class says that it can be set to this attention."""
    if name == "eager":
        return hasattr(model, "set_attn_implementation")
    return bool(getattr(model, {"sdpa": "_supports_sdpa"}.get(name, "_supports_flex_attn"), False))


def offers_packing(subject: ModelSubject) -> bool:
    """Whether several texts may stand in one row: where every layer attends by a mask, and the
    forward gives positions to what makes transformers' masks.
    """
    if not subject.native or subject.offset is None or not subject.adapter.attention_only:
        return False
    text, pads = subject.tokens[:4], subject.tokens[-MASKED:]
    positions = subject.tensor([range(subject.offset, subject.offset + 4)])
    begun = torch.cat([positions[:, :1].expand(1, len(pads)), positions], 1)
    mask = subject.tensor([[0] * len(pads) + [1] * 4])
    with subject.running():
        if not looks_for_packed_texts(
            lambda: subject.plain(subject.tensor([text]), position_ids=positions)
        ):
            return False
        # An attention that heeds no mask, as one that its user put in, keeps no texts apart.
        padded = subject.plain(
            subject.tensor([[*pads, *text]]), attention_mask=mask, position_ids=begun
        )
    return apart(padded[0, len(pads) :], subject.alone(text)) <= subject.limit


@contextlib.contextmanager
def attention_set(model: Any, name: str) -> Iterator[None]:
    """Runs a transformers model with another attention implementation; flex attention as it is
    where nothing is compiled.
    """
    if name == "own":
        yield
        return
    held = {
        id(config): config
        for part in model.modules()
        if (config := getattr(part, "config", None)) is not None
    }
    key = "_attn_implementation_internal"
    before = [(config, vars(config)[key]) for config in held.values() if key in vars(config)]
    try:
        model.set_attn_implementation(name)
        with flex_uncompiled() if name == "flex_attention" else contextlib.nullcontext():
            yield
    finally:
        for config, value in before:
            vars(config)[key] = value
