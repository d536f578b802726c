"""The style of all figures: readable in grey, by the colour-blind and on a phone; and functions
that save figures.

It uses no pyplot, so that importing and drawing leave no trace in the user's session.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvinterp.report.panels import Provenances

RC = matplotlib.rc_params_from_file(
    Path(__file__).with_name("static") / "figures.mplstyle", use_default_template=False
)
CMAP = LinearSegmentedColormap.from_list("amount", ["#efeaf6", "#4a148c"])
"""For maps, the colours of ``static/draw.css``: the nearest to the background is the least, on a
light and on a dark page.
"""
DIVERGING = LinearSegmentedColormap.from_list("signed", ["#b04a00", "#ffffff", "#005a9e"])
"""White at 0, orange below, blue above: distinct for the colour-blind; in grey the sign in each
cell distinguishes them.
"""


#: The colour, the marker and the dashes of each line. The colours are Okabe and Ito's
#  (https://jfly.uni-koeln.de/color/), darkened to a contrast of 4 with white, the darker ones
#  first.
SERIES: tuple[tuple[str, str, Any], ...] = (
    ("#0072B2", "o", "-"),
    ("#CC5A00", "s", (0, (4, 2))),
    ("#008F68", "^", (0, (1, 1.2))),
    ("#000000", "D", (0, (5, 1.5, 1, 1.5))),
    ("#B85A8C", "v", (0, (6, 2))),
    ("#A87400", "P", (0, (2, 2))),
)


def line_of(index: int) -> dict[str, Any]:
    """Keyword arguments of ``Axes.plot`` for a line by its number.

    After the last colour comes the first again, with the next marker and other dashes.
    """
    turn, slot = divmod(index, len(SERIES))
    color, marker, dashes = (SERIES[(slot + part * turn) % len(SERIES)][part] for part in range(3))
    # Every second line has hollow markers: where two coincide, both are visible.
    hollow = {"markerfacecolor": "#ffffff"} if (index + turn) % 2 else {}
    look = {
        "color": color,
        "marker": marker,
        "linestyle": dashes,
        "linewidth": 1.4,
        "markersize": 4,
    }
    return {**look, **hollow}


def ink_on(color: Any) -> str:
    """Black or white, whichever reads better on a colour of a map, also where a dark page inverts
    lightness.
    """
    # Relative luminance (WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance).
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return "#ffffff" if np.dot([0.2126, 0.7152, 0.0722], linear) < 0.188 else "#000000"


# The sheet ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def sheet(width: float, height: float) -> Iterator[Figure]:
    """Makes an empty figure with a size in inches, outside of pyplot, and applies the style while
    the context lasts.
    """
    with matplotlib.rc_context(RC):
        figure = Figure(figsize=(width, height), layout="constrained")
        # In inches: no label touches the edge.
        figure.set_layout_engine("constrained", w_pad=0.08)
        yield figure


SMALL = 5.5
"""The size of the small print, in points."""


def sign(figure: Figure, text: str, provenances: Provenances, size: float = SMALL) -> Figure:
    """Writes a text of a size in points below a figure, and attaches the full provenances for
    :func:`png`.
    """
    figure.supxlabel(text, x=0.01, ha="left", fontsize=size, color="#555555")
    figure.provenance = list(provenances)  # type: ignore[attr-defined]  # kept for png()
    return figure


def png(figure: Figure, dots: int = 160) -> bytes:
    """A figure as PNG, ``dots`` per inch, with the full provenance in its text fields."""
    provenance = json.dumps(getattr(figure, "provenance", []))
    return saved(
        figure,
        RC,
        format="png",
        dpi=dots,
        metadata={"Software": "kvinterp", "Description": provenance},
    )


def saved(figure: Figure, style: Any, **options: Any) -> bytes:
    """The file of a figure, drawn in a style, with the options of ``Figure.savefig``."""
    output = io.BytesIO()
    with matplotlib.rc_context(style):
        figure.savefig(output, **options)
    return output.getvalue()
