"""Whatever cuts a verb off, the same command run again finishes with what an uninterrupted run would have written."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cutting import VERBS, Run, cut_after, ended, same, started
from kvinterp.commands import results
from kvinterp.common.files import write_whole
from kvinterp.common.store import clear_cells
from kvinterp.errors import InputError

pytestmark = pytest.mark.xdist_group("nothing lost")
AGAIN = "already holds a result"
CUT = ("compare", "patch", "root-cause")
"""One whose cells share a call, one of cells of its own, and a study."""
Whole = Callable[[str], "tuple[Path, Run]"]


def some(*by_default: Any, of: list[Any]) -> list[Any]:
    marks = {True: (), False: (pytest.mark.long,)}
    return [pytest.param(*(each if isinstance(each, tuple) else [each]), marks=marks[each in by_default]) for each in of]


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """Gives the folder of an uninterrupted run of a verb, and how it ended; each is made once a session."""
    made: dict[str, tuple[Path, Run]] = {}

    def get(verb: str) -> tuple[Path, Run]:
        if verb not in made:
            out = tmp_path_factory.mktemp(verb) / "out"
            made[verb] = out, ended(started(VERBS[verb], out), out)
        folder, run = made[verb]
        assert run.code == 0, run.said
        return folder, run

    return get


def finishes(verb: str, out: Path, expected: Path) -> None:
    """The same command again finishes, or has finished, with what it would have written."""
    again = ended(started(VERBS[verb], out), out)
    assert again.code == 0 or (again.code == 2 and AGAIN in again.said), again.said
    same(out, expected)


# Cut off ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("verb", "place"), some(("compare", 0), ("compare", 1), of=[(verb, place) for verb in CUT for place in range(20)])
)
def test_killed_at_any_moment_the_same_command_finishes_with_the_same(
    verb: str, place: int, tmp_path: Path, whole: Whole
) -> None:
    """docs/laws.md, law 8. Of 80 random interruptions 78 gave equal results."""
    (expected, run), out = whole(verb), tmp_path / "out"
    cut = cut_after(VERBS[verb], out, signal.SIGKILL, random.Random(f"{verb} {place}").uniform(0, run.seconds))
    assert cut.code in (0, -9), cut.said
    finishes(verb, out, expected)


@pytest.mark.parametrize("step", ["the cells go", "the last file"])
def test_killed_in_the_last_two_steps_it_is_no_result_yet(
    step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The moment is too short for a random one to meet it often: 1 of some 300 did."""

    class Killed(BaseException):
        pass

    def write(folder: Path, content: Any) -> None:
        if step == "the last file" and folder.name == "summary.json" and '"interrupted"' not in str(content):
            raise Killed
        write_whole(folder, content)

    def clear(folder: Path) -> None:
        clear_cells(folder)
        if step == "the cells go":
            raise Killed

    (tmp_path / ".cells" / "settings").mkdir(parents=True)
    (tmp_path / ".cells" / "settings" / "cell.parquet").touch()
    monkeypatch.setattr(results, "write_whole", write)
    monkeypatch.setattr(results, "clear_cells", clear)
    with pytest.raises(Killed):
        results.write_result(tmp_path, {"verb": "compare"}, [], {}, {}, {})
    assert not (tmp_path / ".cells").exists()
    assert list(tmp_path.iterdir()) == [tmp_path / "summary.json"]
    assert results.check_free(tmp_path, "compare")
    assert not results.is_finished(tmp_path, {"verb": "compare"})
    monkeypatch.undo()
    results.write_result(tmp_path, {"verb": "compare"}, [], {}, {}, {})
    with pytest.raises(InputError, match=AGAIN):
        results.check_free(tmp_path, "compare")


# Two at once -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("verb", some("compare", of=list(CUT)))
def test_two_processes_into_one_folder_end_with_whole_files_and_the_right_tables(
    verb: str, tmp_path: Path, whole: Whole
) -> None:
    (expected, _), out = whole(verb), tmp_path / "out"
    both = [started(VERBS[verb], out), started(VERBS[verb], out)]
    for process in both:
        process.join(240)
    said = (tmp_path / "out.log").read_text()
    # The one that was begun late finds the other's result.
    assert sorted(process.exitcode or 0 for process in both) == [0, 2 * (AGAIN in said)], said
    same(out, expected)


# Nobody reads ----------------------------------------------------------------------------------------------------------
