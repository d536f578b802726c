"""Tries the cache of every model that writes text and that transformers' auto classes name by programs; ``make wild``.

Each is made of small random weights by lines that anybody can run, and tried in a process of its own, with a limit of time and of
memory. Each failure is then run as a script in a process that has not heard of kvinterp. ``out/wild`` has a file for a finished one:
what is there is left out, so a run goes on where it stopped. ``--table`` writes ``docs/wild.md`` and all scripts from these files,
``--reports`` what the scripts of ``docs/upstream`` print, ``--board`` what this release is right and wrong in as
``docs/board/transformers-RELEASE.json``, and ``--diff A B`` says what two of those have other words for.
``--quick`` tries each use of a model's cache once and draws no programs: seconds a type, so that many releases can be walked. Its
rows are in ``out/wild-quick/RELEASE``.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import multiprocessing
import os
import resource
import signal
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks" / "bugs"), str(ROOT / "tools")]

from wild import making  # noqa: E402

SECONDS, QUICK_SECONDS, BYTES = 240, 15, 6 * 2**30
"""Of the processor, there where each use is tried once, and of memory, that a model may take."""
BUDGET, FAULTS = 20.0, 8
"""Seconds that its programs may take, and how many faults are looked for at most."""
QUICK_BUDGET, QUICK_PROGRAMS = 6.0, 36
"""Seconds that they may take where each use is tried once, and how many are run: the first are one of each kind, from a decode step to
assisted decoding, and take half as long as all of them.
"""


def tried(auto: str, name: str, config: Mapping[str, Any], programs: int, breadth: str) -> dict[str, Any]:
    """What programs say of one, as a row."""
    row = making.untried(auto, name)
    try:
        made: dict[str, Any] = {}
        row["model"] = making.written(auto, name, config)
        exec(row["model"], made)
        row["class"] = type(made["model"]).__name__
        subject, row["inputs"] = making.subject_of(auto, made["model"].eval())
        return {**row, "read": subject.name.partition(" behind ")[2], **searched(subject, programs, breadth)}
    except Exception as error:  # Whatever it raises is what there is to say.
        return {**row, "why": f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"}


def searched(subject: Any, programs: int, breadth: str = "default") -> dict[str, Any]:
    """By use how many programs were right or another word, and what is wrong.

    Args:
        subject: The model.
        programs: How many are run; a quarter as many go beyond the contract.
        breadth: ``"default"``, or ``"each"``: each use once, within the contract.
    """
    from kvinterp.auditing.programs.first_difference import placed
    from kvinterp.auditing.programs.pasted import pasted
    from kvinterp.auditing.programs.search import base_of, search

    began = time.process_time()
    quick = breadth == "each"
    found = search(subject, programs, QUICK_BUDGET if quick else BUDGET, faults=FAULTS, breadth=breadth)
    beyond = search(subject, 0 if quick else programs // 4, BUDGET / 4, beyond="yes", faults=1)
    wrong = []
    known = {base_of(one.use) for one in found.wrong}
    for one in [*found.wrong, *(one for one in beyond.wrong if base_of(one.use) not in known)]:
        place, lines = None, pasted(one)
        # What is wrong with the model may break the search for its place too.
        with contextlib.suppress(Exception):
            place = placed(subject, one.program)
        wrong.append(
            {
                "use": one.use,
                "beyond": one.program.rows.beyond,
                "why": one.why if one.wrong is None else str(one.wrong),
                "error": one.wrong.error if one.wrong else None,
                "program": str(one.program),
                "ran": one.ran,
                "place": f"{place.tensor}, layer {place.layer}" if place else "",
                "lines": lines,
            }
        )
    others = {use: {"word": word, "why": one.why} for (word, use), one in found.others.items()}
    return {
        "uses": {**others, **{use: {"word": "right", "count": count} for use, count in found.right.items()}},
        "wrong": wrong,
        "ran": [found.ran, beyond.ran],
        "worst": found.worst,
        "limit": subject.limit,
        "seconds": round(time.process_time() - began, 1),
    }


def forked(work: Callable[[], Any], place: Path, seconds: int = SECONDS) -> int:
    """Does it in a fork within the limits, what it gives goes to a file as JSON; returns how the fork ended."""
    if child := os.fork():
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    place.write_text(json.dumps(work()))
    os._exit(0)


def alone(scripts: Sequence[str]) -> list[str]:
    """What each prints, or the error it ends with, in a process that has not heard of kvinterp."""
    with tempfile.TemporaryDirectory() as folder:
        code = forked(lambda: [printed(script) for script in scripts], place := Path(folder) / "printed")
        return [f"the process ended with {code}" for _ in scripts] if code else json.loads(place.read_text())


def printed(script: str) -> str:
    """What a script prints here, and the error that it ends with."""
    assert "kvinterp" not in sys.modules
    with contextlib.redirect_stdout(io.StringIO()) as said:
        try:
            exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        except Exception as error:
            print(f"{type(error).__name__}: {' '.join(str(error).split())[:200]}")
    return said.getvalue().strip()


def save(folder: Path, row: Mapping[str, Any]) -> None:
    """A whole file or none."""
    part = folder / "row.part"
    part.write_text(json.dumps(row))
    part.rename(folder / making.file_of(row["auto"], row["type"]))


def plain(end: Any) -> None:
    """Answers scripts with what they print, until there are no more."""
    with contextlib.suppress(EOFError):
        while True:
            end.send(alone(end.recv()))


def row_of(
    auto: str, name: str, config: Mapping[str, Any], programs: int, breadth: str, folder: Path, scripts: Any
) -> dict[str, Any]:
    """Tries one in a fork, has the script of each failure run, and saves the row."""
    with tempfile.TemporaryDirectory() as aside:
        seconds = QUICK_SECONDS if breadth == "each" else SECONDS
        code = forked(lambda: tried(auto, name, config, programs, breadth), place := Path(aside) / "row", seconds)
        why = f"the process ended with {code}, within {seconds} seconds of the processor and {BYTES // 2**30} GiB"
        if code == -signal.SIGKILL:  # What a process gets at its limit of the processor; that of memory raises.
            why = f"not tried: it takes more than {seconds} seconds of the processor"
        row: dict[str, Any] = making.untried(auto, name, why) if code else json.loads(place.read_text())
    shown = [one for one in row["wrong"] if one["lines"]]
    scripts.send([making.script(row, one) for one in shown])
    for one, said in zip(shown, scripts.recv(), strict=True):
        one["printed"] = said
    save(folder, row)
    return row


def walk(given: argparse.Namespace, scripts: Any) -> None:
    """Tries what is not there yet."""
    # Imported once for all models, and what programs import of torch with it: a third of what a small model takes.
    from torch._inductor import compile_fx  # noqa: F401

    import kvinterp.auditing.programs.pasted
    import kvinterp.auditing.programs.sourced
    import kvinterp.models.native  # noqa: F401

    for auto in given.auto:
        for name, config in making.known(auto).items():
            if (given.names and name not in given.names) or (given.out / making.file_of(auto, name)).exists():
                continue
            row = row_of(auto, name, config, given.programs, "each" if given.quick else "default", given.out, scripts)
            said = row["why"] or [one["use"] for one in row["wrong"]] or "right"
            print(auto, name, said, row.get("seconds", ""), flush=True)


def walk_lens(given: argparse.Namespace, scripts: Any) -> None:
    """Runs the scripts of TransformerLens that are not there yet, in one process: importing it takes seconds."""
    from wild import lens

    rows = [
        (row, one) for row, one in lens.scripts(given.names)
        if not (given.out / making.file_of(row["auto"], row["type"])).exists()
    ]  # fmt: skip
    scripts.send([making.script(row, one) for row, one in rows])
    for (row, one), said in zip(rows, scripts.recv(), strict=True):
        row = lens.judged(row, one, said)
        save(given.out, row)
        print(row["auto"], row["type"], row["why"] or [one["why"] for one in row["wrong"]] or "right", flush=True)


def main() -> None:
    """Does what was asked for; without a word about that, tries what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="model types; all unless given; those that are there are left out")
    parser.add_argument("--auto", nargs="*", choices=[*making.AUTO], default=[*making.AUTO], help="of these auto classes")
    parser.add_argument("--out", type=Path, help="the folder of the rows")
    parser.add_argument("--quick", action="store_true", help="tries each use once and draws no programs")
    parser.add_argument("--programs", type=int, help=f"100, or with --quick {QUICK_PROGRAMS}, unless given")
    parser.add_argument("--lens", action="store_true", help="tries the installed TransformerLens instead")
    parser.add_argument("--table", action="store_true", help="writes docs/wild.md from what is there")
    parser.add_argument("--reports", action="store_true", help="runs the scripts of docs/upstream again")
    parser.add_argument("--board", action="store_true", help="writes this release's board from what is there")
    parser.add_argument(
        "--diff", nargs=2, type=Path, metavar=("A", "B"), help="says what changed from one board to another"
    )
    parser.add_argument(
        "--page", action="store_true", help="writes docs/board/index.html from all boards of the quick walk"
    )
    parser.add_argument(
        "--referee", action="store_true", help="compares this release's board with the one before, and drafts a report"
    )
    parser.add_argument("--scripts", action="store_true", help="with --diff, shows the script of each fault")
    parser.add_argument(
        "--again", action="store_true", help="with --diff, runs the script of each fault here, without kvinterp"
    )
    given = parser.parse_args()
    given.out = given.out or (ROOT / "out" / (f"wild-quick/{transformers.__version__}" if given.quick else "wild"))
    given.programs = given.programs or (QUICK_PROGRAMS if given.quick else 100)
    warnings.simplefilter("ignore")
    transformers.utils.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if given.diff:
        difference(given)
    elif given.table or given.reports or given.board or given.page:
        write(given)
    elif given.referee:
        referee(given)
    else:
        # Begun before kvinterp is imported.
        scripts, end = multiprocessing.Pipe()
        multiprocessing.get_context("fork").Process(target=plain, args=(end,), daemon=True).start()
        given.out.mkdir(parents=True, exist_ok=True)
        (walk_lens if given.lens else walk)(given, scripts)


def difference(given: argparse.Namespace) -> None:
    """Prints what changed from one board to another."""
    from wild import board

    found = [*board.changes(*map(board.read, given.diff))]
    for change, said in zip(found, again(found) if given.again else [""] * len(found), strict=True):
        print(change)
        if given.scripts and change.fault.get("script"):
            print(change.fault["script"], "# printed", change.fault["printed"], "\n", sep="\n")
        if said:
            print(f"  its script, which printed {change.fault['printed']!r}, prints {said!r} here")


def again(found: Sequence[Any]) -> list[str]:
    """What the script of each change prints with what is installed here; nothing where there is none, or of another TransformerLens."""
    from wild import lens

    shown = [change for change in found if change.fault.get("script") and lens.installed(change.auto)]
    said = dict(zip(map(id, shown), alone([change.fault["script"] for change in shown]), strict=True))
    # A script of what raises prints nothing where it does not.
    return [(said[id(change)] or "nothing, and it ends") if id(change) in said else "" for change in found]


def referee(given: argparse.Namespace) -> None:
    """Writes this release's draft of a report beside the board before it, and says what got worse.

    Raises:
        SystemExit: Something did.
    """
    from wild import board, board_page

    boards = board_page.boards_of(ROOT / "docs" / "board" / "quick")
    new = transformers.__version__
    old = board_page.before(boards, new)
    found = [*board.changes(board_page.up_to(boards, old), boards[new])]
    place = ROOT / "out" / "referee" / f"transformers-{new}.md"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(board_page.report(old, new, found, again(found)), encoding="utf-8")
    worse = [change for change in found if change.use and change.after == "wrong"]
    print(*found, f"Beside transformers {old}: {len(found)} changes. The draft of a report: {place}", sep="\n")
    if worse:
        raise SystemExit(f"{len(worse)} uses that were not wrong with transformers {old} are wrong with {new}.")


def write(given: argparse.Namespace) -> None:
    """Writes what is made of rows."""
    from wild import page

    if given.table:
        page.write(given.out, ROOT / "docs")
    if given.reports:
        page.print_again(ROOT / "docs")
    if given.board:
        print(page.write_board(given.out, ROOT / "docs" / "board" / ("quick" if given.quick else "")))
    if given.page:
        from wild import board_page

        print(board_page.write_boards(board_page.boards_of(ROOT / "docs" / "board" / "quick"), ROOT / "docs" / "board"))


if __name__ == "__main__":
    main()
