"""docs/wild.md from what ``make wild`` kept, with what each reproduction prints."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent


def rows_of(folder: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """By model type, then by processor, the last row of each.

    Raises:
        SystemExit: There is none.
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for place in sorted(folder.glob("*.jsonl")):
        for row in map(json.loads, place.read_text().splitlines()):
            found.setdefault(row["type"], {})[place.stem] = row
    if not found:
        raise SystemExit(f"{folder} holds no rows: run make wild first.")
    return found


def causes() -> dict[str, str]:
    """By model type, what the bank of the audit's tests knows to be the cause, found by hand."""
    from bank.clean import KNOWN_TRANSFORMERS_BUGS

    return {name: bug.cause for name, bug in KNOWN_TRANSFORMERS_BUGS.items() if bug.where != "chunk"}


def line_of(name: str, by: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """What stands in a row of the table."""
    row = next((row for row in by.values() if row["word"] not in ("not built", "not audited")), next(iter(by.values())))
    words = list(dict.fromkeys(one["word"] for one in by.values()))
    status = Counter(row.get("checks", {}).values())
    where = f"layer {row['layer']}, {row['tensor']}" if row["word"] == "bug" else ""
    unclear = [check for check, said in row.get("checks", {}).items() if said == "cannot tell"]
    cause = causes().get(name, "") if row["word"] == "bug" else ""
    failed = ", ".join(row.get("failed", {}))
    what = "; ".join(filter(None, (cause, failed and f"failed: {failed}")))
    notes = [what, unclear and f"cannot tell: {', '.join(unclear)}", row.get("detail", "")]
    return {
        "type": name,
        "class": row["class"],
        "words": " / ".join(words),
        "uses": f"{status['passed'] + status['failed']} of {status.total()}" if status else "",
        "where": where,
        "what": what or "decoding itself",
        "note": "; ".join(filter(None, notes)).replace("|", "\\|")[:200],
    }


def printed(script: Path) -> str:
    """What a reproduction prints."""
    made = subprocess.run([sys.executable, "-W", "ignore", str(script)], capture_output=True, text=True, check=True)
    return made.stdout.strip()


def write(folder: Path, target: Path) -> None:
    """Writes the page."""
    found = rows_of(folder)
    lines = [line_of(name, by) for name, by in sorted(found.items())]
    words = Counter(line["words"].split(" / ")[0] for line in lines)
    import torch
    import transformers

    scripts = [
        {"name": path.stem, "code": path.read_text().strip(), "printed": printed(path)}
        for path in sorted((HERE / "reproduce").glob("*.py"))
    ]
    template = Environment(loader=FileSystemLoader(HERE), undefined=StrictUndefined, keep_trailing_newline=True)
    about = {"devices": sorted({row["device"] for by in found.values() for row in by.values()})}
    about |= {"torch": torch.__version__, "transformers": transformers.__version__}
    bugs = [line for line in lines if "bug" in line["words"]]
    page = template.get_template("wild.md.j2").render(lines=lines, words=words, bugs=bugs, scripts=scripts, about=about)
    target.write_text(page, encoding="utf-8")
    print(f"written to {target}")
