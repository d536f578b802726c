"""Sums, products and norms whose order of additions is written down here and depends on no shape.

A row's result then cannot depend on how many rows are computed with it, on the batch, or on how
many masked keys lie before or after the ones it sees. Everything is built from separate elementwise
multiplications and additions, which IEEE 754 rounds one way only, so the bits are the same on every
machine; no library reduction, no fused multiply-add.

Two orders are used. Over a dimension whose length is a property of the model (a projection's width)
the terms are dealt to 16 lanes, each lane is added up from the first term to the last, and the
lanes are added as a tree. Over keys, whose number grows and, under a sliding window, whose first
one moves, terms are added one after another: a masked key adds an exact zero, so neither zeros in
front nor zeros behind change a bit.

Numbers of 16 bits are multiplied and added in float32, as matrix units do, and rounded once at the
end; float32 and float64 stay what they are.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

LANES = 16
_BLOCK = 1 << 19, 1 << 26
"""Most elements of an intermediate product: in float32 about 2 MB, which stay in a processor's
cache, and for a GPU 256 MB, so that few kernels are started. The order of the additions, and so the
bits, do not depend on it."""

_PIECE = 1 << 14, 1 << 40
"""Elements an elementwise function is given at once: under torch's own threshold for splitting work
among threads. A GPU is
given all: a kernel there rounds every element alike."""

_WHOLE_VECTORS = 64
"""A multiple of every vector register's length in elements, so that no element is left to a scalar
remainder loop.
"""


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which numbers of ``dtype`` are multiplied and added."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def sum_over(terms: Tensor, order: str = "lanes") -> Tensor:
    """Adds up the last dimension.

    Args:
        terms: ``[..., term]``.
        order: ``"lanes"``, or ``"one by one"`` where zeros in front must not change the bits.

    Returns:
        ``[...]``, in the dtype of the terms.
    """
    if order == "one by one" or terms.shape[-1] < LANES:
        total = terms.new_zeros(terms.shape[:-1])
        for term in terms.unbind(-1):
            total = total + term
        return total
    short = -terms.shape[-1] % LANES
    padded = torch.nn.functional.pad(terms, (0, short)) if short else terms
    lanes = padded.unflatten(-1, (-1, LANES))
    total = lanes[..., 0, :]
    for index in range(1, lanes.shape[-2]):
        total = total + lanes[..., index, :]
    return _tree(total)


def product(a: Tensor, b: Tensor, order: str = "lanes") -> Tensor:
    """The matrix product ``a @ b`` with a fixed order over the shared dimension, not yet rounded to
    16 bits.

    Args:
        a: ``[..., row, shared]``.
        b: ``[..., shared, column]``.
        order: As in :func:`sum_over`.

    Returns:
        ``[..., row, column]`` in :func:`wide` of the dtype of ``a``.
    """
    dtype = wide(torch.promote_types(a.dtype, b.dtype))
    a, b = a.to(dtype), b.to(dtype)
    if order == "one by one" or a.shape[-1] < LANES:
        total = a.new_zeros((*a.shape[:-1], b.shape[-1]))
        for index in range(a.shape[-1]):
            total = total + a[..., index, None] * b[..., index, None, :]
        return total
    short = -a.shape[-1] % LANES
    if short:
        a, b = torch.nn.functional.pad(a, (0, short)), torch.nn.functional.pad(b, (0, 0, 0, short))
    rows = max(1, _BLOCK[a.is_cuda] // (LANES * b.shape[-1] * max(1, math.prod(a.shape[:-2]))))
    return torch.cat([_lanes_product(piece, b) for piece in a.split(rows, -2)], -2)


def _lanes_product(a: Tensor, b: Tensor) -> Tensor:
    # a: [..., row, shared] -> [..., row, lane, 1]; b: [..., shared, column] -> [..., 1, lane,
    #     column].
    a_lanes, b_lanes = a.unflatten(-1, (-1, LANES)), b.unflatten(-2, (-1, LANES))
    total = a_lanes[..., 0, :, None] * b_lanes[..., None, 0, :, :]
    term = torch.empty_like(total)
    for index in range(1, a_lanes.shape[-2]):
        torch.mul(a_lanes[..., index, :, None], b_lanes[..., None, index, :, :], out=term)
        total += term
    return _tree(total.transpose(-1, -2))


def _tree(lanes: Tensor) -> Tensor:
    while lanes.shape[-1] > 1:
        half = lanes.shape[-1] // 2
        lanes = lanes[..., :half] + lanes[..., half:]
    return lanes[..., 0]


def in_fixed_pieces(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """An elementwise function, called so that every element goes through the same instructions.

    On a CPU a vectorised function leaves the last few elements of a thread's share to scalar code,
    which may round otherwise; which elements those are depends on the shape. Padded pieces have no
    such remainder.
    """
    flat = x.reshape(-1)
    short = -flat.numel() % _WHOLE_VECTORS
    padded = torch.cat([flat, flat.new_ones(short)]) if short else flat.contiguous()
    pieces = [function(piece.clone()) for piece in padded.split(_PIECE[x.is_cuda])]
    whole = pieces[0] if len(pieces) == 1 else torch.cat(pieces) if pieces else function(padded)
    return whole[: flat.numel()].reshape(x.shape)


def softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The softmax in :func:`wide`, its denominator added up one by one: masked entries add exact
    zeros.
    """
    last = x.to(wide(x.dtype)).movedim(dim, -1)
    shifted = last - last.amax(-1, keepdim=True)
    powers = in_fixed_pieces(torch.exp, shifted)
    return (powers / sum_over(powers, "one by one")[..., None]).movedim(-1, dim)


def log_softmax(x: Tensor, dim: int = -1) -> Tensor:
    """The logarithm of the softmax in :func:`wide`."""
    last = x.to(wide(x.dtype)).movedim(dim, -1)
    shifted = last - last.amax(-1, keepdim=True)
    total = sum_over(in_fixed_pieces(torch.exp, shifted))
    return (shifted - in_fixed_pieces(torch.log, total)[..., None]).movedim(-1, dim)


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Layer normalisation over the last dimensions; also the mean and the reciprocal of the
    deviation.
    """
    dtype = wide(x.dtype)
    rows = x.to(dtype).flatten(-len(shape))
    mean = sum_over(rows)[..., None] / rows.shape[-1]
    centred = rows - mean
    scale = 1 / torch.sqrt(sum_over(centred * centred)[..., None] / rows.shape[-1] + epsilon)
    normal = (centred * scale).reshape(x.shape)
    normal = normal if weight is None else normal * weight.to(dtype)
    normal = normal if bias is None else normal + bias.to(dtype)
    return normal.to(x.dtype), mean, scale


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Scaled dot-product attention from the products above, rounded once at the end.

    Args:
        query: ``[..., query, head_dim]``.
        key: ``[..., key, head_dim]``, with as many heads as the queries.
        value: ``[..., key, head_dim]``.
        mask: Boolean (true where a query may look) or additive, broadcast to ``[..., query, key]``.
        causal: Whether query i sees keys 0 to i only.
        scale: Factor on the scores (default: one over the root of head_dim).
    """
    scores = product(query, key.transpose(-1, -2), "one by one")
    scores = scores * (query.shape[-1] ** -0.5 if scale is None else scale)
    if causal:
        seen = torch.ones(
            query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
        ).tril()
        scores = scores.masked_fill(~seen, -torch.inf)
    if mask is not None:
        scores = (
            scores.masked_fill(~mask, -torch.inf)
            if mask.dtype == torch.bool
            else scores + mask.to(scores.dtype)
        )
    weights = softmax(scores)
    if mask is not None:
        # A row that may look nowhere (padding) is zero, as in torch's own kernels, and not NaN.
        weights = weights.masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)
    return product(weights, value, "one by one").to(query.dtype)


def depthwise_convolution(x: Tensor, weight: Tensor, bias: Tensor | None, padding: int) -> Tensor:
    """A causal-style convolution of each channel on its own (Mamba, Gated DeltaNet), taps added one
    by one.

    Args:
        x: ``[batch, channel, position]``.
        weight: ``[channel, 1, tap]``.
        bias: ``[channel]`` or None.
        padding: Zeros on either side.
    """
    dtype = wide(x.dtype)
    windows = torch.nn.functional.pad(x.to(dtype), (padding, padding)).unfold(
        -1, weight.shape[-1], 1
    )
    total = sum_over(windows * weight.to(dtype)[:, 0, None, :], "one by one")
    return (total if bias is None else total + bias.to(dtype)[:, None]).to(x.dtype)
