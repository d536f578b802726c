"""A board: what one release of transformers is right and wrong in, by type and use, kept so that two releases can be compared.

A board is a JSON file, ``docs/board/transformers-5.23.0.json``: what it was made with, which types the release has, and a row a
type. A row has the word of each use that was tried, and of each fault its program, its error, the first tensor that differs, what
its script printed, and the script's hash; the script itself is in the row as well, so that a board needs no other file. Boards of
the quick walk are in ``docs/board/quick``.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from wild.making import CAUSAL, script


@dataclasses.dataclass(frozen=True)
class Change:
    """One use of a type that another board has another word for.

    Attributes:
        auto: The auto class.
        type: The model type.
        use: The use, or ``""`` where the type could be tried in one release alone.
        before: Its word on the first board.
        after: Its word on the second.
        fault: The row's entry of the fault, of whichever board has it; empty where neither has.
    """

    auto: str
    type: str
    use: str
    before: str
    after: str
    fault: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __str__(self) -> str:
        named = self.type if self.auto == CAUSAL else f"{self.auto}, {self.type}"
        what = f"{named}, {self.use}" if self.use else named
        shown = f" ({self.fault['why']}; {self.fault['program']})" if self.fault else ""
        return f"{what}: {self.before}, then {self.after}{shown}"


def written(rows: list[dict[str, Any]], about: dict[str, Any], types: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The board of rows as ``make wild`` keeps them.

    Args:
        rows: A row a type.
        about: What they were made with.
        types: The types that each auto class of the release names, of which some may have no row yet.
    """
    made = [_row(row) for row in sorted(rows, key=lambda row: (row["auto"], row["type"]))]
    return {"made_with": about, "types": {auto: sorted(names) for auto, names in types.items()}, "rows": made}


def _row(row: dict[str, Any]) -> dict[str, Any]:
    faults = []
    for one in row["wrong"]:
        text = script(row, one) if one["lines"] else ""
        faults.append(
            {name: one[name] for name in ("use", "beyond", "why", "error", "program", "place")}
            | {"printed": one.get("printed", ""), "script": text, "hash": hashlib.sha256(text.encode()).hexdigest()[:12]}
        )
    uses = {use: said["word"] for use, said in row["uses"].items()}
    uses |= {one["use"]: "wrong" for one in row["wrong"]}
    return {name: row[name] for name in ("auto", "type", "class", "why")} | {"uses": uses, "wrong": faults}


def changes(before: dict[str, Any], after: dict[str, Any]) -> Iterator[Change]:
    """What the second board says otherwise, by type and use.

    A use that one board has not tried changed nothing: programs are drawn, and what a type offers decides which are. A type that
    could be made in one release alone, or that one has not, is a change without a use; one that a release has and that was not
    walked there is none.

    Args:
        before: A board.
        after: Another.
    """
    old, new = ({(row["auto"], row["type"]): row for row in board["rows"]} for board in (before, after))
    for key in sorted(old.keys() | new.keys()):
        was, now = old.get(key), new.get(key)
        said = [_said(*key, board, row) for board, row in ((before, was), (after, now))]
        if said[0] != said[1] and "" not in said:
            yield Change(*key, "", said[0], said[1])
        if was is None or now is None:
            continue
        for use in sorted(was["uses"].keys() & now["uses"].keys()):
            words = was["uses"][use], now["uses"][use]
            if words[0] != words[1]:
                faults = [one for row in (now, was) for one in row["wrong"] if one["use"] == use]
                yield Change(*key, use, *words, *faults[:1])


def _said(auto: str, name: str, board: dict[str, Any], row: dict[str, Any] | None) -> str:
    """Whether a board has tried a type; nothing where it does not say so."""
    if row is not None:
        return "not tried" if row["why"] else "tried"
    walked = any(one["auto"] == auto for one in board["rows"])
    return "absent" if walked and name not in board.get("types", {}).get(auto, ()) else ""


def read(place: Path) -> dict[str, Any]:
    """A board of a file.

    Raises:
        SystemExit: It is none.
    """
    try:
        board: dict[str, Any] = json.loads(place.read_text())
        board["rows"], board["made_with"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(
            f"{place} is no board ({type(error).__name__}): give a file that `python -m wild --board` wrote."
        ) from error
    return board
