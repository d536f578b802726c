"""What is said of long work: how much is done, for about how long it goes on, in one line and not in thousands."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvinterp.common.progress import Pace, counting, each, listening, unshared
from kvinterp.study.cells import Cell, Local, run_cells
from kvinterp.study.engines import Remaining

HERE = "test_progress"


class Clock:
    """Seconds, set by hand."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_first_piece_is_judged_by_its_share_and_the_others_by_it() -> None:
    clock, told = Clock(), list[tuple[str, float | None]]()
    pace = Pace({"a": "x", "b": "x", "c": "y"}, "parts", lambda *said: told.append(said), clock)
    pace.say("loading")
    clock.now = 10.0
    pace.say("begun", 0.0)
    clock.now = 15.0
    pace.say("half way", 0.5)
    # Five seconds for the other half, and two pieces of twenty; what loading took is no measure of the half.
    assert told == [
        ("0 of 3 parts: loading", None),
        ("0 of 3 parts: begun", None),
        ("0 of 3 parts, about 45 s left: half way", pytest.approx(15 / 60)),
    ]
    clock.now = 30.0
    pace.done("a")
    assert told[-1] == ("1 of 3 parts, about 60 s left: half way", pytest.approx(1 / 3))
    clock.now = 50.0
    pace.say("the second, late")
    assert told[-1][0] == "1 of 3 parts, about 40 s left: the second, late"
    pace.done("b"), pace.done("c")
    assert told[-1] == ("3 of 3 parts: the second, late", None)


def test_what_is_counted_is_told_to_the_listener_once() -> None:
    told = list[tuple[Any, ...]]()
    with listening(lambda *said: told.append(said)):
        for _ in each("ab", "patching", "prompt"):
            list(each("xyz", "within", "step", "bar"))
        list(each("ab", "silent", "prompt", "none"))
        with unshared(), counting(2, "choosing", "prompt") as done:
            done(1)
    assert [said[0] for said in told[:2]] == ["patching 1 of 2 prompts", "patching 2 of 2 prompts"]
    assert [said[1] for said in told[:2]] == [0.5, 1.0]
    # Among pieces that follow each other it is no share of one of them.
    assert [said[0].partition(",")[0] for said in told[2:]] == ["choosing 1 of 2 prompts"]
    assert [len(said) for said in told[2:]] == [1]


def grouped(keys: list[str], keep: Any, settings: str) -> None:
    """A cell's function: it counts something before anything is finished."""
    list(each("ab", "choosing", "prompt"))
    for key in keys:
        keep(key, {}, {})


def single(settings: str) -> dict[str, Any]:
    """A cell's function that counts its own work."""
    list(each("ab", "patching", "prompt"))
    return {}


def test_cells_tell_what_they_count(tmp_path: Path) -> None:
    told = list[str]()
    cells = [Cell(f"g-{n}", f"{HERE}:grouped", {"settings": "x"}) for n in range(2)]
    cells.append(Cell("s", f"{HERE}:single", {"settings": "x"}))
    run_cells(cells, tell=lambda text, share: told.append(text), engine=Remaining(Local(), "prompts"))
    assert told[0] == "0 of 3 prompts"
    assert told[1].startswith("0 of 3 prompts: choosing 1 of 2 prompts")
    assert any(text.startswith("2 of 3 prompts") and text.endswith("patching 1 of 2 prompts") for text in told)
    assert told[-1].startswith("3 of 3 prompts")
