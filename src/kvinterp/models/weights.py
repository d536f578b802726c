"""Notices that a model's weights were changed in place, by whatever way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

__all__ = ["WeightsMark", "weights_mark"]

WeightsMark = tuple[tuple[int, int, int], ...]
"""For each tensor of a model where it lies, how often torch saw it changed, and the sum of its bits."""

_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def weights_mark(model: nn.Module) -> WeightsMark:
    """What changes when the weights do.

    Torch counts changes of a tensor, but not those made through ``.data``, so the bits are summed too: that reads the
    weights once, as one decode step does.
    """
    marks = [(t.data_ptr(), 0 if t.is_inference() else t._version, _bits_summed(t)) for t in _tensors(model)]
    return tuple((place, version, int(total)) for place, version, total in marks)


def _tensors(model: nn.Module) -> list[Tensor]:
    return [t.detach() for t in (*model.parameters(), *model.buffers()) if not t.is_meta and not t.is_quantized]


def _bits_summed(tensor: Tensor) -> Tensor:
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Weights that were laid out anew are contiguous in another order of their dimensions.
    strides = bits.stride()
    flat = bits.permute(sorted(range(bits.dim()), key=lambda dim: -strides[dim])).contiguous().view(-1)
    whole = flat.data_ptr() % 8 == 0 and flat.numel() * flat.element_size() % 8 == 0
    return flat.view(torch.int64 if whole else _WORDS[flat.element_size()]).sum(dtype=torch.int64)
