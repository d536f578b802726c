"""Executes the notebooks from the top and writes them back, without what would change with every run.

python notebooks/execute.py [01_two_paths ...]
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).parent
QUIET = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}
METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> None:
    """Executes one notebook in an empty folder and writes it back."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    with tempfile.TemporaryDirectory() as folder:
        NotebookClient(notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for index, cell in enumerate(notebook.cells):
        cell.id, cell.metadata = f"cell-{index:02d}", {}
        if cell.cell_type == "code":
            cell.outputs = together(cell.outputs)
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise SystemExit(f"{path.name}, cell {index} warns: {output.text}")
            # A widget has a new number in every run; without a front end its text/html is shown.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            if "metadata" in output:
                output.metadata = {}
    notebook.metadata = METADATA
    nbformat.validate(notebook)
    nbformat.write(notebook, path)


def together(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Joins what was printed in one cell, which arrives in as many pieces as the machine had moments."""
    joined: list[NotebookNode] = []
    for output in outputs:
        before = joined[-1] if joined else None
        if before is not None and output.output_type == before.output_type == "stream" and output.name == before.name:
            before.text += output.text
        else:
            joined.append(output)
    return joined


if __name__ == "__main__":
    os.environ.update(QUIET)
    for name in sys.argv[1:] or sorted(path.stem for path in FOLDER.glob("*.ipynb")):
        execute(FOLDER / f"{name}.ipynb")
        print(name)
