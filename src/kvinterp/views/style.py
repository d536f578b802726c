"""How every figure looks: readable in grey, by the colour-blind and on a phone; zeros shown as zeros."""

from __future__ import annotations

import contextlib
import dataclasses
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

__all__ = ["CMAP", "SERIES", "Series", "looks", "place_title", "power", "small_print", "zero_aware"]

RC: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.0,
    "axes.titlesize": 10.0,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9.0,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.0,
    "xtick.labelsize": 8.0,
    "ytick.labelsize": 8.0,
    "figure.facecolor": "white",
    "axes.facecolor": "white",
    "savefig.facecolor": "white",
    # A model's name may hold a dollar sign, which is not mathematics.
    "text.parse_math": False,
    "text.usetex": False,
}
CMAP = "cividis"


@dataclasses.dataclass(frozen=True)
class Series:
    """How one line looks, told apart by marker and dashes as well as by colour."""

    color: str
    marker: str
    line: Any

    def drawn(self) -> dict[str, Any]:
        """Keyword arguments for ``Axes.plot``."""
        return {"color": self.color, "marker": self.marker, "linestyle": self.line}


#: Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), the darker ones first.
SERIES = (
    Series("#0072B2", "o", "-"),
    Series("#D55E00", "s", (0, (4, 2))),
    Series("#009E73", "^", (0, (1, 1.2))),
    Series("#000000", "D", (0, (5, 1.5, 1, 1.5))),
    Series("#CC79A7", "v", (0, (6, 2))),
    Series("#E69F00", "P", (0, (2, 2))),
)


@contextlib.contextmanager
def looks() -> Iterator[None]:
    """Applies the style while a figure is made or saved, and puts the user's own settings back."""
    with matplotlib.rc_context(RC):
        yield


def place_title(axes: Axes, text: str, beside: float = 0.9) -> None:
    """A title that says what is seen, broken where it would leave the figure.

    Args:
        axes: Where it goes, flush with the left spine.
        text: The sentence.
        beside: Inches left of the axes and right of it that the title cannot have.
    """
    target = axes.get_figure(root=False)
    assert target is not None, "axes are made by a figure"
    inches = target.bbox.width / target.dpi - beside
    # Ten characters an inch: what bold DejaVu Sans needs at 10 points.
    axes.set_title("\n".join(textwrap.wrap(text, max(20, int(inches * 10)))))


def zero_aware(axes: Axes, values: Sequence[Any]) -> Any:
    """A logarithmic y axis on which exact zeros have a place of their own: a grey strip under the smallest decade.

    Args:
        axes: The axes.
        values: All the numbers that will be drawn, in any number of arrays; NaN is ignored.

    Returns:
        A function from values to heights: positive ones as they are, zeros in the strip.
    """
    parts = [np.asarray(v, dtype=float).reshape(-1) for v in values]
    flat = np.concatenate(parts) if parts else np.zeros(0)
    flat = flat[np.isfinite(flat)]
    positive = flat[flat > 0]
    if not positive.size:
        axes.set_ylim(-1, 1)
        axes.yaxis.set_major_locator(FixedLocator([0.0]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda *_: "exactly 0"))
        axes.axhspan(-0.25, 0.25, color="#eeeeee", zorder=0)
        return lambda given: np.asarray(given, dtype=float)
    low, high = np.floor(np.log10(positive.min())), np.ceil(np.log10(positive.max()))
    high = max(high, low + 1)
    axes.set_yscale("log")
    stride = max(1, int(np.ceil((high - low) / 6)))
    decades = [10.0**e for e in np.arange(low, high + 1, stride)]
    has_zero = bool((flat == 0).any())
    height = (high - low) * 0.12
    strip = 10 ** (low - height)
    if has_zero:
        axes.axhspan(10 ** (low - 1.5 * height), 10 ** (low - height / 2), color="#e8e8e8", zorder=0, linewidth=0)
        axes.axhline(10 ** (low - height / 2), color="#999999", linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
    bottom = 10 ** (low - (1.5 * height if has_zero else 0.04 * (high - low)))
    axes.set_ylim(bottom, 10 ** (high + 0.04 * (high - low)))
    axes.yaxis.set_major_locator(FixedLocator([strip, *decades] if has_zero else decades))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: "exactly 0" if has_zero and y <= strip * 1.001 else power(y)))
    return lambda given: np.where(np.asarray(given, dtype=float) == 0, strip, np.asarray(given, dtype=float))


def power(value: float) -> str:
    """A power of ten as text."""
    return f"1e{round(np.log10(value)):d}"


def small_print(abouts: Sequence[Mapping[str, Any]], width: int) -> str:
    """What a figure was made with, in a few lines; where the comparisons differ, each value once.

    Args:
        abouts: ``Comparison.about`` of everything drawn.
        width: Characters a line.
    """
    rows = [
        ("", lambda a: f"{a['paths']['a']} against {a['paths']['b']}"),
        ("", lambda a: str(a["model"])),
        ("", lambda a: f"{a['kind']} ({a['attention']})"),
        ("", lambda a: a["dtype"]),
        ("", lambda a: f"{a['protocol']}, {a['strategy']}, seed {a.get('seed', 'unknown')}"),
        ("weights ", lambda a: a["weights"]),
        ("torch ", lambda a: a["torch"]),
        ("transformers ", lambda a: a["transformers"]),
        ("TransformerLens ", lambda a: a["transformer_lens"]),
        ("kvinterp ", lambda a: a["kvinterp"]),
        ("", lambda a: f"{a['device']}, {a['threads']} thread{'s' * (a['threads'] != 1)}"),
    ]
    parts = []
    for name, get in rows:
        values = list(dict.fromkeys(get(about) for about in abouts))
        # Six hashes would fill the picture; the file's own text fields hold them all.
        parts.append(
            name + (f"({len(values)} different)" if name == "weights " and len(values) > 2 else " / ".join(values))
        )
    return "\n".join(textwrap.wrap(" · ".join(parts), width))
