"""The divergences against 60-digit arithmetic, and the identities they must keep to the last bit."""

import math

import jaxtyping
import mpmath
import pytest
import torch

from kvinterp.errors import InputError
from kvinterp.metrics import (
    compare_logits,
    kl_divergence,
    logit_margin,
)
from kvinterp.metrics.divergence import kl_terms

mpmath.mp.dps = 60

#: What an error of 3e-15 in the difference of the log-normalisers costs: its square.
FLOOR = 1e-29


def js_divergence(a, b):
    return compare_logits(a, b)["js"]


def exact(a, b):
    """KL and JS of two 1-D logit vectors, by their definitions, with 60 digits."""
    a = [mpmath.mpf(value) for value in a.double().tolist()]
    b = [mpmath.mpf(value) for value in b.double().tolist()]
    log_a, log_b = (mpmath.log(sum(map(mpmath.exp, logits))) for logits in (a, b))
    kl = js = mpmath.mpf(0)
    for x, y in zip(a, b, strict=True):
        log_p, log_q = x - log_a, y - log_b
        p, q = mpmath.exp(log_p), mpmath.exp(log_q)
        log_m = mpmath.log((p + q) / 2)
        kl += p * (log_p - log_q)
        js += (p * (log_p - log_m) + q * (log_q - log_m)) / 2
    return kl, js


def pair(vocab, scale, perturbation, seed=0):
    generator = torch.Generator().manual_seed(seed)
    a = scale * torch.randn(vocab, generator=generator, dtype=torch.float64)
    return a, a + perturbation * torch.randn(vocab, generator=generator, dtype=torch.float64)


def relative(value, truth):
    return float(abs(mpmath.mpf(float(value)) - truth) / truth)


@pytest.mark.parametrize("perturbation", [1e-12, 1e-10, 1e-8, 1e-6, 1e-4, 3e-3, 1e-2, 0.1, 1.0, 10.0, 300.0])
@pytest.mark.parametrize(("vocab", "scale"), [(2, 1.0), (30, 1.0), (200, 5.0)])
def test_divergences_have_their_digits_at_every_size(vocab, scale, perturbation):
    for seed in range(3):
        a, b = pair(vocab, scale, perturbation, seed)
        kl, js = exact(a, b)
        assert abs(mpmath.mpf(float(kl_divergence(a, b))) - kl) <= 1e-13 * kl + FLOOR
        assert abs(mpmath.mpf(float(js_divergence(a, b))) - js) <= 2e-13 * js + FLOOR


def test_a_divergence_of_1e_25_nats_keeps_three_digits_where_the_textbook_formula_has_none():
    a, b = pair(50, 1.0, 5e-13)
    truth, _ = exact(a, b)
    assert 5e-26 < truth < 5e-25
    assert relative(kl_divergence(a, b), truth) < 1e-3
    textbook = (a.softmax(-1) * (a.log_softmax(-1) - b.log_softmax(-1))).sum()
    assert relative(textbook, truth) > 1e3


@pytest.mark.parametrize("x", [0.0, 1e-300, 1e-12, 1e-5, 2.999e-3, 3e-3, 3.001e-3, 0.1, 1.0, 19.0, 40.0, 3e4])
def test_each_term_is_accurate_on_both_sides_of_the_change_of_formula(x):
    for signed in (x, -x):
        value = torch.tensor([signed], dtype=torch.float64)
        exact_x = mpmath.mpf(signed)
        with mpmath.workdps(700):  # 1e-300 squared must survive beside 1e-300
            tanh = mpmath.tanh(exact_x)
            truth = (tanh - exact_x) + exact_x * tanh
        got = float(kl_terms(value, value.tanh()))
        if x in (0.0, 1e-300):
            assert got == 0.0  # the square underflows
        else:
            assert relative(got, truth) < 3e-14


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("shift", [1.0, -3.0, 512.0])
def test_a_constant_added_to_one_side_is_no_divergence(dtype, shift):
    a = torch.randint(-64, 64, (100,), generator=torch.Generator().manual_seed(1)).to(dtype) / 8
    # 16 bits are too few for the sum, so there side b is float32: the shift is exact, and mixed dtypes are legal.
    b = (a.float() if a.element_size() == 2 else a) + shift
    assert torch.equal(b.double() - shift, a.double())
    assert 0 <= kl_divergence(a, b) < 1e-25
    assert 0 <= js_divergence(a, b) < 1e-25
    assert kl_divergence(a[:50], a[50:]) > 1e-3


def test_two_tokens_have_the_closed_form():
    p, q = 0.3, 0.45
    a, b = (torch.tensor([math.log(x), math.log1p(-x)], dtype=torch.float64) for x in (p, q))
    expected = p * math.log(p / q) + (1 - p) * math.log((1 - p) / (1 - q))
    assert float(kl_divergence(a, b)) == pytest.approx(expected, rel=1e-14)
    assert float(kl_divergence(b, a)) != pytest.approx(expected, rel=1e-2)  # the direction is a to b


@pytest.mark.parametrize("peak", [100.0, 800.0, 60000.0])
def test_opposite_certainties_stay_finite_where_probabilities_underflow(peak):
    """expm1 of the log-ratio overflows here while the probability is 0; the product used to be NaN."""
    a, b = torch.zeros(2, 3, dtype=torch.float16)
    a[0] = b[1] = peak
    kl, js = exact(a, b)
    assert relative(kl_divergence(a, b), kl) < 1e-14
    assert relative(js_divergence(a, b), js) < 1e-14
    assert float(js_divergence(a, b)) == pytest.approx(math.log(2), rel=1e-14)


def test_js_is_symmetric_to_the_bit_and_at_most_ln_2():
    for perturbation in (1e-9, 1e-3, 1.0, 1e3):
        a, b = pair(300, 2.0, perturbation)
        assert torch.equal(js_divergence(a, b), js_divergence(b, a))
        assert 0 < float(js_divergence(a, b)) <= math.log(2)
    # Nearly disjoint, where rounding alone would put one in twenty over the bound.
    peak = torch.linspace(36, 40, 2001, dtype=torch.float64).unsqueeze(-1)
    a, b = torch.cat((peak, 0 * peak), -1), torch.cat((0 * peak, peak), -1)
    assert (js_divergence(a, b) <= math.log(2)).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_compare_logits_is_bitwise_the_single_functions(dtype):
    generator = torch.Generator().manual_seed(3)
    a = torch.randn(2, 5, 64, generator=generator).to(dtype)
    b = (a + 0.01 * torch.randn(2, 5, 64, generator=generator)).to(dtype)
    before = a.clone(), b.clone()
    compared = compare_logits(a, b)
    assert torch.equal(a, before[0])
    assert torch.equal(b, before[1])
    single = {"kl": kl_divergence(a, b), "margin_a": logit_margin(a), "margin_b": logit_margin(b)}
    assert all(torch.equal(compared[key], value) for key, value in single.items())
    assert torch.equal(compared["top1_agree"], a.argmax(-1) == b.argmax(-1))


def test_the_simple_measures_on_numbers_done_by_hand():
    a = torch.tensor([[3.0, 1.0, 0.0, -1.0], [0.0, 0.0, 2.0, 5.0]])
    b = torch.tensor([[3.0, 4.0, 0.0, -1.0], [0.0, 0.0, 2.0, 5.0]])
    compared = compare_logits(a, b)
    assert compared["max_abs_logit"].tolist() == [3.0, 0.0]
    assert compared["rms_logit"].tolist() == [1.5, 0.0]
    assert compared["top1_agree"].tolist() == [False, True]
    assert logit_margin(a).tolist() == [2.0, 3.0]
    top = compared["top_probability_difference"]
    expected = b[0].double().softmax(-1)[0] - a[0].double().softmax(-1)[0]
    assert float(top[0]) == pytest.approx(float(expected), rel=1e-14)
    assert float(top[0]) < -0.5  # p_b - p_a of a's token, which b has let fall
    assert float(top[1]) == 0.0


def test_a_token_only_the_second_path_forbids_is_infinitely_far():
    a = torch.zeros(4)
    b = a.clone()
    b[2] = -math.inf
    assert kl_divergence(a, b).item() == math.inf
    both = a.clone()
    both[2] = -math.inf
    assert kl_divergence(both, b).isnan()  # documented: not a plausible number


@pytest.mark.parametrize("function", [kl_divergence, compare_logits])
def test_shapes_that_would_broadcast_are_refused(function, monkeypatch):
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)
    with pytest.raises(InputError, match=r"shapes \(3, 4\) and \(4,\)"):
        function(torch.zeros(3, 4), torch.zeros(4))
    with pytest.raises(InputError, match="at least one value"):
        function(torch.zeros(3, 0), torch.zeros(3, 0))
