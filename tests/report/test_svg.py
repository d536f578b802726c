"""Figures within a page: one drawing that is legible on white and in the dark, whatever it shows, and nothing but a drawing."""

from __future__ import annotations

import base64
import io
import re
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import EVIL
from matplotlib.image import imread

from kvinterp.study.report.page import styles
from kvinterp.study.report.style import CMAP, SERIES, drawn_as, keeping, save, sheet
from kvinterp.study.report.svg import inline, picture

DARK = re.findall(r"--page: (#\w+)", styles("page"))[1]


def of_hex(color: str) -> np.ndarray:
    return np.array([int(color[n : n + 2], 16) / 255 for n in (1, 3, 5)])


def luminance(rgb: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB colours (WCAG 2.2)."""
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return linear @ np.array([0.2126, 0.7152, 0.0722])


def contrast(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    low, high = np.sort(np.broadcast_arrays(luminance(one), luminance(other)), axis=0)
    return (high + 0.05) / (low + 0.05)


def in_the_dark(rgb: np.ndarray) -> np.ndarray:
    """What the page's own filter makes of colours (https://www.w3.org/TR/filter-effects-1/#ShorthandEquivalents)."""
    invert, degrees, saturate = map(
        float, re.search(r"\.drawn, [^}]*invert\((\S+)\) hue-rotate\((\S+)deg\) saturate\((\S+)\)", styles("page")).groups()
    )
    assert (invert, degrees) == (1, 180)
    weights, own = np.array([0.213, 0.715, 0.072]), np.eye(3)
    turned = np.clip((1 - rgb) @ (2 * weights - own).T, 0, 1)
    return np.clip(turned @ (weights + saturate * (own - weights)).T, 0, 1)


def test_every_line_is_legible_on_both_grounds() -> None:
    for series in SERIES:
        assert contrast(of_hex(series.color), np.ones(3)) >= 4, series
        assert contrast(in_the_dark(of_hex(series.color)), of_hex(DARK)) >= 4, series


def drawn(title: str = "a title", name: str = "one", marks: int = 9) -> str:
    with sheet(5.6, 3.0) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(np.arange(marks), np.arange(marks) % 7, "o-", color=SERIES[0].color, label=title)
        left.set(xlabel="a step", ylabel=title)
        left.legend()
        right.set_title(title)
        figure.colorbar(right.imshow(np.eye(3), cmap=CMAP), ax=right)
        # Each drawing lays out anew, a little otherwise.
        drawn_as(figure, "svg")
        figure.set_layout_engine("none")
        before = drawn_as(figure, "svg")
        svg = inline(figure, name)
        assert drawn_as(figure, "svg") == before, "the figure is left as it was"
    return svg


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
def test_names_are_text_and_nothing_is_loaded_or_run() -> None:
    svg = drawn(f"{EVIL} \x00\x1b $x$ & \ufffe")
    root = ElementTree.fromstring(svg)
    assert {element.tag.rpartition("}")[2] for element in root.iter()} <= {
        "svg", "style", "g", "defs", "clipPath", "path", "rect", "use", "text", "tspan", "image",
    }  # fmt: skip
    texts = [element.text or "" for element in root.iter() if element.tag.endswith("text")]
    assert sum(EVIL in text and "$x$ &" in text for text in texts) == 3
    assert not any(key.startswith("on") for element in root.iter() for key in element.attrib)
    links = [element.get("href", "#") for element in root.iter()]
    assert all(link.startswith(("#", "data:image/png;base64,")) for link in links)
    assert not re.search(r"https?:(?!//www\.w3\.org/2000/svg\")|@import|url\((?!#)", svg)


def test_there_is_no_ground_and_one_picture_of_a_map_which_keeps_every_colour() -> None:
    svg = drawn()
    assert "fill: #ffffff" not in re.sub(r"<use[^>]*>", "", svg), "no white ground"
    points = [imread(io.BytesIO(base64.b64decode(each)))[..., :3] for each in re.findall(r'base64,\s*([^"]+)"', svg)]
    assert len(points) == 2, "the map and its bar"
    colours = {tuple(each) for each in np.round(255 * points[0].reshape(-1, 3)).astype(int)}
    assert colours == {tuple(round(255 * c) for c in CMAP(end)[:3]) for end in (0.0, 1.0)}


def test_a_figure_is_shown_as_svg_where_it_was_kept(tmp_path: Path) -> None:
    with sheet(3, 2) as figure:
        figure.subplots().plot([1, 2])
    assert picture(save(figure, tmp_path / "a.png"), "caption").svg == ""
    with keeping():
        shown = picture(save(figure, tmp_path / "b.png"), "caption", "name")
        assert shown.svg.startswith("<svg")
        assert shown.png == (tmp_path / "b.png").read_bytes()
    assert picture(tmp_path / "b.png", "caption").svg == ""


# The files beside it ---------------------------------------------------------------------------------------------------
