"""CacheBugs: scripts without kvinterp, each of which shows a fault of a cache, and nothing where it is mended."""

from __future__ import annotations

import ast
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from support import has_hooked_transformer

HOME = Path(__file__).parents[2] / "benchmarks" / "cachebugs"
sys.path.insert(0, str(HOME))
import make  # noqa: E402
import methods  # noqa: E402
import run  # noqa: E402

SAMPLE = ("top_left", "second_turn")
"""One of a model from scratch, one of transformers' generate()."""


def said(name: str, mended: bool) -> str:
    """What a script prints; what it plants in a library's module ends with the process."""
    with multiprocessing.get_context("fork").Pool(1) as pool:
        return pool.apply(run.said_here, (name, mended))[0]


@pytest.mark.parametrize(
    "name",
    [*SAMPLE, *(pytest.param(name, marks=pytest.mark.slow) for name in run.BUGS if name not in SAMPLE)],
)
def test_a_script_shows_its_fault_and_its_twin_does_not(name: str) -> None:
    if run.BUGS[name]["model"] == "TransformerLens" and not has_hooked_transformer():
        pytest.skip("TransformerLens 4 has no HookedTransformer")
    bad, good = said(name, False), said(name, True)
    assert run.right(bad, good), (bad, good)


def test_what_a_script_says_is_read_as_it_is_meant() -> None:
    assert run.right("wrong: off by 0.1", "right: off by 1e-07")
    assert not run.right("right: off by 1e-07", "right: off by 1e-07")
    assert not run.right("wrong: off by 0.1", "RuntimeError: no")


def test_the_scripts_are_those_of_the_rebuilt_reports_and_each_has_its_line() -> None:
    written = make.scripts()
    assert {path.name for path in written if path.read_text(encoding="utf-8") != written[path]} == set()
    assert make.bugs() == (HOME / "bugs.jsonl").read_text(encoding="utf-8")
    files = {path.stem for path in (HOME / "scripts").glob("*.py")}
    assert files == {*run.BUGS} == {path.stem for path in written} | {*make.FOUND}
    assert len(files) >= 60


@pytest.mark.parametrize("name", run.BUGS)
def test_a_script_imports_neither_kvinterp_nor_another_file_here(name: str) -> None:
    tree = ast.parse((HOME / "scripts" / f"{name}.py").read_text(encoding="utf-8"))
    imported: set[Any] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported |= {one.name.split(".")[0] for one in node.names}
        elif isinstance(node, ast.ImportFrom):
            imported.add(str(node.module).split(".")[0])
    assert imported - {"torch", "transformers", "transformer_lens"} <= sys.stdlib_module_names
    assert json.dumps(run.BUGS[name])


@pytest.mark.parametrize("method", ["greedy", "tokens", "allclose"])
def test_an_assertion_of_others_finds_a_plain_fault_and_not_its_twin(method: str) -> None:
    with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
        bad, good = (pool.apply(methods.asked, ("gpt2_single", mended, method)) for mended in (False, True))
    assert (bad["said"], good["said"]) == ("found", "right")


def test_what_was_asked_is_of_bugs_that_there_are_and_the_page_has_its_table() -> None:
    rows = [json.loads(line) for line in methods.RESULTS.read_text(encoding="utf-8").splitlines()]
    assert {row["name"] for row in rows} <= {*run.BUGS}
    assert len({(row["name"], row["mended"], row["method"]) for row in rows}) == len(rows)
    for page in (HOME / "README.md", HOME.parents[1] / "docs" / "known_bugs.md"):
        assert methods.table(rows) in page.read_text(encoding="utf-8"), page
