"""Rows of the cache: taken back, moved, selected, reused, shared."""

from __future__ import annotations

import torch

from plans_planted.fault import Fault, named
from plans_planted.tools import cached, layers_of


def _crop(change):
    """A crop that is asked for so many rows less, and does otherwise."""

    def crop(cache, own, count):
        before = int(cache.get_seq_length())
        change(cache, own, before + count if count < 0 else count, before)

    return cached(crop=crop)


def _oldest(layer):
    """One layer drops its oldest rows in place of its newest."""

    def change(cache, own, left, before):
        kept = cache.layers[layer].keys, cache.layers[layer].values
        own(left - before)
        cache.layers[layer].keys, cache.layers[layer].values = (tensor[:, :, before - left :] for tensor in kept)

    return _crop(change)


def _after_crop(edit):
    """A crop that leaves what it should, edited."""

    def change(cache, own, left, before):
        own(left - before)
        edit(cache, left)

    return _crop(change)


def _scaled(layer, name, factor, rows=slice(None)):
    def edit(cache, left):
        tensor = getattr(cache.layers[layer], name).clone()
        tensor[:, :, rows] *= factor
        setattr(cache.layers[layer], name, tensor)

    return edit


def _overwritten(layer):
    """The other request shares the rows, and wrote its own over the last of them."""

    def change(cache, own, left, before):
        kept = cache.layers[layer].keys[:, :, left : left + 1].clone()
        own(left - before)
        keys = cache.layers[layer].keys.clone()
        keys[:, :, -1:] = kept
        cache.layers[layer].keys = keys

    return _crop(change)


def _reorder(change):
    return cached(reorder_cache=lambda cache, own, order: change(cache, order))


def _only(names, which=slice(None)):
    def change(cache, order):
        for layer in layers_of(cache)[which]:
            for name in names:
                setattr(layer, name, getattr(layer, name)[order])

    return change


def _newest(cache, order):
    for layer in layers_of(cache):
        for name in ("keys", "values"):
            tensor = getattr(layer, name).clone()
            tensor[:, :, -1] = tensor[order, :, -1]
            setattr(layer, name, tensor)


def _select(change):
    def select(cache, own, rows):
        own(change(rows))

    return cached(batch_select_indices=select)


def _selected(layer, name):
    """One tensor of one layer keeps the first rows, whichever were chosen."""

    def select(cache, own, rows):
        kept = getattr(cache.layers[layer], name)[: len(rows)]
        own(rows)
        setattr(cache.layers[layer], name, kept)

    return cached(batch_select_indices=select)


BOTH = ("keys", "values")
FAULTS = named(
    Fault("a crop that leaves rows", "forked(4)", _crop(lambda *_: None), 0),
    Fault("a crop that leaves rows: gpt2", "forked(4)", _crop(lambda *_: None), 0, "gpt2"),
    Fault("a crop that leaves one row", "forked(4)", _crop(lambda cache, own, left, before: own(left + 1 - before)), 0),
    Fault(
        "a crop that takes one row too many",
        "forked(4)",
        _crop(lambda cache, own, left, before: own(left - 1 - before)),
        0,
        "mistral",
    ),
    Fault("a crop that drops the oldest rows of one layer", "forked(4)", _oldest(1), 1),
    Fault("a crop that drops the oldest rows of one layer: qwen3", "verified(3)", _oldest(0), 0, "qwen3"),
    Fault("rejected drafts stay in the cache", "verified(3)", _crop(lambda *_: None), 0),
    Fault("rejected drafts stay in the cache: gpt2", "verified(3)", _crop(lambda *_: None), 0, "gpt2"),
    Fault(
        "one rejected draft stays in the cache",
        "verified(3)",
        _crop(lambda cache, own, left, before: own(left + 1 - before)),
        0,
        "qwen2",
    ),
    Fault(
        "a rejection takes an accepted row too",
        "verified(3)",
        _crop(lambda cache, own, left, before: own(left - 1 - before)),
        0,
        "phi",
    ),
    Fault("a rejection zeroes the newest row that stays", "verified(3)", _after_crop(_scaled(1, "values", 0, -1)), 1),
    Fault("a stale prefix after an update of one layer's values", "forked(4)", _after_crop(_scaled(1, "values", 0.98)), 1),
    Fault(
        "a stale prefix after an update of one layer's keys", "forked(4)", _after_crop(_scaled(0, "keys", 1.01)), 0, "gpt2"
    ),
    Fault("a prefix in which the other request wrote", "forked(4)", _overwritten(1), 1),
    Fault("a prefix whose first row is lost", "forked(4)", _after_crop(_scaled(0, "values", 0, 0)), 0, "qwen3_moe"),
    Fault("beams stay where they were", "beams(3)", _reorder(lambda *_: None), 0),
    Fault("beams stay where they were: opt", "beams(3)", _reorder(lambda *_: None), 0, "opt"),
    Fault("of beams the keys alone move", "beams(3)", _reorder(_only(("keys",))), 0),
    Fault("of beams the values alone move", "beams(3)", _reorder(_only(("values",))), 0, "gpt2"),
    Fault("of beams one layer stays", "beams(3)", _reorder(_only(BOTH, slice(1))), 1),
    Fault("of beams the first layer stays", "beams(3)", _reorder(_only(BOTH, slice(1, None))), 0, "qwen2"),
    Fault("beams move the other way", "beams(3)", _reorder(lambda cache, order: _only(BOTH)(cache, order.argsort())), 0),
    Fault("beams move their newest row alone", "beams(3)", _reorder(_newest), 0),
    Fault("the first rows are kept, whichever were chosen", "batched(4)", _select(lambda rows: torch.arange(len(rows))), 0),
    Fault("the rows kept are turned", "batched(8)", _select(lambda rows: rows.roll(1)), 0, "gpt2"),
    Fault("the rows kept are one too far", "batched(4)", _select(lambda rows: (rows + 1) % (len(rows) + 1)), 0, "qwen3"),
    Fault("of one layer the first keys are kept", "batched(4)", _selected(1, "keys"), 1),
    Fault("of one layer the first values are kept", "batched(8)", _selected(0, "values"), 0, "mistral"),
)
