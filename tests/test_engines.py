"""Where cells are done changes nothing of what they give, and what ends a worker costs the cell that it was at."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp
from kvinterp.common.store import Store
from kvinterp.errors import InputError, KvinterpError
from kvinterp.models.provenance import machine
from kvinterp.study.cells import Cell, Local, run_cells
from kvinterp.study.engines import Ray, Remaining, engine_named

pytestmark = [pytest.mark.xdist_group("engines"), pytest.mark.slow]
HERE = "test_engines"


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
    logging.getLogger("kvinterp").warning("about to refuse")
    raise InputError("no such thing: expected another.")


def cells_of(folder: Path, count: int = 3) -> list[Cell]:
    """Of two models in turn."""
    return [Cell(f"x-{n}", f"{HERE}:described", {"x": n, "folder": str(folder), "model": f"{n % 2}"}) for n in range(count)]


def kept(folder: Path) -> dict[str, bytes]:
    return dict(Store(folder).rows("select key, content from cell"))


def test_ray_gives_what_this_process_gives(cluster: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Bits, order, threads, and the very bytes of the parts; a worker that ends costs its cell; an error stays an error."""
    for name, engine in (("local", Local()), ("ray", Ray(2))):
        (tmp_path / name).mkdir()
        made = run_cells(cells_of(tmp_path), Store(tmp_path / name, {"verb": "x"}), engine=engine)
        assert list(made) == ["x-0", "x-1", "x-2"]
        assert {int(tables["table"]["threads"][0]) for tables, _ in made.values()} == {torch.get_num_threads()}
    assert kept(tmp_path / "local") == kept(tmp_path / "ray")
    assert len(kept(tmp_path / "ray")) == 3

    settings = {"folder": str(tmp_path), "at": "k-2", "times": 1}
    group = [Cell(f"k-{n}", f"{HERE}:fatal", settings) for n in range(5)]
    with caplog.at_level(logging.INFO, "kvinterp"):
        made = run_cells(group, engine=Ray(1))
    assert [tables["table"]["key"][0] for tables, _ in made.values()] == [cell.key for cell in group]
    lines = (tmp_path / "noted").read_text().split()
    assert {cell.key: lines.count(cell.key) for cell in group} == {"k-0": 1, "k-1": 1, "k-2": 2, "k-3": 1, "k-4": 1}
    assert "a worker ended at part k-2, which is done again" in caplog.text

    with caplog.at_level(logging.INFO, "kvinterp"), pytest.raises(InputError, match="expected another"):
        run_cells([Cell("r", f"{HERE}:refusing", {})], engine=Ray(1))
    assert "about to refuse" in caplog.text


@pytest.mark.long
def test_what_ends_its_worker_every_time_is_said_once(cluster: Any, tmp_path: Path) -> None:
    parts = Store(tmp_path, {"verb": "x"})
    group = [Cell(f"k-{n}", f"{HERE}:fatal", {"folder": str(tmp_path), "at": "k-1", "times": 9}) for n in range(3)]
    with pytest.raises(KvinterpError, match="part 'k-1' ended its worker 3 times"):
        run_cells(group, parts, engine=Ray(1))
    assert parts.read("k-0") is not None
    assert (tmp_path / "noted").read_text().split().count("k-1") == 3


@pytest.mark.long
def test_a_worker_unlike_this_machine_is_refused(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = machine()
    monkeypatch.setattr("kvinterp.models.provenance.machine", lambda: {**real, "torch": "1.0"})
    with pytest.raises(InputError, match=r'unlike this one.*torch: "1\.0", now'):
        run_cells(cells_of(tmp_path), engine=Ray(1))


@pytest.mark.long
@pytest.mark.parametrize(("who", "said"), [("raylet", "agent (raylet) ended"), ("gcs_server", "head process at")])
def test_a_cluster_that_is_killed_is_said(tmp_path: Path, request: pytest.FixtureRequest, who: str, said: str) -> None:
    """Ray itself waits for ever, or ends the process with an audit's exit code; what is finished is gone on from."""
    pytest.importorskip("ray")
    arguments = [
        "study",
        "layer-drift",
        "zoo:gqa2-mini",
        "--divergent",
        "1",
        "--prompts",
        "arithmetic:40",
        "--max-new-tokens",
        "48",
    ]
    arguments += ["--out", "out"]
    command = [sys.executable, "-m", "kvinterp", *arguments, "--engine", "ray(2)"]
    study = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True, start_new_session=True)
    request.addfinalizer(study.kill)
    until, store = time.monotonic() + 300, tmp_path / "out" / ".kvinterp.db"
    # Somebody else holds the store; it grows when a cell is kept.
    while not (store.exists() and store.stat().st_size > 100_000):
        assert study.poll() is None, "it ended before a part was made"
        assert time.monotonic() < until, "no part was made"
        time.sleep(0.2)
    for place in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            named, _, fields = (place / "stat").read_text().rpartition(")")
            if named.endswith(f"({who}") and int(fields.split()[1]) == study.pid:
                os.kill(int(place.name), signal.SIGKILL)
    _, errors = study.communicate(timeout=120)
    assert (study.returncode, errors.splitlines()[-1].count(said)) == (2, 1), errors[-2000:]
    assert Store(store.parent).rows("select key from cell")


# Without Ray -----------------------------------------------------------------------------------------------------------


def test_engines_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    assert engine_named("local") == Local()
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(InputError, match=r"not installed: pip install 'kvinterp\[ray\]'"):
        engine_named("ray(2)")
    for wrong in ("ray(0)", "ray(1.5)", "rai"):
        with pytest.raises(InputError, match=r"expected|did you mean"):
            engine_named(wrong)


def test_what_remains_is_told_by_what_each_function_took(tmp_path: Path) -> None:
    """Two functions, one ten times as slow: the remaining time counts each by its own."""
    now, told = [0.0], list[str]()

    def engine(cells: Any, offered: Any) -> None:
        for cell in cells:
            offered["tell"](f"doing {cell.function}")
            now[0] += 60 if cell.function == "slow" else 6
            offered["keep"](cell.key, {}, {})

    cells = [Cell(f"{n}", name, {}) for n, name in enumerate(["slow", "fast", "slow", "fast", "fast", "slow"])]
    offered = {"keep": lambda *_: None, "tell": lambda text, share: told.append(text)}
    Remaining(engine, clock=lambda: now[0])(cells, offered)
    # Told at every event; how much of it is shown is a matter of who shows it.
    assert [text for text in told if text.endswith("doing slow")] == [
        "0 of 6 cells: doing slow",
        "1 of 6 cells, about 5 min left: doing slow",
        "2 of 6 cells, about 2 min left: doing slow",
        "3 of 6 cells, about 72 s left: doing slow",
        "5 of 6 cells, about 60 s left: doing slow",
        "6 of 6 cells: doing slow",
    ]
