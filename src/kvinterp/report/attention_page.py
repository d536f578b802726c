"""Makes the page that shows attention side by side: one HTML file, with the code of circuitsvis in
it once.

Only the page's own two scripts may run, and nothing may be loaded, so that it works offline and the
text of a prompt stays text.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from importlib import resources
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Float64
from markupsafe import Markup
from torch import Tensor

from kvinterp.errors import unexpected
from kvinterp.recording import Trace
from kvinterp.report.page import render


@dataclasses.dataclass(frozen=True)
class View:
    """The positions to show, and the number of positions in a cell."""

    start: int
    stop: int
    block: int = 1

    @classmethod
    def choose(cls, length: int, positions: tuple[int, int] | None, cells: int, fit: str) -> View:
        """Makes the view for the options of
        :func:`kvinterp.report.attention.attention_comparison`.
        """
        if positions is not None:
            whole = isinstance(positions, list | tuple) and len(positions) == 2
            if not (
                whole
                and all(isinstance(p, int) for p in positions)
                and 0 <= positions[0] < positions[1] <= length
            ):
                raise unexpected(
                    "positions",
                    positions,
                    f"(start, stop) with 0 <= start < stop <= {length}, the length here",
                )
            return cls(*positions)
        return (
            cls(0, length, -(-length // cells))
            if fit == "pool"
            else cls(max(length - cells, 0), length)
        )

    @property
    def starts(self) -> range:
        """The first position of each row."""
        return range(self.start, self.stop, self.block)

    def crop(self, square: Float64[Tensor, "query key"]) -> Float64[np.ndarray, "side side"]:
        """Crops a pattern to the view, and pools its blocks."""
        cut = square[self.start : self.stop, self.start : self.stop].numpy()
        edges = np.arange(0, len(cut), self.block)
        summed: np.ndarray = np.add.reduceat(np.add.reduceat(cut, edges, axis=0), edges, axis=1)
        return summed / np.diff([*edges, len(cut)])[:, None]


@dataclasses.dataclass(frozen=True, eq=False)
class ShownHead:
    """One head with its numbers and its two patterns, pooled or cropped alike.

    Attributes:
        row: layer, head, kl, largest_row_kl and largest_row.
        a: The first path's probabilities.
        b: The second path's.
    """

    row: dict[str, Any]
    a: Float64[np.ndarray, "side side"]
    b: Float64[np.ndarray, "side side"]

    @property
    def difference(self) -> Float64[np.ndarray, "side side"]:
        """The first path's less the second's."""
        return self.a - self.b


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionPage:
    """The page of two traces at a step; the template has its sentences.

    Attributes:
        pair: The traces.
        sides: What each is called.
        step: The decode step.
        compared: The number of heads that were compared.
        view: The positions to show.
        names: The text of every position.
        heads: The heads to show, in their order on the page.
        finding: What was found, in a sentence.
    """

    pair: tuple[Trace, Trace]
    sides: tuple[str, str]
    step: int
    compared: int
    view: View
    names: Sequence[str]
    heads: Sequence[ShownHead]
    finding: str = ""
    digits: ClassVar[int] = 6

    @property
    def rows(self) -> list[tuple[str, int, int]]:
        """The text of each row and column, and its first and its last position."""
        rows, view = [], self.view
        for first in view.starts:
            last = min(first + view.block, view.stop) - 1
            text, span = (
                "".join(self.names[first : last + 1]),
                f"{first}-{last}" if first < last else f"{first}",
            )
            rows.append((f"{span}: {text}" if view.start or view.block > 1 else text, first, last))
        return rows

    @property
    def inside(self) -> float:
        """The share of their attention that the rows give to keys that are shown."""
        return float(
            np.mean([pattern.sum(1).mean() for head in self.heads for pattern in (head.a, head.b)])
        )

    def html(self) -> str:
        """The page as text."""
        title = f"Attention at step {self.step}: {self.sides[0]} against {self.sides[1]}"
        return render(title, template="attention", sheet="attention", page=self)

    @property
    def data(self) -> dict[str, Any]:
        """The data of the figures: the tokens, and for each figure its rows up to the diagonal and
        the limit of its scale.
        """
        figures = []
        for number, head in enumerate(self.heads):
            limit = float(np.abs(head.difference).max()) or 1.0
            for side, values, largest in (
                ("a", head.a, 1.0),
                ("b", head.b, 1.0),
                ("difference", head.difference, limit),
            ):
                rows = [
                    [float(f"{v:.{self.digits}g}") for v in row[: at + 1]]
                    for at, row in enumerate(values.tolist())
                ]
                figures.append({"id": f"head-{number}-{side}", "rows": rows, "limit": largest})
        return {"tokens": [text for text, *_ in self.rows], "figures": figures}

    @staticmethod
    @functools.cache
    def bundle() -> Markup:
        """The code of the installed circuitsvis, escaped for use inside a page."""
        source = (
            resources.files("circuitsvis")
            .joinpath("dist", "cdn", "iife.js")
            .read_text(encoding="utf-8")
        )
        # In a JavaScript string "<\\/" means "</", but it ends no script element. The file of the
        # source map does not exist.
        return Markup(
            source.replace("</script", "<\\/script")
            .partition("//# sourceMappingURL")[0]
            .replace("\r", "")
        )


def readable(token: str) -> str:
    """Makes the blanks of a token visible, since circuitsvis drops white space from its labels."""
    return token.replace(" ", "·").replace("\n", "↵").replace("\t", "→") or "(empty)"
