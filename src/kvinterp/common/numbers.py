"""Formats numbers, counts, intervals and machines for readers."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd

_SUPERSCRIPT = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


# One number ---------------------------------------------------------------------------------------


def number(value: float) -> str:
    """A number with two or three digits: 0.0156, or 1.6 × 10⁻⁷; exact zeros as 0, NaN as a dash."""
    if pd.isna(value):
        return "–"
    if value == 0:
        return "0"
    if np.isinf(value):
        return "∞" if value > 0 else "−∞"
    if 1e-3 <= abs(value) < 1e6:
        return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"
    mantissa, exponent = f"{value:.1e}".split("e")
    return f"{mantissa}\u00a0×\u00a010{str(int(exponent)).translate(_SUPERSCRIPT)}"


def short(value: float, digits: int = 1) -> str:
    """A number in few characters, for figures: 0.81, or 1.2e-6."""
    return (
        f"{value:.2g}"
        if value == 0 or 0.01 <= value < 1000
        else re.sub(r"e([+-])0*", r"e\1", f"{value:.{digits}e}")
    )


def power(value: float) -> str:
    """A power of ten as text."""
    return f"1e{round(np.log10(value)):d}"


def percent(value: float) -> str:
    """A share of any size and sign in percent, for figures: 50 %, −3.0e4 %."""
    text = (
        f"{value * 100:.0f}"
        if abs(value) < 100
        else f"{value * 100:.1e}".replace("e+0", "e").replace("e+", "e")
    )
    return ("0" if text == "-0" else text).replace("-", "−") + "\u202f%"


# Several ------------------------------------------------------------------------------------------


def between(values: Sequence[float]) -> str:
    """The smallest and the largest of some numbers, or one of them where both look the same."""
    low, high = number(min(values)), number(max(values))
    return low if low == high else f"{low} to {high}"


def listed(names: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)


def counted(count: int, what: str) -> str:
    """``1 step``, ``6 steps``, ``2 policies``, ``3 patches``."""
    many = (
        f"{what.removesuffix('cy')}cies"
        if what.endswith("cy")
        else f"{what}{'es' if what.endswith('ch') else 's'}"
    )
    return f"{count} {what if count == 1 else many}"


def every(count: int, what: str) -> str:
    """``the 1 step``, ``all 6 steps``."""
    return f"{'the' if count == 1 else 'all'} {counted(count, what)}"


def upper(text: str) -> str:
    """A text that begins with a capital letter."""
    return text[:1].upper() + text[1:]


def ends_said(
    low: float | None, high: float | None, form: str, written: Callable[[Any], str]
) -> str:
    """The ends of an interval, to stand after a number; empty where there is none."""
    return (
        "" if pd.isna(low) or pd.isna(high) else form.format(f"{written(low)} to {written(high)}")
    )


# Paths and machines -------------------------------------------------------------------------------


def against(provenance: Mapping[str, Any]) -> str:
    """The two paths of a comparison."""
    return f"{provenance['paths']['a']} against {provenance['paths']['b']}"


def models_of(provenances: Iterable[Mapping[str, Any]]) -> str:
    """Models and how they ran, as in
    ``zoo:llama-mini (native, float16; AMD EPYC (AVX2), 1 thread)``.

    Args:
        provenances: The provenance of each model. Models that ran alike are named together; one
            without a kind is left out.
    """
    names: dict[str, list[str]] = {}
    for about in provenances:
        if "kind" in about:
            ran = f"({about['kind']}, {about['dtype']}{'; ' + machine_of(about) if 'device' in about else ''})"
            names.setdefault(ran, []).append(str(about["model"]))
    return "; ".join(f"{', '.join(dict.fromkeys(models))} {ran}" for ran, models in names.items())


def machine_of(provenance: Mapping[str, Any]) -> str:
    """The hardware of a measurement, and its threads."""
    threads = provenance["threads"]
    return f"{provenance['device']}, {threads if isinstance(threads, str) else counted(threads, 'thread')}"
