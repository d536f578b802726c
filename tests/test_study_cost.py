"""The arithmetic of what the study costs, beside loops that count one by one; and docs/study_cost.md, whose numbers are the tool's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import study_cost
from study_cost import Costs, Plan, counted

ROOT = Path(__file__).parents[1]
MEASURED = ROOT / "benchmarks/results/study_cost-amd-epyc-avx512.json"
PAGE = ROOT / "docs/study_cost.md"


def test_the_papers_decodes_are_those_it_reports_and_the_different_ones() -> None:
    plan = Plan()
    assert 3 * plan.reported == 31_500
    assert 3 * plan.decodes == 23_100


def test_forwards_and_seconds_are_those_of_a_loop() -> None:
    plan, costs = Plan(prompt=7, steps=5, flipped=0.5), Costs((3.0, 0.25), (2.0, 0.5, 0.125), around=1.5)
    forwards: list[tuple[str, int]] = [("prefill", 7)]
    for step in range(5):
        forwards += [("cached", 1)] if step else []
        forwards += [("recompute", 7 + step)]
    by = {kind: [tokens for name, tokens in forwards if name == kind] for kind in ("prefill", "cached", "recompute")}
    made = counted(plan)
    assert (made["prefill"].count, made["prefill"].tokens) == (1, 7)
    assert (made["cached steps"].count, made["cached steps"].tokens) == (len(by["cached"]), sum(by["cached"]))
    assert (made["recompute, matched"].count, made["recompute, matched"].tokens) == (5, sum(by["recompute"]))
    assert made["recompute, free"].tokens == 0.5 * sum(by["recompute"][1:])
    whole = [2 + 0.5 * tokens + 0.125 * tokens**2 for tokens in (7, *by["recompute"])]
    steps = [3 + 0.25 * (7 + step) for step in range(1, 5)]
    assert costs.matched(7, 5) == pytest.approx(1.5 * (sum(whole) + sum(steps)))
    assert costs.decode(plan) == pytest.approx(costs.matched(7, 5) + 0.5 * 1.5 * sum(whole[2:]))


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["study_cost.py", *arguments])
    code = study_cost.main()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_page_says_what_the_tool_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the page that begins with a command of the tool is what the command prints."""
    blocks = re.findall(r"```text\n\$ python tools/study_cost\.py (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 2
    for command, shown in blocks:
        code, out, _ = printed(capsys, monkeypatch, *command.replace("benchmarks/results", str(MEASURED.parent)).split())
        assert code == 0
        assert out.strip() == shown.strip(), command
