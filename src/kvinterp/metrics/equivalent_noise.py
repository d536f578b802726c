"""The noise that a policy's change of keys and values amounts to: gain, spread, flipped signs and
tails of the error.

The error ``e`` of an element ``x`` is split by least squares into ``gain * x`` and a residual. For
multiplicative noise, ``e = x u``, the gain is the mean of ``u`` and the spread its standard
deviation, whatever ``x`` is, so that quantisers and injected noise share an axis. Sums are kept
instead of means, so that several prompts, heads and layers combine exactly.
"""

from __future__ import annotations

import pandas as pd
from jaxtyping import Float, Float64
from torch import Tensor

SUMS = ("elements", "nonzero", "x2", "ex", "e1", "e2", "e3", "e4", "flipped", "zeroed")
"""The sums over elements: their count, how many are not 0, moments, and how many change sign or
become 0.
"""


def error_sums(
    exact: Float[Tensor, "*heads row width"], read: Float[Tensor, "*heads row width"]
) -> dict[str, Float64[Tensor, "*heads"]]:
    """The sums of :data:`SUMS` over rows and width, in float64.

    Args:
        exact: Keys or values as they were computed.
        read: The same rows as attention reads them.
    """
    x, y = exact.double(), read.double()
    e = y - x
    there = x != 0
    terms = {
        "elements": x.new_ones(()).expand_as(x),
        "nonzero": there,
        "x2": x**2,
        "ex": e * x,
        **{f"e{power}": e**power for power in (1, 2, 3, 4)},
        "flipped": x * y < 0,
        "zeroed": there & (y == 0),
    }
    return {name: terms[name].double().sum((-2, -1)) for name in SUMS}


def noise_of_sums(sums: pd.DataFrame) -> pd.DataFrame:
    """Computes the noise of each row of sums; add rows up first to combine places.

    Args:
        sums: The columns of :data:`SUMS`.

    Returns:
        relative_rms, the error's root mean square over that of the elements; bias, its gain: the
        mean error of multiplicative noise, below 0 where elements shrink; relative_std, the rest of
        relative_rms besides the bias; sign_flips and zeroed, shares of the elements that are not 0;
        kurtosis of the error about its mean, 0 for a normal distribution, NaN without an error.
        Combined places of different size have heavier tails than each alone.
    """
    count, x2, power = (
        sums["elements"],
        sums["x2"],
        {n: sums[f"e{n}"] / sums["elements"] for n in (1, 2, 3, 4)},
    )
    mean = power[1]
    spread = (power[2] - mean**2).clip(lower=0)
    fourth = power[4] - 4 * mean * power[3] + 6 * mean**2 * power[2] - 3 * mean**4
    some = count > 0
    return pd.DataFrame(
        {
            "relative_rms": (sums["e2"] / x2) ** 0.5,
            "bias": sums["ex"] / x2,
            "relative_std": ((sums["e2"] - sums["ex"] ** 2 / x2).clip(lower=0) / x2) ** 0.5,
            "sign_flips": sums["flipped"] / sums["nonzero"],
            "zeroed": sums["zeroed"] / sums["nonzero"],
            # The spread of a constant error is rounding.
            "kurtosis": (fourth / spread**2 - 3).where(some & (spread > 1e-12 * power[2])),
        }
    )
