"""Pages: the parts that one is made of, and the one template that shows them all (``page.html.j2``).

A page asks the network for nothing, reads in light and dark, on a desk and on a phone. It is rendered with autoescape on:
whatever comes from a model, a prompt or a file is text.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any, TypeAlias

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from kvinterp.errors import visible

Parts: TypeAlias = list[Any]
"""What a page consists of, one under the other; what is empty (a text without words, a table without rows or a line that
unfolds it) is not shown."""

# Parts: each is shown by the macro that bears its name -----------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Text:
    """A text, led by a label: a paragraph, or what ``look`` says (note, h2, h3, alert; frame: a whole page in a notebook)."""

    text: str
    label: str = ""
    look: str = ""
    name: str = ""
    """By which a link finds a heading."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """The box at the top; with a mark (good, bad, unsure) it is a verdict."""

    sentences: Sequence[str]
    mark: str = ""


@dataclasses.dataclass(frozen=True)
class Bullets:
    """A list of texts."""

    texts: Sequence[str]


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Terms and what they are, under each other or side by side."""

    found: Mapping[str, str]
    look: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure: what it is called, its PNG, the name by which a link finds it, and what a page shows of it.

    The SVG is of our own making (:func:`kvinterp.study.report.svg.inline`), and stands in the page as it is; without one, and in
    a notebook, whose ground no page knows, the PNG is shown.
    """

    caption: str
    png: bytes
    name: str = ""
    svg: str = ""
    narrow: str = ""
    """The same drawn for a phone."""


@dataclasses.dataclass(frozen=True)
class Links:
    """Links, by what they say, to things on the page or to files beside it: a cell of a table, or a line."""

    to: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Names on the page."""
    files: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Relative to the page."""
    label: str = ""
    """Before the links, where they are a line of their own."""


@dataclasses.dataclass(frozen=True)
class Fold:
    """A cell of one line, which unfolds into more."""

    line: str
    more: Mapping[str, str]


@dataclasses.dataclass(frozen=True)
class Column:
    """The head of a column, and what its cells are: ``number``, ``text`` (broken into lines), ``pre``, ``code`` or ``filter``,
    by whose values the reader chooses among the rows.
    """

    text: str
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the row whose first cell is ``here`` stands out, and ``folded`` is what one clicks on to see it."""

    head: Sequence[Column]
    rows: Sequence[Sequence[str | Links | Fold]]
    here: str | None = None
    caption: str = ""
    folded: str = ""
    name: str = ""
    """By which a link finds it."""
    look: str = ""
    """``cards``: on a phone each row is a card."""


def told(value: Any) -> str:
    """A value as text: three digits of a number, what a list or a mapping holds, nothing where there is none."""
    if value is None or value != value:
        return ""
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {told(each) or 'none'}" for name, each in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(told(each) or "none" for each in value)
    return f"{value or 0:.3g}" if isinstance(value, float) else str(value)


def table_of_rows(rows: Sequence[Mapping[str, Any]], text: str = "", here: str | None = None, folded: str = "") -> Table:
    """A table of rows that all have the same names; where one column is a ``text``, each row is a card on a phone."""
    head = [Column(name.replace("_", " "), "text" if name == text else "") for name in (rows[0] if rows else ())]
    return Table(head, [list(map(told, row.values())) for row in rows], here, folded=folded, look="cards" if text else "")


def pairs_of(found: Mapping[str, Any]) -> Pairs:
    """Values beside their names."""
    return Pairs({name.replace("_", " "): told(value) or "none" for name, value in found.items()}, look="beside")


def opened(table: Table, count: int, what: str) -> list[Table]:
    """A table of which the first rows are seen, and the others behind a line that says how many more there are of what."""
    rest = dataclasses.replace(table, rows=table.rows[count:], name="", folded=f"{len(table.rows) - count} more {what}")
    return [dataclasses.replace(table, rows=table.rows[:count]), *([rest] if rest.rows else [])]


@dataclasses.dataclass(frozen=True)
class Folded:
    """Parts that are seen where one clicks on a line."""

    summary: str
    parts: Sequence[Any]
    name: str = ""


@dataclasses.dataclass(frozen=True)
class Packed:
    """Data that the page's script draws, JSON compressed with gzip, by what the reader calls them."""

    name: str
    blobs: Mapping[str, bytes]


@dataclasses.dataclass(frozen=True)
class Shaded:
    """A text whose tokens are shaded by a number, and the legend of the shades.

    A look is ``a1`` to ``a5`` (above 0, from pale to off the scale), ``b1`` to ``b5`` (below), ``n`` (not given: hatched) or
    nothing, and with a blank between ``p`` (of the prompt) and ``s`` (it begins here).
    """

    tokens: Sequence[tuple[str, str, str]]
    """Gives each one's text, its look, and what one reads who points at it."""
    legend: Sequence[tuple[str, str]] = ()
    """Looks and what they mean."""


# Rendering -------------------------------------------------------------------------------------------------------------


@functools.cache
def _static(ending: str, *names: str) -> Markup:
    """Files of ``static/`` by their names without ending, joined; they hold no "</", and nothing of a user's is in them."""
    folder = resources.files("kvinterp.study.report").joinpath("static")
    return Markup("\n".join(folder.joinpath(f"{name}.{ending}").read_text(encoding="utf-8") for name in names))


script = functools.partial(_static, "js")
"""The code of several scripts as one module, the one that others use first: ``script("draw", "page")``.

No script imports another, so that one text serves a page, which allows it by its hash, and a notebook's widget.
"""
styles = functools.partial(_static, "css")
"""The styles that go with scripts, as one style sheet."""


_STYLES = {"report": ("page",), "audit": ("page", "audit"), "attention": ("page", "attention")}


def render(
    look: str,
    title: str,
    parts: Sequence[Any] = (),
    heading: str = "",
    kicker: str = "",
    page: Any = None,
    scripts: Sequence[str] = ("tables",),
    sheets: Sequence[str] = (),
) -> str:
    """A page; every value is escaped.

    Args:
        look: ``"report"``, ``"audit"`` or ``"attention"``.
        title: The browser's title.
        parts: What the page consists of.
        heading: The heading (default: the title).
        kicker: A line above it.
        page: The attention page's own content; it has its own scripts.
        scripts: The scripts that run on it, by the names of their files in ``static/``: no others can.
        sheets: Style sheets behind those of the look, named likewise.
    """
    content = {"title": title, "parts": parts, "heading_text": heading or title, "kicker": kicker, "page": page}
    shell = {"style": styles(*_STYLES[look], *sheets), "script": script(*scripts)}
    return _template().render(look=look, **content, **shell).lstrip()


def fragment(*parts: Any) -> str:
    """Parts without a page around them, as a notebook shows them."""
    return _template().render(look="fragment", parts=parts).strip()


@functools.cache
def _template() -> Any:
    environment = Environment(
        autoescape=True,
        # What moves a cursor or turns a text round is shown as its escape, on a page as on a terminal.
        finalize=lambda value: visible(value) if type(value) is str else value,
        undefined=StrictUndefined,
        loader=PackageLoader("kvinterp.study.report", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["base64"] = lambda data: base64.b64encode(data).decode()
    # The hash by which a policy allows a script.
    environment.filters["sha256"] = lambda text: hashlib.sha256(text.encode()).digest()
    return environment.get_template("page.html.j2")
