"""A figure as SVG that stands inside a page, where text stays text.

matplotlib draws every figure once, for a white ground; on a dark one the page turns its lightness round (``.drawn`` in
``static/page.css``): what has a contrast of 3 and more on white has no less there.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D

from kvinterp.study.report.page import Picture
from kvinterp.study.report.style import drawn_as, kept

_LOOK = (
    "stroke-linejoin:round;stroke-linecap:butt;font-family:'DejaVu Sans', Verdana, 'Bitstream Vera Sans', Arial, sans-serif"
)
_MANY = 1000
"""Marks and segments from which on an artist's are drawn as a picture of points."""
_BROAD = 7.5
"""Inches from which on a figure has a row of the page to itself."""


def picture(path: Path, caption: str, name: str = "", *, narrow: bool = False) -> Picture:
    """A figure of a page, from its PNG: as SVG where it was saved within :func:`kvinterp.study.report.style.keeping`.

    Args:
        path: The PNG.
        caption: What it is called.
        name: By which a link finds it.
        narrow: Whether it is drawn for a phone too, where it is the drawing of a chart.
    """
    figure = kept(path)
    again = getattr(figure, "narrow", None) if narrow else None
    return Picture(
        caption,
        path.read_bytes(),
        name,
        inline(figure, path.stem) if figure is not None else "",
        inline(again(), f"{path.stem}-narrow") if again is not None else "",
    )


def inline(figure: Figure, name: str) -> str:
    """A figure as an ``<svg>`` element without ground.

    Args:
        figure: The figure, laid out; it is left as it was.
        name: What tells it apart from the other figures of its page: its ids are made of it.
    """
    restore = list(_made_ready(figure))
    try:
        text = drawn_as(figure, "svg", name).decode()
    finally:
        for undo in restore:
            undo()
    # XML has no name for these; a model's name may hold them.
    text = re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]", "\ufffd", text[text.index("<svg") :])
    body = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>", "", text.partition(">")[2])
    named = {found[1] for found in re.finditer(r"""[("]#([^")]+)""", body)}
    # matplotlib escapes what ends a tag, in texts and in what is quoted.
    body = re.sub("(?s)<[^>]*>", lambda tag: _shortened(tag[0], named), re.sub(r">\s+<", "><", body))
    width, height = figure.get_size_inches()
    broad = " broad" * bool(width > _BROAD)
    view = f'viewBox="0 0 {72 * width:g} {72 * height:g}" class="drawn{broad}" style="--inches:{width:g};{_LOOK}"'
    return f"<svg {view}>{body}"


def _shortened(tag: str, named: set[str]) -> str:
    """A tag without ids that nothing refers to, and with short numbers but where a picture lies."""
    tag = re.sub(' id="([^"]*)"', lambda found: found[0] if found[1] in named else "", tag)
    if not tag.startswith("<image"):
        tag = re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), tag)
    return tag.replace("xlink:href", "href").replace(" font-family: 'DejaVu Sans';", "")


def _made_ready(figure: Figure) -> Iterator[Callable[[], None]]:
    """Takes away white grounds, and draws as pictures what has too many marks; gives what puts each back."""
    for part in (figure, *figure.subfigs):
        yield _changed(part.patch, "visible", False)  # type: ignore[attr-defined]  # every figure has one
    for axes in figure.findobj(Axes):
        if np.allclose(axes.patch.get_facecolor(), 1) and not axes.patch.get_hatch():
            yield _changed(axes.patch, "visible", False)
    for image in figure.findobj(AxesImage):
        # A cell is a pixel, which the browser enlarges; of more cells than there is room for, only those that are seen.
        if image.get_size()[0] * image.get_size()[1] < 200_000:
            yield _changed(image, "interpolation", "none")
    for line in figure.findobj(Line2D):
        if line.get_marker() not in ("None", "none", None, "", " ") and np.size(line.get_xdata()) > _MANY:
            yield _changed(line, "rasterized", True)
    for several in figure.findobj(Collection):
        if len(several.get_paths()) > _MANY or np.shape(several.get_offsets())[0] > _MANY:
            yield _changed(several, "rasterized", True)


def _changed(artist: Any, what: str, value: Any) -> Callable[[], None]:
    before, change = getattr(artist, f"get_{what}")(), getattr(artist, f"set_{what}")
    change(value)
    return lambda: change(before)
