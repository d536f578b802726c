"""Hostile folders: records, links and parts that others planted cost nobody a file."""

from __future__ import annotations

import contextlib
import json
import os
import random
from pathlib import Path

import pandas as pd
import pytest
import torch

from kvinterp.cells import Parts, remove_parts
from kvinterp.comparison import TABLES, Comparison
from kvinterp.errors import InputError
from kvinterp.files import Record, digest_of, partial_name, write_whole
from kvinterp.folders import check_free
from kvinterp.recording import Trace
from kvinterp.results import load_result
from synthetic import comparison, prompts
from writing import Compared, write_tables

TABLE = {"recovery": pd.DataFrame({"x": [1.0, 2.0]})}


@pytest.mark.parametrize(
    "name",
    ["../victim", "/etc/hostname", "a/../../victim", ".git/HEAD", "a/b/c", "a\\b", "", "..", "figures/.hidden", "x\n"],
)
def test_a_record_that_names_what_it_cannot_is_refused(tmp_path: Path, name: str) -> None:
    """`--overwrite` over a record naming ../.git/HEAD removed that file, and its folder with it."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("mine")
    (out / "summary.json").write_text("{}")
    (out / ".kvinterp.json").write_text(json.dumps({"files": {name: [digest_of(victim)]}}))
    with pytest.raises(InputError, match="lies outside of the folder or is hidden"):
        write_tables(out, TABLE, {}, "overwrite")
    with pytest.raises(InputError, match="lies outside of the folder or is hidden"):
        Record(out).remove()
    assert victim.read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == [".kvinterp.json", "summary.json"]


@pytest.mark.parametrize(
    "name", [".kvinterp.json", ".kvinterp.lock", ".parts", "figures", "summary.json", "recovery.parquet"]
)
@pytest.mark.parametrize("dangling", [False, True])
def test_a_planted_link_is_never_written_through(tmp_path: Path, name: str, dangling: bool) -> None:
    """A dangling link in the lock's place made a loop without end."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    if not dangling:
        victim.write_text("mine")
    (out / name).symlink_to(victim)
    with pytest.raises(InputError):
        write_tables(out, TABLE, {}, "overwrite", lambda place: [])
    assert (out / name).is_symlink()
    assert [path.name for path in out.iterdir()] == [name]
    assert victim.read_text() == "mine" if not dangling else not victim.exists()


def test_partial_files_cannot_be_foreseen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A link planted as .summary.json.partial had its target overwritten."""
    opened: list[tuple[str, int]] = []
    opening = os.open
    monkeypatch.setattr(
        os,
        "open",
        lambda path, flags, *more, **named: opened.append((str(path), flags)) or opening(path, flags, *more, **named),
    )
    for _ in range(2):
        write_whole(tmp_path / "summary.json", "{}")
    (first, flags), (second, _) = [(path, flags) for path, flags in opened if "partial" in path]
    assert first != second
    assert flags & os.O_EXCL
    assert flags & os.O_NOFOLLOW


@pytest.mark.parametrize("where", ["mine", "0123456789abcdef/mine", "settings.json"])
def test_somebody_elses_parts_are_left(tmp_path: Path, where: str) -> None:
    file = tmp_path / ".parts" / where
    file.parent.mkdir(parents=True)
    file.write_text("mine")
    with pytest.raises(InputError, match=r"'\.parts', which kvinterp did not write"):
        check_free(tmp_path, "overwrite")
    remove_parts(tmp_path)
    assert file.read_text() == "mine"


def test_a_file_among_the_parts_outlives_them(tmp_path: Path) -> None:
    parts = Parts(tmp_path, {"verb": "root-cause"})
    parts.keep("one", TABLE)
    (parts.folder / "notes.txt").write_text("mine")
    remove_parts(tmp_path)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file() and path.name != "settings.json"] == ["notes.txt"]


def test_an_unfinished_result_of_another_verb_is_not_removed_without_a_word(tmp_path: Path) -> None:
    Parts(tmp_path, {"verb": "root-cause"}).keep("one", TABLE)
    with pytest.raises(InputError, match="holds an unfinished result of 'root-cause'"):
        write_tables(tmp_path, TABLE, {}, about={"verb": "patch"})
    write_tables(tmp_path, TABLE, {}, "overwrite", about={"verb": "patch"})
    assert not (tmp_path / ".parts").exists()


def test_overwriting_leaves_none_of_the_other_verbs_tables(tmp_path: Path) -> None:
    """`decompose --overwrite` over a `patch` result left recovery.parquet beside its own."""
    write_tables(tmp_path, TABLE, {}, about={"verb": "patch"})
    write_tables(tmp_path, {"decomposition": TABLE["recovery"]}, {}, "overwrite", about={"verb": "decompose"})
    assert sorted(p.name for p in tmp_path.iterdir()) == [".kvinterp.json", "decomposition.parquet", "summary.json"]


def test_cut_off_while_figures_are_drawn_it_is_not_finished_and_the_same_again_finishes(tmp_path: Path) -> None:
    """`patch` and `decompose`, interrupted there, were stuck: "already holds a result"."""

    def draw(place: Path) -> list[Path]:
        write_whole(place / "recovery.png", b"drawn")
        return [place / "recovery.png"]

    def cut(place: Path) -> list[Path]:
        raise KeyboardInterrupt

    about = {"verb": "patch", "steps": 4}
    with pytest.raises(KeyboardInterrupt):
        write_tables(tmp_path / "cut", TABLE, {}, draw=cut, about=about)
    with pytest.raises(InputError, match=r"unfinished result made with other settings \(steps: 4, now 5\)"):
        write_tables(tmp_path / "cut", TABLE, {}, draw=draw, about={"verb": "patch", "steps": 5})
    write_tables(tmp_path / "cut", TABLE, {}, draw=draw, about=about)
    write_tables(tmp_path / "whole", TABLE, {}, draw=draw, about=about)
    one, other = (
        {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file()}
        for f in (tmp_path / "cut", tmp_path / "whole")
    )
    assert one == other
    with pytest.raises(InputError, match="already holds a result"):
        write_tables(tmp_path / "cut", TABLE, {}, draw=draw, about=about)


@pytest.mark.parametrize("flips", [150, pytest.param(1000, marks=pytest.mark.long)])
def test_no_flipped_bit_gives_other_numbers(tmp_path: Path, flips: int) -> None:
    """Of 150 bits flipped in kv.parquet 73 were read as other numbers."""
    parts, table = Parts(tmp_path, {"a": 1}), TABLE["recovery"]
    parts.keep("one", {"table": table}, {"paths": "ab"})
    path = parts.folder / "one.part"
    content = {path: path.read_bytes()}
    draw, refused = random.Random(0), 0
    for _ in range(flips):
        bit = draw.randrange(8 * len(content[path]))
        changed = bytearray(content[path])
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = parts.read("one")
        if found is None:
            refused += 1
            (aside,) = parts.folder.glob(".damaged.*")
            aside.rename(path)
        else:
            pd.testing.assert_frame_equal(found[0]["table"], table, check_exact=True)
            assert found[1] == {"paths": "ab"}
        path.write_bytes(content[path])
    assert refused > 0.9 * flips


def test_other_circumstances_are_never_joined_and_never_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Parts(tmp_path, {"verb": "root-cause", "made_with": {"threads": 1}})
    one.keep("a", TABLE)
    other = Parts(tmp_path, {"verb": "root-cause", "made_with": {"threads": 2}})
    assert other.read("a") is None
    assert "made with other threads: 1, now 2" in caplog.text
    assert Parts(tmp_path, {"verb": "root-cause", "made_with": {"threads": 1}}).read("a") is not None


@pytest.mark.parametrize("flips", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_no_flipped_bit_of_a_comparison_gives_other_numbers(tmp_path: Path, flips: int) -> None:
    """In the parts of an unfinished one and in the tables of a finished one."""
    part = comparison((0,))
    made = Compared(tmp_path / "parts", {"made_with": {}}, prompts(1))
    made.add(part)
    finished = Compared(tmp_path / "tables", {"made_with": {}}, prompts(1))
    finished.add(part)
    finished.close()
    (held,) = (tmp_path / "parts" / ".parts").glob("*/*.part")
    content = {path: path.read_bytes() for path in (held, *(tmp_path / "tables").glob("*.parquet"))}
    draw, accepted = random.Random(0), 0
    for _ in range(flips):
        path = draw.choice(sorted(content))
        bit = draw.randrange(8 * len(content[path]))
        changed = bytearray(content[path])
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found: Comparison | None = None
        if path == held:
            read = made.made()
            found = Comparison(*[read["example-0"][0][name] for name in (*TABLES, "failures")], {}) if read else None
            if found is None:
                (aside,) = held.parent.glob(".damaged.*")
                aside.rename(held)
        else:
            with contextlib.suppress(InputError):
                found = load_result(tmp_path / "tables").comparison
        if found is not None:
            accepted += 1
            for name in TABLES:
                pd.testing.assert_frame_equal(getattr(found, name), getattr(part, name), check_exact=True)
        path.write_bytes(content[path])
    assert accepted < flips / 10


def test_what_a_killed_process_left_half_written_is_gone_and_a_users_file_is_not(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    left = [tmp_path / partial_name("steps.parquet"), tmp_path / "figures" / partial_name("recovery.png")]
    users = [tmp_path / ".steps.parquet.partial", tmp_path / "figures" / ".mine.kvinterp-partial"]
    for path in (*left, *users):
        path.write_text("half")
    write_tables(tmp_path, TABLE, {}, about={"verb": "patch"})
    assert not any(path.exists() for path in left)
    assert all(path.read_text() == "half" for path in users)


def test_a_trace_is_not_written_through_a_planted_link(tmp_path: Path) -> None:
    """`.trace.json.partial` could be foreseen, and what it led to was overwritten."""
    (tmp_path / "victim").write_text("mine")
    for name in (".trace.json.partial", ".trace.safetensors.partial", "trace.json"):
        (tmp_path / name).symlink_to(tmp_path / "victim")
    trace = Trace("cached", (1,), (2,), (2,), {("resid_post", 0): [torch.zeros(3)]}, (0,))
    trace.save(tmp_path)
    assert (tmp_path / "victim").read_text() == "mine"
    assert not (tmp_path / "trace.json").is_symlink()
    assert Trace.load(tmp_path).prompt == (1,)
