"""Where cells are done changes nothing of what they give."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp
from kvinterp.commands.cells import Cell, Local, engine_named, run_cells
from kvinterp.common.store import CellStore
from kvinterp.errors import InputError
from kvinterp.papers.ray import Ray

pytestmark = pytest.mark.xdist_group("engines")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    # The workers find this file, and the package that is tested.
    places = [Path(__file__).parent, Path(kvinterp.__file__).parents[1]]
    os.environ["RAY_USAGE_STATS_ENABLED"], before = "0", os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, places), *filter(None, [before])])
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()
    os.environ["PYTHONPATH"] = before or ""


def noted(folder: str, what: str) -> int:
    """Appends a line, and says how many such lines there are by now: cells are done in other processes."""
    with (Path(folder) / "noted").open("a") as file:
        file.write(f"{what}\n")
    return (Path(folder) / "noted").read_text().split().count(what)


def described(x: int, folder: str, model: str = "") -> pd.DataFrame:
    """A cell's function: some arithmetic, and where it was done."""
    noted(folder, f"{x}")
    values = torch.randn(257, 263, generator=torch.Generator().manual_seed(x), dtype=torch.float32)
    return pd.DataFrame({"x": [x], "sum": [float((values @ values.T).sum())], "threads": [torch.get_num_threads()]})


def fatal(folder: str, keys: list[str], keep: Callable[..., None], at: str, times: int) -> None:
    """Makes several parts, and ends its process before one of them."""
    for key in keys:
        if noted(folder, key) <= times and key == at:
            os._exit(9)
        keep(key, {"table": pd.DataFrame({"key": [key]})}, {})


def refusing() -> pd.DataFrame:
    """One that cannot work."""
    raise InputError("no such thing: expected another.")


def cells_of(folder: Path, count: int = 3) -> list[Cell]:
    """Of two models in turn."""
    return [Cell(f"x-{n}", described, {"x": n, "folder": str(folder), "model": f"{n % 2}"}) for n in range(count)]


@pytest.mark.slow
def test_ray_gives_what_this_process_gives(cluster: Any, tmp_path: Path) -> None:
    """Bits, order, threads, and the very bytes of the cells; a worker that ends costs its piece; an error stays an error."""
    for name, engine in (("local", Local()), ("ray", Ray())):
        made = run_cells(cells_of(tmp_path), CellStore(tmp_path / name, {"verb": "x"}), engine=engine)
        assert list(made) == ["x-0", "x-1", "x-2"]
        assert {int(tables["table"]["threads"][0]) for tables, _ in made.values()} == {torch.get_num_threads()}
    local, ray = (
        {path.name: path.read_bytes() for path in (tmp_path / name).rglob("*.parquet")} for name in ("local", "ray")
    )
    assert local == ray
    assert len(ray) == 3

    settings = {"folder": str(tmp_path), "at": "k-2", "times": 1}
    group = [Cell(f"k-{n}", fatal, settings) for n in range(5)]
    made = run_cells(group, engine=Ray())
    assert [tables["table"]["key"][0] for tables, _ in made.values()] == [cell.key for cell in group]
    assert (tmp_path / "noted").read_text().split().count("k-2") == 2

    with pytest.raises(InputError, match="expected another"):
        run_cells([Cell("r", refusing, {})], engine=Ray())


@pytest.mark.long
def test_workers_of_this_machine_are_started_and_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).parent}:{Path(kvinterp.__file__).parents[1]}")
    ray.shutdown()
    made = run_cells(cells_of(tmp_path), engine=Ray(2))
    assert list(made) == ["x-0", "x-1", "x-2"]
    assert not ray.is_initialized()


# Without Ray -----------------------------------------------------------------------------------------------------------


def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_named("local") == Local()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'kvinterp\[ray\]'"):
        engine_named("ray(2)")
    for wrong in ("ray(0)", "ray(1.5)", "rai"):
        with pytest.raises(InputError, match=r"expected|did you mean"):
            engine_named(wrong)
