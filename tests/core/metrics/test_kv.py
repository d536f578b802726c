"""Units in the last place over every float16 and bfloat16 there is, and over the boundaries of the wider dtypes."""

import math

import pytest
import torch

from kvinterp.metrics import units_in_last_place, vector_errors

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
BITS = {torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float32: torch.int32, torch.float64: torch.int64}


def probes(dtype):
    """Non-negative finite floats: all of them in 16 bits, else both sides of every power of two and random ones."""
    if BITS[dtype] is torch.int16:
        values = torch.arange(2**15, dtype=torch.int16).view(dtype)
    else:
        info = torch.finfo(dtype)
        digits = round(-math.log2(info.eps))
        lowest, highest = round(math.log2(info.smallest_normal)) - digits, math.frexp(info.max)[1] - 1
        powers = torch.tensor([2.0**k for k in range(lowest, highest + 1)], dtype=dtype)
        bits = torch.randint(0, int(powers[-1].view(BITS[dtype])), (2000,), generator=torch.Generator().manual_seed(0))
        inner = bits.to(BITS[dtype]).view(dtype)
        up, down = (torch.nextafter(powers, torch.full_like(powers, end)) for end in (math.inf, 0.0))
        values = torch.cat((powers, up, down, inner, torch.zeros(1, dtype=dtype)))
    return values[values.isfinite()]


def next_up(values):
    """The next larger float, by the bits: non-negative floats are ordered as their bits are."""
    bits = BITS[values.dtype]
    return (values.view(bits) + 1).view(values.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_unit_is_the_distance_to_the_next_larger_float(dtype):
    values = probes(dtype)
    above = next_up(values)
    inner = above.isfinite()
    unit = units_in_last_place(values, dtype)
    assert torch.equal(unit[inner], (above.double() - values.double())[inner])
    assert torch.equal(units_in_last_place(-values, dtype), unit)
    assert inner.sum() > 2000


def test_the_unit_of_another_dtype_is_taken_at_the_numbers_magnitude():
    x = torch.tensor([1.0, 1.99, 2.0, 1e-30, 0.0, 1e6], dtype=torch.float64)
    assert units_in_last_place(x, torch.float16).tolist() == [2**-10, 2**-10, 2**-9, 2**-24, 2**-24, 2.0**9]
    assert units_in_last_place(torch.tensor([math.nan, math.inf, -math.inf]), torch.float16).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_neighbours_are_one_apart_or_half_across_a_power_of_two(dtype):
    values = probes(dtype)
    above = next_up(values)
    values, above = values[above.isfinite()], above[above.isfinite()]
    error = vector_errors(values.unsqueeze(-1), above.unsqueeze(-1))["ulp_max"]
    fraction, _ = torch.frexp(above.double())
    crosses = (fraction == 0.5) & (above.double() > torch.finfo(dtype).smallest_normal)
    assert torch.equal(error, torch.where(crosses, 0.5, 1.0).double())
    assert crosses.any()
    assert not crosses.all()
    assert torch.equal(vector_errors(-above.unsqueeze(-1), -values.unsqueeze(-1))["ulp_max"], error)


def test_mean_and_max_over_the_head():
    a = torch.ones(2, 4, dtype=torch.bfloat16)
    b = a.clone()
    b[0, 1] += 2**-7
    b[0, 2] += 3 * 2**-7
    error = vector_errors(a, b)
    assert error["ulp_mean"].tolist() == [1.0, 0.0]
    assert error["ulp_max"].tolist() == [3.0, 0.0]


def test_mixed_dtypes_are_measured_in_the_coarser_unit():
    a = torch.tensor([1.0 + 2**-8], dtype=torch.float32)
    assert vector_errors(a, torch.ones(1, dtype=torch.bfloat16))["ulp_max"].item() == 0.5
    assert vector_errors(torch.ones(1, dtype=torch.bfloat16), a)["ulp_max"].item() == 0.5
    assert vector_errors(a, torch.ones(1, dtype=torch.float16))["ulp_max"].item() == 4.0
    # Which of float16 and bfloat16 is the coarser depends on the magnitude: bfloat16 at 1, float16 at 1e-8.
    tiny = torch.tensor([2.0**-24])
    assert vector_errors(tiny.half(), (2 * tiny).bfloat16())["ulp_max"].item() == 1.0


def test_signs_and_zeros():
    zero = torch.zeros(1, dtype=torch.float16)
    tiny = torch.tensor([2.0**-24], dtype=torch.float16)
    assert vector_errors(zero, -zero)["ulp_max"].item() == 0.0
    assert vector_errors(zero, tiny)["ulp_max"].item() == 1.0
    assert vector_errors(-tiny, tiny)["ulp_max"].item() == 2.0


def test_relative_error():
    a = torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, 0.0], [0.0, 0.0]])
    b = torch.tensor([[0.0, 4.0], [0.0, 0.0], [0.0, 0.0], [0.0, 2.0]])
    assert vector_errors(a, b)["relative_error"].tolist() == [0.75, 0.0, math.inf, 1.0]
