"""The recipe for a lent GPU (``tools/gpu``), rehearsed on the CPU: every job runs with the smallest sizes, so that no typing error costs a start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu import on_gpu

ROOT = Path(__file__).parents[1]
FIRST = ("versions", "zoo-native", "zoo-patch", "bench")
"""Those that run by default; ``--everything`` runs all."""
JOBS = [
    pytest.param(plan, name, marks=[] if name in FIRST else [pytest.mark.long, *[pytest.mark.hooked] * ("hooked" in name)])
    for plan, jobs in on_gpu.PLANS.items()
    for name in jobs
]


@pytest.mark.parametrize(("plan", "name"), JOBS)
def test_a_job_runs_on_the_cpu(plan: str, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    ask = on_gpu.asked([plan, "--device", "cpu", "--tiny"])
    found = on_gpu.run_job(name, ask, tmp_path)
    assert not {key: value for key, value in found.items() if "FAILED" in key}
    assert len(found) > 3
    assert json.loads((tmp_path / "notes.json").read_text()).keys() == found.keys()


def test_a_job_that_fails_is_said_and_the_rest_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def breaks(note: Any, ask: Any) -> None:
        note("before", 1)
        raise ValueError("broken")

    monkeypatch.setitem(on_gpu.PLANS["look"], "versions", (breaks, 1, False))
    found = on_gpu.run_job("versions", on_gpu.asked(["look"]), tmp_path)
    assert found["before"] == 1
    assert "broken" in found["versions: FAILED"]["error"]


@pytest.mark.long
def test_a_call_brings_back_what_its_processes_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole way of a call: a process a job, and one archive of what all calls found."""
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(on_gpu, "RESULTS", tmp_path / "kvi" / "results")
    monkeypatch.setenv("KVI_GPU_WORK", str(tmp_path / "kvi"))
    ask = on_gpu.asked(["look", "--only", "versions", "--device", "cpu", "--tiny", "--limit", "1000"])
    said, ended = {}, {}
    on_gpu.run(ask, said, ended, {}, tmp_path / "out")
    summary, left = on_gpu.pack(said, ended, tmp_path / "out")
    on_gpu.show(summary, left)
    assert ended["versions"]["rc"] == 0
    assert summary["jobs"]["versions"]["versions"]["torch"]
    assert not left
    assert (tmp_path / "out" / "results.tar.gz").stat().st_size
