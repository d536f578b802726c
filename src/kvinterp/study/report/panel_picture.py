"""The panel as it stands, as plain HTML: tables with colours and numbers, for a page that has no kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

WHITE, MORE, LESS = (255, 255, 255), (0, 90, 158), (176, 74, 0)
"""The colours of the light panel; each cell brings the colour of its own text, so that it reads on any page."""


def picture(asked: Mapping[str, Any], answer: Mapping[str, Any], made: Mapping[str, Any], error: str) -> str:
    """What a panel shows of what is asked, its answer and its map, which may be empty, and of what was wrong; all escaped."""
    note = "A picture of the panel as it last stood. To change it, run the cell in a notebook."
    parts = [_p(Markup("<em>{}</em>").format(note)), _p(Markup("Prompt: <code>{}</code>").format(asked["prompt"]))]
    if asked["donor"] not in ("path", "zero") and asked["other"]:
        parts.append(_p(Markup("Other prompt: <code>{}</code>").format(asked["other"])))
    if error:
        parts.append(Markup('<p role="alert"><b>{}</b></p>').format(error))
    if answer:
        parts += [_p(Markup("<b>{}</b> {}").format(answer["lead"], answer["rest"])), _p(answer["said"])]
        head = ["distance", "before", "after", "recovery"]
        parts.append(_table(head, answer["distances"], ""))
    if made and made["filled"]:
        parts.append(_heat(made))
    if answer:
        lists = [_table(["token", "probability", "logit"], found["rows"], found["title"]) for found in answer["lists"]]
        parts.append(_p(answer["step"]))
        parts.append(Markup('<div style="display:flex;flex-wrap:wrap;gap:1em">{}</div>').format(Markup("").join(lists)))
    return str(Markup("\n").join(parts))


def _p(text: Any) -> Markup:
    return Markup("<p>{}</p>").format(text)


def _table(head: Sequence[str], rows: Sequence[Sequence[str]], caption: str) -> Markup:
    cells = Markup("").join(Markup("<th>{}</th>").format(cell) for cell in head)
    body = Markup("").join(
        Markup("<tr>{}</tr>").format(Markup("").join(Markup("<td>{}</td>").format(cell) for cell in row)) for row in rows
    )
    said = Markup("<caption>{}</caption>").format(caption) if caption else ""
    return _wide(Markup("<table>{}<thead><tr>{}</tr></thead><tbody>{}</tbody></table>").format(said, cells, body))


def _heat(made: Mapping[str, Any]) -> Markup:
    shown = [value for row in made["cells"] for value in row if value is not None]
    limit = made["limits"][1] if made["limits"] else max(shown, default=0.0)
    corner = Markup("<th>{} ↓ {} →</th>").format(*made["fields"])
    head = corner + Markup("").join(Markup("<th>{}</th>").format(column) for column in made["columns"])
    rows = []
    for at, (row, values) in enumerate(zip(made["rows"], made["cells"], strict=True)):
        cells = [
            _cell(value, limit, made["chosen"] == [at, column], ".2f" if made["limits"] else ".3g")
            for column, value in enumerate(values)
        ]
        rows.append(Markup("<tr><th>{}</th>{}</tr>").format(row, Markup("").join(cells)))
    left = len(made["rows"]) - made["filled"]
    notes = [
        made["title"] + ("." if made["limits"] else f", {made['unit']}."),
        "– is no value." if any(None in row for row in made["cells"][: made["filled"]]) else "",
        f"{left} of {len(made['rows'])} rows were not filled." if left else "",
        "The framed cell is the patch above." if made["chosen"] else "",
    ]
    table = Markup("<table><thead><tr>{}</tr></thead><tbody>{}</tbody></table>")
    return _p(" ".join(filter(None, notes))) + _wide(table.format(head, Markup("").join(rows)))


def _cell(value: float | None, limit: float, chosen: bool, digits: str) -> Markup:
    frame = ";outline:3px solid #000;outline-offset:-3px" if chosen else ""
    if value is None:
        return Markup('<td style="background:#fff;color:#333{}">–</td>').format(Markup(frame))
    part = min(abs(value) / limit, 1.0) if limit > 0 else 0.0
    end = MORE if value > 0 else LESS
    colour = [round(low + (high - low) * part) for low, high in zip(WHITE, end, strict=True)]
    ink = "#fff" if part > 0.55 else "#111"
    style = Markup("background:rgb({},{},{});color:{}{}").format(*colour, ink, Markup(frame))
    return Markup('<td style="{}">{}</td>').format(
        style, format(round(value, 2) + 0.0 if digits == ".2f" else value, digits)
    )


def _wide(table: Markup) -> Markup:
    return Markup('<div style="overflow-x:auto">{}</div>').format(table)
