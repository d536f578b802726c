"""Positions: behind pads, in a batch, after a crop, in chunks."""

from __future__ import annotations

import torch

from plans_planted.fault import Fault, named
from plans_planted.tools import Now, attending, batched, decode, many, told


def _moved(by, condition=lambda: True):
    """Moves the positions that are given, by a number or by what the forward says."""

    def change(given):
        at = given.get("position_ids")
        if at is None or not condition():
            return {}
        return {"position_ids": (at + (by() if callable(by) else by)).clamp(min=0)}

    return told(change)


def _own(condition=lambda: True, by=0):
    """Positions made by the model: as if none were given, or as its own counter has them."""

    def change(given):
        if not condition():
            return {}
        at = Now.past + torch.arange(Now.new) + by
        return {"position_ids": at[None].expand(Now.batch, -1)}

    return told(change)


def _of_row(which):
    def change(given):
        at = given.get("position_ids")
        return {} if at is None or not batched() else {"position_ids": which(at).expand(Now.batch, -1)}

    return told(change)


def _counter(forget):
    """A position counter on the cache, which a crop does not take back."""

    def change(given):
        cache = given.get("past_key_values")
        if cache is None:
            return {}
        seen = getattr(cache, "counted", 0)
        cache.counted = seen + Now.new
        off = seen - Now.past
        return {"position_ids": (seen + torch.arange(Now.new))[None]} if off > 0 and forget() else {}

    return told(change)


def _turned(by, condition):
    """Turns the rotation that one layer is given by so many positions: its cosines and sines are another row's."""

    def change(given):
        cos, sin = given["position_embeddings"]
        return {"position_embeddings": (cos.roll(by, 1), sin.roll(by, 1))} if condition() else {}

    return attending(1, change)


LEFT, RIGHT = "padded(left,5)", "padded(right,5)"
FAULTS = named(
    Fault("positions count the pads: gpt2", LEFT, _own(), 0, "gpt2"),
    Fault("positions count the pads: opt", LEFT, _own(), 0, "opt"),
    Fault("positions count the pads: biogpt", LEFT, _own(), 0, "biogpt"),
    Fault("positions count the pads in decode", LEFT, _own(decode), 0, "mistral"),
    Fault("positions count the pads in decode: gpt_neox", LEFT, _own(decode), 0, "gpt_neox"),
    Fault("positions count the pads in the prefill", LEFT, _own(lambda: not Now.past), 0, "qwen2"),
    Fault("positions count the pads on the right", RIGHT, _own(decode), 0),
    Fault("positions count the pads on the right: gpt2", RIGHT, _own(decode), 0, "gpt2"),
    Fault("positions one too early behind pads", LEFT, _moved(-1, lambda: Now.padded() and decode()), 0, "gpt2"),
    Fault("positions one too late behind pads", RIGHT, _moved(1, lambda: Now.padded() and decode()), 0, "phi"),
    Fault("positions start anew in decode behind pads", LEFT, _moved(lambda: -9, lambda: Now.padded() and decode()), 0),
    Fault(
        "positions stand still behind pads",
        LEFT,
        _moved(lambda: -(Now.past - 13), lambda: Now.padded() and decode()),
        0,
    ),
    Fault("positions of the first row for all", "batched(4)", _of_row(lambda at: at[:1]), 0),
    Fault("positions of the first row for all: gpt2", "batched(4)", _of_row(lambda at: at[:1]), 0, "gpt2"),
    Fault(
        "positions of the row with most pads for all",
        "batched(8)",
        _of_row(lambda at: at.amin(0, keepdim=True)),
        0,
        "qwen2",
    ),
    Fault("a counter of positions that a crop leaves: prefix", "forked(4)", _counter(lambda: True), 0),
    Fault("a counter of positions that a crop leaves: drafts", "verified(3)", _counter(lambda: True), 0, "gpt2"),
    Fault("a counter of positions that a crop leaves: any draft", "verified(3)", _counter(lambda: True), 0, "mistral"),
    Fault("positions of a rest start at 0", "forked(4)", _own(many, -4), 0, "gpt2"),
    Fault(
        "positions of a chunk start at 0",
        "chunked(4)",
        told(lambda _: {"position_ids": torch.arange(Now.new)[None]} if many() else {}),
        0,
    ),
    Fault("the last row of a chunk is turned with the first's angle", "chunked(4)", _turned(1, many), 1),
    Fault("drafts are turned with one another's angle", "verified(3)", _turned(-1, many), 1, "qwen3"),
    Fault(
        "a padded prompt is turned a row too far in one layer", LEFT, _turned(1, lambda: Now.padded() and not Now.past), 1
    ),
)
