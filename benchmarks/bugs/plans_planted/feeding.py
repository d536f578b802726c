"""What the loop around the model does: generate() and assisted decoding, chunks, static room, windows, drafts, compiled code."""

from __future__ import annotations

import functools

import torch
from bank.planting import edited

from plans_planted.fault import Fault, named
from plans_planted.tools import (
    Now,
    attention,
    decode,
    embedding,
    head,
    many,
    mlp,
    read,
    returned,
    stored,
    told,
    when,
)  # fmt: skip


def prepared(change):
    """Changes what ``generate()`` gives a forward."""

    def plant(model):
        base = type(model)

        @functools.wraps(base.prepare_inputs_for_generation)
        def prepare(self, *args, **given):
            made = base.prepare_inputs_for_generation(self, *args, **given)
            # A fault of the cache: without one, and where embeddings are given, nothing is changed.
            cached = made.get("past_key_values") is not None and made.get("input_ids") is not None
            return made | change(made) if cached else made

        own = {"prepare_inputs_for_generation": prepare, "__module__": base.__module__}
        model.__class__ = type(base.__name__, (base,), own)
        return model

    return plant


def _positions(by, decode_only=True):
    def change(made):
        ids, at = made["input_ids"], made.get("position_ids")
        if decode_only and ids.shape[1] > 2:
            return {}
        if at is None:
            past = int(made["past_key_values"].get_seq_length())
            at = past + torch.arange(ids.shape[1])[None]
        return {"position_ids": at + by}

    return prepared(change)


def _first_dropped(made):
    mask = made.get("attention_mask")
    if mask is None:
        mask = torch.ones(1, int(made["past_key_values"].get_seq_length()) + made["input_ids"].shape[1], dtype=torch.long)
    return {"attention_mask": edited(mask, lambda m: m[:, :1].zero_())} if mask is not None and mask.dim() == 2 else {}


def _other_token(made):
    """In decode the token before the newest is fed."""
    ids = made["input_ids"]
    return {"input_ids": ids + 1 if ids.shape[1] == 1 else ids}


def _filled(value):
    """The room of a static cache is not cleared."""

    def plant(model):
        def change(given):
            cache = given.get("past_key_values")
            if Now.static and not Now.past:
                for layer in cache.layers:
                    own = type(layer).lazy_initialization

                    def begin(keys, values, layer=layer, own=own):
                        own(layer, keys, values)
                        layer.keys.fill_(value), layer.values.fill_(value)

                    layer.lazy_initialization = begin
            return {}

        return told(change)(model)

    return plant


def _slots(by):
    """A static cache of one layer writes so many slots too far left, once there are pads."""

    def change(given):
        cache = given.get("past_key_values")
        if Now.static and Now.past and Now.padded():
            layer = cache.layers[1]
            own = type(layer).update

            def update(keys, values, *more, **named):
                made = own(layer, keys, values, *more, **named)
                at = int(layer.cumulative_length) - 1
                for tensor in (layer.keys, layer.values):
                    tensor[:, :, at - by] = tensor[:, :, at]
                return made

            layer.update = update
        return {}

    return told(change)


def _static(change):
    return when(lambda: Now.static, change)


def _shifted(count):
    """The newest rows of what a chunk appends are in each other's place."""
    return lambda keys, values: (keys, torch.cat([values[:, :, :-count], values[:, :, -count:].flip(2)], 2))


def _last_lost(keys, values):
    """The last row of a chunk is not written."""
    return keys, torch.cat([values[:, :, :-1], values[:, :, -2:-1]], 2)


def _over_first(keys, values):
    """A chunk is read from where the cache begins."""
    return keys, torch.cat([values[:, :, Now.past :], values[:, :, : Now.past]], 2)


def _windowed(by):
    """A window counted in rows of which the pads are some: the oldest tokens are let go of too early."""

    def change(keys, values):
        if not Now.padded() or not decode():
            return keys, values
        values = values.clone()
        values[:, :, 5 : 5 + by] = 0
        return keys, values

    return change


def _ring(keys, values):
    """A full window wraps at the wrong row once several rows came at once."""
    return (keys.roll(1, 2), values) if many() else (keys, values)


def _rows_exchanged(made):
    return made.roll(1, 1)


LEFT = "padded(left,5)"
FAULTS = named(
    Fault("generate() numbers what it decodes one too late", "generate", _positions(1), 0),
    Fault("generate() numbers what it decodes one too late: gpt2", "generate", _positions(1), 0, "gpt2"),
    Fault("generate() numbers what it decodes one too early", "generate", _positions(-1), 0, "qwen3"),
    Fault("generate() masks the first token", "generate", prepared(_first_dropped), 0),
    Fault("generate() masks the first token: opt", "generate", prepared(_first_dropped), 0, "opt"),
    Fault("generate() feeds another token in decode", "generate", prepared(_other_token), 0, "mistral"),
    Fault("room of a static cache that nobody cleared", "static", _filled(torch.nan), 0),
    Fault("a static cache that writes over an older slot behind pads", "padded(left,5)+static", _slots(5), 1),
    Fault("a static cache read a row too far", "static", read(1, _static(lambda k, v: (k, v.roll(1, 2)))), 1),
    Fault(
        "a static cache whose newest row is not there yet",
        "static",
        read(
            0,
            _static(lambda k, v: (k, edited(v, lambda t: t[:, :, Now.past + Now.new - 1].zero_())) if Now.past else (k, v)),
        ),
        0,
        "gpt2",
    ),
    Fault("a chunk's last row is not written", "chunked(4)", stored(1, when(many, _last_lost)), 1),
    Fault("a chunk's last rows change places", "chunked(4)", stored(1, when(many, _shifted(2))), 1, "qwen2"),
    Fault("a chunk's values are read from where the cache begins", "chunked(3)", read(1, when(many, _over_first)), 1),
    Fault("a chunk's feed-forward is a row off", "chunked(4)", returned(mlp(0), when(many, _rows_exchanged)), 0),
    Fault(
        "a chunk's attention is scaled",
        "chunked(4)",
        returned(attention(1), when(many, lambda made: made * 1.01)),
        1,
        "phi",
    ),
    Fault("a window counts the pads", LEFT, read(1, _windowed(3)), 1, "mistral"),
    Fault("a window wraps at the wrong row behind a prefix", "forked(4)", read(1, _ring), 1, "mistral"),
    Fault("the logits of drafts are a row off", "verified(3)", returned(head, when(many, _rows_exchanged)), 2),
    Fault("drafts' values are read a row off", "verified(3)", read(1, when(many, lambda k, v: (k, v.roll(1, 2)))), 1),
    Fault(
        "accepted drafts are written in each other's place", "verified(3)", stored(0, when(many, _shifted(3))), 0, "gpt2"
    ),
    Fault(
        "embeddings of drafts are a row off", "verified(3)", returned(embedding, when(many, _rows_exchanged)), 0, "qwen2"
    ),
)
