"""The hash of a model's weights, worked out where they are: as fast as one decode step reads them, and read once."""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor, nn

_ROW = 1 << 12
_PIECE = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Words of 8 bytes that are summed at once: what a processor's cache holds, and what leaves a GPU little to be told."""


def weights_hash(model: nn.Module) -> str:
    """BLAKE2 over names, shapes, dtypes and sums of what a checkpoint of the model holds, 16 hex digits.

    In the sum of a tensor's bytes each word has a weight of its place, so that numbers that change places change it too.
    """
    tensors = {name: tensor.detach() for name, tensor in sorted(model.state_dict().items())}
    known: dict[tuple[object, ...], Tensor] = {}
    keys = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            # Tied weights are one.
            keys[name] = key = tensor.device, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype
            if key not in known:
                known[key] = _sum(tensor)
    sums = list(known.values())
    read = torch.stack([each.to(sums[0].device) for each in sums]).tolist() if sums else []
    found = dict(zip(known, read, strict=True))
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {_order(tensor)} {found[keys[name]] if name in keys else None}"
        for name, tensor in tensors.items()
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _order(tensor: Tensor) -> list[int]:
    """The dimensions as they lie in memory, the innermost last."""
    return sorted((d for d in range(tensor.dim()) if tensor.shape[d] > 1), key=lambda d: -tensor.stride()[d])


def _sum(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    order = _order(tensor)
    laid = tensor.permute([*order, *(d for d in range(tensor.dim()) if d not in order)]).contiguous().view(-1)
    words, piece = _padded(laid.view(torch.uint8), 8).view(torch.int64), _PIECE.get(tensor.device.type, 1 << 24)
    while len(words) > 1:
        words = torch.cat([_rows(part) for part in words.split(piece)])
    return words[0]


def _rows(words: Tensor) -> Tensor:
    rows = _padded(words, _ROW).view(-1, _ROW)
    # The high half is laid over the low one, since numbers whose highest bits alone differ (their signs) would cancel.
    mixed = rows >> 31
    mixed ^= rows
    mixed *= _weights(words.device)
    return mixed.sum(1)


def _padded(given: Tensor, size: int) -> Tensor:
    rest = -len(given) % size
    return nn.functional.pad(given, (0, rest)) if rest else given


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers of 64 bits, always the same ones; nobody's random numbers are drawn from."""
    made = torch.Generator().manual_seed(1)
    return torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=made).to(device) | 1
