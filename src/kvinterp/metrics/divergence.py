"""How far apart two next-token distributions are, accurate down to the last bit that differs.

Two paths of one model often differ by 1e-13 nats or less, and the textbook ``sum p (log p - log q)`` loses all of that:
its terms are of both signs and cancel down to rounding noise, which can even be negative. Because p and q both sum to
one, ``q - p`` may be added to the terms for free. With ``d = log q - log p``::

    KL(p || q) = sum p phi(d),    phi(d) = expm1(d) - d >= 0

has no negative term, and is exactly zero when every d is. An error common to every d, such as that of the two
log-normalisers, enters only in second order, because the terms without it sum to zero in first order. This is the
non-negative estimator "k3", ``(r - 1) - log r``, of John Schulman, "Approximating KL divergence" (2020),
http://joschu.net/blog/kl-approx.html, summed over the whole vocabulary instead of sampled.

One more step keeps it finite. For d over 709 ``expm1`` overflows just where p underflows to zero. With ``x = d / 2`` and
``t = tanh x = (q - p) / (q + p)`` the same term is::

    p phi(d) = (p + q) ((t - x) + x t)

which overflows nowhere, and the Jensen-Shannon divergence shares its parts::

    JS(p, q) = sum (p + q) / 2 (x t - log cosh x)

A probability that underflows to zero in float64 still has its log-ratio, taken from the logits.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from kvinterp.common.shapes import Flag, Logits, Measure
from kvinterp.metrics.base import Metric, float64_pair

#: Half log-ratios under this take ``tanh x - x`` from its series. Measured against 60 digits: there both ways have a
#: relative error of 2e-14; the difference is worse below (1e-13 at 1e-3), the series above (2e-13 at 5e-3).
_SERIES_BELOW = 3e-3

#: Beyond this, ``x tanh x - log cosh x`` is ln 2 to within rounding, and ``sinh`` is still far from overflow.
_SATURATED = 20.0


class _Distributions(NamedTuple):
    """Both paths' logits in float64 and all that the metrics share; the first dimension is the path."""

    logits: Float64[Tensor, "path=2 *batch vocab"]
    difference: Float64[Tensor, "*batch vocab"]
    probability: Float64[Tensor, "path=2 *batch vocab"]
    mass: Float64[Tensor, "*batch vocab"]
    top_logit: Float64[Tensor, "path=2 *batch 1"]
    top_token: Int64[Tensor, "path=2 *batch 1"]
    half_log_ratio: Float64[Tensor, "*batch vocab"]


def kl_divergence(a: Logits, b: Logits) -> Measure:
    """Kullback-Leibler divergence KL(softmax(a) || softmax(b)).

    Exactly 0 for bitwise equal logits, never negative, and accurate for values down to 1e-25 (see the module's text).
    Adding a constant to one side changes nothing beyond that addition's own rounding. NaN gives NaN; so does a token
    whose logit is -inf on both sides.

    Args:
        a: Logits of the first path, of any float dtype.
        b: Logits of the second path.

    Returns:
        The divergence in nats, in float64.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    both = _distributions(a, b)
    return _kl(both, torch.tanh(both.half_log_ratio))


def js_divergence(a: Logits, b: Logits) -> Measure:
    """Jensen-Shannon divergence: the mean KL of the two distributions to their even mixture.

    Exactly 0 for bitwise equal logits, never negative, at most ln 2, and bitwise the same with the sides exchanged.

    Args:
        a: Logits of the first path, of any float dtype.
        b: Logits of the second path.

    Returns:
        The divergence in nats, in float64.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    both = _distributions(a, b)
    return _js(both, torch.tanh(both.half_log_ratio))


def max_abs_difference(a: Logits, b: Logits) -> Measure:
    """Largest absolute difference of two logit vectors, in logits.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    return _max_abs(_difference(float64_pair(a, b, "logits")))


def rms_difference(a: Logits, b: Logits) -> Measure:
    """Root of the mean squared difference of two logit vectors, in logits.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    return _rms(_difference(float64_pair(a, b, "logits")))


def top1_agreement(a: Logits, b: Logits) -> Flag:
    """Whether both paths' greedy tokens are the same; of equal logits the first wins, as in ``torch.argmax``.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    token = float64_pair(a, b, "logits").max(-1).indices
    return token[0] == token[1]


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
    top = logits.max(-1, keepdim=True)
    return _margin(logits, top.values, top.indices)[0]


def top_probability_difference(a: Logits, b: Logits) -> Measure:
    """What the second path gives the first path's greedy token, minus what the first gives it: ``p_b(top) - p_a(top)``.

    llama-perplexity's Δp is the same difference with another token, the one that follows in its text file. Decoding has
    no such text, so the token here is the first path's most probable one.

    Args:
        a: Logits of the path that is the reference.
        b: Logits of the other path.

    Returns:
        A difference of probabilities in [-1, 1].

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    both = _distributions(a, b)
    return _top_probability_difference(both)


def compare_logits(a: Logits, b: Logits) -> dict[str, Measure | Flag]:
    """Everything this module measures about two logit vectors, with the work they share done once.

    Made to be called at every decode step: about 45 kernels, no transfer to the host, and bitwise the same values as
    the single functions.

    Args:
        a: Logits of the first path, of any float dtype.
        b: Logits of the second path.

    Returns:
        ``kl`` and ``js`` in nats, ``max_abs_logit`` and ``rms_logit`` in logits, ``top1_agree``, ``margin_a`` and
        ``margin_b`` in logits, and ``top_probability_difference``.

    Raises:
        InputError: The shapes differ, or the vocabulary is empty.
    """
    both = _distributions(a, b)
    tanh = torch.tanh(both.half_log_ratio)
    margin = _margin(both.logits, both.top_logit, both.top_token)  # Overwrites the logits: everything else has used them.
    return {
        "kl": _kl(both, tanh),
        "js": _js(both, tanh),
        "max_abs_logit": _max_abs(both.difference),
        "rms_logit": _rms(both.difference),
        "top1_agree": (both.top_token[0] == both.top_token[1]).squeeze(-1),
        "margin_a": margin[0],
        "margin_b": margin[1],
        "top_probability_difference": _top_probability_difference(both),
    }


def kl_terms(half_log_ratio: Float64[Tensor, "*shape"], tanh: Float64[Tensor, "*shape"]) -> Float64[Tensor, "*shape"]:
    """The non-negative terms of KL(p || q) over p + q: with ``x = log(q/p) / 2`` and ``t = tanh x``, ``(t - x) + x t``.

    Args:
        half_log_ratio: x.
        tanh: t.

    Returns:
        The terms, relatively accurate to 2e-14 for every finite x and exactly 0 for x = 0.
    """
    x = half_log_ratio
    square = x * x
    # tanh x - x = -x^3/3 + 2x^5/15 - ...; it is added to x tanh x, about x^2, so that two terms are enough.
    series = torch.rsub(square, -1 / 3, alpha=-2 / 15).mul_(square).mul_(x)
    below = torch.where(square < _SERIES_BELOW**2, series, tanh - x)
    return torch.addcmul(below, x, tanh)


def _distributions(a: Tensor, b: Tensor) -> _Distributions:
    logits = float64_pair(a, b, "logits")
    difference = _difference(logits)
    probability = torch.softmax(logits, -1)
    top = logits.max(-1, keepdim=True)
    # log sum exp = top logit - log of its probability. Equal rows give equal bits, so their shift is exactly 0.
    normaliser = top.values - torch.log(probability.amax(-1, keepdim=True))
    half_log_ratio = (difference - (normaliser[1] - normaliser[0])).mul_(0.5)
    mass = probability[0] + probability[1]
    return _Distributions(logits, difference, probability, mass, top.values, top.indices, half_log_ratio)


def _difference(logits: Tensor) -> Tensor:
    return logits[1] - logits[0]


def _kl(both: _Distributions, tanh: Tensor) -> Tensor:
    return kl_terms(both.half_log_ratio, tanh).mul_(both.mass).sum(-1)


def _js(both: _Distributions, tanh: Tensor) -> Tensor:
    x = both.half_log_ratio.clamp(-_SATURATED, _SATURATED)
    # log cosh x = log1p(2 sinh(x/2)^2) keeps its digits for small x, where cosh x rounds to 1.
    # Of sinh torch's AVX2 gives other last bits at a tensor's end than within it, so that a row's number would hang on how many
    # are measured with it: 2 sinh(y) = e + e / (e + 1) with e = expm1(y), of |y|, so that both signs give the same bits.
    grown = (x.abs() * 0.5).expm1_()
    log_cosh = (grown + grown / (grown + 1)).square_().mul_(0.5).log1p_()
    return (x * tanh).sub_(log_cosh).mul_(both.mass).sum(-1).mul_(0.5).clamp_(max=math.log(2))


def _max_abs(difference: Tensor) -> Tensor:
    return difference.abs().amax(-1)


def _rms(difference: Tensor) -> Tensor:
    return torch.linalg.vector_norm(difference, dim=-1) / math.sqrt(difference.shape[-1])


def _margin(logits: Tensor, top_logit: Tensor, top_token: Tensor) -> Tensor:
    # Not topk(2): among equal logits it may order the tokens otherwise than argmax does.
    second = logits.scatter_(-1, top_token, -math.inf).amax(-1)
    return top_logit.squeeze(-1) - second


def _top_probability_difference(both: _Distributions) -> Tensor:
    chosen = both.probability.gather(-1, both.top_token[:1].expand_as(both.top_token)).squeeze(-1)
    return chosen[1] - chosen[0]


def _margin_of_a(a: Logits, b: Logits) -> Measure:
    """Largest logit of the first path minus its second largest."""
    return logit_margin(a)


def _margin_of_b(a: Logits, b: Logits) -> Measure:
    """Largest logit of the second path minus its second largest."""
    return logit_margin(b)


METRICS = tuple(
    Metric(name, function, "logits", zero, nonnegative, together=compare_logits)
    for name, function, zero, nonnegative in (
        ("kl", kl_divergence, 0.0, True),
        ("js", js_divergence, 0.0, True),
        ("max_abs_logit", max_abs_difference, 0.0, True),
        ("rms_logit", rms_difference, 0.0, True),
        ("top1_agree", top1_agreement, True, True),
        ("margin_a", _margin_of_a, None, True),
        ("margin_b", _margin_of_b, None, True),
        ("top_probability_difference", top_probability_difference, 0.0, False),
    )
)
