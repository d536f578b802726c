"""docs/wild.md and docs/wild_sources.md from what ``make wild`` kept, a script for each failure in a folder beside them, and what docs/upstream's reports print now."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from wild.__main__ import alone
from wild.board import written
from wild.making import AUTO, CAUSAL, file_of, script

COLUMNS = {
    "decode": ("prompt", "decode step", "positions given", "mask and positions given", "mask alone"),
    "chunks": ("several chunks", "batch, several chunks"),
    "batch": ("batch",),
    "padding": ("left padding", "left padding, mask alone"),
    "later pads": ("left padding, in a later part",),
    "generate": ("generate()",),
    "second turn": ("generate() on a filled cache",),
    "beams": ("beam search",),
    "drafts": ("assisted decoding", "prompt lookup", "drafts checked", "sampled assisted decoding"),
    "crop": ("crop and go on", "cache that records its past"),
    "rows": ("reorder_cache", "batch_select_indices", "batch_repeat_interleave", "rows that join"),
    "fork": (
        "fork",
        "another request in between",
        "another batch, padded otherwise",
        "the same request again",
        "a cache that was reset",
    ),
    "bare": ("DynamicCache()",),
    "static": ("StaticCache",),
    "forms": (
        "embeddings",
        "boolean 4D mask",
        "additive 4D mask",
        "several ways to go on in one forward",
        "texts packed",
        "token types",
        "output_attentions",
        "output_hidden_states",
        "logits_to_keep",
        "eager attention",
        "sdpa attention",
        "flex attention",
        "sampling",
        "the cache is read",
        "compiled",
    ),
}
"""By column of the table, how the names of its uses begin."""
PAGES = {"wild.md": (CAUSAL,), "wild_sources.md": tuple(auto for auto in AUTO if auto != CAUSAL)}
"""The auto classes of each page: that of text alone, and of sources, sound and images."""
BOARD = f"transformers-{transformers.__version__}.json"
"""The file of this release's board."""
BEYOND = "beyond"
WORST = {"wrong": "**wrong**", "off without a cache too": "*off too*"}
"""A cell that holds one of these says it alone."""


def column_of(use: str) -> str:
    """The column of a use: that with the longest name which it begins with."""
    fitting = [(len(name), column) for column, names in COLUMNS.items() for name in names if use.startswith(name)]
    return max(fitting)[1] if fitting else ""


def line_of(row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    words: dict[str, set[str]] = {}
    for use, said in row["uses"].items():
        words.setdefault(column_of(use), set()).add(said["word"])
    for one in row["wrong"]:
        words.setdefault(BEYOND if one["beyond"] == "yes" else column_of(one["use"]), set()).add("wrong")
    return [_cell(words.get(column, set())) for column in [*COLUMNS, BEYOND]]


def _cell(words: set[str]) -> str:
    return next((said for word, said in WORST.items() if word in words), " ".join(sorted(words, reverse=True)))


def verdict(row: dict[str, Any]) -> str:
    """What a type comes to in one word."""
    if row["why"]:
        return "not tried"
    beyond = [one["beyond"] for one in row["wrong"]]
    return "wrong" if "no" in beyond else BEYOND if beyond else "right"


def rows_of(folder: Path) -> list[dict[str, Any]]:
    """The rows that ``make wild`` kept.

    Raises:
        SystemExit: There is none.
    """
    rows = [json.loads(place.read_text()) for place in sorted(folder.glob("*.json"))]
    if not rows:
        raise SystemExit(f"{folder} holds no rows: run make wild first.")
    return rows


def write_board(folder: Path, boards: Path) -> Path:
    """Writes the board of this release, and says where.

    Args:
        folder: The rows, all of one kind of walk.
        boards: The folder of the boards of that kind.
    """
    # Whoever runs a script of a report must not have heard of kvinterp.
    from kvinterp.models.provenance import machine

    about = {name: value for name, value in machine(torch.device("cpu")).items() if isinstance(value, str | int | float)}
    boards.mkdir(parents=True, exist_ok=True)
    place = boards / BOARD
    made = written(rows_of(folder), about, AUTO)
    rows = ",\n".join(map(json.dumps, made["rows"]))
    head = ",\n".join(f'"{name}": {json.dumps(made[name])}' for name in ("made_with", "types"))
    place.write_text(f'{{{head},\n"rows": [\n{rows}\n]}}\n', encoding="utf-8")
    return place


def write(folder: Path, docs: Path) -> None:
    """Writes the pages of which there are rows, and their scripts.

    Raises:
        SystemExit: There is nothing to write.
    """
    rows = rows_of(folder)
    for name, autos in PAGES.items():
        if of_page := [row for row in rows if row["auto"] in autos]:
            _write(of_page, docs, name, autos)


def _write(rows: list[dict[str, Any]], docs: Path, name: str, autos: Sequence[str]) -> None:
    scripts = docs / name.removesuffix(".md")
    scripts.mkdir(exist_ok=True)
    for old in scripts.glob("*.txt"):
        old.unlink()
    for row in rows:
        for n, one in enumerate(row["wrong"], 1):
            one["script"] = f"{file_of(row['auto'], row['type']).removesuffix('.json')}-{n}.txt" if one["lines"] else ""
            if one["script"]:
                text = f"{script(row, one)}\n# prints {one['printed']}\n"
                (scripts / one["script"]).write_text(text, encoding="utf-8")
    template = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True)
    page = template.get_template("wild.md.j2").render(
        causal=name == "wild.md",
        scripts=scripts.name,
        autos={auto: [row for row in rows if row["auto"] == auto] for auto in autos},
        rows=rows,
        total=Counter(map(verdict, rows)),
        counts={auto: Counter(verdict(row) for row in rows if row["auto"] == auto) for auto in autos},
        line_of=line_of,
        columns=[*COLUMNS, BEYOND],
        ran=sum(sum(row.get("ran", [])) for row in rows),
        minutes=round(sum(row.get("seconds", 0) for row in rows) / 60),
        missing=sum(len(AUTO[auto]) for auto in autos) - len(rows),
        about=f"transformers {transformers.__version__}, torch {torch.__version__}",
        board=BOARD,
    )
    (docs / name).write_text(page, encoding="utf-8")


def print_again(docs: Path) -> None:
    """Runs the script of every report and puts under it what it prints now, and with what."""
    about = f"transformers {transformers.__version__}, torch {torch.__version__}."
    for report in sorted((docs / "upstream").glob("*.md")):
        text = report.read_text()
        for code, old in re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL):
            text = text.replace(f"{code}```\n\n```\n{old}```", f"{code}```\n\n```\n{alone([code])[0]}\n```")
        report.write_text(re.sub(r"transformers [\d.]+, torch \S+\.$", about, text, flags=re.MULTILINE), encoding="utf-8")
