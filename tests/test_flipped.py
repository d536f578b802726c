"""No flipped bit and no other digit in what is read back of a result is read or printed."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvinterp as kv
from command_line import kvinterp, wrong
from kvinterp.auditing.folder import put
from kvinterp.common.store import write_whole
from kvinterp.comparison import Comparisons
from kvinterp.errors import InputError
from kvinterp.recording import Trace
from synthetic import comparison, prompts
from writing import resealed


def compared(folder: Path) -> Path:
    made = comparison((0, 1), flip=2)
    made.prompts = prompts(2)
    return made.save(folder)


def several(folder: Path) -> Path:
    paths = ("recompute", "recompute@float64")
    pairs = [comparison((0,), steps=3, paths={"a": "cached", "b": b}) for b in paths]
    return Comparisons(pairs).save(folder)


def traced(folder: Path) -> Path:
    records = {("resid_post", 0): [torch.arange(12.0) / 7]}
    return Trace("cached", (1, 22, 333), (4,), (4,), records, (0,), provenance={"seed": 0}).save(folder)


def audited(folder: Path) -> Path:
    evidence = {"float32": {"unit_roundoff": 5.96e-08, "steps": 12, "max_abs_logit": 0.125}}
    about = {"model": "zoo:gqa2-mini", "threads": 1}
    fields = {"first_layer": 3, "first_position": 65, "tensor": "K", "module": "", "evidence": evidence, "notes": []}
    said = {"exit_code": 1, "verdict": "bug", **fields, "checks": [], "reading": "FAIL  bug", "provenance": about}
    return put({"verdict.json": json.dumps(said)}, folder)


def of_bit(content: bytearray, draw: random.Random) -> None:
    bit = draw.randrange(8 * len(content))
    content[bit // 8] ^= 1 << bit % 8


def of_digit(content: bytearray, draw: random.Random) -> None:
    at = draw.choice([found.start() for found in re.finditer(rb"[0-9]", content)])
    content[at] = draw.choice([digit for digit in b"0123456789" if digit != content[at]])


def says(content: bytes) -> Any:
    """What a JSON file says, or nothing where it is none."""
    try:
        return json.dumps(json.loads(content))
    except ValueError:
        return None


def refusal(folder: Path) -> str | None:
    try:
        kv.load(folder)
    except InputError as error:
        return str(error)
    return None


@pytest.mark.parametrize(
    ("make", "flips"),
    [
        (compared, 25),
        (traced, 100),
        (audited, 100),
        pytest.param(compared, 300, marks=pytest.mark.slow),
        pytest.param(several, 300, marks=pytest.mark.slow),
    ],
)
def test_no_flip_of_what_is_read_back_is_accepted(make: Callable[[Path], Path], flips: int, tmp_path: Path) -> None:
    """81 of 125 flips in the digits of a summary.json were read as other numbers, 15 of them in printed sentences."""
    folder = make(tmp_path / "result")
    read = {path: path.read_bytes() for path in folder.iterdir() if path.is_file() and path.name[0] != "."}
    json_one = next(path for path in read if path.name in ("summary.json", "trace.json", "verdict.json"))
    kv.load(folder)
    draw, accepted, changed = random.Random(0), [], 0
    for number in range(flips):
        # Every second in the numbers of the summary, the others anywhere.
        path = json_one if number % 2 else draw.choice(sorted(read))
        content = bytearray(read[path])
        (of_digit if path == json_one and number % 4 else of_bit)(content, draw)
        if path.suffix == ".json" and says(bytes(content)) == says(read[path]):
            continue
        changed += 1
        path.write_bytes(content)
        said = refusal(folder)
        if said is None:
            accepted.append((path.name, bytes(content)))
        else:
            assert path.name in said, said
            assert "again" in said or "give a folder" in said, said
            assert "\n" not in said
        path.write_bytes(read[path])
    assert accepted == []
    assert changed > 0.9 * flips
    kv.load(folder)


@pytest.mark.parametrize("make", [compared, traced, audited])
def test_what_has_no_digest_of_its_own_is_refused_with_how_to_make_it_again(
    make: Callable[[Path], Path], tmp_path: Path
) -> None:
    folder = make(tmp_path / "result")
    (path,) = folder.glob("[!.]*.json")
    fields = json.loads(path.read_text())
    for digests in ({name: each for name, each in fields["sha256"].items() if name != path.name}, None, []):
        path.write_text(json.dumps({**fields, "sha256": digests}))
        with pytest.raises(
            InputError, match=rf"{path.name} without a digest of its own.*make it again by the same command"
        ):
            kv.load(folder)


def test_another_layout_of_the_same_summary_is_the_same(tmp_path: Path) -> None:
    """A digest is of what is said: an editor that indents otherwise damages nothing."""
    folder = compared(tmp_path / "result")
    said = json.loads((folder / "summary.json").read_text())
    (folder / "summary.json").write_text(json.dumps(said, indent=4, ensure_ascii=False))
    assert kv.load(folder).sentences() == said["reading"]


def test_a_sentence_that_was_changed_is_not_printed(tmp_path: Path) -> None:
    folder = compared(tmp_path / "result")
    text = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text(text.replace("differ", "agree"))
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    wrong("a summary.json that is not as kvinterp wrote it", "show", folder, "--rewrite", "--no-open")
    wrong("a summary.json that is not as kvinterp wrote it", "report", folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_prompts_that_were_changed_are_refused_and_those_of_nobody_are_not_read(tmp_path: Path) -> None:
    folder = compared(tmp_path / "result")
    text = (folder / "prompts.jsonl").read_text()
    (folder / "prompts.jsonl").write_text(text.replace("p0", "p9"))
    with pytest.raises(InputError, match=r"prompts\.jsonl is not the one that summary\.json was written with"):
        kv.load(folder)
    alone = comparison((0,)).save(tmp_path / "alone")
    (alone / "prompts.jsonl").write_text('{"prompt": "mine"}')
    assert kv.load(alone).prompts == []


def test_a_page_that_was_changed_is_not_shown(tmp_path: Path) -> None:
    folder = compared(tmp_path / "result")
    write_whole(folder / "report.html", "KL 0.125")
    assert kvinterp("show", folder, "--no-open").exit_code == 0
    (folder / "report.html").write_text("KL 0.225")
    wrong("a report.html that kvinterp did not write or that was changed since", "show", folder, "--no-open")


@pytest.mark.slow
def test_a_page_that_was_changed_stays_and_is_made_again_beside_it(tmp_path: Path) -> None:
    folder = compared(tmp_path / "result")
    assert kvinterp("show", folder, "--rewrite", "--no-open").exit_code == 0
    page, written = folder / "report.html", (folder / "report.html").read_bytes()
    assert kvinterp("show", folder, "--no-open").exit_code == 0
    page.write_bytes(written.replace(b"5", b"6", 1))
    wrong("a report.html that kvinterp did not write or that was changed since", "show", folder, "--no-open")
    wrong(
        "'report.html', which kvinterp did not write or which was changed since", "show", folder, "--rewrite", "--no-open"
    )
    assert page.read_bytes() == written.replace(b"5", b"6", 1)
    page.unlink()
    assert kvinterp("show", folder, "--rewrite", "--no-open").exit_code == 0
    assert page.read_bytes() == written


@pytest.mark.slow
def test_a_folder_copied_without_its_record_is_read_and_its_page_made_again(tmp_path: Path) -> None:
    """Some copies leave hidden files out."""
    folder = compared(tmp_path / "result")
    kv.load(folder).report()
    copied = Path(shutil.copytree(folder, tmp_path / "copied", ignore=shutil.ignore_patterns(".*")))
    assert kv.load(copied).sentences() == kv.load(folder).sentences()
    wrong("a report.html that kvinterp did not write", "show", copied, "--no-open")
    (copied / "report.html").unlink()
    for more in (("--rewrite",), ()):
        shown = kvinterp("show", copied, "--no-open", *more)
        assert shown.exit_code == 0, shown.output


def test_a_table_that_the_summary_does_not_name_is_not_read(tmp_path: Path) -> None:
    """It was read without a digest."""
    folder = compared(tmp_path / "result")
    digests = json.loads((folder / "summary.json").read_text())["sha256"]
    named = {name: digest for name, digest in digests.items() if name not in ("summary.json", "heads.parquet")}
    resealed(folder / "summary.json", sha256=named)
    with pytest.raises(InputError, match=r"heads\.parquet is not among its tables"):
        kv.load(folder)
