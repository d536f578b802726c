"""Makes an SVG of a figure for use inside a page, with its texts as text.

matplotlib draws every figure once, for a white background. A dark page inverts its lightness (``.drawn`` in
``static/page.css``), which keeps any contrast of 3 or more.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from kvinterp.study.report.page import Picture
from kvinterp.study.report.style import png, svg

_LOOK = (
    "stroke-linejoin:round;stroke-linecap:butt;font-family:'DejaVu Sans', Verdana, 'Bitstream Vera Sans', Arial, sans-serif"
)
_MANY = 1000
"""An artist with more marks or segments is drawn as pixels."""
_BROAD = 7.5
"""A figure that is wider, in inches, has a row of the page to itself."""


def picture(figure: Figure, name: str, *, narrow: bool = False) -> Picture:
    """Makes a page's picture of a figure: as PNG, and as SVG.

    Args:
        figure: The figure.
        name: A name that no other figure of the page has; with blanks it is the caption.
        narrow: Whether to draw it for a phone too, if it is the drawing of a chart.
    """
    content = png(figure)
    # The SVG has the layout of the PNG.
    figure.set_layout_engine("none")
    again = getattr(figure, "narrow", None) if narrow else None
    phone = "" if again is None else inline(again(), f"{name}-narrow")
    return Picture(name.replace("_", " "), content, svg=inline(figure, name), narrow=phone)


def inline(figure: Figure, name: str) -> str:
    """Makes an ``<svg>`` element without a background.

    Args:
        figure: The figure, with its layout; it is not changed.
        name: A name that no other figure of the page has, for the ids.
    """
    with contextlib.ExitStack() as undone:
        for artist, what, value in _changes(figure):
            undone.callback(artist.set, **{what: getattr(artist, f"get_{what}")()})
            artist.set(**{what: value})
        text = svg(figure, name).decode()
    # XML cannot express these characters, and a model's name may have them.
    text = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]", "\ufffd", text[text.index("<svg") :])
    body = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>", "", text.partition(">")[2])
    referenced = {match[1] for match in re.finditer(r"""[("]#([^")]+)""", body)}
    # matplotlib escapes ">" in texts and in attributes, so that it only ends tags.
    body = re.sub("(?s)<[^>]*>", lambda tag: _shorten(tag[0], referenced), re.sub(r">\s+<", "><", body))
    width, height = figure.get_size_inches()
    broad = " broad" * bool(width > _BROAD)
    view = f'viewBox="0 0 {72 * width:g} {72 * height:g}" class="drawn{broad}" style="--inches:{width:g};{_LOOK}"'
    return f"<svg {view}>{body}"


def _shorten(tag: str, referenced: set[str]) -> str:
    """Removes ids that nothing refers to, and shortens numbers, except in the place of a picture."""
    tag = re.sub(' id="([^"]*)"', lambda match: match[0] if match[1] in referenced else "", tag)
    if not tag.startswith("<image"):
        tag = re.sub(r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), tag)
    return tag.replace("xlink:href", "href").replace(" font-family: 'DejaVu Sans';", "")


def _changes(figure: Figure) -> Iterator[tuple[Any, str, Any]]:
    """What an SVG has otherwise: no white backgrounds, and artists with many marks as pixels; artist, property and value."""
    for part in (figure, *figure.subfigs):
        yield part.patch, "visible", False  # type: ignore[attr-defined]  # every figure has one
    for axes in figure.findobj(Axes):
        if np.allclose(axes.patch.get_facecolor(), 1) and not axes.patch.get_hatch():
            yield axes.patch, "visible", False
    for image in figure.findobj(AxesImage):
        # A cell is a pixel, which the browser enlarges. With more cells than there is room for, matplotlib samples them.
        if np.prod(image.get_size()) < 200_000:
            yield image, "interpolation", "none"
    for line in figure.findobj(Line2D):
        if line.get_marker() not in ("None", "none", None, "", " ") and np.size(line.get_xdata()) > _MANY:
            yield line, "rasterized", True
    for several in figure.findobj(Collection):
        if max(len(several.get_paths()), np.shape(several.get_offsets())[0]) > _MANY:
            yield several, "rasterized", True
