"""Which of torch's calls are attention: its fused one, or a product of queries and keys, a softmax, and a product with values.

Asked of the calls in the order in which a model makes them, so that it does not matter how the model is written or caches.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvinterp.models.hooks import in_order

_F = torch.nn.functional
MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_BADDBMM = (torch.baddbmm, Tensor.baddbmm)
_FUSED = _F.scaled_dot_product_attention
_SOFTMAX = (torch.softmax, _F.softmax, Tensor.softmax)


class Fused(NamedTuple):
    """Attention in one call, ``[..., row, head_dim]`` each."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    made: Tensor


class Product(NamedTuple):
    """A product of two activations, which may be scores; and the one before it, if no softmax followed that one."""

    a: Tensor
    b: Tensor
    made: Tensor
    before: Product | None = None


class Scores(NamedTuple):
    """A softmax of a product's numbers, scaled and masked in between: the product was of queries and keys."""

    product: Product
    given: Tensor
    dtype: torch.dtype | None


class Values(NamedTuple):
    """The softmax's probabilities by values; with the scores that they were made of."""

    weights: Tensor
    values: Tensor
    made: Tensor
    scores: Scores


class Recogniser:
    """Told every call of torch, says which part of attention it is."""

    def __init__(self) -> None:
        self.product: Product | None = None
        self.scores: Scores | None = None

    def told(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any
    ) -> Fused | Product | Scores | Values | None:
        """What a call and its result are, or None."""
        args, kwargs = in_order(args, kwargs)
        if func is _FUSED:
            return _fused(result, *args, **kwargs)
        if func in MATMUL or func in _BADDBMM:
            named = [kwargs[name] for name in ("batch1", "batch2", "other", "mat2") if name in kwargs]
            given = [*args[func in _BADDBMM :], *named]
            return self._multiplied(given[0], given[1], result) if len(given) > 1 else None
        product = self.product
        if func in _SOFTMAX and product is not None and args[0].dim() >= 3 and _rows(args[0]) == _rows(product.made):
            self.scores, self.product = Scores(product, args[0], kwargs.get("dtype")), None
            return self.scores
        return None

    def _multiplied(self, a: Tensor, b: Tensor, made: Tensor) -> Product | Values | None:
        if a.dim() < 3 or a.dim() != b.dim():
            return None
        if self.scores is not None and _like(a, self.scores.product.made):
            scores, self.scores = self.scores, None
            return Values(a, b, made, scores)
        found = Product(a, b, made, self.product)
        self.product = Product(a, b, made)
        return found


def _fused(
    made: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Fused:
    """SDPA's arguments by name, however they were given."""
    return Fused(query, key, value, attn_mask, {"is_causal": is_causal, **options}, made)


def _rows(tensor: Tensor) -> int:
    return tensor.numel() // max(tensor.shape[-1], 1)


def _like(a: Tensor, b: Tensor) -> bool:
    return a.shape[-1] == b.shape[-1] and _rows(a) == _rows(b)
