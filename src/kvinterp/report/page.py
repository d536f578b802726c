"""The parts of pages, and the templates that render them: ``parts.html.j2`` has a macro for each,
``page.html.j2`` the frame.

A page loads nothing from the network, and can be read in light and dark, on a desk and on a phone.
It is rendered with autoescape on, so that all text of a model, a prompt or a file stays text.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, TypeAlias
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape

from kvinterp.common.numbers import counted, number, upper
from kvinterp.errors import visible

Parts: TypeAlias = list[Any]
"""The parts of a page, in order; an empty part (a text without words, a table without rows) is not
shown.
"""

# Parts: the template has a macro of the same name for each ----------------------------------------


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph, or what ``look`` says (note, h2, h3; frame: a whole page in a notebook)."""

    text: str
    look: str = ""
    name: str = ""
    """The name for links to a heading."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The box at the top of a page."""

    sentences: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure as PNG, for a notebook: its caption and its file."""

    caption: str
    png: bytes


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure that the page's own script draws as wide as there is room, in the page's colours.

    Attributes:
        caption: What it is called.
        packed: Its data, as JSON compressed with gzip (:func:`kvinterp.report.panels.drawing`).
    """

    caption: str
    packed: bytes


@dataclasses.dataclass(frozen=True)
class Links:
    """Links to parts of the page by their texts, as a cell of a table."""

    to: Mapping[str, str]
    """Names of parts of the page."""


@dataclasses.dataclass(frozen=True)
class Column:
    """The head of a column, and the kind of its cells: ``number``, ``text`` (broken into lines) or
    ``code``.
    """

    text: str
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the row whose first cell is ``here`` is highlighted, and ``folded`` is the line that
    unfolds the table.
    """

    head: Sequence[Column]
    rows: Sequence[Sequence[str | Links]]
    here: str | None = None
    caption: str = ""
    folded: str = ""
    name: str = ""
    """The name for links."""
    look: str = ""
    """``cards``: on a phone each row is a card."""
    visible: int | None = None
    """The number of rows that are visible; the others are folded."""


def as_text(value: Any) -> str:
    """A value as text: a float with three digits, the items of a list or a mapping, empty for what
    is missing.
    """
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {as_text(item) or 'none'}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) or "none" for item in value)
    if pd.isna(value):
        return ""
    return f"{value or 0:.3g}" if isinstance(value, float) else str(value)


def table_of_rows(
    rows: Sequence[Mapping[str, Any]], text: str = "", here: str | None = None
) -> Table:
    """A table of rows with the same names; where one column is a ``text``, each row is a card on a
    phone.
    """
    head = [
        Column(name.replace("_", " "), "text" if name == text else "")
        for name in (rows[0] if rows else ())
    ]
    return Table(
        head, [list(map(as_text, row.values())) for row in rows], here, look="cards" if text else ""
    )


def filled_columns(head: Sequence[Column], rows: Sequence[Sequence[Any]], **options: Any) -> Table:
    """A table without the columns in which every cell is empty or a dash; the options are further
    fields.
    """
    filled = [
        at
        for at, cells in enumerate(zip(*rows, strict=True))
        if not {*map(str, cells)} <= {"", "–"}
    ]
    return Table(
        [head[at] for at in filled], [[row[at] for at in filled] for row in rows], **options
    )


@dataclasses.dataclass(frozen=True)
class Packed:
    """Data that the page's script draws, as JSON compressed with gzip, by their labels."""

    name: str
    blobs: Mapping[str, bytes]


# Rendering ----------------------------------------------------------------------------------------


@functools.cache
def _static(ending: str, *names: str) -> Markup:
    """Joins files of ``static/``, named without their suffix; they contain no "</" and nothing of a
    user's.
    """
    folder = resources.files("kvinterp.report").joinpath("static")
    return Markup(
        "\n".join(folder.joinpath(f"{name}.{ending}").read_text(encoding="utf-8") for name in names)
    )


script = functools.partial(_static, "js")
"""Joins several scripts to one module, scripts that others use first: ``script("draw", "page")``.

No script imports another, so that the same text works in a page, which allows it by its hash, and
in a notebook's widget.
"""
styles = functools.partial(_static, "css")
"""Joins the styles of several scripts to one style sheet."""


def render(title: str, parts: Sequence[Any] = (), template: str = "page", **content: Any) -> str:
    """Renders a page; every value is escaped.

    Args:
        title: The browser's title, and the heading unless another one is given.
        parts: Parts of the page.
        template: The page's template.
        content: What else the template shows: ``heading``; ``kicker``, a line above it; ``sheet``,
            a style sheet by the name of its file.
    """
    packed = any(isinstance(part, Packed) for part in parts)
    charts = any(isinstance(part, Drawing) for part in (*parts, *content.get("pictures", ())))
    sheet, draw = content.pop("sheet", ""), ["draw"] * (packed or charts)
    return from_template(
        template,
        title=title,
        parts=parts,
        style=styles("page", *draw, *["charts"] * charts, *[sheet] * bool(sheet)),
        script=script("tables", *draw, *["charts"] * charts, *["page"] * packed),
        **{"heading": "", "kicker": "", **content},
    )


def from_template(name: str, **content: Any) -> str:
    """Renders a template by its name; every value is escaped."""
    return _environment().get_template(f"{name}.html.j2").render(**content).strip()


def fragment(*parts: Any) -> str:
    """Renders parts without a page around them, for a notebook."""
    macros: Any = _environment().get_template("parts.html.j2").make_module({"in_notebook": True})
    return "".join(map(macros.show, parts)).strip()


def _linked(text: str, files: Sequence[str]) -> Markup:
    """A text in which the names of files beside the page are links."""
    shown = escape(visible(text))
    for name in files:
        shown = shown.replace(
            escape(name), Markup('<a href="./{}">{}</a>').format(quote(name), name)
        )
    return shown


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        autoescape=True,
        # Characters that move a cursor or reverse a text are escaped, as on a terminal.
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=StrictUndefined,
        loader=PackageLoader("kvinterp.report", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.globals |= {
        "counted": counted,
        "upper": upper,
        "number": number,
        "as_text": as_text,
        "in_notebook": False,
    }
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    environment.filters["linked"] = _linked
    # The hash by which the page's content security policy allows a script.
    environment.filters["sha256"] = lambda text: hashlib.sha256(text.encode()).digest()
    return environment
