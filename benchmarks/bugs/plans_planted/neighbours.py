"""What others in the batch may not change: rows, scales, choices of experts, states."""

from __future__ import annotations

import torch
from bank.planting import around, blocks

from plans_planted.fault import Fault, named
from plans_planted.tools import (
    Now,
    attention,
    batched,
    decode,
    embedding,
    head,
    mlp,
    read,
    returned,
    stored,
    then,
    told,
    watched,
    when,
)


def _keys(change):
    return lambda keys, values: (change(keys), values)


def _values(change):
    return lambda keys, values: (keys, change(values))


def _prefill():
    return batched() and not Now.past


def _decode():
    return batched() and decode()


def _neighbour(tensor):
    return tensor.roll(1, 0)


def _one_head(tensor):
    return torch.cat([tensor[:, :1].roll(1, 0), tensor[:, 1:]], 1)


def _gridded(tensor):
    """On a grid of 8 bits whose step is that of the largest number of the whole batch."""
    step = tensor.abs().amax() / 127
    return (tensor / step).round() * step


def _newest_lost(tensor):
    """The newest row is written a row too far, so that it is not there yet."""
    return torch.cat([tensor[:, :, :-1], tensor[:, :, -2:-1]], 2)


def _joined(condition, change):
    """From when on another request has joined: the batch is larger than it was."""

    def grown():
        return condition() and Now.grown

    def note(given):
        cache = given.get("past_key_values")
        Now.grown = False
        if cache is not None:
            smallest = min(getattr(cache, "smallest", Now.batch), Now.batch)
            cache.smallest = smallest
            Now.grown = Now.batch > smallest
        return {}

    return then(told(note), read(0, when(grown, change)))


def _narrow(dtype):
    return lambda keys, values: (keys.to(dtype).to(keys.dtype), values.to(dtype).to(values.dtype))


def _routed(layer, change):
    """What the router of a layer computes with, ``[batch * position, width]``."""

    def plant(model):
        router = blocks(model)[layer].mlp.gate
        around(router, lambda _, forward, args, given: forward(change(args[0]), *args[1:], **given))
        return watched(model)

    return plant


def _unpadded_rows(hidden):
    """Rows counted as if there were no pads: each is routed as the one so many before it."""
    if not Now.padded() or Now.past:
        return hidden
    rows = hidden.reshape(Now.batch, Now.new, -1)
    moved = [row.roll(-int(pads), 0) for row, pads in zip(rows, Now.pads, strict=True)]
    return torch.stack(moved).reshape(hidden.shape)


def _overflown(made):
    """Each expert takes half of the batch; who comes later gets nothing."""
    kept = made.clone()
    kept[len(made) // 2 :] = 0
    return kept


def _mean_of_batch(made):
    return made + 0.01 * made.mean(0, keepdim=True)


def _pads_seen(made):
    """The pads' own outputs are added to the first token behind them."""
    if not Now.padded() or Now.past or not bool(Now.pads[0]):
        return made
    made = made.clone()
    made[0, int(Now.pads[0])] += 0.01 * made[0, 0]
    return made


def _rescaled(by):
    return lambda made: made * by


MOE = ("qwen3_moe", "mixtral", "olmoe")
FAULTS = named(
    Fault("a row reads its neighbour's values", "batched(4)", read(1, when(batched, _values(_neighbour))), 1),
    Fault("a row reads its neighbour's keys", "batched(4)", read(0, when(batched, _keys(_neighbour))), 0, "gpt2"),
    Fault(
        "a row reads its neighbour's values in decode",
        "batched(8)",
        read(1, when(_decode, _values(_neighbour))),
        1,
        "qwen2",
    ),
    Fault("a row reads its neighbour's keys in the prefill", "batched(4)", read(1, when(_prefill, _keys(_neighbour))), 1),
    Fault("one head reads its neighbour's values", "batched(4)", read(1, when(batched, _values(_one_head))), 1, "mistral"),
    Fault(
        "a row's keys are stored in its neighbour's place",
        "batched(4)",
        stored(1, when(_decode, _keys(_neighbour))),
        1,
        "qwen3",
    ),
    Fault("values on a grid of the whole batch", "batched(4)", stored(1, when(batched, _values(_gridded))), 1),
    Fault("keys on a grid of the whole batch", "batched(8)", stored(0, when(batched, _keys(_gridded))), 0, "opt"),
    Fault("the newest row of a batch is not there yet", "batched(4)", read(1, when(_decode, _values(_newest_lost))), 1),
    Fault("the logits of the next row", "batched(4)", returned(head, when(batched, _neighbour)), 2),
    Fault("the logits of the next row in decode", "batched(8)", returned(head, when(_decode, _neighbour)), 2, "gpt_neox"),
    Fault("embeddings of the next row", "batched(4)", returned(embedding, when(_decode, _neighbour)), 0),
    Fault(
        "a feed-forward that leaks the mean of the batch", "batched(4)", returned(mlp(1), when(batched, _mean_of_batch)), 1
    ),
    Fault(
        "an attention scaled by the batch", "batched(8)", returned(attention(0), when(batched, _rescaled(1.001))), 0, "phi"
    ),
    Fault(
        "a cache that becomes float32 when a request joins",
        "batched(4)",
        _joined(lambda: True, _narrow(torch.float32)),
        0,
        "gpt2",
    ),
    Fault(
        "a cache that becomes bfloat16 when a request joins",
        "batched(4)",
        _joined(lambda: True, _narrow(torch.bfloat16)),
        0,
    ),
    Fault("experts that overflow in a batch", "batched(4)", returned(mlp(1), when(batched, _overflown)), 1, "mixtral"),
    Fault(
        "experts that overflow in a batch's prefill", "batched(4)", returned(mlp(0), when(_prefill, _overflown)), 0, "olmoe"
    ),
    Fault("a router computed from padded rows", "padded(left,5)", _routed(1, _unpadded_rows), 1, "qwen3_moe"),
    Fault("a router computed from padded rows: mixtral", "padded(left,5)", _routed(0, _unpadded_rows), 0, "mixtral"),
    Fault(
        "a router that sees its neighbour",
        "batched(4)",
        _routed(1, lambda hidden: hidden.roll(1, 0) if batched() else hidden),
        1,
        "olmoe",
    ),
    Fault("a pad's output is added to the first token", "padded(left,5)", returned(mlp(0), _pads_seen), 0),
    Fault("beams leak the mean of the batch", "beams(3)", returned(mlp(1), when(_decode, _mean_of_batch)), 1, "qwen2"),
)
