"""The divergence of two attention patterns, given as the probabilities of a softmax in the model's
dtype.
"""

from __future__ import annotations

import torch

from kvinterp.common.shapes import Measure, Pattern
from kvinterp.metrics.base import Metric, float64_pair
from kvinterp.metrics.divergence import kl_terms

#: Below this, half the log-ratio is computed from the difference of the probabilities, above it
#  from their logarithms.
_NEAR = 0.5


def pattern_kl(a: Pattern, b: Pattern) -> Measure:
    """KL divergence KL(a || b) between attention distributions over the keys.

    The terms are ``p log(p/q) - p + q``, none of them negative (see
    :mod:`kvinterp.metrics.divergence`), so that equal patterns give exactly 0. Both rows are
    normalised in float64 first, because in 16 bits they sum to one only to three digits.

    A probability that underflowed to 0 on one side only would make the result infinite. It is
    floored at the smallest subnormal of the coarser dtype of the two, the least a nonzero
    probability can be there. The result is then a lower bound that depends on the dtype. A key that
    is 0 on both sides (masked, or far away) contributes 0.

    Args:
        a: Attention probabilities of the first path, of any float dtype.
        b: Attention probabilities of the second path.

    Returns:
        The divergence in nats, in float64; 0 where both rows are all zero, NaN where only one is
        or where an input is NaN.

    Raises:
        InputError: The shapes differ, or there is no key.
    """
    raw = float64_pair(a, b, "attention patterns")
    zero = raw == 0
    one_sided = zero[0] ^ zero[1]
    p, q = torch.where(
        zero & one_sided, max(_smallest_subnormal(a.dtype), _smallest_subnormal(b.dtype)), raw
    )
    # With excess = sum(q)/sum(p) - 1, q/sum(q) and p/sum(p) are q and p (1 + excess) over sum(q).
    # The differences come
    # first: equal parts vanish exactly, and what is left of an error in the excess is its square.
    difference = q - p
    excess = difference.sum(-1, keepdim=True) / p.sum(-1, keepdim=True)
    difference = difference - p * excess
    weight = q + p + p * excess
    tanh = difference / weight
    by_logarithm = (torch.log(q) - torch.log(p) - torch.log1p(excess)) * 0.5
    half_log_ratio = torch.where(tanh.abs() < _NEAR, torch.atanh(tanh), by_logarithm)
    terms = (kl_terms(half_log_ratio, tanh) * weight).masked_fill_(zero[0] & zero[1], 0)
    empty = zero.all(-1)
    divergence = (terms.sum(-1) / q.sum(-1)).masked_fill_(empty[0] ^ empty[1], torch.nan)
    return divergence.masked_fill_(empty[0] & empty[1], 0)


def _smallest_subnormal(dtype: torch.dtype) -> float:
    info = torch.finfo(dtype)
    return info.smallest_normal * info.eps


METRICS = (Metric("pattern_kl", pattern_kl, "pattern", 0.0, nonnegative=True, column="kl"),)
