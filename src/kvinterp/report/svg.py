"""Makes an SVG of a figure for use inside a page, with its texts as text.

matplotlib draws every figure once, for a white background. A dark page inverts its lightness
(``.drawn`` in ``static/page.css``), which keeps any contrast of 3 or more.
"""

from __future__ import annotations

import re

from matplotlib.figure import Figure

from kvinterp.errors import visible
from kvinterp.report.page import Picture
from kvinterp.report.style import RC, png, saved

_LOOK = "stroke-linejoin:round;stroke-linecap:butt;font-family:'DejaVu Sans', Verdana, 'Bitstream Vera Sans', Arial, sans-serif"
_BROAD = 7.5
"""A figure that is wider, in inches, has a row of the page to itself."""


def picture(figure: Figure, name: str, *, narrow: bool = False) -> Picture:
    """Makes a page's picture of a figure: as PNG, and as SVG with the same layout.

    Args:
        figure: The figure; its layout is fixed.
        name: A name that no other figure of the page has; with blanks it is the caption.
        narrow: Whether to draw it for a phone too, if it is the drawing of a chart.
    """
    content = png(figure)
    figure.set_layout_engine("none")
    again = getattr(figure, "narrow", None) if narrow else None
    phone = "" if again is None else inline(again(), f"{name}-narrow")
    return Picture(name.replace("_", " "), content, svg=inline(figure, name), narrow=phone)


def inline(figure: Figure, name: str) -> str:
    """Makes an ``<svg>`` element without a background; the same figure always gives the same text.

    Args:
        figure: The figure.
        name: A name that no other figure of the page has, for the ids.
    """
    style = {**RC, "svg.hashsalt": name, "svg.fonttype": "none"}
    about = {"Creator": "kvinterp", "Date": None}
    text = saved(figure, style, format="svg", dpi=144, metadata=about, transparent=True).decode()
    # XML cannot express some characters, which a model's name may have, and others turn the text
    # around.
    text = re.sub("[\ufffe\uffff]", "\ufffd", visible(text[text.index("<svg") :]))
    body = re.sub(r"(?s)<metadata>.*?</metadata>|<style.*?</style>", "", text.partition(">")[2])
    referenced = set(re.findall(r"""[("]#([^")]+)""", body))
    # matplotlib escapes ">" in texts and in attributes, so that it only ends tags.
    body = re.sub(
        "(?s)<[^>]*>", lambda tag: _shorten(tag[0], referenced), re.sub(r">\s+<", "><", body)
    )
    width, height = figure.get_size_inches()
    broad = " broad" if width > _BROAD else ""
    view = f'viewBox="0 0 {72 * width:g} {72 * height:g}" class="drawn{broad}" style="--inches:{width:g};{_LOOK}"'
    return f"<svg {view}>{body}"


def _shorten(tag: str, referenced: set[str]) -> str:
    """Removes ids that nothing refers to, and shortens numbers, except in the place of a
    picture.
    """
    tag = re.sub(' id="([^"]*)"', lambda match: match[0] if match[1] in referenced else "", tag)
    if not tag.startswith("<image"):
        tag = re.sub(
            r"\d+\.\d{3,}", lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), tag
        )
    return tag.replace("xlink:href", "href").replace(" font-family: 'DejaVu Sans';", "")
