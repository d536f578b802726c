"""What a section of the report is made of."""

from __future__ import annotations

import base64
import dataclasses
from pathlib import Path

from matplotlib.figure import Figure

from kvinterp.views.plots import save

__all__ = ["Column", "Gallery", "Picture", "Section"]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on the page: its caption, and its PNG in base64."""

    caption: str
    data: str


@dataclasses.dataclass(frozen=True)
class Column:
    """The head of a column: its text, and whether it holds numbers or whole texts."""

    text: str
    number: bool = False
    text_block: bool = False


@dataclasses.dataclass
class Section:
    """One section of the page."""

    title: str
    done: list[str]
    seen: list[str]
    pictures: list[Picture] = dataclasses.field(default_factory=list)
    head: list[Column] = dataclasses.field(default_factory=list)
    rows: list[list[str]] = dataclasses.field(default_factory=list)


class Gallery:
    """Saves figures and keeps them for the page.

    Args:
        folder: Where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, figure: Figure, caption: str) -> Picture:
        """Saves one figure as ``name.png``."""
        path = save(figure, self.folder / f"{name}.png")
        return Picture(caption, base64.b64encode(path.read_bytes()).decode("ascii"))
