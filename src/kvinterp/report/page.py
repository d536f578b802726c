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
from typing import Any, ClassVar

from jinja2 import Environment, PackageLoader, StrictUndefined

__all__ = [
    "Alert",
    "Answer",
    "Bullets",
    "Column",
    "Folded",
    "Heading",
    "NotebookFrame",
    "Pairs",
    "Picture",
    "Pictures",
    "Section",
    "Table",
    "Text",
    "fragment",
    "render",
]


@dataclasses.dataclass(frozen=True)
class Column:
    """The head of a column: its text, and what its cells are.

    Attributes:
        text: The head.
        kind: ``""``, ``"number"``, ``"text"`` (broken into lines), ``"pre"`` (a whole text as it is) or ``"code"``.
    """

    text: str
    kind: str = ""


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on the page: its caption, its file in base64, and what kind of file."""

    caption: str
    data: str
    format: str = "png"


# Parts: each is shown by the macro of its kind -------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Answer:
    """The box at the top; with a mark (good, bad, unsure) it is a verdict."""

    sentences: Sequence[str]
    mark: str = ""
    kind: ClassVar = "answer"


@dataclasses.dataclass(frozen=True)
class Heading:
    """A heading of the second or third level."""

    text: str
    level: int = 2
    kind: ClassVar = "heading"


@dataclasses.dataclass(frozen=True)
class Text:
    """A paragraph, led by a label, or a note in small print."""

    text: str
    label: str = ""
    note: bool = False
    kind: ClassVar = "text"


@dataclasses.dataclass(frozen=True)
class Bullets:
    """A list of texts."""

    texts: Sequence[str]
    kind: ClassVar = "bullets"


@dataclasses.dataclass(frozen=True)
class Table:
    """A table; the row whose first cell is ``here`` stands out."""

    head: Sequence[Column]
    rows: Sequence[Sequence[str]]
    here: str | None = None
    caption: str = ""
    kind: ClassVar = "table"


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Terms and what they are."""

    values: Mapping[str, str]
    side_by_side: bool = False
    kind: ClassVar = "pairs"


@dataclasses.dataclass(frozen=True)
class Pictures:
    """Figures beside each other."""

    pictures: Sequence[Picture]
    kind: ClassVar = "pictures"


@dataclasses.dataclass(frozen=True)
class Section:
    """A section of the report: what was done, a table or figures, and what to see in them."""

    title: str
    done: Sequence[str]
    seen: Sequence[str]
    pictures: Sequence[Picture] = ()
    head: Sequence[Column] = ()
    rows: Sequence[Sequence[str]] = ()
    here: str | None = None
    caption: str = ""
    kind: ClassVar = "section"


@dataclasses.dataclass(frozen=True)
class Folded:
    """Parts that are shown on a click."""

    summary: str
    parts: Sequence[Any]
    kind: ClassVar = "folded"


@dataclasses.dataclass(frozen=True)
class Alert:
    """One sentence about what went wrong."""

    text: str
    kind: ClassVar = "alert"


@dataclasses.dataclass(frozen=True)
class NotebookFrame:
    """A whole page in a frame without rights."""

    page: str
    kind: ClassVar = "notebook_frame"


# Rendering -------------------------------------------------------------------------------------------------------------


def render(look: str, title: str, parts: Sequence[Any] = (), heading: str = "", kicker: str = "", page: Any = None) -> str:
    """A page; every value is escaped.

    Args:
        look: ``"report"``, ``"audit"`` or ``"attention"``.
        title: The browser's title.
        parts: What the page consists of.
        heading: The heading (default: the title).
        kicker: A line above it.
        page: The attention page's own content.
    """
    content = {"title": title, "parts": parts, "heading_text": heading or title, "kicker": kicker, "page": page}
    return _template().render(look=look, **content)


def fragment(*parts: Any) -> str:
    """Parts without a page around them, as a notebook shows them."""
    return _template().render(look="fragment", parts=parts).strip()


@functools.cache
def _template() -> Any:
    environment = Environment(
        autoescape=True,
        undefined=StrictUndefined,
        loader=PackageLoader("kvinterp.report", ""),
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":")}
    environment.filters["sha256"] = _sha256
    return environment.get_template("page.html.j2")


def _sha256(text: str) -> str:
    """The hash by which a policy allows a script."""
    return base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
