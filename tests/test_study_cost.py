"""The arithmetic of what the study costs, beside loops that count one by one; and docs/study_cost.md, whose numbers are the tool's."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import study_cost
from study_cost import Costs, Plan, counted, fitted, makespan, scaled

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


def test_one_total_gives_a_range_that_holds_whatever_divides_it() -> None:
    plan = Plan(prompt=50, steps=20)
    for fixed, each in ((1.0, 0.0), (0.0, 0.1), (0.3, 0.02)):
        costs = Costs((fixed + each,), (fixed, each))
        low, high = scaled(costs.matched(10, 8), 10, 8, plan)
        assert low - 1e-9 <= costs.decode(plan) <= high + 1e-9
        assert low < high


def test_a_fit_finds_what_was_put_in_and_nothing_below_zero() -> None:
    lengths = (10, 50, 100, 400)
    assert fitted(lengths, [0.2 + 0.01 * n + 1e-4 * n * n for n in lengths], 3) == pytest.approx(
        [0.2, 0.01, 1e-4], rel=1e-6
    )
    assert min(fitted(lengths, [4.0, 3.0, 2.0, 1.0], 2)) >= 0


def test_devices_share_the_cells_and_a_model_is_loaded_by_each_that_runs_it() -> None:
    plan = Plan(examples=50, block=20, strategies=2, seeds=3)
    one = makespan([1.0, 2.0], [10.0, 20.0], plan, 1)
    assert one == 50 * 4 * 3.0 + 30.0
    two = makespan([1.0, 2.0], [10.0, 20.0], plan, 2)
    assert one / 2 <= two <= one / 2 + 40 + 30
    assert makespan([1.0, 2.0], [10.0, 20.0], plan, 10_000) == 2 * 20 + 20


def printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[int, str, str]:
    monkeypatch.setattr("sys.argv", ["study_cost.py", *arguments])
    code = study_cost.main()
    said = capsys.readouterr()
    return code, said.out, said.err


def test_the_page_says_what_the_tool_prints(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Every block of the page that begins with a command of the tool is what the command prints."""
    blocks = re.findall(r"```text\n\$ python tools/study_cost\.py (.*?)\n(.*?)```", PAGE.read_text(), re.DOTALL)
    assert len(blocks) >= 3
    for command, shown in blocks:
        code, out, _ = printed(capsys, monkeypatch, *command.replace("benchmarks/results", str(MEASURED.parent)).split())
        assert code == 0
        assert out.strip() == shown.strip(), command


def test_what_benchmarks_gpu_writes_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "gpu.json"
    seconds = {"seconds": {"bare": 0.5, "compared": 1.0}}
    file.write_text(json.dumps({"prompt": 256, "steps": 32, "models": {"one": {"row_invariance": [], "native": seconds}}}))
    code, out, _ = printed(capsys, monkeypatch, "hours", str(file), "--prompt", "256", "--steps", "32", "--flipped", "0")
    assert code == 0
    assert "one: 1 to 1 s a decode" in out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("count", "--examples", "0"), "--examples 0: expected at least 1"),
        (("count", "--flipped", "2"), "--flipped 2.0: expected a share from 0 to 1"),
        (("hours", "nowhere.json"), "nowhere.json"),
        (("hours", str(ROOT / "benchmarks/results/trees-amd-epyc.json")), "it holds no costs of models"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    code, _, err = printed(capsys, monkeypatch, *arguments)
    assert code == 2
    assert said in err
    assert err.count("\n") == 1
