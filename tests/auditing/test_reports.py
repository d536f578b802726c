"""Public reports: a plain loop shows each fault as it was reported, the audit finds it, and finds nothing without it."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from reported import own_code
from reports import answered

SHOWN = 1e-3
"""How far of the largest logit a fault has to move an answer; without the faults the loops are below 1e-5."""


def asked(name: str, fault: bool) -> dict[str, Any]:
    """The audit's answer; what is planted in a library's module ends with the process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(answered, (name, fault))


@pytest.mark.parametrize("name", own_code.REPORTS)
def test_a_plain_loop_shows_the_fault_and_nothing_without_it(name: str) -> None:
    report = own_code.REPORTS[name]
    assert report.shows is not None
    assert report.shows(report.build(True)) > SHOWN
    assert report.shows(report.build(False)) < 1e-5


def test_a_report_is_found() -> None:
    answer = asked("top left", fault=True)
    assert answer["verdict"] == "bug"
    assert "decode step" in [use["name"] for use in answer["wrong"]]
