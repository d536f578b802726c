"""A figure as SVG that stands inside a page and follows its ground, light or dark.

matplotlib draws every figure once, for a white ground; on a dark one each of its colours is what :mod:`kvinterp.study.report.ink`
makes of it. Text stays text.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from matplotlib.axes import Axes
from matplotlib.collections import Collection
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.lines import Line2D
from PIL import Image

from kvinterp.study.report.ink import on_dark, on_dark_hex
from kvinterp.study.report.page import Picture
from kvinterp.study.report.style import drawn_as, kept

_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_FONTS = "font-family:'DejaVu Sans', Verdana, 'Bitstream Vera Sans', Arial, sans-serif"
_MANY = 1000
"""Marks and segments from which on an artist's are drawn as a picture of points."""
_LARGE = 50_000
"""Points from which on a picture has 128 colours at most: one of marks, and not a map of few cells."""
_BROAD = 7.5
"""Inches from which on a figure has a row of the page to itself."""

# Figures ---------------------------------------------------------------------------------------------------------------


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
    """A figure as an ``<svg>`` element without ground, whose colours follow the page.

    Args:
        figure: The figure, laid out; it is left as it was.
        name: What tells it apart from the other figures of its page: its ids begin with it.
    """
    restore = list(_made_ready(figure))
    try:
        text = drawn_as(figure, "svg").decode()
    finally:
        for undo in restore:
            undo()
    # XML has no name for these; a model's name may hold them.
    root = ElementTree.fromstring(re.sub("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f\ufffe\uffff]", "\ufffd", text))
    for parent in [*root.iter()]:
        for child in [*parent]:
            if child.tag in (f"{_SVG}metadata", f"{_SVG}style"):
                parent.remove(child)
    _name_ids(root, re.sub(r"[^\w-]", "-", name))
    _follow(root)
    _shorten(root)
    width, height = figure.get_size_inches()
    look = f"--inches:{width:g};stroke-linejoin:round;stroke-linecap:butt;fill:{_variable('#000000')};{_FONTS}"
    view = root.get("viewBox", f"0 0 {72 * width:g} {72 * height:g}")
    root.attrib.clear()
    root.attrib.update({"viewBox": view, "class": "drawn broad" if width > _BROAD else "drawn", "style": look})
    ElementTree.register_namespace("", _SVG[1:-1])
    # Within HTML the namespace goes without saying.
    return ElementTree.tostring(root, encoding="unicode").replace(f' xmlns="{_SVG[1:-1]}"', "", 1)


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


def _name_ids(root: ElementTree.Element, name: str) -> None:
    """Ids that something refers to are the figure's name and a number; the others go."""
    named: dict[str, str] = {}

    def new(found: str) -> str:
        return named.setdefault(found, f"{name}-{len(named)}")

    for element in root.iter():
        link = element.attrib.pop(_LINK, None)
        if link is not None:
            element.set("href", f"#{new(link[1:])}" if link.startswith("#") else link)
        for key, value in element.attrib.items():
            element.set(key, re.sub(r"url\(#([^)]+)\)", lambda found: f"url(#{new(found[1])})", value))
    for element in root.iter():
        found = element.attrib.pop("id", None)
        if found in named:
            element.set("id", named[found])


def _shorten(root: ElementTree.Element) -> None:
    """Without blanks between elements; the look of marks that are alike stands once, above them."""
    for parent in root.iter():
        for child in parent:
            child.tail = None
        if len(parent):
            parent.text = None
        looks = {child.get("style") for child in parent}
        if len(parent) > 1 and len(looks) == 1 and {child.tag for child in parent} == {f"{_SVG}use"} and None not in looks:
            parent.set("style", f"{parent.get('style', '')};{looks.pop()}".lstrip(";"))
            for child in parent:
                del child.attrib["style"]


def _follow(root: ElementTree.Element) -> None:
    """Colours become variables that the scheme sets, every picture of points is there for both, numbers are short."""
    colors = {"#000000"}

    def variable(found: re.Match[str]) -> str:
        colors.add(found[0])
        return _variable(found[0])

    for parent in [*root.iter()]:
        for key, value in parent.attrib.items():
            if key in ("style", "fill", "stroke"):
                parent.set(key, re.sub("#[0-9a-f]{6}", variable, value).replace(" font-family: 'DejaVu Sans';", ""))
            elif key in ("d", "x", "y", "width", "height"):
                parent.set(
                    key, re.sub(r"\d+\.\d{3,}", lambda found: f"{float(found[0]):.2f}".rstrip("0").rstrip("."), value)
                )
        for place, child in reversed([*enumerate(parent)]):
            if child.tag == f"{_SVG}image":
                on_white, mirrored = _pictures(child.get("href", ""))
                dark = ElementTree.Element(child.tag, {**child.attrib, "class": "on-dark", "href": mirrored})
                child.attrib.update({"class": "on-light", "href": on_white})
                parent.insert(place + 1, dark)
    light, night = (
        "".join(f"--{color[1:]}:{to(color)};" for color in sorted(colors)) for to in (lambda color: color, on_dark_hex)
    )
    style = ElementTree.Element(f"{_SVG}style")
    style.text = (
        f":root{{{light}}}.on-dark{{display:none}}"
        f"@media(prefers-color-scheme:dark){{:root{{{night}}}.on-dark{{display:inline}}.on-light{{display:none}}}}"
    )
    root.insert(0, style)


def _variable(color: str) -> str:
    return f"var(--{color[1:]},{color})"


def _pictures(address: str) -> tuple[str, str]:
    """A PNG within an address, and the same in the colours of the dark ground."""
    light = Image.open(io.BytesIO(base64.b64decode(address.partition(",")[2]))).convert("RGBA")
    if light.width * light.height > _LARGE:
        light = light.quantize(128, Image.Quantize.FASTOCTREE).convert("RGBA")
    points = np.asarray(light) / 255
    dark = np.concatenate([on_dark(points[..., :3]), points[..., 3:]], axis=-1)
    return _address(np.asarray(light)), _address((255 * dark).round().astype(np.uint8))


def _address(points: np.ndarray) -> str:
    """Points as the address of a PNG: by a list of their colours, where those are few."""
    colors, numbers = np.unique(points.reshape(-1, 4), axis=0, return_inverse=True)
    picture = Image.fromarray(points)
    if len(colors) <= 256:
        picture = Image.fromarray(numbers.reshape(points.shape[:2]).astype(np.uint8), mode="P")
        picture.putpalette(colors.tobytes(), "RGBA")
    written = io.BytesIO()
    picture.save(written, format="png", optimize=True)
    return f"data:image/png;base64,{base64.b64encode(written.getvalue()).decode()}"
