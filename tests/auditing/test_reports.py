"""Public reports: a plain loop shows each fault as it was reported, the audit finds it, and finds nothing without it."""

from __future__ import annotations

import multiprocessing
from typing import Any

import pytest
from reported import own_code
from reports import REPORTS, answered, found

SHOWN = 1e-3
"""How far of the largest logit a fault has to move an answer; without the faults the loops are below 1e-5."""

MISSED = {"state left behind"}
"""A request in between and a text that goes on behind it are drawn as program 71."""

WRONG_WITHOUT_FAULTS = {"mamba beams", "Mamba2, first of a chunk", "Mamba2, from zero", "state left behind"}
"""What transformers 5.23 has besides (docs/wild.md)."""


def asked(name: str, fault: bool) -> dict[str, Any]:
    """The audit's answer; what is planted in a library's module ends with the process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(answered, (name, fault))


def shown(name: str, fault: bool) -> float:
    report = REPORTS[name]
    return report.shows(report.build(fault))


@pytest.mark.parametrize("name", own_code.REPORTS)
def test_a_plain_loop_shows_the_fault_and_nothing_without_it(name: str) -> None:
    assert shown(name, True) > SHOWN
    assert shown(name, False) < 1e-5


@pytest.mark.slow
def test_a_plain_loop_shows_the_faults_that_are_planted_in_libraries() -> None:
    names = [name for name in REPORTS if name not in own_code.REPORTS]
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        faults = {name: pool.apply(shown, (name, True)) for name in names}
        clean = {name: pool.apply(shown, (name, False)) for name in names}
    assert {name: far for name, far in faults.items() if far < SHOWN} == {}
    assert {name: far for name, far in clean.items() if far > 1e-5} == {}


def test_a_report_is_found() -> None:
    answer = asked("top left", fault=True)
    assert found(answer)
    assert "decode step" in [use["name"] for use in answer["wrong"]]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_every_report_is_found_but_those_that_are_known_to_be_missed() -> None:
    assert {name for name in REPORTS if not found(asked(name, fault=True))} == MISSED


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_nothing_is_found_without_the_faults() -> None:
    answers = [asked(name, fault=False) for name in REPORTS if name not in WRONG_WITHOUT_FAULTS]
    assert [answer for answer in answers if answer["exit"] != 0] == []
