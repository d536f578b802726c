"""Figures within a page: one drawing that is legible on white and in the dark, whatever it shows, and nothing but a drawing."""

from __future__ import annotations

import base64
import io
import pickle
import re
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from browser import EVIL
from fontTools.subset import Options
from fontTools.ttLib import TTFont
from matplotlib.colors import Colormap, to_hex
from matplotlib.figure import Figure
from matplotlib.image import imread
from PIL import Image

from kvinterp.study.report.ink import DARK, INK, contrast, ink_on, luminance, on_dark, on_dark_hex
from kvinterp.study.report.panel_picture import LESS, MORE
from kvinterp.study.report.script import styles
from kvinterp.study.report.style import CMAP, DIVERGING, SERIES, drawn_as, keeping, save, sheet
from kvinterp.study.report.svg import _address, _pictures, inline, picture

GROUND = float(luminance(np.array([int(DARK[n : n + 2], 16) / 255 for n in (1, 3, 5)])))


def test_every_line_is_legible_on_both_grounds() -> None:
    for series in SERIES:
        assert contrast(series.color, "#ffffff") >= 4, series
        assert contrast(on_dark_hex(series.color.lower()), DARK) >= 4, series


def test_the_dark_mirrors_the_contrast_of_every_colour() -> None:
    """The law that all figures rest on: with the ground, and so of any two colours with each other, as it was on white."""
    rgb = np.random.default_rng(0).uniform(size=(500, 3))
    rgb = rgb[luminance(rgb) > 0.01]
    dark = on_dark(rgb)
    assert ((dark >= 0) & (dark <= 1)).all()
    np.testing.assert_allclose((luminance(dark) + 0.05) / (GROUND + 0.05), 1.05 / (luminance(rgb) + 0.05), rtol=1e-9)
    # The hue is kept: the channels keep their order.
    assert (dark.argmax(-1) == rgb.argmax(-1)).all()
    assert on_dark_hex("#ffffff") == DARK
    assert on_dark_hex("#000000") == INK
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


@pytest.mark.parametrize("ramp", [CMAP, DIVERGING], ids=lambda ramp: ramp.name)
def test_what_stands_in_a_cell_is_legible_on_both_grounds(ramp: Colormap) -> None:
    for cell in ramp(np.linspace(0, 1, 64)):
        shade, ink = "#" + "".join(f"{round(255 * c):02x}" for c in cell[:3]), ink_on(cell)
        assert contrast(ink, shade) >= 4.4
        assert contrast(on_dark_hex(ink), on_dark_hex(shade)) >= 3


def test_figures_panel_and_page_have_one_colour_for_one_meaning() -> None:
    """Recovery +1 was blue in a figure and orange in the panel."""
    light = dict(re.findall(r"--kv-(\w+): light-dark\((#\w+)", styles("draw")))
    ends = {"low": CMAP(0.0), "high": CMAP(1.0), "less": DIVERGING(0.0), "more": DIVERGING(1.0)}
    assert {name: to_hex(color) for name, color in ends.items()} == {name: light[name] for name in ends}
    assert [to_hex([c / 255 for c in end]) for end in (LESS, MORE)] == [light["less"], light["more"]]


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


def test_ids_of_two_figures_do_not_meet() -> None:
    one, other = drawn(name="one"), drawn(name="other one")
    found = [set(re.findall(r' id="([^"]+)"', svg)) for svg in (one, other)]
    assert found[0]
    assert not found[0] & found[1]
    for svg, ids in zip((one, other), found, strict=True):
        refers = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', svg))
        assert {a or b for a, b in refers} == ids, "what is referred to is there, and nothing else has an id"


def test_no_ground_and_no_colour_of_its_own() -> None:
    svg = drawn()
    body = svg[svg.index("</style>") :]
    assert not re.search(r"(?<!,)#[0-9a-f]{6}", re.sub(r"base64,[^\"]*", "", body)), "every colour is a variable"
    assert "var(--ffffff" not in body, "no white ground"
    assert svg.count('class="on-light"') == svg.count('class="on-dark"') >= 1
    dark = re.findall(r'class="on-dark"[^>]*href="data:image/png;base64,\s*([^"]+)"', svg) or re.findall(
        r'href="data:image/png;base64,\s*([^"]+)"[^>]*class="on-dark"', svg
    )
    points = imread(io.BytesIO(base64.b64decode(dark[0])))[..., :3]
    # Zeros and ones: the least is near the dark ground, the most far from it.
    assert luminance(points).min() < 0.04
    assert luminance(points).max() > 0.6


@pytest.mark.parametrize("shape", [(2, 3), (40, 7)])
def test_a_map_keeps_every_colour(shape: tuple[int, int]) -> None:
    points = (255 * np.random.default_rng(0).uniform(size=(*shape, 4))).astype(np.uint8)
    points[0, 0] = 255
    kept = Image.open(io.BytesIO(base64.b64decode(_address(points).partition(",")[2]))).convert("RGBA")
    np.testing.assert_array_equal(np.asarray(kept), points)
    light, dark = (Image.open(io.BytesIO(base64.b64decode(each.partition(",")[2]))) for each in _pictures(_address(points)))
    np.testing.assert_array_equal(np.asarray(light.convert("RGBA")), points)
    assert "#{:02x}{:02x}{:02x}".format(*dark.convert("RGBA").getpixel((0, 0))[:3]) == DARK


@pytest.mark.slow
def test_many_marks_are_drawn_as_a_picture() -> None:
    few, many = drawn(marks=900), drawn(marks=20_000)
    assert "<use" in few
    assert len(many) < 150_000
    assert many.count("<image") > few.count("<image")


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


def test_a_figure_is_drawn_once_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``savefig`` drew each twice: half the time of a study's page."""
    drawn_by: list[str] = []
    draw = Figure.draw
    monkeypatch.setattr(Figure, "draw", lambda self, by: drawn_by.append(type(by).__name__) or draw(self, by))
    with sheet(3.0, 2.0) as figure:
        figure.subplots().plot([0, 1])
    save(figure, tmp_path / "one.png", ("svg", "pdf"))
    assert drawn_by == ["RendererAgg", "MixedModeRenderer", "MixedModeRenderer"]


def test_what_is_printed_is_what_matplotlib_prints(tmp_path: Path) -> None:
    with sheet(3.0, 2.0) as figure:
        axes = figure.subplots()
        axes.plot([0, 1], label="a line")
        axes.legend()
        other = pickle.loads(pickle.dumps(figure))
        other.savefig(tmp_path / "other.png", dpi=160)
    before = figure.dpi, figure.canvas
    ours, theirs = (np.asarray(Image.open(path)) for path in (save(figure, tmp_path / "one.png"), tmp_path / "other.png"))
    assert ours.shape == (320, 480, 4)
    np.testing.assert_array_equal(ours, theirs)
    assert (figure.dpi, figure.canvas) == before


def test_the_fonts_of_a_pdf_are_truetype_and_hold_no_ligature_tables() -> None:
    with sheet(3.0, 2.0) as figure:
        figure.subplots().set_title("difficult: fi, ffi")
    pdf = drawn_as(figure, "pdf")
    assert pdf == drawn_as(figure, "pdf")
    assert b"/CIDFontType2" in pdf
    assert b"/Type3" not in pdf
    streams = [zlib.decompressobj().decompress(each) for each in re.findall(rb"stream\r?\n(x.*?)endstream", pdf, re.DOTALL)]
    fonts = [TTFont(io.BytesIO(each)) for each in streams if each[:4] == b"\0\1\0\0"]
    assert len(fonts) >= 2
    for font in fonts:
        assert {"glyf", "loca", "hmtx"} <= {*font.keys()}
        assert not {"GSUB", "GPOS", "GDEF"} & {*font.keys()}
    assert "GSUB" not in Options().drop_tables, "it is left as it was"
