"""Divergences of two next-token distributions, accurate down to the last bit that differs.

Two paths of one model often differ by 1e-13 nats or less, and the textbook
``sum p (log p - log q)`` loses all of that: its terms are of both signs and cancel down to rounding
noise, which can even be negative. Because p and q both sum to one, ``q - p`` may be added to the
terms for free. With ``d = log q - log p``::

    KL(p || q) = sum p phi(d),    phi(d) = expm1(d) - d >= 0

has no negative term, and is exactly zero when every d is. An error common to every d, such as that
of the two log-normalisers, enters only in second order, because the terms without it sum to zero in
first order. This is the non-negative estimator "k3", ``(r - 1) - log r``, of John Schulman,
"Approximating KL divergence" (2020), http://joschu.net/blog/kl-approx.html, summed over the whole
vocabulary instead of sampled.

One more step keeps it finite. For d over 709 ``expm1`` overflows just where p underflows to zero.
With ``x = d / 2`` and ``t = tanh x = (q - p) / (q + p)`` the same term is::

    p phi(d) = (p + q) ((t - x) + x t)

which overflows nowhere, and the Jensen-Shannon divergence shares its parts::

    JS(p, q) = sum (p + q) / 2 (x t - log cosh x)

A probability that underflows to zero in float64 still has its log-ratio, taken from the logits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from jaxtyping import Float64
from torch import Tensor

from kvinterp.common.shapes import Flag, Logits, Measure
from kvinterp.metrics.base import float64_pair, parted

#: Half log-ratios under this take ``tanh x - x`` from its series. Measured against 60 digits: there
#  both ways have a relative error of 2e-14; the difference is worse below (1e-13 at 1e-3), the
#  series above (2e-13 at 5e-3).
_SERIES_BELOW = 3e-3

#: Beyond this, ``x tanh x - log cosh x`` is ln 2 to within rounding, and ``sinh`` is still far from
#  overflow.
_SATURATED = 20.0


def kl_divergence(a: Logits, b: Logits) -> Measure:
    """Kullback-Leibler divergence KL(softmax(a) || softmax(b)).

    Exactly 0 for bitwise equal logits, never negative, and accurate for values down to 1e-25 (see
    the module's text). Adding a constant to one side changes nothing beyond that addition's own
    rounding. NaN gives NaN; so does a token whose logit is -inf on both sides.

    Args:
        a: Logits of the first path, of any float dtype.
        b: Logits of the second path.

    Returns:
        The divergence in nats, in float64.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    *_, probability, half_log_ratio = _distributions(a, b)
    return _kl(half_log_ratio, torch.tanh(half_log_ratio), probability[0] + probability[1])


def logit_margin(a: Logits) -> Measure:
    """Largest logit minus the second largest: how far the greedy choice is from flipping.

    Args:
        a: Logits of one path.

    Returns:
        The margin in logits; 0 where two share the top, inf where the vocabulary has one token.

    Raises:
        InputError: The vocabulary is empty.
    """
    logits = float64_pair(a, a, "logits")[:1]
    return _margin(logits, *logits.max(-1, keepdim=True))[0]


def compare_logits(a: Logits, b: Logits) -> dict[str, Measure | Flag]:
    """Computes every metric of this module for two logit vectors, with shared work done once.

    It is called at every decode step: about 45 kernels, and no transfer to the host.

    Args:
        a: Logits of the first path, of any float dtype.
        b: Logits of the second path.

    Returns:
        ``kl``, see :func:`kl_divergence`, and ``js``, the Jensen-Shannon divergence (the mean KL of
        the two distributions to their even mixture, at most ln 2, bitwise the same with the sides
        exchanged), in nats, both exactly 0 for bitwise equal logits and never negative;
        ``max_abs_logit`` and ``rms_logit``, the largest difference and the root of the mean squared
        one, in logits; ``top1_agree``, whether both greedy tokens are the same, of equal logits the
        first; ``margin_a`` and ``margin_b``, see :func:`logit_margin`; and
        ``top_probability_difference``, the probability that the second path gives the first path's
        greedy token minus that of the first path. llama-perplexity's Δp is the same difference for
        the next token of its text file, which decoding does not have.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    logits, top, difference, probability, half_log_ratio = _distributions(a, b)
    tanh, mass = torch.tanh(half_log_ratio), probability[0] + probability[1]
    margin = _margin(logits, *top)  # Overwrites the logits: everything else has used them.
    agree = top.indices[0] == top.indices[1]
    of_top = probability.gather(-1, top.indices[:1].expand_as(top.indices)).squeeze(-1)
    return {
        "kl": _kl(half_log_ratio, tanh, mass),
        "js": _js(half_log_ratio, tanh, mass),
        "max_abs_logit": difference.abs().amax(-1),
        "rms_logit": torch.linalg.vector_norm(difference, dim=-1) / math.sqrt(difference.shape[-1]),
        "top1_agree": agree.squeeze(-1),
        "margin_a": margin[0],
        "margin_b": margin[1],
        "top_probability_difference": of_top[1] - of_top[0],
    }


def kl_terms(
    half_log_ratio: Float64[Tensor, "*shape"], tanh: Float64[Tensor, "*shape"]
) -> Float64[Tensor, "*shape"]:
    """The non-negative terms of KL(p || q) over p + q: with ``x = log(q/p) / 2`` and
    ``t = tanh x``, ``(t - x) + x t``.

    Args:
        half_log_ratio: x.
        tanh: t.

    Returns:
        The terms, relatively accurate to 2e-14 for every finite x and exactly 0 for x = 0.
    """
    x = half_log_ratio
    square = x * x
    # tanh x - x = -x^3/3 + 2x^5/15 - ...; it is added to x tanh x, about x^2, so that two terms are
    # enough.
    series = torch.rsub(square, -1 / 3, alpha=-2 / 15).mul_(square).mul_(x)
    below = torch.where(square < _SERIES_BELOW**2, series, tanh - x)
    return torch.addcmul(below, x, tanh)


def _distributions(a: Tensor, b: Tensor) -> tuple[Tensor, Any, Tensor, Tensor, Tensor]:
    """Computes in float64 the parts that the metrics share.

    Returns:
        The logits of both paths, values and indices of the largest, the difference, the
        probabilities, and half the logarithm of their ratio; the first dimension is the path, where
        there are two.
    """
    logits = float64_pair(a, b, "logits")
    difference = logits[1] - logits[0]
    probability = torch.softmax(logits, -1)
    top = logits.max(-1, keepdim=True)
    # log sum exp = top logit - log of its probability. Equal rows give equal bits, so their shift
    # is exactly 0.
    normaliser = top.values - torch.log(probability.amax(-1, keepdim=True))
    half_log_ratio = (difference - (normaliser[1] - normaliser[0])).mul_(0.5)
    return logits, top, difference, probability, half_log_ratio


def _kl(half_log_ratio: Tensor, tanh: Tensor, mass: Tensor) -> Tensor:
    return kl_terms(half_log_ratio, tanh).mul_(mass).sum(-1)


def _js(half_log_ratio: Tensor, tanh: Tensor, mass: Tensor) -> Tensor:
    x = half_log_ratio.clamp(-_SATURATED, _SATURATED)
    # log cosh x = log1p(2 sinh(x/2)^2) keeps its digits for small x, where cosh x rounds to 1.
    # Torch's sinh under AVX2 has other last bits at a tensor's end than within it, so that a row's
    # number would depend on how many rows are measured with it: 2 sinh(y) = e + e / (e + 1) with
    # e = expm1(y), for |y|, so that both signs give the same bits.
    grown = (x.abs() * 0.5).expm1_()
    log_cosh = (grown + grown / (grown + 1)).square_().mul_(0.5).log1p_()
    return (x * tanh).sub_(log_cosh).mul_(mass).sum(-1).mul_(0.5).clamp_(max=math.log(2))


def _margin(logits: Tensor, top_logit: Tensor, top_token: Tensor) -> Tensor:
    # Not topk(2): among equal logits it may order the tokens otherwise than argmax does.
    second = logits.scatter_(-1, top_token, -math.inf).amax(-1)
    return top_logit.squeeze(-1) - second


_MARGIN = "Largest logit of the {} path minus its second largest."
METRICS = parted(
    "logits",
    compare_logits,
    ("kl", 0.0, True, "Kullback-Leibler divergence KL(softmax(a) || softmax(b))."),
    ("js", 0.0, True, "Jensen-Shannon divergence: the mean KL of the two distributions to their even mixture."),
    ("max_abs_logit", 0.0, True, "Largest absolute difference of two logit vectors, in logits."),
    ("rms_logit", 0.0, True, "Root of the mean squared difference of two logit vectors, in logits."),
    ("top1_agree", True, True, "Whether both paths' greedy tokens are the same; of equal logits the first wins, as in "
     "``torch.argmax``."),
    ("margin_a", None, True, _MARGIN.format("first")),
    ("margin_b", None, True, _MARGIN.format("second")),
    ("top_probability_difference", 0.0, False, "What the second path gives the first path's greedy token, minus what the first "
     "gives it: ``p_b(top) - p_a(top)``."),
)  # fmt: skip
