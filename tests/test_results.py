"""A result folder is whole, or says that it is not, whatever interrupts the run that fills it."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from kvinterp.common.files import write_whole
from kvinterp.comparison import TABLES
from kvinterp.data import Prompt
from kvinterp.errors import InputError
from synthetic import comparison, failed, prompts
from writing import Compared, cells_of, changed, read_result, write_tables

SETTINGS = {"model": "zoo:mistral-mini", "dtype": "float16", "made_with": {"threads": 1}}


def folder(path: Path, count: int = 4, existing: str = "error", **changed: Any) -> Compared:
    return Compared(path, {**SETTINGS, **changed}, prompts(count), existing)


def filled(path: Path, order: tuple[int, ...] = (0, 1, 2, 3)) -> Compared:
    made = folder(path)
    for number in order:
        made.add(comparison((number,)))
    return made


def tables(path: Path) -> dict[str, pd.DataFrame]:
    return {name: pd.read_parquet(path / f"{name}.parquet") for name in TABLES}


def same(one: dict[str, pd.DataFrame], other: dict[str, pd.DataFrame]) -> None:
    for name, frame in one.items():
        pd.testing.assert_frame_equal(frame, other[name], check_exact=True, obj=name)


def test_finished_result_is_the_joined_parts_and_leaves_nothing_else(tmp_path: Path) -> None:
    filled(tmp_path / "out").close()
    whole = comparison((0, 1, 2, 3))
    same({name: getattr(whole, name) for name in TABLES}, tables(tmp_path / "out"))
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == sorted(
        ["summary.json", "prompts.jsonl", *(f"{name}.parquet" for name in TABLES)]
    )


def test_summary_has_the_promised_keys_and_numbers(tmp_path: Path) -> None:
    filled(tmp_path / "out").close()
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    steps = comparison((0, 1, 2, 3)).steps
    assert summary["counts"] == {"examples": 4, "steps": 20, "failed": 0, "planned": 4}
    assert summary["mean_kl"] == pytest.approx(steps["kl"].mean(), rel=1e-12)
    assert summary["max_abs_logit"] == steps["max_abs_logit"].max()
    assert summary["divergence_rate"] == 0
    assert summary["mean_kl_after_flip"] is None
    assert summary["interrupted"] is False
    assert {"paths", "protocol", "strategy", "mean_kl_before_flip", "provenance"} <= set(summary)
    assert summary["provenance"]["weights"] == "0123456789abcdef"


def test_loading_gives_back_what_was_written(tmp_path: Path) -> None:
    asked = [Prompt("p0", "Tell <me>.", "restate", "", ("one", "two"), {"count": 3}), Prompt("p1", "Line\u2028two")]
    made = Compared(tmp_path, SETTINGS, asked)
    made.add(comparison((0, 1), flip=2))
    made.close()
    read = read_result(tmp_path)
    assert read.prompts == asked
    same({n: getattr(read, n) for n in TABLES}, {n: getattr(comparison((0, 1), flip=2), n) for n in TABLES})
    assert read.where() == comparison((0, 1), flip=2).where()


def test_a_killed_run_goes_on_and_gives_the_same_tables(tmp_path: Path) -> None:
    """docs/laws.md, law 8. A run that is killed leaves its parts and runs no further code, so no close()."""
    filled(tmp_path / "whole").close()
    killed = folder(tmp_path / "cut")
    killed.add(comparison((1,)))
    killed.add(comparison((0,)))
    again = folder(tmp_path / "cut")
    assert again.done() == {0, 1}
    for number in (2, 3):
        again.add(comparison((number,)))
    again.close()
    same(tables(tmp_path / "whole"), tables(tmp_path / "cut"))
    assert cells_of(tmp_path / "cut") == []


def test_an_interrupted_result_of_other_settings_is_refused_with_what_differs(tmp_path: Path) -> None:
    filled(tmp_path, (0,)).close("interrupted")
    with pytest.raises(InputError, match=r'dtype: "float16", now "float32".*--overwrite') as error:
        folder(tmp_path, dtype="float32")
    assert "model" not in str(error.value).partition("settings")[2].partition(")")[0]
    with pytest.raises(InputError, match=r"prompts.count: 4, now 3"):
        folder(tmp_path, count=3)
    assert folder(tmp_path, existing="overwrite", dtype="float32").done() == frozenset()


def test_a_finished_result_is_refused_used_or_overwritten(tmp_path: Path) -> None:
    filled(tmp_path).close()
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(InputError, match="already holds a result: choose another folder with --out, or pass --overwrite"):
        folder(tmp_path)
    assert folder(tmp_path, existing="use").finished
    with pytest.raises(InputError, match="dtype"):
        folder(tmp_path, existing="use", dtype="float32")
    again = folder(tmp_path, existing="overwrite")
    assert not again.finished
    assert (tmp_path / "summary.json").exists()
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_failed_examples_are_done_and_keep_the_others_types(tmp_path: Path) -> None:
    """Joining an example without steps once turned every column of the examples table into objects."""
    made = folder(tmp_path)
    for part in (comparison((0,)), failed(1), comparison((2, 3))):
        made.add(part)
    assert made.done() == {0, 1, 2, 3}
    done = made.close()
    assert done is not None
    expected = comparison((0, 2, 3))
    same({n: getattr(expected, n) for n in TABLES}, tables(tmp_path))
    assert done.written()[1]["counts"] == {"examples": 3, "steps": 15, "failed": 1, "planned": 4}
    assert done.written()[1]["failures"][0]["id"] == "p1"
    assert read_result(tmp_path).failures["message"].tolist() == done.failures["message"].tolist()


def test_parts_made_differently_are_not_joined(tmp_path: Path) -> None:
    made = folder(tmp_path)
    made.add(comparison((0,)))
    other = comparison((1,))
    made.add(dataclasses.replace(other, provenance={**other.provenance, "weights": "another"}))
    with pytest.raises(InputError, match="different weights"):
        made.close()


# What is there already ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["prompts.jsonl", "report.html", "steps.parquet", "summary.json", "figures"])
def test_a_file_of_no_result_is_refused_before_anything_happens(tmp_path: Path, name: str) -> None:
    """A user's DIR/prompts.jsonl given with --out DIR was rewritten, and deleted where the run was cut off early."""
    (tmp_path / name).write_text("mine")
    with pytest.raises(InputError, match=rf"holds '{name}'.*choose another folder with --out"):
        folder(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert (tmp_path / name).read_text() == "mine"


def test_overwriting_removes_what_the_result_before_had_and_nothing_else(tmp_path: Path) -> None:
    """--overwrite removed the whole figures folder, the user's own figures in it too; and left the other verb's tables."""
    table = {"recovery": pd.DataFrame({"x": [1.0]})}

    def draw(place: Path) -> list[Path]:
        for path in (place / "recovery_by_layer.png", place.parent / "report.html"):
            write_whole(path, b"drawn")
        return [place / "recovery_by_layer.png"]

    write_tables(tmp_path, table, {}, draw=draw, about={"verb": "patch"})
    for name in ("figures/mine.png", "notes.txt", "recovery.parquet.mine"):
        (tmp_path / name).write_text("mine")
    again = folder(tmp_path, existing="overwrite", count=1)
    assert again.done() == frozenset()
    assert (tmp_path / "report.html").exists(), "it is there until something else is"
    again.add(comparison((0,)))
    again.close()
    left = {path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*") if path.is_file()}
    assert left - {"summary.json", "prompts.jsonl", *(f"{name}.parquet" for name in TABLES)} == {
        "figures/mine.png", "notes.txt", "recovery.parquet.mine",
    }  # fmt: skip


def test_a_summary_that_names_other_folders_takes_nothing_there(tmp_path: Path) -> None:
    """`--overwrite` over a record naming ../.git/HEAD removed that file, and its folder with it."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    write_tables(out, {"recovery": pd.DataFrame({"x": [1.0]})}, {})
    victim.write_text("mine")
    changed(out / "summary.json", files=["../victim", str(victim), "figures/../../victim", "../*", "*", 5])
    write_tables(out, {"other": pd.DataFrame({"x": [1.0]})}, {}, "overwrite")
    assert victim.read_text() == "mine"


@pytest.mark.parametrize("before", [None, {"other": pd.DataFrame({"x": [1.0]})}])
def test_cut_off_while_it_is_written_it_is_not_finished_and_the_same_again_finishes(
    tmp_path: Path, before: dict[str, pd.DataFrame] | None
) -> None:
    """`patch` and `decompose`, interrupted there, were stuck: "already holds a result"; over another result its tables stayed."""
    table, about = {"recovery": pd.DataFrame({"x": [1.0]})}, {"verb": "patch", "steps": 4}

    def draw(place: Path) -> list[Path]:
        write_whole(place / "recovery.png", b"drawn")
        return [place / "recovery.png"]

    def cut(place: Path) -> list[Path]:
        raise KeyboardInterrupt

    if before is not None:
        write_tables(tmp_path / "cut", before, {}, about={"verb": "other"})
    with pytest.raises(KeyboardInterrupt):
        write_tables(tmp_path / "cut", table, {}, "error" if before is None else "overwrite", draw=cut, about=about)
    with pytest.raises(InputError, match=r"result made with other settings \(steps: 4, now 5\)"):
        write_tables(tmp_path / "cut", table, {}, draw=draw, about={"verb": "patch", "steps": 5})
    write_tables(tmp_path / "cut", table, {}, draw=draw, about=about)
    write_tables(tmp_path / "whole", table, {}, draw=draw, about=about)
    one, other = (
        {path.relative_to(each).as_posix(): path.read_bytes() for path in each.rglob("*") if path.is_file()}
        for each in (tmp_path / "cut", tmp_path / "whole")
    )
    assert one == other
    with pytest.raises(InputError, match="already holds a result"):
        write_tables(tmp_path / "cut", table, {}, draw=draw, about=about)
