"""The notebooks run from top to bottom on the zoo, are committed executed and small, and define nothing themselves."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from support import SUITES_OWN_SETTINGS

nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed: pip install 'kvinterp[notebook]'")
nbclient = pytest.importorskip("nbclient", reason="nbclient is not installed: pip install 'kvinterp[notebook]'")
pytest.importorskip("ipykernel", reason="ipykernel is not installed: pip install 'kvinterp[notebook]'")

pytestmark = [pytest.mark.xdist_group("notebooks"), pytest.mark.slow]
FOLDER = Path(__file__).parents[1] / "notebooks"
OF_FILES = ("05_another_engine", "06_a_mismatch")
NAMES = (
    "01_two_paths",
    "02_where_it_starts",
    "03_interactive_patching",
    "04_what_carries_it",
    *OF_FILES,
    "07_which_run",
)
EVERY = pytest.mark.parametrize("name", NAMES)
SMALLER = {'PROMPTS = "arithmetic:3"': 'PROMPTS = "arithmetic:2"', "STEPS = 12": "STEPS = 5"}
"""What is made smaller so that the tests are quick; each text must be found."""
OF_ENGINE = {"SEQUENCES = 8": "SEQUENCES = 4"}
"""And in those that judge files."""
ONE_PROMPT = {"04_what_carries_it": ("(model, prompts, ", "(model, prompts[1:], ")}
"""And where one of the prompts is enough: what is sought and what stands there instead."""


def _read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def _code(notebook: Any) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def _python(source: str) -> ast.Module:
    return ast.parse(re.sub(r"(?m)^%.*$", "", source))


@pytest.fixture(scope="module")
def execute(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[Any], Path]]:
    """Executes notebooks one after another in one kernel, emptied in between: importing torch is most of the time."""
    folder = tmp_path_factory.mktemp("notebooks")
    patch = pytest.MonkeyPatch()
    for variable in SUITES_OWN_SETTINGS:
        patch.delenv(variable, raising=False)
    client = nbclient.NotebookClient(
        nbformat.v4.new_notebook(), timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )

    def run(notebook: Any) -> Path:
        client.nb = notebook
        client.reset_execution_trackers()
        client.widget_registry = {}
        reset = nbformat.v4.new_code_cell("%reset -f")
        client.nb.cells.append(reset)
        # The last cell first: names of the notebook before must not keep this one alive.
        for index in (len(notebook.cells) - 1, *range(len(notebook.cells) - 1)):
            client.execute_cell(notebook.cells[index], index)
        return folder

    with client.setup_kernel():
        yield run
    patch.undo()


@pytest.mark.bits
@EVERY
def test_it_runs_on_the_zoo(name: str, execute: Callable[[Any], Path]) -> None:
    notebook = _read(name)
    replacements = dict(OF_ENGINE if name in OF_FILES else SMALLER)
    sources = "\n".join(_code(notebook))
    for old in replacements:
        assert sources.count(old) == 1, f"{old!r} is to be replaced, and {name} has it {sources.count(old)} times"
    assert name not in ONE_PROMPT or ONE_PROMPT[name][0] in sources
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = []
            for old, new in replacements.items():
                cell.source = cell.source.replace(old, new)
            cell.source = cell.source.replace(*ONE_PROMPT.get(name, ("", "")))
    folder = execute(notebook)
    shown = [o for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]
    assert shown, "nothing was shown"
    assert not [o for o in shown if o.output_type == "error"]
    assert not [o.text for o in shown if o.output_type == "stream" and o.name == "stderr"], "a warning was printed"
    if name == "02_where_it_starts":
        assert (folder / "attention.html").read_text(encoding="utf-8").count("var CircuitsVis=") == 1


@EVERY
def test_it_defines_nothing_itself(name: str) -> None:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    for source in _code(_read(name)):
        assert not [node for node in ast.walk(_python(source)) if isinstance(node, kinds)], source


@EVERY
def test_it_is_committed_executed_and_stable(name: str) -> None:
    notebook = _read(name)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1)), "execute it from the top"
    assert not [o for cell in cells for o in cell.outputs if o.output_type == "error"]
    assert not any(cell.metadata for cell in notebook.cells), "timestamps and the like make every run a change"
    assert set(notebook.metadata) == {"kernelspec", "language_info"}
    assert [cell.id for cell in notebook.cells] == [f"cell-{i:02d}" for i in range(len(notebook.cells))]
    text = (FOLDER / f"{name}.ipynb").read_text(encoding="utf-8")
    assert "CircuitsVis=" not in text, "the page with circuitsvis inside belongs into a file of its own"
    assert "widget-view" not in text, "a widget's number changes with every run"
    for target in re.findall(r"\]\(([^)#]+)\)", "\n".join(c.source for c in notebook.cells if c.cell_type == "markdown")):
        assert (FOLDER / target).exists(), f"{target} is linked and not there"


def test_together_they_are_small() -> None:
    files = sorted(FOLDER.glob("*.ipynb"))
    assert tuple(file.stem for file in files) == NAMES
    assert sum(file.stat().st_size for file in files) < 1_500_000
