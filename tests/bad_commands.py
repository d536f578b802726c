"""Command lines that are bad in one way, by a seed: an option, a file, what surrounds them, where the answer goes, how much.

Run by itself, ``python bad_commands.py FIRST:END ...``, it prints a JSON line for every case that was not handled as it should
be. How a case is judged it says when it is drawn:

* ``refused``: by what was given no answer can be right. Exit code 2, one sentence that names a remedy, and nothing written.
* ``any``: what was given may be right. As ``refused``, or a verdict: exit code 0, or for an audit 1 or 3.
* ``same``: nothing that was given bears on the answer. As ``refused``, or exit code 0 and what the undisturbed run finds.

In no case may there be a traceback, a control character, a hang or gigabytes of memory (:mod:`forked` has the limits).
"""

from __future__ import annotations

import json
import os
import random
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from bad_arguments import LONGEST, REMEDIES
from bad_choices import of_choices, of_cost, of_environment, of_options, of_streams
from bad_files import GIVEN, Results, found_in, of_files, of_given, of_results, of_special
from forked import Ended, forked, fresh, warmed
from right_commands import Case

KINDS = {
    "option": 380,
    "file": 200,
    "result": 100,
    "special": 90,
    "stream": 80,
    "composed": 130,
    "cost": 110,
    "environment": 50,
    "given": len(GIVEN),
}
"""How many cases there are of each kind; seeds are counted through, in this order."""
CASES = sum(KINDS.values())


class Cases:
    """Draws and runs them."""

    def __init__(self, home: Path) -> None:
        warmed()
        self.results = Results(home / "results")
        self.home = home

    def of(self, seed: int) -> tuple[str, Case]:
        """The kind and the case of a seed."""
        chosen, number = random.Random(f"command {seed}"), seed
        kinds = iter(KINDS)
        while number >= KINDS[kind := next(kinds)]:
            number -= KINDS[kind]
        draw: dict[str, Callable[[], Case]] = {
            "option": lambda: of_options(chosen),
            "file": lambda: of_files(chosen),
            "result": lambda: of_results(chosen, self.results),
            "special": lambda: of_special(chosen),
            "stream": lambda: of_streams(chosen, self.results),
            "composed": lambda: of_choices(chosen, number),
            "cost": lambda: of_cost(chosen, number),
            "environment": lambda: of_environment(chosen, number),
            "given": lambda: of_given(number),
        }
        return kind, draw[kind]()

    def wrong(self, seed: int) -> str:
        """Runs the case of a seed; says what was wrong with how it was handled, or nothing."""
        kind, case = self.of(seed)
        # Removed by hand: a fork leaves through this frame too, and would remove what is its parent's.
        folder = Path(tempfile.mkdtemp(dir=self.home)) / "here"
        folder.mkdir()
        case.prepare(folder)
        before = listed(folder)
        if kind == "environment":
            ended = fresh(case.arguments, folder, case.environment)
        else:
            ended = forked(case.arguments, folder, case.environment, case.streams)
        found = list(self.faults(case, ended, folder, before))
        shutil.rmtree(folder.parent)
        line = " ".join(each if len(each) < 60 else f"{each[:40]}..({len(each):,})" for each in case.arguments[:40])
        said = f"kvinterp {line}" + (f"  [{case.shown}]" if case.shown else "")
        return f"{kind}: {said}: {'; '.join(found)}" if found else ""

    def faults(self, case: Case, ended: Ended, folder: Path, before: list[str]) -> Iterator[str]:
        """What was wrong with how a case was handled."""
        both = ended.out + ended.err
        if ended.cut:
            yield ended.cut
            return
        if "Traceback (most recent call last)" in both or "panicked at" in both or "Exception ignored" in both:
            yield f"a traceback, exit code {ended.code}: ...{both.strip()[-300:]!r}"
            return
        if "\x1b" in both or "\x07" in both:
            yield "control characters"
        if case.judged == "streams":
            if ended.code not in case.codes:
                yield f"exit code {ended.code}, expected {' or '.join(map(str, case.codes))}: {both.strip()[-200:]!r}"
            return
        right = (0, 1, 3) if case.arguments[0] == "audit" else (0,)
        if ended.code == 2:
            yield from refusal(ended, before, listed(folder))
        elif ended.code not in right:
            yield f"exit code {ended.code}: {both.strip()[-300:]!r}"
        elif case.judged == "refused":
            yield f"it ran, with exit code {ended.code}: {both.strip()[-200:]!r}"
        elif case.judged == "same" and found_in(folder / "out") != self.results.undisturbed:
            yield f"it ran, and found something else than the run that is not disturbed: {both.strip()[-200:]!r}"


def refusal(ended: Ended, before: list[str], now: list[str]) -> Iterator[str]:
    """What is wrong with how a command was refused."""
    errors = [line for line in ended.err.splitlines() if line.startswith("error: ")]
    if now != before:
        yield f"something was written: {sorted(set(now) ^ set(before))[:3]}"
    if len(errors) != 1:
        yield f"{len(errors)} errors: {ended.err.strip()[-300:]!r}"
        return
    if not any(word in errors[0] for word in (*REMEDIES, "make ", "decode ", "take ", "see 'kvinterp")):
        yield f"no remedy: {errors[0][:300]!r}"
    if len(errors[0]) > LONGEST:
        yield f"{len(errors[0])} characters"


def listed(folder: Path) -> list[str]:
    """What lies in a folder."""
    return sorted(str(Path(root, name)) for root, folders, files in os.walk(folder) for name in (*folders, *files))


def main(seeds: list[int]) -> None:
    """Runs the cases of these seeds and prints the wrong ones."""
    warnings.simplefilter("ignore")
    home = Path(tempfile.mkdtemp())
    cases = Cases(home)
    for seed in seeds:
        if wrong := cases.wrong(seed):
            print(json.dumps({"seed": seed, "wrong": wrong}), flush=True)
    shutil.rmtree(home)
    print(json.dumps({"done": len(seeds)}))


if __name__ == "__main__":
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1", "TOKENIZERS_PARALLELISM": "false"}
    main([seed for part in sys.argv[1:] for seed in range(*map(int, part.split(":")))])
