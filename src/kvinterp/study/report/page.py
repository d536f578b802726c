"""The parts of pages, and the one template that renders them (``page.html.j2``).

A page loads nothing from the network, and can be read in light and dark, on a desk and on a phone. It is rendered with
autoescape on, so that all text of a model, a prompt or a file stays text.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, TypeAlias

import pandas as pd
from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvinterp.errors import visible

Parts: TypeAlias = list[Any]
"""The parts of a page, in order; an empty part (a text without words, a table without rows) is not shown."""

# Parts: the template has a macro of the same name for each --------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Text:
    """A text after a label: a paragraph, or what ``look`` says (note, h2, h3, alert; frame: a whole page in a notebook)."""

    text: str
    label: str = ""
    look: str = ""
    name: str = ""
    """The name for links to a heading."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The box at the top of a page; with a mark (good, bad, unsure) it is a verdict."""

    sentences: Sequence[str]
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Terms and their meanings or values, below each other or side by side."""

    terms: Mapping[str, str]
    look: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure: its caption, its PNG, its name for links, and its SVG.

    The SVG comes from :func:`kvinterp.study.report.svg.inline` and goes into the page unescaped. Without an SVG, and in a
    notebook, whose background is not known, the PNG is shown.
    """

    caption: str
    png: bytes
    name: str = ""
    svg: str = ""
    narrow: str = ""
    """The SVG for a phone."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Links to parts of the page or to files beside it, by their texts: a cell of a table, or a line."""

    to: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names of parts of the page."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Paths relative to the page."""
    label: str = ""
    """The text before the links, where they are a line."""


@dataclasses.dataclass(frozen=True)
class Column:
    """The head of a column, and the kind of its cells: ``number``, ``text`` (broken into lines), ``pre`` or ``code``."""

    text: str
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the row whose first cell is ``here`` is highlighted, and ``folded`` is the line that unfolds the table."""

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
    """A value as text: a float with three digits, the items of a list or a mapping, empty for what is missing."""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {as_text(item) or 'none'}" for name, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(as_text(item) or "none" for item in value)
    if pd.isna(value):
        return ""
    return f"{value or 0:.3g}" if isinstance(value, float) else str(value)


def table_of_rows(rows: Sequence[Mapping[str, Any]], text: str = "", here: str | None = None, folded: str = "") -> Table:
    """A table of rows with the same names; where one column is a ``text``, each row is a card on a phone."""
    head = [Column(name.replace("_", " "), "text" if name == text else "") for name in (rows[0] if rows else ())]
    return Table(
        head, [list(map(as_text, row.values())) for row in rows], here, folded=folded, look="cards" if text else ""
    )


def pairs_of(values: Mapping[str, Any]) -> Pairs:
    """Values beside their names."""
    return Pairs({name.replace("_", " "): as_text(value) or "none" for name, value in values.items()}, look="beside")


def filled_columns(head: Sequence[Column], rows: Sequence[Sequence[Any]], **options: Any) -> Table:
    """A table without the columns in which every cell is empty or a dash; the options are further fields."""
    columns = list(zip(head, zip(*rows, strict=True), strict=True)) if rows else []
    filled = [(column, cells) for column, cells in columns if not {*map(str, cells)} <= {"", "–"}]
    return Table([column for column, _ in filled], [*zip(*(cells for _, cells in filled), strict=True)], **options)


@dataclasses.dataclass(frozen=True)
class Folded:
    """Parts behind a line that unfolds them."""

    summary: str
    parts: Sequence[Any]
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Packed:
    """Data that the page's script draws, as JSON compressed with gzip, by their labels."""

    name: str
    blobs: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Shaded:
    """A text whose tokens are shaded by a number, and the legend of the shades.

    A look is ``a1`` to ``a5`` (above 0, from pale to off the scale), ``b1`` to ``b5`` (below), ``n`` (not given: hatched) or
    nothing, and with a blank between ``p`` (of the prompt) and ``s`` (it begins here).
    """

    tokens: Sequence[tuple[str, str, str]]
    """For each token its text, its look, and the hint that appears where the reader points at it."""
    legend: Sequence[tuple[str, str]] = ()
    """Looks and what they mean."""


# Rendering -------------------------------------------------------------------------------------------------------------


@functools.cache
def _static(ending: str, *names: str) -> Markup:
    """Joins files of ``static/``, named without their suffix; they contain no "</" and nothing of a user's."""
    folder = resources.files("kvinterp.study.report").joinpath("static")
    return Markup("\n".join(folder.joinpath(f"{name}.{ending}").read_text(encoding="utf-8") for name in names))


script = functools.partial(_static, "js")
"""Joins several scripts to one module, scripts that others use first: ``script("draw", "page")``.

No script imports another, so that the same text works in a page, which allows it by its hash, and in a notebook's widget.
"""
styles = functools.partial(_static, "css")
"""Joins the styles of several scripts to one style sheet."""


def render(title: str, parts: Sequence[Any], heading: str = "", kicker: str = "", look: str = "") -> str:
    """Renders a page; every value is escaped.

    Args:
        title: The browser's title.
        parts: The parts of the page.
        heading: The heading (default: the title).
        kicker: A line above it.
        look: ``"audit"``, or ``"attention"`` for the page with an ``AttentionPage`` as its only part; it has its own scripts.
    """
    drawn = any(isinstance(part, Packed) for part in parts)
    return (
        _template()
        .render(
            look=look,
            title=title,
            parts=parts,
            heading_text=heading or title,
            kicker=kicker,
            style=styles("page", *["draw"] * drawn, *[look] * bool(look)),
            script=script("tables", *["draw", "page"] * drawn),
        )
        .lstrip()
    )


def fragment(*parts: Any) -> str:
    """Renders parts without a page around them, for a notebook."""
    return _template().render(look="fragment", parts=parts).strip()


@functools.cache
def _template() -> Any:
    environment = Environment(
        autoescape=True,
        # Characters that move a cursor or reverse a text are escaped, as on a terminal.
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=StrictUndefined,
        loader=PackageLoader("kvinterp.study.report", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    # The hash by which the page's content security policy allows a script.
    environment.filters["sha256"] = lambda text: hashlib.sha256(text.encode()).digest()
    return environment.get_template("page.html.j2")
