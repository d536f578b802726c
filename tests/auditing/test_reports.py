"""Public reports: programs find each fault as it was reported, and nothing without it."""

from __future__ import annotations

import multiprocessing

import pytest
from reports import REPORTS, tried

OURS = ("left padding, mask alone",)
"""No fault of a cache: its plain forward is off as well."""


def asked(name: str, fault: bool) -> str:
    """The row; what is planted in a library's module ends with the process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(tried, (name, fault))


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name == "second turn" else pytest.mark.slow) for name in REPORTS]
)
def test_a_report_is_found(name: str) -> None:
    assert f"|{'off without a cache too' if name in OURS else 'wrong'}: " in asked(name, fault=True)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(REPORTS) - {*OURS, "state left behind"}))
def test_nothing_is_found_without_the_fault(name: str) -> None:
    assert "|right||" in asked(name, fault=False)
