"""What stands in a file is read and shown, and never imported: only what a user says runs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.errors import InputError
from kvinterp.paths import path_named, path_read
from support import PROMPT, Case
from synthetic import comparison, prompts
from writing import changed

PLANTED = "cached[cache=planted_module:Planted]"


@pytest.fixture
def mark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file that the planted module makes when it is imported."""
    made, code = tmp_path / "mark", tmp_path / "code"
    code.mkdir()
    (code / "planted_module.py").write_text(
        f"from transformers import DynamicCache as Planted\nopen({str(made)!r}, 'w').close()\n"
    )
    monkeypatch.syspath_prepend(str(code))
    yield made
    sys.modules.pop("planted_module", None)


def poisoned(value: Any) -> Any:
    """A value with the planted path in the place of every path."""
    if isinstance(value, dict):
        return {name: poisoned(inner) for name, inner in value.items()}
    if isinstance(value, list):
        return [poisoned(inner) for inner in value]
    return PLANTED if isinstance(value, str) and value.startswith(("cached", "recompute")) else value


def poison(folder: Path) -> Path:
    """Plants it in summary and tables, and in what tables say they were made with."""
    for file in folder.glob("*.parquet"):
        table = pd.read_parquet(file)
        about, table = poisoned(table.attrs), table.map(poisoned)
        table.attrs = about
        table.to_parquet(file, index=False)
    summary = json.loads((folder / "summary.json").read_text())
    changed(folder / "summary.json", **{name: poisoned(value) for name, value in summary.items()})
    return folder


def test_a_folder_that_names_code_is_read_and_shown_and_imports_nothing(tmp_path: Path, mark: Path) -> None:
    made = comparison((0, 1), size=1e-2)
    made.prompts = prompts(2)
    found = kv.load(poison(made.save(tmp_path / "out")))
    assert PLANTED in repr(found)
    assert found.sentences()
    assert not mark.exists()


def test_a_path_of_a_file_is_its_text_and_one_of_a_user_its_class(mark: Path) -> None:
    """`cached[cache=evilmod:Evil]` in a summary.json was imported."""
    assert str(path_read(PLANTED)) == PLANTED
    assert path_read("cached[cache=static(64)]+q8_0") == path_named("cached[cache=static(64)]+q8_0")
    assert not mark.exists()
    assert str(path_named(PLANTED)).startswith("cached[cache=")
    assert mark.exists()


@pytest.mark.slow
def test_what_a_folder_names_is_run_only_where_the_user_names_it(load: Any, tmp_path: Path, mark: Path) -> None:
    adapter = load(Case("zoo:gqa2-mini", "native"), "float32")
    made = kv.compare(adapter, [list(PROMPT)], max_new_tokens=2, record="", progress="none")
    folder = poison(made.save(tmp_path / "out"))
    with pytest.raises(
        InputError, match=r"cache=planted_module:Planted was read from a file.*give the path yourself"
    ) as said:
        kv.attention_comparison(kv.load(folder), list(PROMPT), model=adapter, step=1)
    assert "\n" not in str(said.value)
    assert not mark.exists()
    kv.run(adapter, list(PROMPT), PLANTED, max_new_tokens=1)
    assert mark.exists()
