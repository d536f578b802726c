"""Charts are data: what is drawn are the table's numbers, zeros and what leaves the range included; nothing is cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvinterp.findings import Chart, Panel, finding, line, median_of
from kvinterp.report.charts import draw_chart
from synthetic import ABOUT

TABLE = pd.DataFrame(
    {
        "x": [0, 1, 2, 0, 1, 2],
        "y": [0.5, 0.0, 0.25, 0.75, 1.0, 0.125],
        "low": [0.25, 0.0, 0.125, 0.5, 1.0, 0.0625],
        "high": [1.0, 0.5, 0.5, 1.0, 1.0, 0.25],
        "arm": ["cached"] * 3 + ["recompute"] * 3,
        "model": ["m"] * 3 + ["n"] * 3,
    }
)
SCALES = ("zero", "linear", "share", "signed", "log")


def figure_of(**how: Any) -> Any:
    figure = draw_chart(Chart("What there is", [Panel(TABLE, **{"x": "x", "y": "y", "label": "size", **how})]), [ABOUT])
    figure.draw_without_rendering()
    return figure


def inside(figure: Any) -> bool:
    box, page = figure.get_tightbbox(), figure.bbox_inches
    return bool(box.x0 >= -0.02 and box.y0 >= -0.02 and box.x1 <= page.width + 0.02 and box.y1 <= page.height + 0.02)


@pytest.mark.parametrize("facet", ["", "model"])
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("kind", ["line", "points", "step", "medians", "dots"])
def test_every_kind_on_every_scale_shows_its_numbers_and_cuts_nothing_off(kind: str, scale: str, facet: str) -> None:
    given = {"x": "y", "y": "x"} if kind == "dots" else {}
    figure = figure_of(kind=kind, scale=scale, color="arm", facet=facet, **given)
    assert inside(figure)
    axes = [each for each in figure.axes if each.lines]
    shown = np.concatenate(
        [
            each.get_xdata() if kind == "dots" else each.get_ydata()
            for one in axes
            for each in one.lines
            if len(each.get_ydata()) == 3
        ]
    )
    wanted = TABLE["y"][TABLE["y"] > 0] if scale in ("zero", "log") else TABLE["y"]
    assert set(wanted.round(9)) <= set(np.asarray(shown, dtype=float).round(9))


@pytest.mark.parametrize("column", ["y", "size"])
def test_each_line_of_medians_is_in_the_legend_once(column: str) -> None:
    panel = Panel(TABLE.rename(columns={"y": column}), "x", column, "medians", color="arm")
    figure = draw_chart(Chart("What there is", [panel]), [ABOUT])
    assert figure.axes[0].get_legend_handles_labels()[1] == ["cached", "recompute"]


@pytest.mark.parametrize("scale", ["zero", "linear", "signed"])
def test_a_map_has_a_cell_for_each_place(scale: str) -> None:
    figure = figure_of(kind="map", x="x", y="arm", color="y", scale=scale)
    assert inside(figure)
    cells = np.ma.filled(figure.axes[0].images[-1].get_array(), 0.0)
    np.testing.assert_allclose(cells, TABLE["y"].to_numpy().reshape(2, 3))


def test_what_is_beyond_a_signed_scale_stands_at_its_edge_with_its_number() -> None:
    table = pd.DataFrame({"x": [0, 1], "y": [-30.0, 0.5]})
    figure = draw_chart(Chart("Recovery", [Panel(table, "x", "y", scale="signed")]), [ABOUT])
    assert [text.get_text().replace("\u202f", " ") for text in figure.axes[0].texts] == ["▼ −3000 %"]


@pytest.mark.parametrize("name", ["size", "tick"])
def test_a_column_of_any_name_is_an_axis(name: str) -> None:
    """The figure of susceptibility, whose horizontal axis is ``size``, once had the values on both axes."""
    table = pd.DataFrame({name: [1.0, 2.0, 4.0], "rate": [0.0, 0.5, 0.25]})
    figure = draw_chart(Chart("Noise", [Panel(table, name, "rate", scale="share", xscale="log")]), [ABOUT])
    assert figure.axes[0].lines[0].get_xdata().tolist() == [1, 2, 4]


@pytest.mark.parametrize("values", [(5.6, 2.9), (1.02, 0.98), (3.0, 40.0), (2.0, 9e4)])
def test_a_logarithmic_axis_has_more_than_one_labelled_tick(values: tuple[float, float]) -> None:
    """Ratios of 5.6 and 2.9 once stood on an axis with the one label "1"."""
    table = pd.DataFrame({"ratio": values, "line": ["a", "b"]})
    figure = draw_chart(Chart("Ratios", [Panel(table, "ratio", "line", "dots", scale="log", level=1)]), [ABOUT])
    figure.draw_without_rendering()
    axes = figure.axes[0]
    low, high = axes.get_xlim()
    said = [tick.get_text() for tick in axes.get_xticklabels() if low <= tick.get_position()[0] <= high]
    assert len(set(filter(None, said))) > 1
    assert len(said) == len(set(said))


@pytest.mark.parametrize("kind", ["line", "dots"])
def test_what_has_no_value_says_why(kind: str) -> None:
    """A panel of Figure 5 was empty without a word."""
    table = pd.DataFrame(
        {"at": [0, 1] * 2, "size": [np.nan] * 2 + [0.5] * 2, "model": ["m", "m", "n", "n"], "why": ["0 of 6"] * 4}
    )
    given = ("size", "model") if kind == "dots" else ("at", "size")
    panel = Panel(table, *given, kind, facet="" if kind == "dots" else "model", why="why")
    figure = draw_chart(Chart("Recovery", [panel]), [ABOUT])
    figure.draw_without_rendering()
    said = [[text.get_text() for text in axes.texts] for axes in figure.axes]
    assert said == ([["0 of 6"]] if kind == "dots" else [["0 of 6"], []])
    assert inside(figure)


# Findings --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (finding("mean KL", 2e-5, n=1, measure="nats", model="m"), "m: mean KL 2.0 × 10⁻⁵ nats (n = 1 prompt)."),
        (finding("flips", 0.125, (0.0, 0.5), 8, "steps", "%"), "flips 12.5% (95% interval 0% to 50%, n = 8 steps)."),
        (finding("size", float("nan"), note="nothing was recorded"), "size has no number: nothing was recorded."),
        (finding("gap", 2.0, n=3, null=1.0, p=0.01, p_corrected=0.02, test="t", verdict="larger", layer=3),
         "layer 3: gap 2 (n = 3 prompts, null 1, t p = 0.01, corrected 0.02): larger."),
        (median_of("error", [0.0, 0.0, 1.0]), "error 0 (n = 3 prompts): 2 of them exactly 0."),
    ],
)  # fmt: skip
def test_a_finding_is_one_line(found: dict[str, Any], said: str) -> None:
    assert line(found).replace("\u00a0", " ") == said
