"""A piece of work is done once, kept whole, and found by its name alone."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest

from kvinterp.commands.cells import Cell, loaded, loading_once, run_cells
from kvinterp.common.store import CellStore, clear_cells
from writing import change_cell

CALLED: list[Any] = []


@pytest.fixture(autouse=True)
def _forgotten() -> None:
    CALLED.clear()


def doubled(x: int) -> pd.DataFrame:
    """A cell's function."""
    CALLED.append(x)
    return pd.DataFrame({"x": [2 * x]})


def together(keys: list[str], keep: Callable[..., None], by: int) -> None:
    """One that makes several parts at once."""
    CALLED.append(keys)
    for key in reversed(keys):
        keep(key, {"table": pd.DataFrame({"x": [by * int(key)]})}, {"by": by})


def model(**given: Any) -> Any:
    """A loader."""
    CALLED.append(given)
    return SimpleNamespace(lasting=lambda: object())


def cells(count: int = 3) -> list[Cell]:
    return [Cell(f"cell-{n}", doubled, {"x": n}) for n in range(count)]


def values(made: Any) -> list[int]:
    return [int(tables["table"]["x"][0]) for tables, _ in made.values()]


def test_what_is_finished_is_not_done_again(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    parts = CellStore(tmp_path, {"verb": "x"})
    run_cells(cells()[1:2], parts)
    with caplog.at_level(logging.INFO, "kvinterp"):
        made = run_cells(cells(), CellStore(tmp_path, {"verb": "x"}))
    assert CALLED == [1, 0, 2]
    assert f"going on in {tmp_path}: 1 of 3 parts are already there" in caplog.text
    assert list(made) == ["cell-0", "cell-1", "cell-2"]
    assert values(made) == values(run_cells(cells())) == [0, 2, 4]
    clear_cells(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("left", ["half", "nothing", "other bytes"])
def test_a_cell_that_is_not_whole_is_never_read(tmp_path: Path, left: str, caplog: pytest.LogCaptureFixture) -> None:
    """Kept whole by its name alone: what a machine that lost its power leaves is made again."""
    store = CellStore(tmp_path, {"verb": "x"})
    run_cells(cells(), store)
    change = {
        "half": lambda content: content[: len(content) // 2],
        "nothing": lambda _: b"",
        "other bytes": lambda _: b"x" * 99,
    }
    change_cell(tmp_path, "cell-1", change[left])
    assert store.read("cell-1") is None
    assert "cell-1" in caplog.text
    assert values(run_cells(cells(), store)) == [0, 2, 4]
    assert CALLED == [0, 1, 2, 1]


@pytest.mark.parametrize(
    "now",
    [{"weights": "b"}, {"kernels": {"tf32": "on"}}, {"more": 1}],
)
def test_what_was_made_with_other_settings_is_not_used(
    tmp_path: Path, now: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    before = {"weights": "a", "dtype": "float16", "torch": "2", "threads": 1, "kernels": {"tf32": "off"}}
    run_cells(cells(), CellStore(tmp_path, {"verb": "x", "made_with": before}))
    other = CellStore(tmp_path, {"verb": "x", "made_with": before | now})
    assert other.read("cell-0") is None
    other.say_others()
    assert f"is not used: it was made with other settings ({next(iter(now))}" in caplog.text
    assert CellStore(tmp_path, {"verb": "x", "made_with": before}).read("cell-0") is not None


def test_cells_that_share_their_settings_may_share_a_call(tmp_path: Path) -> None:
    wanted = [Cell(str(n), together, {"by": 10}) for n in range(3)]
    parts = CellStore(tmp_path, {"verb": "x"})
    run_cells(wanted[:1], parts)
    made = run_cells(wanted, parts)
    assert CALLED == [["0"], ["1", "2"]]
    assert values(made) == [0, 10, 20]
    assert [about for _, about in made.values()] == [{"by": 10}] * 3


def test_a_model_is_loaded_once_and_let_go_of() -> None:
    named = {"loader": f"{__name__}:model", "name": "a", "kind": "native"}
    with loading_once():
        assert loaded(named) is loaded(dict(named))
        assert loaded({**named, "kind": "hooked"}) is not loaded(named)
    loaded(named)
    assert [{"name": "a", "kind": kind} for kind in ("native", "hooked", "native")] == CALLED
