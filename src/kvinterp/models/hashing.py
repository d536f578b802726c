"""The hash of a model's weights, computed on their device in one pass, as fast as one decode step
reads them.
"""

from __future__ import annotations

import functools
import hashlib

import torch
from torch import Tensor, nn

_ROW = 1 << 12
_PIECE = {"cpu": 1 << 17, "cuda": 1 << 24}
"""Words of 8 bytes that are summed at once: as many as a processor's cache holds, and for a GPU few
launches of kernels.
"""


def weights_hash(model: nn.Module) -> str:
    """BLAKE2 over the names, shapes, dtypes and sums of the tensors in the model's state dict, 16
    hex digits.

    The sum of a tensor's bytes weights each word by its place, so that numbers that change places
    change the sum too.
    """
    tensors = {name: tensor.detach() for name, tensor in sorted(model.state_dict().items())}
    sums: dict[tuple[object, ...], Tensor] = {}
    keys = {}
    for name, tensor in tensors.items():
        if tensor.numel() and not tensor.is_meta:
            # Tied weights have one key.
            keys[name] = key = (
                tensor.device,
                tensor.data_ptr(),
                tensor.shape,
                tensor.stride(),
                tensor.dtype,
            )
            if key not in sums:
                sums[key] = _sum(tensor)
    # One transfer from the device for all of them.
    first = next(iter(sums.values()), torch.zeros(()))
    numbers = (
        torch.stack([total.to(first.device) for total in sums.values()]).tolist() if sums else []
    )
    number_of = dict(zip(sums, numbers, strict=True))
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.dtype} {_order(tensor)} {number_of[keys[name]] if name in keys else None}"
        for name, tensor in tensors.items()
    ]
    return hashlib.blake2b("\n".join(lines).encode(), digest_size=8).hexdigest()


def _order(tensor: Tensor) -> list[int]:
    """The dimensions in their order in memory, the innermost last."""
    outermost_first = sorted(range(tensor.dim()), key=tensor.stride().__getitem__, reverse=True)
    return [dimension for dimension in outermost_first if tensor.shape[dimension] > 1]


def _sum(tensor: Tensor) -> Tensor:
    tensor = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    order = _order(tensor)
    flat = (
        tensor.permute([*order, *(d for d in range(tensor.dim()) if d not in order)])
        .contiguous()
        .view(-1)
    )
    words, piece = (
        _pad(flat.view(torch.uint8), 8).view(torch.int64),
        _PIECE.get(tensor.device.type, 1 << 24),
    )
    weights = _weights(tensor.device)
    while len(words) > 1:
        sums = []
        for part in words.split(piece):
            rows = _pad(part, _ROW).view(-1, _ROW)
            # The high half is mixed into the low one, since numbers that differ in their highest
            # bits only (their signs) would cancel.
            mixed = rows >> 31
            mixed ^= rows
            mixed *= weights
            sums.append(mixed.sum(1))
        words = torch.cat(sums)
    return words[0]


def _pad(numbers: Tensor, size: int) -> Tensor:
    rest = -len(numbers) % size
    return nn.functional.pad(numbers, (0, rest)) if rest else numbers


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers of 64 bits, always the same, from a generator of their own."""
    generator = torch.Generator().manual_seed(1)
    return torch.randint(-(2**63), 2**63 - 1, (_ROW,), generator=generator).to(device) | 1
