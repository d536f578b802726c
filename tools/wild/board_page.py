"""The boards of all releases as one page of type x use x release, a badge each, and a draft of what to report of a new release."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from packaging.version import Version

from wild.board import Change, changes, read
from wild.lens import LENS
from wild.making import AUTO
from wild.page import COLUMNS, column_of

KINDS = {
    "wrong": ("✗", "wrong"),
    "off without a cache too": ("o", "other"),
    "refused": ("r", "other"),
    "right": ("✓", "right"),
}
"""The mark and class of each word, the worst first; a cell has the worst of its uses."""
NOT_TRIED, ABSENT, NOT_MADE = ("·", "none"), ("–", "none"), ("?", "none")
GREEN, RED, GREY = "#1a6e37", "#b3261e", "#59636e"


def boards_of(folder: Path) -> dict[str, dict[str, Any]]:
    """The boards of a folder by their release, the oldest first.

    Raises:
        SystemExit: There is none.
    """
    found = {place.stem.partition("-")[2]: read(place) for place in folder.glob("transformers-*.json")}
    if not found:
        raise SystemExit(f"{folder} holds no boards: run python -m wild --quick and then --quick --board.")
    return {release: found[release] for release in sorted(found, key=Version)}


def before(boards: dict[str, dict[str, Any]], release: str) -> str:
    """The newest release with a board that is older than one.

    Raises:
        SystemExit: There is none.
    """
    older = [one for one in boards if Version(one) < Version(release)]
    if not older:
        raise SystemExit(f"no board is older than that of {release}: there is nothing to compare it with.")
    return older[-1]


def up_to(boards: dict[str, dict[str, Any]], release: str) -> dict[str, Any]:
    """The board of a release with the rows of those before for what was not walked in it, each with its release."""
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for one, board in boards.items():
        if Version(one) <= Version(release):
            rows |= {(row["auto"], row["type"]): {**row, "release": one} for row in board["rows"]}
    return {**boards[release], "rows": [*rows.values()]}


def write_boards(boards: dict[str, dict[str, Any]], folder: Path) -> Path:
    """Writes ``index.html`` and a badge of each release, and says where.

    Args:
        boards: By release, the oldest first.
        folder: That of the page; the boards are in ``quick`` beside it.
    """
    (folder / "badges").mkdir(parents=True, exist_ok=True)
    for release, board in boards.items():
        said = {"schemaVersion": 1, "label": f"KV cache, transformers {release}", "message": summary(board)}
        said["color"] = "red" if faulty(board) else "green" if tried(board) else "lightgrey"
        stem = folder / "badges" / f"transformers-{release}"
        stem.with_name(f"{stem.name}.json").write_text(json.dumps(said) + "\n", encoding="utf-8")
        stem.with_name(f"{stem.name}.svg").write_text(badge(str(said["label"]), summary(board)), encoding="utf-8")
    page = _templates().get_template("board.html.j2").render(**shown(boards))
    (place := folder / "index.html").write_text(re.sub(r"\n\s*\n+", "\n", page) + "\n", encoding="utf-8")
    return place


def _templates() -> Environment:
    return Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, autoescape=True, trim_blocks=True
    )


def tried(board: dict[str, Any]) -> list[dict[str, Any]]:
    """The rows of types of transformers' auto classes that could be tried."""
    return [row for row in board["rows"] if row["auto"] in AUTO and not row["why"]]


def faulty(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Those of them that are wrong in a use that they offer."""
    return [row for row in tried(board) if any(one["beyond"] == "no" for one in row["wrong"])]


def summary(board: dict[str, Any]) -> str:
    """What a release comes to, for its badge; of a release that was walked in part it says how many types there are."""
    had = {row["auto"] for row in board["rows"]}
    left = sum(len(set(names)) for auto, names in board["types"].items() if auto in had)
    walked = sum(row["auto"] in AUTO for row in board["rows"])
    if not walked:
        return "no type walked"
    wrong = f"{len(faulty(board))} of {len(tried(board))} types wrong"
    return wrong if walked >= left else f"{wrong} ({left} there are)"


def badge(label: str, said: str) -> str:
    """A flat badge as SVG, drawn with the reader's own font: 6.6 px a letter is the widest of those in use."""
    left, right = (round(6.6 * len(text)) + 12 for text in (label, said))
    colour = GREEN if said.startswith("0 ") else RED if said[0].isdigit() else GREY
    text = _templates().from_string(
        '<svg xmlns="http://www.w3.org/2000/svg" width="{{ left + right }}" height="20" role="img" aria-label="{{ label }}: {{ said }}">'
        "<title>{{ label }}: {{ said }}</title>"
        '<rect width="{{ left }}" height="20" fill="#444c56"/><rect x="{{ left }}" width="{{ right }}" height="20" fill="{{ colour }}"/>'
        '<g fill="#fff" font-family="Verdana,DejaVu Sans,sans-serif" font-size="11" text-anchor="middle">'
        '<text x="{{ left / 2 }}" y="14" textLength="{{ left - 12 }}">{{ label }}</text>'
        '<text x="{{ left + right / 2 }}" y="14" textLength="{{ right - 12 }}">{{ said }}</text></g></svg>\n'
    )
    return text.render(label=label, said=said, left=left, right=right, colour=colour)


# What the page shows ------------------------------------------------------------------------------------------------------


def shown(boards: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What the template of the page is given."""
    rows = {release: {(row["auto"], row["type"]): row for row in board["rows"]} for release, board in boards.items()}
    keys = sorted({key for of_release in rows.values() for key in of_release})
    sections: dict[str, dict[str, Any]] = {}
    types = [(auto, name) for auto, name in keys if auto in AUTO]
    lens = [(auto, name) for auto, name in keys if LENS in auto]
    versions = sorted({auto.partition(LENS)[2].strip() for auto, _ in lens}, key=Version)
    kinds = sorted({(auto.partition(LENS)[0].strip(), name) for auto, name in lens})
    seen = {
        column_of(use) for key in types for of_release in rows.values() for use in of_release.get(key, {}).get("uses", ())
    }
    columns = [column for column in COLUMNS if column in seen]
    # A release in which none of a table's rows was walked would only keep its marks from being alike.
    with_types = _walked(boards, lambda auto: auto in AUTO)
    with_lens = _walked(boards, lambda auto: LENS in auto)
    of_types = [
        _line(with_types, rows, sections, _named(auto, name), [((auto, name), column) for column in columns], "types")
        for auto, name in types
    ]
    of_lens = [
        _line(with_lens, rows, sections, f"{kind}: {name}", [((f"{kind} {LENS} {one}", name), "generate") for one in versions], "lens")
        for kind, name in kinds
    ]  # fmt: skip
    tables = [
        {"id": "lens", "title": "generate() of TransformerLens from its cache", "rows": of_lens,
         "columns": [f"TransformerLens {one}" for one in versions], "releases": [*with_lens]},
        {"id": "types", "title": "Every type, every use", "rows": of_types, "columns": columns, "releases": [*with_types]},
    ]  # fmt: skip
    about = {f"torch {board['made_with']['torch']}" for board in boards.values()}
    pairs = [*_pairs(boards, sections)]
    return {
        "lead": _lead(boards, pairs),
        "releases": [*boards],
        "walked": {release: sum(row["auto"] in AUTO for row in board["rows"]) for release, board in boards.items()},
        "badges": {release: summary(board) for release, board in boards.items()},
        "about": ", ".join(sorted(about)),
        "pairs": pairs,
        "tables": [table for table in tables if table["rows"]],
        "sections": sections.values(),
    }  # fmt: skip


def _lead(boards: dict[str, dict[str, Any]], pairs: Sequence[dict[str, Any]]) -> str:
    """The page in a sentence or two: what the newest release comes to, and what the releases before it made worse."""
    releases = [*boards]
    first, newest = releases[0], releases[-1]
    wrong, of_all = len(faulty(boards[newest])), len(tried(boards[newest]))
    worse = [(pair["after"], use) for pair in pairs for use in pair["uses"] if use["after"] == "wrong" != use["before"]]
    became = "; ".join(
        f"{use['what']}, with {release} ({len(use['types'])} type{'s' * (len(use['types']) != 1)})"
        for release, use in worse
    )
    count = f"{len(worse)} use{'s' * (len(worse) != 1)} became wrong: {became}" if worse else "no use became wrong"
    return f"In transformers {newest}, {wrong} of {of_all} types get a use of their cache wrong. Since {first}, {count}."


def _walked(boards: dict[str, dict[str, Any]], wanted: Callable[[str], bool]) -> dict[str, dict[str, Any]]:
    """The boards that have a row of an auto class that is wanted."""
    return {release: board for release, board in boards.items() if any(wanted(row["auto"]) for row in board["rows"])}


def _named(auto: str, name: str) -> str:
    kind = auto.removeprefix("AutoModelFor")
    return name if kind == "CausalLM" else f"{name} ({kind})"


def _line(boards: Any, rows: Any, sections: Any, name: str, cells: Sequence[Any], back: str) -> dict[str, Any]:
    made = [_cell(boards, rows, sections, key, column, back) for key, column in cells]
    same = all(mark["kind"] in ("right", "none") for cell in made for mark in cell)
    return {"name": name, "cells": made, "same": same}


def _cell(boards: Any, rows: Any, sections: Any, key: tuple[str, str], column: str, back: str) -> list[dict[str, str]]:
    """A mark of each release, or one where all are alike."""
    marks = []
    for release, board in boards.items():
        row = rows[release].get(key)
        link = ""
        if row is None:
            (text, kind), word = (NOT_TRIED, "not walked") if _has(board, *key) else (ABSENT, "no such type")
        elif row["why"]:
            (text, kind), word = NOT_MADE, row["why"][:120]
        else:
            words = {word for use, word in row["uses"].items() if column_of(use) == column}
            word = next((word for word in KINDS if word in words), "not tried")
            text, kind = KINDS.get(word, NOT_TRIED)
            faults = [one for one in row["wrong"] if column_of(one["use"]) == column]
            if faults:
                link = _section(sections, key, column, release, faults, back)
        marks.append({"text": text, "kind": kind, "title": f"{release}: {word}", "word": word, "link": link})
    if len({mark["word"] for mark in marks}) == 1:
        return [{**marks[-1], "title": f"{', '.join(boards)}: {marks[-1]['word']}"}]
    return marks


def _has(board: dict[str, Any], auto: str, name: str) -> bool:
    """Whether a type without a row may be in a release all the same: of a TransformerLens that was walked, all are there."""
    if LENS in auto:
        version = auto.partition(LENS)[2]
        return not any(row["auto"].endswith(LENS + version) for row in board["rows"])
    return name in board.get("types", {}).get(auto, ())


def _section(
    sections: dict[str, dict[str, Any]], key: tuple[str, str], column: str, release: str, faults: Any, back: str
) -> str:
    """Keeps the faults of a cell under its name, each script once, and returns the name."""
    name = re.sub(r"[^\w.-]+", "-", f"{key[0].removeprefix('AutoModelFor')}.{key[1]}.{column}")
    kept = sections.setdefault(name, {"id": name, "title": f"{_named(*key)}: {column}", "faults": [], "back": back})
    for one in faults:
        same = [old for old in kept["faults"] if (old["use"], old["hash"]) == (one["use"], one["hash"])]
        if same:
            same[0]["releases"].append(release)
        else:
            kept["faults"].append({**one, "releases": [release]})
    return name


def _pairs(boards: dict[str, dict[str, Any]], sections: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """What changed up to each release, each type beside the last release before in which it was walked."""
    for old, new in itertools.pairwise(boards):
        found = [*changes(earlier := up_to(boards, old), boards[new])]
        last = {(row["auto"], row["type"]): row for row in earlier["rows"]}
        both = [(last[key], row) for row in boards[new]["rows"] if (key := (row["auto"], row["type"])) in last]
        compared = [len(was["uses"].keys() & now["uses"].keys()) for was, now in both]
        of_use = [change for change in found if change.use]
        links = {
            id(change): name for change in of_use for name, kept in sections.items()
            if any(one["hash"] == change.fault.get("hash") and one["use"] == change.use for one in kept["faults"])
        }  # fmt: skip
        groups: dict[tuple[str, ...], list[dict[str, str]]] = {}
        for change in of_use:
            what = f"{change.auto}, {change.use}" if LENS in change.auto else change.use
            kind = change.auto.removeprefix("AutoModelFor")
            name = change.type if LENS in change.auto or kind == "CausalLM" else f"{change.type} ({kind})"
            said = {"name": name, "why": change.fault.get("why", ""), "link": links.get(id(change), "")}
            since = last[change.auto, change.type]["release"]
            groups.setdefault((what, change.before, since, change.after), []).append(said)
        uses = [
            {"what": what, "before": was, "since": since, "after": now, "types": said}
            for (what, was, since, now), said in groups.items()
        ]
        types = {
            state: [_named(one.auto, one.type) for one in found if not one.use and (one.before, one.after) == state]
            for state in dict.fromkeys((one.before, one.after) for one in found if not one.use)
        }  # fmt: skip
        yield {
            "before": old,
            "after": new,
            "uses": uses,
            "types": types,
            "compared": f"{sum(compared)} uses of {sum(map(bool, compared))} types",
        }


# What a maintainer is told ------------------------------------------------------------------------------------------------


def report(old: str, new: str, found: Sequence[Change], here: Sequence[str]) -> str:
    """A draft in Markdown: what is newly wrong, and what else changed.

    A use that several types get wrong is one heading with all of them, and the script of the first: it is likely to be one fault.

    Args:
        old: The release before.
        new: The release.
        found: What changed.
        here: What the script of each change printed when it was run again with the new release, or nothing.
    """
    worse: dict[tuple[str, str, str], list[tuple[Change, str]]] = {}
    for change, said in zip(found, here, strict=True):
        if change.use and change.after == "wrong":
            worse.setdefault((change.auto, change.use, change.before), []).append((change, said))
    others = [change for change in found if change.use and change.after != "wrong"]
    template = Environment(
        loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True
    ).get_template("report.md.j2")  # fmt: skip
    types = [change for change in found if not change.use]
    return template.render(old=old, new=new, worse=worse, others=others, types=types, count=sum(map(len, worse.values())))
