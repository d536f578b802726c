"""Makes the page that shows attention side by side: one HTML file, with the code of circuitsvis in it once.

Only the page's own two scripts may run, and nothing may be loaded, so that it works offline and the text of a prompt stays text.
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

from kvinterp.errors import InputError
from kvinterp.recording import Trace
from kvinterp.study.report.page import render


@dataclasses.dataclass(frozen=True)
class View:
    """The positions to show, and the number of positions in a cell."""

    start: int
    stop: int
    block: int

    @classmethod
    def choose(cls, length: int, positions: tuple[int, int] | None, cells: int, fit: str) -> View:
        """Makes the view for the options of :func:`kvinterp.study.report.attention.attention_comparison`."""
        if positions is not None:
            whole = isinstance(positions, list | tuple) and len(positions) == 2
            if not (whole and all(isinstance(p, int) for p in positions) and 0 <= positions[0] < positions[1] <= length):
                raise InputError(
                    f"positions={positions!r} was given: expected (start, stop) with 0 <= start < stop <= {length}, the "
                    "positions at this step."
                )
            return cls(*positions, 1)
        if fit == "pool":
            return cls(0, length, -(-length // cells))
        return cls(max(length - cells, 0), length, 1)

    @property
    def side(self) -> int:
        """The number of rows."""
        return -(-(self.stop - self.start) // self.block)

    def crop(self, square: Float64[Tensor, "query key"]) -> Float64[np.ndarray, "side side"]:
        """Crops a pattern to the view, and pools its blocks."""
        cut = square[self.start : self.stop, self.start : self.stop].numpy()
        if self.block == 1:
            return cut
        edges = np.arange(0, len(cut), self.block)
        counts = np.diff([*edges, len(cut)])
        summed: np.ndarray = np.add.reduceat(np.add.reduceat(cut, edges, axis=0), edges, axis=1)
        return summed / counts[:, None]

    def place(self, number: int, prompt: int) -> tuple[str, str]:
        """The positions of a row as text, and whether they are the prompt's, decoded, or both."""
        first = self.start + number * self.block
        last = min(first + self.block, self.stop) - 1
        whose = "prompt" if last < prompt else "decoded" if first >= prompt else "prompt and decoded"
        return (f"position {first}" if first == last else f"positions {first} to {last}"), whose

    def labels(self, names: Sequence[str]) -> tuple[str, ...]:
        """The text of each row."""
        if self.block > 1:
            starts = range(self.start, self.stop, self.block)
            return tuple(f"{s}-{min(s + self.block, self.stop) - 1}: {''.join(names[s : s + self.block])}" for s in starts)
        positions = range(self.start, self.stop)
        return tuple(names[p] if self.start == 0 else f"{p}: {names[p]}" for p in positions)


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
    def scale(self) -> str:
        """The scale of the difference, with the number of cells that are not 0, since small ones look white."""
        difference, cells = self.a - self.b, len(self.a) * (len(self.a) + 1) // 2
        differing = np.count_nonzero(difference)
        return (
            f"±{np.abs(difference).max():.2g}, in {differing} of {cells} cells" if differing else f"0 in all {cells} cells"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class AttentionPage:
    """The page of two traces at a step; the template has its sentences.

    Attributes:
        pair: The traces.
        step: The decode step.
        compared: The number of heads that were compared.
        view: The positions to show.
        names: The text of every position.
        heads: The heads to show, in their order on the page.
    """

    pair: tuple[Trace, Trace]
    step: int
    compared: int
    view: View
    names: Sequence[str]
    heads: Sequence[ShownHead]
    digits: ClassVar[int] = 6

    @property
    def title(self) -> str:
        """The heading."""
        return f"Attention at step {self.step}: {self.pair[0].path} against {self.pair[1].path}"

    @property
    def tokens(self) -> tuple[str, ...]:
        """The text of each row and column."""
        return self.view.labels(self.names)

    @property
    def places(self) -> list[tuple[str, str]]:
        """The positions of each row, and whether they are the prompt's, decoded or the newest, as text."""
        places = [self.view.place(number, len(self.pair[0].prompt)) for number in range(self.view.side)]
        if self.view.stop == len(self.names) and self.view.block == 1:
            places[-1] = (places[-1][0], "newest")
        return places

    @property
    def inside(self) -> float:
        """The share of their attention that the rows give to keys that are shown."""
        return float(np.mean([pattern.sum(1).mean() for head in self.heads for pattern in (head.a, head.b)]))

    def html(self) -> str:
        """The page as text."""
        return render("attention", self.title, page=self)

    @property
    def data(self) -> dict[str, Any]:
        """The data of the figures: the tokens, and for each figure its rows up to the diagonal and the limit of its scale."""
        figures = []
        for number, head in enumerate(self.heads):
            difference = head.a - head.b
            limit = float(np.abs(difference).max()) or 1.0
            for side, values, largest in (("a", head.a, 1.0), ("b", head.b, 1.0), ("difference", difference, limit)):
                rows = [[float(f"{v:.{self.digits}g}") for v in row[: at + 1]] for at, row in enumerate(values.tolist())]
                figures.append({"id": f"head-{number}-{side}", "rows": rows, "limit": largest})
        return {"tokens": self.tokens, "figures": figures}

    @property
    def bundle(self) -> Markup:
        """The code of circuitsvis."""
        return _bundle()


@functools.cache
def _bundle() -> Markup:
    """The code of the installed circuitsvis, escaped for use inside a page."""
    source = resources.files("circuitsvis").joinpath("dist", "cdn", "iife.js").read_text(encoding="utf-8")
    # In a JavaScript string "<\\/" means "</", but it ends no script element. The file of the source map does not exist.
    return Markup(source.replace("</script", "<\\/script").partition("//# sourceMappingURL")[0].replace("\r", ""))


def readable(token: str) -> str:
    """Makes the blanks of a token visible, since circuitsvis drops white space from its labels."""
    return token.replace(" ", "·").replace("\n", "↵").replace("\t", "→") or "(empty)"
