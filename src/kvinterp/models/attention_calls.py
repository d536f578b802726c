"""Which of torch's calls are attention: its fused one, or a product of queries and keys, a softmax,
and a product with values.

Asked of the calls in the order in which a model makes them, so that it does not matter how the
model caches, or who wrote it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvinterp.models.derived import SDPA
from kvinterp.models.hooks import in_order

_F = torch.nn.functional
MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
_BADDBMM = (torch.baddbmm, Tensor.baddbmm)
_SOFTMAX = (torch.softmax, _F.softmax, Tensor.softmax)


class Fused(NamedTuple):
    """Attention in one call, ``[..., row, head_dim]`` each."""

    query: Tensor
    key: Tensor
    value: Tensor
    mask: Tensor | None
    options: dict[str, Any]
    result: Tensor


class Product(NamedTuple):
    """A product of two activations, which may be scores; and the one before it, if no softmax
    followed that one.
    """

    a: Tensor
    b: Tensor
    result: Tensor
    before: Product | None = None


class Scores(NamedTuple):
    """A softmax of a product's numbers, scaled and masked in between: the product was of queries
    and keys.
    """

    product: Product
    scaled: Tensor
    dtype: torch.dtype | None


class Values(NamedTuple):
    """The softmax's probabilities by values; with the scores that they were made of."""

    weights: Tensor
    values: Tensor
    result: Tensor
    scores: Scores


class Recogniser:
    """Says which part of attention each call of torch is."""

    def __init__(self) -> None:
        self.product: Product | None = None
        self.scores: Scores | None = None

    def recognise(
        self, func: Any, args: Any, kwargs: Any, result: Any
    ) -> Fused | Product | Scores | Values | None:
        """What a call and its result are, or None."""
        args, kwargs = in_order(args, kwargs)
        if func is SDPA:
            named = (
                dict(
                    zip(
                        ("query", "key", "value", "attn_mask", "dropout_p", "is_causal"),
                        args,
                        strict=False,
                    )
                )
                | kwargs
            )
            return Fused(
                named["query"], named["key"], named["value"], named.get("attn_mask"), named, result
            )
        if func in MATMUL or func in _BADDBMM:
            others = [
                kwargs[name] for name in ("batch1", "batch2", "other", "mat2") if name in kwargs
            ]
            factors = [*args[func in _BADDBMM :], *others]
            return self._multiplied(factors[0], factors[1], result) if len(factors) > 1 else None
        product = self.product
        if (
            func in _SOFTMAX
            and product is not None
            and args[0].dim() >= 3
            and _rows(args[0]) == _rows(product.result)
        ):
            self.scores, self.product = Scores(product, args[0], kwargs.get("dtype")), None
            return self.scores
        return None

    def _multiplied(self, a: Tensor, b: Tensor, result: Tensor) -> Product | Values | None:
        if a.dim() < 3 or a.dim() != b.dim():
            return None
        scores = self.scores
        if (
            scores is not None
            and a.shape[-1] == scores.product.result.shape[-1]
            and _rows(a) == _rows(scores.product.result)
        ):
            self.scores = None
            return Values(a, b, result, scores)
        product = Product(a, b, result, self.product)
        self.product = Product(a, b, result)
        return product


def _rows(tensor: Tensor) -> int:
    return tensor.numel() // max(tensor.shape[-1], 1)


def visible_keys(mask: Tensor) -> Tensor:
    """Which keys any query of a mask, or of masked scores, ``[..., row, key]``, may see:
    ``[key]``.
    """
    visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 4
    return visible.flatten(0, -2).any(0)
