"""Audits the whole bank and writes a Markdown table: name, word, layer, tensor, seconds.

Run as `python benchmarks/bugs/bank/table.py [OUT.md]`; without a file, to standard output.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

from bank.bugs import BUGS
from bank.clean import CLEAN
from bank.run import CANNOT_TELL, PASS, audited, audited_bug, wrong_about

Case = tuple[str, Callable[[], Any], Callable[[Any], str]]


def _cases() -> Iterator[tuple[str, list[Case]]]:
    yield (
        "Clean models",
        [
            (
                name,
                lambda clean=clean: audited(clean.build(), clean.dtype),
                lambda verdict: "" if verdict.exit_code == PASS else "should pass",
            )
            for name, clean in CLEAN.items()
        ],
    )
    yield (
        "Planted bugs",
        [
            (name, lambda bug=bug: audited_bug(bug), lambda verdict, bug=bug: wrong_about(bug, verdict))
            for name, bug in BUGS.items()
        ],
    )


def lines() -> Iterator[str]:
    """The table's lines, each as soon as its audit is done."""
    for title, cases in _cases():
        right = unsure = 0
        yield f"### {title}\n"
        yield "| name | word | layer | tensor | seconds | wrong |\n|---|---|---|---|---|---|"
        for name, audit, judge in cases:
            start = time.perf_counter()
            try:
                verdict = audit()
            except Exception as error:  # One that cannot be audited is a line of the table, and not the end of it.
                yield f"| {name} | {type(error).__name__} | | | {time.perf_counter() - start:.1f} | {str(error).splitlines()[0][:120]} |"
                continue
            told = verdict.exit_code != CANNOT_TELL
            wrong = judge(verdict) if told else "cannot tell"
            right, unsure = right + (not wrong), unsure + (not told)
            layer = "" if verdict.first_layer is None else verdict.first_layer
            yield f"| {name} | {verdict.verdict} | {layer} | {verdict.tensor or ''} | {time.perf_counter() - start:.1f} | {wrong} |"
        yield f"\n{right} of {len(cases)} right, {unsure} cannot tell.\n"


def main() -> None:
    """Writes the table to a file, or prints it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("out", nargs="?", type=Path, help="the Markdown file; standard output unless given")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    with nullcontext(sys.stdout) if out is None else out.open("w", encoding="utf-8") as file:
        for line in lines():
            print(line, file=file, flush=True)


if __name__ == "__main__":
    main()
