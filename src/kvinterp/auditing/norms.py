"""What is normal: how far apart the two paths of other models were, by architecture, dtype, length and plan.

A table of one row a model and way of running. Ours is made by ``kvinterp norms`` and comes with the package; the file that the
variable KVINTERP_NORMS names stands beside it. It says where a model stands among others like it, and never judges: rounding or
bug is the audit's to say.
"""

from __future__ import annotations

import functools
import io
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd

from kvinterp.common.files import opened
from kvinterp.errors import InputError

NUMBERS = ("layers", "width", "length", "steps", "median", "largest")
COLUMNS = ("model", "architecture", *NUMBERS[:2], "dtype", "plan", *NUMBERS[2:], "device", "versions")
"""``median`` and ``largest`` are of the relative logit difference of ``steps`` decode steps behind ``length`` tokens."""
VARIABLE = "KVINTERP_NORMS"
FEWEST = 5
"""Of fewer models a rank says nothing."""
LIKE = {"length": 2.0, "layers": 4.0, "width": 4.0}
"""Within which factor a model is like another."""
_MOST = 16 * 2**20


class Standing(NamedTuple):
    """Where a model stands.

    Attributes:
        percentile: Share of like models whose difference is smaller, ties by half, in percent; None where nothing is like it.
        models: How many those are.
        said: In a sentence.
    """

    percentile: float | None
    models: int
    said: str


def shipped() -> Path:
    """The table that comes with the package."""
    return Path(__file__).parents[1] / "data" / "norms.csv"


def read_norms(path: Path, option: str = "--add") -> pd.DataFrame:
    """A table of norms.

    Raises:
        InputError: It is none, or is larger than 16 MiB.
    """
    expected = f"a table that kvinterp norms wrote, with the columns {', '.join(COLUMNS)}"
    try:
        with opened(path, _MOST) as file:
            content = file.read(_MOST + 1)
        table = pd.read_csv(io.BytesIO(content), dtype=str, keep_default_na=False)[list(COLUMNS)]
        table = table.assign(**{name: pd.to_numeric(table[name]).astype(float) for name in NUMBERS})
        sound = len(content) <= _MOST and bool((table[list(NUMBERS)] >= 0).all(axis=None))
    except (OSError, ValueError, KeyError) as error:
        why = (error.strerror or str(error)) if isinstance(error, OSError) else type(error).__name__
        raise InputError(f"{option} {str(path)!r} cannot be read ({why}): expected {expected}.") from error
    if not sound:
        raise InputError(f"{option} {str(path)!r} is too large or holds numbers below 0 or none: expected {expected}.")
    return table


@functools.lru_cache(maxsize=4)
def _known(extra: str) -> pd.DataFrame:
    tables = [read_norms(shipped(), "the table of norms"), *([read_norms(Path(extra), VARIABLE)] if extra else [])]
    return pd.concat(tables, ignore_index=True)


def known() -> pd.DataFrame:
    """Our rows and the user's own."""
    return _known(os.environ.get(VARIABLE, ""))


def standing(of: Mapping[str, Any], difference: float, table: pd.DataFrame | None = None) -> Standing:
    """Where a difference stands among those of like models.

    Args:
        of: What it is of: architecture, dtype, plan, device, length, layers, width.
        difference: Its median relative logit difference over some steps.
        table: The norms; those that are known unless given.
    """
    rows = known() if table is None else table
    for name in ("architecture", "dtype", "plan"):
        rows = rows[rows[name] == str(of[name])]
    rows = rows[rows["device"].str.split(" ").str[0] == str(of["device"]).split(" ")[0]].reset_index(drop=True)
    for name, factor in LIKE.items():
        rows = rows[(rows[name] <= of[name] * factor) & (rows[name] * factor >= of[name])]
    # Of several lengths of one model the nearest.
    nearest = (np.log(rows["length"]) - np.log(of["length"])).abs().sort_values(kind="stable").index
    sizes = rows.loc[nearest].groupby("model", sort=True)["median"].first().to_numpy()
    what = f"{of['architecture']} models of like size in {of['dtype']}, about {of['length']:g} tokens, {of['plan']}"
    if len(sizes) < FEWEST or not np.isfinite(difference):
        return Standing(None, len(sizes), f"nothing comparable is in the table of norms ({len(sizes)} {what})")
    below = 100 * float(np.mean(sizes < difference) + np.mean(sizes == difference) / 2)
    middle, high = np.quantile(sizes, [0.5, 0.9])
    said = (
        f"{difference:.1e} relative logit difference is at the {_ordinal(round(below))} percentile of {len(sizes)} {what}"
    )
    return Standing(below, len(sizes), f"{said} (median {middle:.1e}, 90% below {high:.1e}); this judges nothing")


def _ordinal(number: int) -> str:
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number // 10 % 10 != 1 else "th"
    return f"{number}{ending}"
