"""Hostile folders: records, links and parts that others planted cost nobody a file."""

from __future__ import annotations

import contextlib
import os
import random
import sqlite3
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest
import torch

from kvinterp.cli.showing import page_of
from kvinterp.common.files import digest_of, partial_name
from kvinterp.common.store import _SCHEMA, Store, write_whole
from kvinterp.comparison import TABLES, Comparison
from kvinterp.errors import InputError
from kvinterp.recording import Trace
from synthetic import comparison, prompts
from writing import Compared, cells_of, read_result, write_tables

TABLE = {"recovery": pd.DataFrame({"x": [1.0, 2.0]})}


@pytest.mark.parametrize(
    "name",
    [
        "../victim",
        "/etc/hostname",
        "a/../../victim",
        ".git/HEAD",
        "a/b/c",
        "a\\b",
        "",
        "..",
        "figures/.hidden",
        "x\n",
        "x" * 300,
    ],
)
def test_a_record_that_names_what_it_cannot_is_refused(tmp_path: Path, name: str) -> None:
    """`--overwrite` over a record naming ../.git/HEAD removed that file, and its folder with it."""
    out, victim = tmp_path / "out", tmp_path / "victim"
    out.mkdir()
    victim.write_text("mine")
    (out / "summary.json").write_text("{}")
    with Store(out).changed() as store:
        store.execute("insert into written values(?, ?, 0)", (name, digest_of(victim)))
    with pytest.raises(InputError, match="lies outside of the folder or is hidden"):
        write_tables(out, TABLE, {}, "overwrite")
    with pytest.raises(InputError, match="lies outside of the folder or is hidden"):
        Store(out).remove([name])
    assert victim.read_text() == "mine"
    assert sorted(path.name for path in out.iterdir()) == [".kvinterp.db", "summary.json"]


@pytest.mark.parametrize(
    "name", [".kvinterp.db", ".kvinterp.db-journal", ".kvinterp.json", "figures", "summary.json", "recovery.parquet"]
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


STORES = {
    "a text": "",
    "another program's": "create table cell(x)",
    "without tables": f"{_SCHEMA} drop table written;",
    "with a trigger": f"{_SCHEMA} create trigger t after delete on run begin delete from written; end;",
    "with a view that has no end": f"{_SCHEMA} drop table written; create view written as with recursive c(x) as"
    " (select 1 union all select x + 1 from c) select x as name, x as sha, 0 as state from c;",
}


@pytest.mark.parametrize("what", STORES)
def test_somebody_elses_store_is_left(tmp_path: Path, what: str) -> None:
    """Triggers and views of a store that came from elsewhere ran: a view without an end hung every verb."""
    file = tmp_path / ".kvinterp.db"
    if what == "a text":
        file.write_text("mine")
    else:
        with contextlib.closing(sqlite3.connect(file)) as other:
            other.executescript(STORES[what])
    before = file.read_bytes()
    with pytest.raises(InputError, match=r"'\.kvinterp\.db', which this version of kvinterp did not write"):
        write_tables(tmp_path, TABLE, {}, "overwrite")
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_a_store_that_is_cut_is_said_to_be_damaged(tmp_path: Path) -> None:
    write_tables(tmp_path, TABLE, {}, "overwrite")
    file = tmp_path / ".kvinterp.db"
    file.write_bytes(before := file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"'\.kvinterp\.db', which is damaged"):
        write_tables(tmp_path, TABLE, {}, "overwrite")
    assert file.read_bytes() == before


CUT = """
import os, sqlite3, sys
db = sqlite3.connect(sys.argv[1], isolation_level=None)
for each in ("pragma auto_vacuum=full", "pragma cache_size=1", "begin", "create table written(name text, sha text)"):
    db.execute(each)
for number in range(2000):
    db.execute("insert into written values(?, ?)", (str(number), "x" * 64))
os._exit(0)
"""


def test_a_store_whose_making_was_killed_is_made_again(tmp_path: Path) -> None:
    """A kill -9 between the store's first page and the end of its journal left a size and nothing in it, and stuck the folder."""
    file = tmp_path / ".kvinterp.db"
    subprocess.run([sys.executable, "-c", CUT, file], check=True)
    assert file.stat().st_size > 0
    assert (tmp_path / ".kvinterp.db-journal").exists()
    write_tables(tmp_path, TABLE, {}, "overwrite")
    assert (tmp_path / "summary.json").exists()


@pytest.mark.parametrize("name", [".kvinterp.json", ".parts/0123456789abcdef/settings.json"])
def test_a_folder_of_an_earlier_version_is_refused_in_one_sentence(tmp_path: Path, name: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(InputError, match=r"of an earlier version of kvinterp: choose another folder with --out") as error:
        write_tables(tmp_path, TABLE, {}, "overwrite")
    assert "\n" not in str(error.value)
    (tmp_path / "report.html").write_text("a page")
    with pytest.raises(InputError, match="of an earlier version of kvinterp"):
        page_of(tmp_path)
    (tmp_path / "report.html").unlink()
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [tmp_path / name]


def test_a_damaged_store_is_set_aside_and_its_cells_are_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for number in range(20):
        Store(tmp_path, {"verb": "patch"}).keep(f"cell-{number}", TABLE)
    file = tmp_path / ".kvinterp.db"
    content = bytearray(file.read_bytes())
    content[4096:8192] = bytes(4096)
    file.write_bytes(content)
    with Store(tmp_path):
        assert Store(tmp_path, {"verb": "patch"}).read("cell-0") is None
        Store(tmp_path, {"verb": "patch"}).keep("cell-0", TABLE)
        assert Store(tmp_path, {"verb": "patch"}).read("cell-0") is not None
    assert "is damaged: it is set aside, and what it held is made again" in caplog.text
    (aside,) = tmp_path.glob(".kvinterp.db.damaged.*")
    assert aside.stat().st_size == len(content)


def test_an_unfinished_result_of_another_verb_is_not_removed_without_a_word(tmp_path: Path) -> None:
    Store(tmp_path, {"verb": "root-cause"}).keep("one", TABLE)
    with pytest.raises(InputError, match="holds an unfinished result of 'root-cause'"):
        write_tables(tmp_path, TABLE, {}, about={"verb": "patch"})
    write_tables(tmp_path, TABLE, {}, "overwrite", about={"verb": "patch"})
    assert cells_of(tmp_path) == []


def test_overwriting_leaves_none_of_the_other_verbs_tables(tmp_path: Path) -> None:
    """`decompose --overwrite` over a `patch` result left recovery.parquet beside its own."""
    write_tables(tmp_path, TABLE, {}, about={"verb": "patch"})
    write_tables(tmp_path, {"decomposition": TABLE["recovery"]}, {}, "overwrite", about={"verb": "decompose"})
    assert sorted(p.name for p in tmp_path.iterdir()) == [".kvinterp.db", "decomposition.parquet", "summary.json"]


def test_overwriting_leaves_the_other_verbs_table_that_a_user_changed(tmp_path: Path) -> None:
    write_tables(tmp_path, TABLE, {}, about={"verb": "patch"})
    (tmp_path / "recovery.parquet").write_text("mine")
    write_tables(tmp_path, {"decomposition": TABLE["recovery"]}, {}, "overwrite", about={"verb": "decompose"})
    assert (tmp_path / "recovery.parquet").read_text() == "mine"


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
        {p.relative_to(f).as_posix(): p.read_bytes() for p in f.rglob("*") if p.is_file() and p.name != ".kvinterp.db"}
        for f in (tmp_path / "cut", tmp_path / "whole")
    )
    assert one == other
    with pytest.raises(InputError, match="already holds a result"):
        write_tables(tmp_path / "cut", TABLE, {}, draw=draw, about=about)


@pytest.mark.parametrize("flips", [150, pytest.param(1000, marks=pytest.mark.long)])
def test_no_flipped_bit_gives_other_numbers(tmp_path: Path, flips: int) -> None:
    """Of 150 bits flipped in kv.parquet 73 were read as other numbers."""
    parts, table = Store(tmp_path, {"a": 1}), TABLE["recovery"]
    parts.keep("one", {"table": table}, {"paths": "ab"})
    path = tmp_path / ".kvinterp.db"
    content = path.read_bytes()
    ((packed,),) = Store(tmp_path).rows("select content from cell")
    draw, refused = random.Random(0), 0
    for number in range(flips):
        # Half of them anywhere in the store, half in what the cell gave.
        begin, count = (0, len(content)) if number % 2 else (content.index(packed[:200]), 200)
        bit = 8 * begin + draw.randrange(8 * count)
        changed = bytearray(content)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found = None
        with contextlib.suppress(InputError), Store(tmp_path):
            found = Store(tmp_path, {"a": 1}).read("one")
        if found is None:
            refused += 1
        else:
            pd.testing.assert_frame_equal(found[0]["table"], table, check_exact=True)
            assert found[1] == {"paths": "ab"}
        for left in tmp_path.iterdir():
            left.unlink()
        path.write_bytes(content)
    assert refused >= flips / 2


def test_other_circumstances_are_never_joined_and_never_lost(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    one = Store(tmp_path, {"verb": "root-cause", "made_with": {"threads": 1}})
    one.keep("a", TABLE)
    other = Store(tmp_path, {"verb": "root-cause", "made_with": {"threads": 2}})
    assert other.read("a") is None
    assert "made with other threads: 1, now 2" in caplog.text
    assert Store(tmp_path, {"verb": "root-cause", "made_with": {"threads": 1}}).read("a") is not None


@pytest.mark.parametrize("flips", [60, pytest.param(1000, marks=pytest.mark.long)])
def test_no_flipped_bit_of_a_comparison_gives_other_numbers(tmp_path: Path, flips: int) -> None:
    """In the parts of an unfinished one and in the tables of a finished one."""
    part = comparison((0,))
    made = Compared(tmp_path / "parts", {"made_with": {}}, prompts(1))
    made.add(part)
    finished = Compared(tmp_path / "tables", {"made_with": {}}, prompts(1))
    finished.add(part)
    finished.close()
    made.folder.release()
    held = tmp_path / "parts" / ".kvinterp.db"
    content = {path: path.read_bytes() for path in (held, *(tmp_path / "tables").glob("*.parquet"))}
    draw, accepted = random.Random(0), 0
    ((packed,),) = Store(held.parent).rows("select content from cell")
    for _ in range(flips):
        path = draw.choice(sorted(content))
        begin, count = (0, len(content[path])) if path != held else (content[path].index(packed[:200]), 200)
        bit = 8 * begin + draw.randrange(8 * count)
        changed = bytearray(content[path])
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        found: Comparison | None = None
        if path == held:
            read = made.made()
            found = Comparison(*[read["example-0"][0][name] for name in (*TABLES, "failures")], {}) if read else None
        else:
            with contextlib.suppress(InputError):
                found = read_result(tmp_path / "tables")
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
