"""The core and its wings: each can be taken away, and a stranger's package is handed in by the door that ours use."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import tomllib

ROOT = Path(__file__).parents[1]
WINGS = {
    # What a wing is made of, the commands that go with it, and the wings that stand on it.
    "papers": ("papers", "lm_eval.py"),
    "engines": ("engines",),
    "auditing": ("auditing", "testing.py", "engines", "papers", "lm_eval.py"),
}
GOES = {"papers": {"behaviour", "chain"}, "engines": {"compare-traces"}, "auditing": {"audit", "kernels", "compare-traces"}}
STAYS = {"compare", "patch", "attention", "decompose"}
STRANGER = {
    "stranger/__init__.py": "",
    "stranger/tallying.py": '''"""Tally the tokens of prompts, for nobody."""

import pandas as pd

from kvinterp.commands.kit import Cell, Experiment, Result, load_prompts, option, shared


class Tallying(Experiment):
    """How many?"""

    prompts: str = shared("prompts")
    letter: str = option("e", "What is counted.")

    def cells(self):
        return [Cell("all", tallied, {"prompts": self.prompts, "letter": self.letter})]

    def reduce(self, parts):
        return Result(parts["all"][0], {"letter": self.letter})

    def sentences(self, result):
        return [f"{result.tables['table']['count'].sum()} times {self.letter}"]

    def has_page(self, result):
        return False


def tallied(prompts, letter):
    return pd.DataFrame({"count": [str(prompt.text).count(letter) for prompt in load_prompts(prompts)]})
''',
    "stranger/names.py": "def greet():\n    return 'hello'\n\n\ndef rows():\n    return [{'name': 'a stranger'}]\n",
    "stranger-1.dist-info/METADATA": "Metadata-Version: 2.1\nName: stranger\nVersion: 1\n",
    "stranger-1.dist-info/entry_points.txt": (
        "[kvinterp.studies]\nstranger = stranger.tallying\n[kvinterp.names]\ngreet = stranger.names:greet\n"
        "[kvinterp.lists]\nstrangers = stranger.names:rows\n"
    ),
}


def _asked(folder: Path, code: str) -> str:
    """What a program prints that finds the packages in this folder first."""
    environment = os.environ | {"PYTHONPATH": str(folder)}
    made = subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    return made.stdout


def _copy(folder: Path, without: tuple[str, ...] = ()) -> Path:
    """The package in a folder, without some of it, with the entry points that are left, as pip would write them."""
    shutil.copytree(ROOT / "src" / "kvinterp", folder / "kvinterp", ignore=lambda at, names: {
        name for name in names if name == "__pycache__" or (Path(at).name == "kvinterp" and name in without)
    })  # fmt: skip
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
    gone = tuple(f"kvinterp.{name.removesuffix('.py')}" for name in without)
    lines = []
    for group, points in groups.items():
        lines += [f"[{group}]", *(f"{name} = {to}" for name, to in points.items() if not to.startswith(gone or ("?",)))]
    (folder / "kvinterp-0.dist-info").mkdir()
    (folder / "kvinterp-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: kvinterp\nVersion: 0\n")
    (folder / "kvinterp-0.dist-info" / "entry_points.txt").write_text("\n".join(lines))
    return folder


HELP = "from kvinterp.commands.registry import experiments; print(*experiments())"
RUNS = """
import importlib, pkgutil
import kvinterp as kv
for module in pkgutil.walk_packages(kv.__path__, "kvinterp."):
    if module.name not in ("kvinterp.__main__", "kvinterp.lm_eval"):
        importlib.import_module(module.name)
found = kv.compare(kv.load_model("zoo:gqa2-mini", dtype="float32"), "2 + 2 =", b="recompute@float64", max_new_tokens=2, progress="none")
assert len(found.steps)
print(*["no audit"] * (not hasattr(kv, "audit")), sep="")
"""


@pytest.mark.parametrize("wing", WINGS)
def test_without_a_wing_the_rest_goes_on(wing: str, tmp_path: Path) -> None:
    folder = _copy(tmp_path, WINGS[wing])
    left = {*_asked(folder, HELP).split()}
    assert left >= STAYS
    assert not left & GOES[wing]
    assert _asked(folder, RUNS).strip() == ("no audit" if wing == "auditing" else "")


@pytest.mark.slow
def test_the_cores_tests_pass_where_the_wings_are_gone(tmp_path: Path) -> None:
    folder = _copy(tmp_path, WINGS["auditing"])
    asked = [sys.executable, "-m", "pytest", "tests/core", "-p", "no:cacheprovider", "-q", "-n", "2", "--dist", "loadgroup"]
    environment = os.environ | {"PYTHONPATH": str(folder)}
    made = subprocess.run(asked, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert made.returncode == 0, made.stdout[-4000:]


def test_the_core_names_no_wing_in_a_text_either() -> None:
    """An import that hides in a string is one that import-linter cannot see."""
    core = ROOT / "src" / "kvinterp"
    rooms = (
        "cli",
        "commands",
        "common",
        "comparison",
        "data",
        "metrics",
        "models",
        "paths",
        "patching",
        "policies",
        "recording",
        "report",
    )
    files = [file for room in rooms for file in (core / room).rglob("*.py")]
    named = [
        file.relative_to(core)
        for file in files
        for wing in ("auditing", "engines", "papers")
        if f'"kvinterp.{wing}' in (text := file.read_text(encoding="utf-8")) or f"'kvinterp.{wing}" in text
    ]
    assert len(files) > 100
    assert not named


def test_a_strangers_package_is_handed_in_by_the_same_door(tmp_path: Path) -> None:
    folder = _copy(tmp_path)
    for name, text in STRANGER.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    code = """
import sys
import kvinterp as kv
from kvinterp.cli import app
print(kv.greet(), kv.experiment("tallying", prompts="an eel", progress="none").sentences())
sys.argv = ["kvinterp", "study", "tallying", "--prompts", "is sleepless", "--letter", "s", "--out", "tallied"]
try:
    app(["list", "strangers"], standalone_mode=False)
except SystemExit:
    pass
app()
"""
    said = _asked(folder, code)
    for part in ("hello ['2 times e']", "a stranger", "4 times s"):
        assert part in said
    assert (folder / "tallied" / "table.parquet").is_file()
