"""Every verb asks for its folder before it works, and takes nothing away before it has something to put there."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

import kvinterp as kv
import kvinterp.auditing.folder as folder_of_audit
import kvinterp.papers.studies.root_cause  # what no_model takes away must be there before
from command_line import wrong
from cutting import MODEL, SMALL, VERBS
from kvinterp.common.files import write_whole
from kvinterp.errors import InputError
from writing import write_tables

TABLE = pd.DataFrame({"x": [1.0, 2.0]})
TEXTS = {"report.html": "the page", "verdict.json": "{}"}
SOME = ("audit", "compare", "kernels", "root-cause")
"""The audit, one of the core, a table, and a study."""


@pytest.fixture
def no_model(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in (
        "kvinterp.models.load_model",
        "kvinterp.models.load.load_model",
        "kvinterp.auditing.commands.audit.load_model",
    ):
        monkeypatch.setattr(place, lambda *_, **__: pytest.fail("a model was loaded"))


@pytest.fixture
def audited() -> Any:
    """An audit of nothing, as far as its files go."""
    rung = SimpleNamespace(name="float32", **dict.fromkeys(folder_of_audit.TABLES, pd.DataFrame()))
    rung.steps = TABLE
    return SimpleNamespace(rungs=[rung])


def content(folder: Path) -> dict[str, bytes | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None for path in folder.rglob("*")
    }


@pytest.mark.parametrize("verb", SOME)
@pytest.mark.usefixtures("no_model")
def test_a_folder_that_cannot_be_written_is_found_before_the_work(tmp_path: Path, verb: str) -> None:
    """`audit` and `root-cause` found it after minutes of work."""
    (tmp_path / "file").write_text("mine")
    wrong("cannot be written (Not a directory)", *VERBS[verb], "--out", tmp_path / "file" / "out")
    assert content(tmp_path) == {"file": b"mine"}


@pytest.mark.parametrize(
    "command",
    [
        ("compare", MODEL, *SMALL, "--record", "resid_pst"),
        ("compare", MODEL, *SMALL, "--layers", "99"),
        ("patch", MODEL, *SMALL, "--preset", "papr"),
        ("decompose", "zoo:nothing", *SMALL),
        ("kernels", MODEL, "--kernels", "split"),
        ("audit", MODEL, "--rungs", "float12"),
    ],
    ids=" ".join,
)
def test_a_bad_option_costs_no_result_and_leaves_no_lock(tmp_path: Path, command: tuple[str, ...]) -> None:
    """8 of 12 failing commands with --overwrite had removed the finished result before they said what was wrong."""
    write_tables(tmp_path / "out", {"recovery": TABLE}, {}, about={"verb": "patch"})
    write_whole(tmp_path / "out" / "figures" / "recovery.png", b"drawn")
    before = content(tmp_path)
    wrong("", *command, "--overwrite", "--out", tmp_path / "out")
    assert content(tmp_path) == before
    wrong("", *command, "--out", tmp_path / "new")
    assert content(tmp_path) == before


@pytest.mark.parametrize("verb", SOME)
@pytest.mark.usefixtures("no_model")
def test_an_unfinished_result_of_another_verb_is_in_the_way(tmp_path: Path, verb: str) -> None:
    """It was removed without a word."""
    (tmp_path / "summary.json").write_text('{"settings": {"verb": "survey"}, "interrupted": true, "files": []}')
    before = content(tmp_path)
    said = "another command's result" if verb == "audit" else "a result of 'survey'"
    wrong(f"holds {said}", *VERBS[verb], "--out", tmp_path)
    assert content(tmp_path) == before


def test_an_audit_takes_the_place_of_audits_alone(tmp_path: Path, audited: Any) -> None:
    """Its page has the name of every page: beside another command's result it would take that one's place."""
    folder_of_audit.put(TEXTS, tmp_path / "audit", folder_of_audit.tables_of(audited.rungs))
    before = content(tmp_path / "audit").keys()
    audited.rungs = []
    folder_of_audit.put(TEXTS, tmp_path / "audit", folder_of_audit.tables_of(audited.rungs))
    assert content(tmp_path / "audit").keys() == before - {"steps.parquet"} < before
    write_tables(tmp_path / "patch", {"recovery": TABLE}, {}, about={"verb": "patch"})
    kept = content(tmp_path / "patch")
    with pytest.raises(InputError, match="holds another command's result"):
        folder_of_audit.put(TEXTS, tmp_path / "patch")
    assert content(tmp_path / "patch") == kept


def test_an_audit_cut_off_while_it_is_written_says_so(
    tmp_path: Path, audited: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def cut(path: Path, content: Any) -> None:
        if path.name == "report.html":
            raise KeyboardInterrupt
        write_whole(path, content)

    with monkeypatch.context() as patch:
        patch.setattr(folder_of_audit, "write_whole", cut)
        with pytest.raises(KeyboardInterrupt):
            folder_of_audit.put(TEXTS, tmp_path, folder_of_audit.tables_of(audited.rungs))
    with pytest.raises(InputError, match="holds no readable verdict"):
        kv.load(tmp_path)
    folder_of_audit.put(TEXTS, tmp_path, folder_of_audit.tables_of(audited.rungs))
