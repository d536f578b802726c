"""docs/wild.md from what ``make wild`` kept, a script for each failure in docs/wild/, and what docs/upstream's reports print now."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from wild.__main__ import alone

COLUMNS = {
    "decode": ("prompt", "decode step", "positions given", "mask and positions given", "mask alone"),
    "chunks": ("several chunks", "batch, several chunks"),
    "batch": ("batch",),
    "padding": ("left padding", "left padding, mask alone"),
    "later pads": ("left padding, in a later part",),
    "generate": ("generate()",),
    "second turn": ("generate() on a filled cache",),
    "beams": ("beam search",),
    "drafts": ("assisted decoding", "prompt lookup"),
    "crop": ("crop and go on", "cache that records its past"),
    "rows": ("reorder_cache", "batch_select_indices", "batch_repeat_interleave"),
    "fork": ("fork", "another request in between"),
    "bare": ("DynamicCache()",),
    "static": ("StaticCache",),
}
"""By column of the table, how the names of its uses begin."""
BEYOND = "beyond"
WORDS = {"wrong": "**wrong**", "refused": "refused", "off without a cache too": "*off too*", "right": "right"}
"""How a cell says it: the first that any use of it came to."""


def column_of(use: str) -> str:
    """The column of a use: that with the longest name which it begins with."""
    fitting = [(len(name), column) for column, names in COLUMNS.items() for name in names if use.startswith(name)]
    return max(fitting)[1] if fitting else ""


def line_of(row: dict[str, Any]) -> dict[str, Any]:
    """A row of the table."""
    words: dict[str, set[str]] = {}
    for check in row["uses"]:
        words.setdefault(column_of(check["name"]), set()).add(check["status"])
    cells = [next((WORDS[word] for word in WORDS if word in words.get(column, ())), "") for column in COLUMNS]
    beyond = any(check["status"].startswith("wrong beyond") for check in row["uses"])
    return {"type": row["type"], "cells": [*cells, WORDS["wrong"] if beyond else ""], "why": row["why"]}


def failures(row: dict[str, Any]) -> list[dict[str, Any]]:
    """What is wrong with a type, each with its script's name."""
    wrong = [check for check in row["uses"] if check["status"].startswith("wrong")]
    return [
        {**check, "type": row["type"], "script": f"{row['type']}-{n}.txt" if check["lines"] else "", "model": row["model"]}
        for n, check in enumerate(wrong, 1)
    ]


def verdict(row: dict[str, Any]) -> str:
    """What a type comes to in one word."""
    statuses = {check["status"] for check in row["uses"]}
    if "right" not in statuses and "wrong" not in statuses:
        return "not tried"
    return next((word for word in ("wrong", "wrong beyond what a cache promises") if word in statuses), "right")


def write(folder: Path, docs: Path) -> None:
    """Writes the page and the scripts.

    Raises:
        SystemExit: There is nothing to write.
    """
    rows = [json.loads(place.read_text()) for place in sorted(folder.glob("*.json"))]
    if not rows:
        raise SystemExit(f"{folder} holds no rows: run make wild first.")
    wrong = [one for row in rows for one in failures(row)]
    scripts = docs / "wild"
    scripts.mkdir(exist_ok=True)
    for old in scripts.glob("*.txt"):
        old.unlink()
    for one in wrong:
        if one["script"]:
            (scripts / one["script"]).write_text(f"{one['model']}\n{one['lines']}\n# {one['printed']}\n", encoding="utf-8")
    import torch
    import transformers

    template = Environment(loader=FileSystemLoader(Path(__file__).parent), undefined=StrictUndefined, trim_blocks=True)
    page = template.get_template("wild.md.j2").render(
        lines=[line_of(row) for row in rows],
        counts=Counter(map(verdict, rows)),
        wrong=wrong,
        columns=[*COLUMNS, BEYOND],
        untried=[(row["type"], _why(row)) for row in rows if verdict(row) == "not tried"],
        seconds=round(sum(row.get("seconds", 0) for row in rows) / 60),
        about={"torch": torch.__version__, "transformers": transformers.__version__},
    )
    (docs / "wild.md").write_text(page, encoding="utf-8")
    for report in sorted((docs / "upstream").glob("*.md")):
        printed_again(report)


def _why(row: dict[str, Any]) -> str:
    said = row["why"] or "; ".join(check["detail"] for check in row["uses"])
    return said.replace("|", "\\|").replace("<", "&lt;")[:160]


def printed_again(report: Path) -> None:
    """Runs the script of a report and puts what it prints under it."""
    text = report.read_text()
    for code, old in re.findall(r"```python\n(.*?)```\n\n```\n(.*?)```", text, re.DOTALL):
        text = text.replace(f"{code}```\n\n```\n{old}```", f"{code}```\n\n```\n{alone(code)}\n```")
    report.write_text(text, encoding="utf-8")
