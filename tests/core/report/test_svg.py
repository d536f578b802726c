"""Figures within a page: one drawing that is legible on white and in the dark, whatever it shows, and nothing but a drawing."""

from __future__ import annotations

import base64
import io
import re
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.image import imread

from browser import EVIL
from kvinterp.report.style import CMAP, SERIES, sheet
from kvinterp.report.svg import inline


def drawn(title: str = "a title", name: str = "one") -> str:
    with sheet(5.6, 3.0) as figure:
        left, right = figure.subplots(1, 2)
        left.plot(np.arange(9), np.arange(9) % 7, "o-", color=SERIES[0][0], label=title)
        left.set(xlabel="a step", ylabel=title)
        left.legend()
        right.set_title(title)
        figure.colorbar(right.imshow(np.eye(3), cmap=CMAP, interpolation="none"), ax=right)
        return inline(figure, name)


@pytest.mark.filterwarnings("ignore:Glyph", "ignore:constrained_layout")
def test_names_are_text_and_nothing_is_loaded_or_run() -> None:
    svg = drawn(f"{EVIL} \x00\x1b\u202e $x$ & \ufffe")
    root = ElementTree.fromstring(svg)
    assert "\u202e" not in svg
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


# The files beside it ---------------------------------------------------------------------------------------------------
