"""The documentation says what there is: every command and public name has its place, and every command that is written is one."""

from __future__ import annotations

import importlib.util
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import kvinterp
from command_line import kvinterp as kvinterp_command
from command_line import parsed
from kvinterp.auditing.programs.names import OPERATIONS, program_named
from kvinterp.auditing.programs.operations.generate import HOW, Generate
from kvinterp.auditing.programs.program import ASKS, ATTENTION, CACHES, FED, MASKS
from kvinterp.commands.registry import experiments
from kvinterp.common import spec

ROOT = Path(__file__).parents[1]
PAGES = sorted(page for page in (ROOT / "docs").rglob("*.md") if "upstream" not in page.parts)


def tool(name: str) -> Any:
    """One of the files beside the site, which is no package."""
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "tools" / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


def commands() -> list[list[str]]:
    """Every kvinterp command of the pages, with a model that is here, but for those that read a file of their reader's."""
    blocks = [
        block for page in PAGES for block in re.findall(r"(?ms)^```bash\n(.*?)^```", page.read_text(encoding="utf-8"))
    ]
    lines = [line.partition("|")[0] for line in "\n".join(blocks).splitlines() if line.startswith("kvinterp ")]
    lines = [line.replace("real:smollm2-135m", "zoo:llama-mini") for line in lines if ".jsonl" not in line]
    return [shlex.split(line, comments=True)[1:] for line in lines]


def test_every_command_that_is_written_is_one() -> None:
    asked = commands()
    assert len(asked) > 35
    for arguments in asked:
        parsed(arguments)


NOT_RUN = re.compile(r"<!-- not run: (\S[^>\n]*) -->\n$")
"""What stands above a block of commands that no test runs: why."""
SMALLER = {
    "audit": ("--lengths", "5", "--steps", "1", "--programs", "1", "--seconds", "1", "--rungs", "float64"),
    "paper": ("zoo:llama-mini", "--strategy", "greedy"),
    "kernels": ("--sizes", "2,5"),
    "show": ("--no-open",),
}
"""What is added to a command, by its name, so that it is quick; the last of an option that is given twice counts."""
FEW = ("--prompts", "arithmetic:1", "--max-new-tokens", "3", "--overwrite")


def run_blocks() -> dict[str, list[str]]:
    """The lines of the blocks that are not marked as not run, by their page."""
    found: dict[str, list[str]] = {}
    for page in (ROOT / "README.md", *PAGES):
        text = page.read_text(encoding="utf-8")
        for block in re.finditer(r"(?ms)^```bash\n(.*?)^```", text):
            if NOT_RUN.search(text[: block.start()]) is None:
                found.setdefault(page.relative_to(ROOT).as_posix(), []).extend(block[1].splitlines())
    return found


def made_smaller(line: str) -> list[str]:
    """The arguments of a command of kvinterp, with little to do."""
    arguments = shlex.split(line.partition(" | ")[0].replace("MODEL", "zoo:gqa2-mini"), comments=True)[1:]
    name = next(word for word in arguments if word != "study")
    few = FEW if name in ("compare", "patch", "decompose", "paper") else ()
    return [*arguments, *SMALLER.get(name, ()), *few, *("--examples", "1") * ("--examples" in arguments)]


@pytest.mark.always  # In CI, too.
@pytest.mark.slow
def test_every_command_runs_or_is_marked_as_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """docs/evaluators.md had a command that failed on a machine without CUDA, and on its model anywhere. CI runs this test."""
    ci = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    asked = run_blocks()
    assert len(asked) > 8
    for page, lines in asked.items():
        folder = tmp_path / page
        folder.mkdir(parents=True)
        monkeypatch.chdir(folder)
        for line in lines:
            words = line.split()
            if line.startswith("kvinterp "):
                if words[1] == "show" and not Path(words[2]).exists():
                    assert kvinterp_command("compare", "zoo:gqa2-mini", *FEW, "--out", words[2]).exit_code == 0
                made = kvinterp_command(*made_smaller(line))
                # An audit of what is wrong leaves with 1.
                assert made.exit_code == 0 or (words[1], made.exit_code) == ("audit", 1), (page, line, made.output)
            elif line.startswith("python -c "):
                subprocess.run([sys.executable, *shlex.split(line)[1:]], check=True)
            elif line.startswith("python -m kvinterp.lm_eval "):
                assert line in (ROOT / "docs" / "evaluators.md").read_text(
                    encoding="utf-8"
                )  # tests/papers/test_evaluators.py.
            else:
                assert words[0] == "make", f"{page}: no test runs {line!r}: write <!-- not run: why --> above its block"
                assert f"part make {words[1]}" in ci, f"{page}: CI runs no {line!r}"


def test_every_public_name_is_on_the_page_of_the_api() -> None:
    """One that was not given a place stands at its end."""
    pytest.importorskip("mkdocs", reason="mkdocs is not installed: pip install 'kvinterp[docs]'")
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    for given in (page, page.replace("::: kvinterp.sweep\n", "")):
        named = re.findall(r"(?m)^::: kvinterp\.(\w+)$", tool("hooks").completed(given))
        assert sorted(named) == sorted(set(kvinterp.__all__) - {"__version__"})


def test_every_command_is_on_the_page_of_all_commands() -> None:
    page = (ROOT / "docs" / "commands.md").read_text(encoding="utf-8")
    table = "\n".join(line for line in page.splitlines() if line.startswith("|"))
    missing = [name for name in (*experiments(), "study", "show", "list") if not re.search(rf"`{name}[` ]", table)]
    assert not missing


@pytest.mark.parametrize("page", list((ROOT / "docs").rglob("*.md")), ids=lambda path: path.stem)
def test_figures_that_are_shown_are_there(page: Path) -> None:
    for shown in re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        assert (page.parent / shown).is_file(), shown


def test_every_figure_is_shown_is_in_the_index_and_is_made_again() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    shown = {name for page in pages for name in re.findall(r"figures/(\w+\.png)", page.read_text(encoding="utf-8"))}
    index = (ROOT / "figures" / "README.md").read_text(encoding="utf-8")
    there = {path.name for path in (ROOT / "figures").glob("*.png")}
    assert there == shown == set(re.findall(r"`(\w+\.png)`", index))
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("\nfigures:")[2].partition("\nCOMMA")[0]
    copied = {f"root_cause_{name}.png" for name in re.findall(r"for name in ([\w ]+);", recipe)[0].split()}
    made = (
        copied
        | set(re.findall(r"(\w+\.png)", recipe))
        | {f"{name}.png" for name in re.findall(r"benchmarks/(\w+)\.py", recipe)}
    )
    assert there <= made


def test_files_and_rooms_that_are_named_are_there() -> None:
    """The walks through the house and the map in the README name what is there."""
    core, root = ROOT / "src" / "kvinterp", ROOT
    for page in (ROOT / "docs" / "architecture.md", ROOT / "CONTRIBUTING.md"):
        named = [
            name for name in re.findall(r"`([\w/]+(?:\.py|/))`", page.read_text(encoding="utf-8")) if "NAME" not in name
        ]
        assert len(named) > 10
        missing = [name for name in named if not any((place / name).exists() for place in (core, root))]
        assert not missing, f"{page.name}: {missing}"
    (drawn,) = re.findall(r"(?ms)^src/kvinterp/\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"))
    rooms = re.findall(r"(?m)^ +(\w+)/", drawn)
    assert len(rooms) > 12
    assert not [
        room
        for room in rooms
        if not any((place / room).is_dir() for place in (core, core / "auditing", core / "papers", core / "commands"))
    ]
    assert {place.name for place in core.iterdir() if (place / "__init__.py").is_file()} <= set(
        re.findall(r"(\w+)/", drawn)
    )


def test_every_program_beside_a_test_of_others_is_one_and_every_operation_stands_there() -> None:
    """The page says what tries the same: its programs can be run, and nothing that can be asked is left out of it."""
    page = (ROOT / "docs" / "audit_tests.md").read_text(encoding="utf-8")
    programs = [program_named(text) for text in re.findall(r"`(rows\([^`]*)`", page)]
    assert len(programs) > 80
    assert {spec.name_of(type(step)) for program in programs for step in program.steps} == set(OPERATIONS)
    for name, choices in {"told": MASKS, "fed": FED, "asks": ASKS, "attention": ATTENTION, "cache": CACHES}.items():
        assert set(choices) == {getattr(program.rows, name) for program in programs} & set(choices), name
    assert {step.how for program in programs for step in program.steps if isinstance(step, Generate)} >= {*HOW}
