"""CacheBugs: scripts without kvinterp, each of which shows a fault of a cache, and nothing where it is mended."""

from __future__ import annotations

import ast
import json
import multiprocessing
import sys
from pathlib import Path
from typing import Any

import pytest

from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import RIGHT, WRONG
from kvinterp.auditing.programs.search import run_program
from kvinterp.models import wrap
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


def test_what_was_asked_is_of_bugs_and_types_that_there_are_and_the_pages_have_its_tables() -> None:
    rows = [json.loads(line) for line in methods.RESULTS.read_text(encoding="utf-8").splitlines()]
    of_bugs, of_types = [row for row in rows if "name" in row], [row for row in rows if "type" in row]
    assert {row["name"] for row in of_bugs} <= {*run.BUGS}
    assert {row["type"]: row["walk"] for row in of_types}.items() <= methods.types().items()
    assert len({tuple(row.values())[:3] for row in rows}) == len(rows)
    first, second = methods.tables(rows).split("\n\n")
    read = (HOME / "README.md").read_text(encoding="utf-8")
    assert first in read
    assert second in read
    assert first in (HOME.parents[1] / "docs" / "known_bugs.md").read_text(encoding="utf-8")


def test_another_fault_of_a_type_is_no_false_alarm_and_one_that_nobody_knows_is() -> None:
    row = {"said": "found", "seconds": 1.0, "model_type": "mamba"}
    known, unknown, right = {**row, "use": "several chunks"}, {**row, "use": "beam search"}, {**row, "said": "right"}
    none: dict[str, list[Any]] = {method: [] for method in methods.METHODS}
    lines = methods.table(none, {**none, "quick": [known, unknown, right]}, "bugs").splitlines()
    assert "|1 of 3, 1 with another fault|" in lines[-1]
    assert "|0 of 0|" in lines[2]


def test_the_program_of_a_bug_shows_it_on_its_model() -> None:
    for bug in run.BUGS.values():
        assert bug["program"] is None or str(program_named(bug["program"])) == bug["program"]
    for mended, word in ((False, WRONG), (True, RIGHT)):
        with multiprocessing.get_context("fork").Pool(1, maxtasksperchild=1) as pool:
            assert pool.apply(program_said, ("roberta_embeds", mended)) == word


def program_said(name: str, mended: bool) -> str:
    """What the program of a bug comes to on the bug's model."""
    model = run.loaded(name).build(not mended)
    return run_program(ModelSubject(wrap(model)), program_named(run.BUGS[name]["program"])).word
