"""A new policy, metric, kernel mode or experiment is one new file: listed, run, in the tables, in the contracts, a command."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

import kvinterp

FILES = {
    "policies/halved.py": '''"""Keys and values, smaller."""

import dataclasses

from kvinterp.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Halved(Policy):
    """Keeps a share of every number."""

    share: float = 0.5

    def write(self, keys, values, place):
        return keys * self.share, values * self.share
''',
    "metrics/farthest.py": '''"""The farthest logit."""

from kvinterp.metrics.base import Metric, float64_pair


def farthest(a, b):
    """Largest absolute difference of two logits, doubled."""
    one, other = float64_pair(a, b, "logits")
    return 2 * (one - other).abs().amax(-1)


METRICS = (Metric("farthest_doubled", farthest, "logits", 0.0, nonnegative=True),)
''',
    "paths/kernels/untouched.py": '''"""``untouched``: the machine's own kernels under another name."""

import dataclasses

from kvinterp.paths.kernels.base import KernelMode, Kernels


@dataclasses.dataclass(frozen=True)
class Untouched(Kernels):
    """Touches nothing."""

    def mode(self, adapter):
        return KernelMode()
''',
    "experiments/counting.py": '''"""Count to a number, for nobody."""

import dataclasses
from typing import ClassVar

import pandas as pd

from kvinterp.cells import Cell
from kvinterp.experiments.base import Experiment, Outcome, option


@dataclasses.dataclass(frozen=True)
class Counting(Experiment):
    """How far?"""

    TABLES: ClassVar = ("numbers",)

    most: int = option(3, "How far to count.")
    by_names: tuple[int, ...] = option((1, 2), "What is added.", example="1,2")

    def cells(self):
        return [Cell(f"number-{n}", f"{__name__}:counted", {"n": n, "more": list(self.by_names)}) for n in range(self.most)]

    def reduce(self, made, settings, folder):
        tables = {"numbers": pd.concat([tables["table"] for tables, _ in made.values()], ignore_index=True)}
        return Outcome(tables, tables, {"count": len(made)})

    def sentences(self, outcome):
        return [f"counted to {outcome.summary['count']}"]


def counted(n, more):
    return pd.DataFrame({"n": [n + sum(more)]})
''',
}


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("copy")
    package = Path(str(kvinterp.__file__)).parent
    shutil.copytree(package, folder / "kvinterp", ignore=shutil.ignore_patterns("__pycache__"))
    for name, content in FILES.items():
        (folder / "kvinterp" / name).write_text(content)
    return folder


def python(copy: Path, *arguments: str) -> str:
    made = subprocess.run(
        [sys.executable, *arguments],
        env={**os.environ, "PYTHONPATH": str(copy), "COLUMNS": "200"},
        cwd=copy,
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stdout + made.stderr
    return made.stdout


def command(copy: Path, *arguments: str) -> str:
    return python(copy, "-c", "import sys; from kvinterp.cli import main; sys.argv[0] = 'kvinterp'; main()", *arguments)


def test_each_is_listed(copy):
    shown = command(copy, "list")
    for words in ("halved", "farthest_doubled", "untouched", "Count to a number"):
        assert words in shown


def test_policy_kernel_mode_and_metric_run_and_fill_a_table(copy):
    path = "cached[kernels=untouched]+halved(0.25)"
    options = ["--a", path, "--prompts", "arithmetic:1", "--max-new-tokens", "3", "--stop", "length", "--record", ""]
    command(copy, "compare", "zoo:gqa2-mini", *options, "--dtype", "float32", "--out", "compared")
    steps = pd.read_parquet(copy / "compared" / "steps.parquet").set_index("step")
    assert steps.loc[0, "farthest_doubled"] == 0
    assert (steps.loc[1:, "farthest_doubled"] > 1e-3).all()
    assert (steps["farthest_doubled"] == 2 * steps["max_abs_logit"]).all()


@pytest.mark.long
def test_contracts_hold_of_each(copy):
    """The laws of metrics, policies and kernel modes are asked of the new ones too, and hold."""
    tests = Path(__file__).parent
    words = "halved or farthest_doubled or untouched"
    asked = [str(tests / "test_metrics.py"), str(tests / "test_plugins.py"), "-k", words]
    said = python(copy, "-m", "pytest", "-v", "-p", "no:cacheprovider", "--everything", *asked)
    assert int(re.findall(r"(\d+) passed", said)[-1]) >= 10, said


def test_an_experiment_is_a_command(copy):
    shown = command(copy, "counting", "--help")
    assert "--most" in shown
    assert "--by-names" in shown
    assert "How far to count." in shown
    assert "counted to 2" in command(copy, "counting", "--most", "2", "--by-names", "1,10", "--out", "out")
    assert pd.read_parquet(copy / "out" / "numbers.parquet")["n"].tolist() == [11, 12]
