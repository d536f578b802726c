"""A page as a browser takes it apart: its elements, what they ask for, its scripts, and the text between them."""

from __future__ import annotations

import re
from html.parser import HTMLParser

__all__ = ["Page"]


class Page(HTMLParser):
    """A page that was read; an element that closes another one fails.

    Attributes:
        elements: Every element with its attributes.
        scripts: The text of every script.
        text: The text outside of scripts and styles.
        comments: How many there are.
    """

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.text, self.comments = "", 0
        self._open: list[str] = []
        self.feed(html)
        self.close()

    @property
    def tags(self) -> list[str]:
        """The name of every element."""
        return [tag for tag, _ in self.elements]

    @property
    def wanted(self) -> list[str]:
        """What they ask for or lead to."""
        asks = ("src", "href", "srcset", "data", "action")
        return [str(value) for _, attributes in self.elements for name, value in attributes.items() if name in asks]

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attributes)))
        self.scripts += [""] * (tag == "script")
        if tag not in ("meta", "img", "link"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"<{tag}> closes something else"
        self.text += " " if tag in ("td", "th") else ""

    def handle_data(self, data: str) -> None:
        if "script" in self._open:
            self.scripts[-1] += data
        elif "style" not in self._open:
            self.text += re.sub(r"[ \n]+", " ", data)

    def handle_comment(self, data: str) -> None:
        self.comments += 1
