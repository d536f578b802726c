"""Masks: ignored, moved, of another row, of another shape."""

from __future__ import annotations

import torch

from plans_planted.fault import Fault, named
from plans_planted.tools import Now, attending, batched, decode, many, told


def _mask(change, condition=lambda: True):
    """Changes the mask of tokens, where one is given."""

    def changed(given):
        mask = given.get("attention_mask")
        return {} if mask is None or not condition() else {"attention_mask": change(mask)}

    return told(changed)


def _without(condition=lambda: True):
    """The mask is not looked at; positions are as they were given."""
    return _mask(torch.ones_like, condition)


def _scores(layer, change, condition):
    """Changes the mask of scores, ``[batch, 1, query, key]``, true where a key is seen, that a layer is given."""

    def changed(given):
        mask = given.get("attention_mask")
        if not condition():
            return {}
        if mask is None:
            total = Now.past + Now.new
            mask = torch.ones(1, 1, Now.new, total, dtype=torch.bool).tril(Now.past)
        return {"attention_mask": change(mask)}

    return attending(layer, changed)


def _all(mask):
    return torch.ones_like(mask)


def _top_left(mask):
    """Causal from the first key on, as if the queries were the first of all."""
    return torch.ones_like(mask).tril()


def _extended(given):
    """Made once in the prefill; what follows is taken for pads too."""
    cache, mask = given.get("past_key_values"), given.get("attention_mask")
    if cache is None or mask is None or not Now.padded():
        return {}
    if not Now.past:
        cache.first_mask = mask
        return {}
    first = cache.first_mask
    held = torch.nn.functional.pad(first, (0, mask.shape[1] - first.shape[1] - 1))
    return {"attention_mask": torch.cat([held, first.new_ones(len(first), 1)], 1)} if len(first) == len(mask) else {}


LEFT, RIGHT = "padded(left,5)", "padded(right,5)"
FAULTS = named(
    Fault("the mask is ignored", LEFT, _without(), 0),
    Fault("the mask is ignored: gpt2", LEFT, _without(), 0, "gpt2"),
    Fault("the mask is ignored: opt", RIGHT, _mask(torch.ones_like, decode), 0, "opt"),
    Fault("the mask is ignored in decode", LEFT, _without(decode), 0),
    Fault("the mask is ignored in decode: qwen3_moe", LEFT, _without(decode), 0, "qwen3_moe"),
    Fault("the mask is ignored in decode, on the right", RIGHT, _without(decode), 0, "mistral", {"sliding_window": None}),
    Fault("the mask is ignored in the prefill", LEFT, _without(lambda: not Now.past), 0, "qwen2"),
    Fault("the mask is ignored in one layer", LEFT, _scores(1, _all, lambda: Now.padded() and decode()), 1),
    Fault(
        "the mask is ignored in one layer: gpt_neox",
        LEFT,
        _scores(1, _all, lambda: Now.padded() and decode()),
        1,
        "gpt_neox",
    ),
    Fault("the mask is a row too far left", LEFT, _mask(lambda mask: mask.roll(-1, 1), lambda: Now.padded()), 0),
    Fault(
        "the mask is a row too far right", LEFT, _mask(lambda mask: mask.roll(1, 1), lambda: Now.padded() and decode()), 0
    ),
    Fault("the mask is turned round", RIGHT, _mask(lambda mask: mask.flip(1), lambda: Now.padded() and decode()), 0),
    Fault("the mask of the prefill hides what is decoded", LEFT, told(_extended), 0, "gpt2"),
    Fault("the mask of the first row for all", "batched(4)", _mask(lambda m: m[:1].expand(len(m), -1), batched), 0),
    Fault("the mask of the next row", "batched(4)", _mask(lambda mask: mask.roll(1, 0), batched), 0, "gpt2"),
    Fault(
        "a mask of pads takes the place of the causal one",
        LEFT,
        _scores(0, lambda mask: mask.any(-2, keepdim=True).expand_as(mask), lambda: Now.padded() and not Now.past),
        0,
    ),
    Fault("drafts see one another's future", "verified(3)", _scores(0, _all, many), 0),
    Fault("drafts see one another's future in one layer: gpt2", "verified(3)", _scores(1, _all, many), 1, "gpt2"),
    Fault("a rest behind a prefix is masked from the first key on", "forked(4)", _scores(0, _top_left, many), 0),
    Fault(
        "a rest behind a prefix does not see it",
        "forked(4)",
        _scores(1, lambda mask: mask & (torch.arange(mask.shape[-1]) >= Now.past), many),
        1,
        "qwen3",
    ),
    Fault("a chunk is masked from the first key on", "chunked(4)", _scores(1, _top_left, many), 1),
    Fault("a chunk sees its own future", "chunked(4)", _scores(0, _all, many), 0, "gpt2"),
    Fault(
        "a chunk does not see the one before the last",
        "chunked(3)",
        _scores(1, lambda mask: mask & (torch.arange(mask.shape[-1]) >= Now.past - 3), many),
        1,
    ),
    Fault("empty room of a static cache is seen", "static", _scores(1, _all, lambda: Now.new == 1 and Now.static), 1),
    Fault(
        "empty room of a static cache is seen behind pads",
        "padded(left,5)+static",
        _scores(0, _all, lambda: Now.new == 1 and Now.static and Now.padded()),
        0,
    ),
)
