"""The sheet every figure is drawn on, and how it looks: readable in grey, by the colour-blind and on a phone.

No pyplot, so importing or drawing leaves no trace in the user's own session.
"""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.backend_bases import get_registered_canvas_class
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure

from kvinterp.common.numbers import listed
from kvinterp.common.store import write_whole

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
    "grid.color": "#d4d4d4",
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
CMAP = LinearSegmentedColormap.from_list("amount", ["#efeaf6", "#4a148c"])
"""Of maps, the colours of ``static/draw.css``: nearest to the ground is least, on a light page and on a dark one."""
DIVERGING = LinearSegmentedColormap.from_list("signed", ["#b04a00", "#ffffff", "#005a9e"])
"""White at 0, orange below, blue above, as there: told apart by the colour-blind; in grey the sign in each cell tells."""


@dataclasses.dataclass(frozen=True)
class Series:
    """How one line looks, told apart by marker and dashes as well as by colour."""

    color: str
    marker: str
    line: Any


#: Okabe and Ito's colours (https://jfly.uni-koeln.de/color/), darkened to a contrast of 4 with white, the darker ones first.
SERIES = (
    Series("#0072B2", "o", "-"),
    Series("#CC5A00", "s", (0, (4, 2))),
    Series("#008F68", "^", (0, (1, 1.2))),
    Series("#000000", "D", (0, (5, 1.5, 1, 1.5))),
    Series("#B85A8C", "v", (0, (6, 2))),
    Series("#A87400", "P", (0, (2, 2))),
)


def series_of(index: int) -> Series:
    """The look of a number: behind the last colour comes the first again, with the next marker and another line."""
    turn, place = divmod(index, len(SERIES))
    marker, line = SERIES[(place + turn) % len(SERIES)].marker, SERIES[(place + 2 * turn) % len(SERIES)].line
    return Series(SERIES[place].color, marker, line)


def line_of(index: int, width: float = 1.4, **otherwise: Any) -> dict[str, Any]:
    """Keyword arguments for ``Axes.plot`` of the line of a number, and what is otherwise in it."""
    series = series_of(index)
    # Later lines are drawn hollow: where two coincide, both are seen.
    hollow = {"markerfacecolor": "#ffffff"} if (index + index // len(SERIES)) % 2 else {}
    look = {"color": series.color, "marker": series.marker, "linestyle": series.line}
    return {**look, "linewidth": width, "markersize": 4, **hollow, **otherwise}


def ink_on(color: Any) -> str:
    """Black or white: what can be read better on a colour of a map, red, green and blue first, and where lightness is turned."""
    # Relative luminance (WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance).
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in color[:3]]
    return "#ffffff" if np.dot([0.2126, 0.7152, 0.0722], linear) < 0.188 else "#000000"


# The sheet -------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def looks() -> Iterator[None]:
    """Applies the style while a figure is made or saved, and puts the user's own settings back."""
    with matplotlib.rc_context(RC):
        yield


@contextlib.contextmanager
def sheet(width: float, height: float) -> Iterator[Figure]:
    """An empty figure of a size in inches, and the style while it is drawn on; no session of pyplot knows it."""
    with looks():
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(figure)
        yield figure


def signed(figure: Figure, text: str, provenances: Sequence[Mapping[str, Any]]) -> None:
    """Writes under a figure what it was made with, and keeps the whole of it for :func:`save`."""
    figure.supxlabel(text, x=0.01, ha="left", fontsize=5.5, color="#555555")
    figure.provenance = list(provenances)  # type: ignore[attr-defined]  # kept for save()


def png(figure: Figure, dots: int = 160) -> bytes:
    """A figure as PNG of so many dots an inch, with the full provenance in its text fields."""
    provenance = json.dumps(getattr(figure, "provenance", []))
    with looks():
        return _printed(figure, "png", dots, {"Software": "kvinterp", "Description": provenance})


def save(figure: Figure, path: str | Path, formats: Sequence[str] = ()) -> Path:
    """Writes a PNG, with the full provenance in its text fields.

    Args:
        figure: A figure made here.
        path: Where to; the folder is made.
        formats: What else is written beside it: ``svg``, ``pdf``.

    Raises:
        InputError: It cannot be written.
    """
    place = Path(path)
    write_whole(place, png(figure))
    held = _KEPT.get()
    if held is not None:
        held[place] = figure
    if formats or held is not None:
        # What was laid out once stays where it is.
        figure.set_layout_engine("none")
    for name in formats:
        write_whole(place.with_suffix(f".{name}"), drawn_as(figure, name))
    return place


_KEPT: ContextVar[dict[Path, Figure] | None] = ContextVar("kept", default=None)


@contextlib.contextmanager
def keeping() -> Iterator[None]:
    """Within it every figure that is saved is kept, by its file, for the page that will show it."""
    token = _KEPT.set({})
    try:
        yield
    finally:
        _KEPT.reset(token)


def kept(path: Path) -> Figure | None:
    """The figure of a file that was saved within :func:`keeping`."""
    return (_KEPT.get() or {}).get(path)


def drawn_as(figure: Figure, name: str, ids: str = "kvinterp") -> bytes:
    """A figure as ``svg`` or ``pdf``; the same figure is the same file, whenever it is drawn.

    Args:
        figure: The figure.
        name: The format.
        ids: What the ids of an SVG are made of.
    """
    undated = {"Date": None} if name == "svg" else {"CreationDate": None}
    look: Any = {"svg.hashsalt": ids, "svg.fonttype": "none", "pdf.fonttype": 42}
    with looks(), matplotlib.rc_context(look), _lean() if name == "pdf" else contextlib.nullcontext():
        return _printed(figure, name, 144, {"Creator": "kvinterp", **undated})


def _printed(figure: Figure, name: str, dots: int, metadata: Mapping[str, Any]) -> bytes:
    """A figure in a format. ``savefig`` would draw it twice, the first time for where everything goes."""
    drawn, before = io.BytesIO(), (figure.canvas, figure.dpi)
    canvas = get_registered_canvas_class(name)(figure)
    try:
        figure.dpi = dots
        getattr(canvas, f"print_{name}")(drawn, metadata=metadata)
    finally:
        figure.dpi = before[1]
        figure.set_canvas(before[0])
    return drawn.getvalue()


@contextlib.contextmanager
def _lean() -> Iterator[None]:
    """Leaves the tables of ligatures out of the fonts of a PDF: no reader uses them, and most time went into reducing them."""
    from fontTools.subset import Options

    before = Options._drop_tables_default
    Options._drop_tables_default = [*before, "GDEF", "GPOS", "GSUB"]
    try:
        yield
    finally:
        Options._drop_tables_default = before


# The small print -------------------------------------------------------------------------------------------------------

_VERSIONS = {
    "torch": "torch",
    "transformers": "transformers",
    "TransformerLens": "transformer_lens",
    "kvinterp": "kvinterp",
}


def of_models(figure: Figure, provenances: Sequence[Mapping[str, Any]], more: Sequence[str] = ()) -> Figure:
    """Signs a figure with more that is said of it, and what it was made with, each value once."""
    signed(figure, small_print(provenances, more, min(130, int(18 * figure.get_figwidth()))), provenances)
    return figure


def small_print(provenances: Sequence[Mapping[str, Any]], more: Sequence[str] = (), width: int = 130) -> str:
    """What stands below a figure, in lines of a width."""
    columns: dict[str, list[str]] = {
        "paths": [],
        "how": [],
        "model": [],
        **{title: [] for title in _VERSIONS},
        "machine": [],
    }
    for about in provenances:
        how = [about[name] for name in ("direction", "protocol", "strategy") if name in about]
        # Of several pairs there are several paths b.
        paths = (path if isinstance(path, str) else listed(path) for path in about.get("paths", {}).values())
        columns["paths"].append(" against ".join(paths))
        columns["how"].append(", ".join([*how, *([f"seed {about['seed']}"] if "seed" in about else [])]))
        # Of a result that is of many models the machine alone is told.
        columns["model"].append(" ".join((*_model(about), f"weights {about['weights']}")) if "model" in about else "")
        for title, name in _VERSIONS.items():
            columns[title].append(f"{title} {about.get(name, 'not given')}")
        columns["machine"].append(f"{about['device']}, threads: {about['threads']}")
    said = ["; ".join(dict.fromkeys(filter(None, column))) for column in columns.values()]
    return "\n".join(textwrap.wrap(" · ".join(filter(None, (*more, *said))), width))


def _model(provenance: Mapping[str, Any]) -> tuple[str, str, str]:
    return str(provenance["model"]), f"{provenance['kind']} ({provenance['attention']})", provenance["dtype"]
