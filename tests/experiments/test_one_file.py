"""A new experiment is one new file: a command with its options, a line of the list, and a result that is kept."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pandas as pd

import kvinterp

NEW = '''"""Count to a number, for nobody."""

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
'''


def test_an_experiment_of_one_file_is_a_command(tmp_path: Path) -> None:
    package = Path(str(kvinterp.__file__)).parent
    shutil.copytree(package, tmp_path / "kvinterp", ignore=shutil.ignore_patterns("*-mini", "__pycache__"))
    (tmp_path / "kvinterp" / "experiments" / "counting.py").write_text(NEW)

    def command(*arguments: str) -> str:
        code = "import sys; from kvinterp.cli import main; sys.argv[0] = 'kvinterp'; main()"
        made = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            env={**os.environ, "PYTHONPATH": str(tmp_path), "COLUMNS": "200"},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )
        assert made.returncode == 0, made.stderr
        return made.stdout

    assert "Count to a number" in command("list", "experiments")
    shown = command("counting", "--help")
    assert "--most" in shown
    assert "--by-names" in shown
    assert "How far to count." in shown
    said = command("counting", "--most", "2", "--by-names", "1,10", "--out", "out")
    assert "counted to 2" in said
    assert pd.read_parquet(tmp_path / "out" / "numbers.parquet")["n"].tolist() == [11, 12]
