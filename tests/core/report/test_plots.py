"""The figures show what the tables say: zeros as zeros, flips, the prompt's end; nothing is cut off."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from kvinterp.comparison import Comparison
from kvinterp.comparison.findings import charts_of_comparison
from kvinterp.report.charts import draw_chart, set_scale
from kvinterp.report.style import sheet
from synthetic import CHARTS, comparison

MADE = {
    "usual": comparison((0, 1, 2)),
    "flipped": comparison((0, 1), flip=2, steps=9),
    "equal": comparison((0, 1), size=0.0),
    "one step": comparison((0,), steps=1),
    "one example, layer and head": comparison((0,), layers=1, heads=1, steps=2),
    "large": comparison((0,), layers=40, heads=48, steps=2),
    "dollars": comparison((0,), model="a$b_{c}$ <model>"),
}


def figure_with(name: str, made: Comparison) -> Figure:
    """One of the four figures."""
    return draw_chart(charts_of_comparison(made)[name], [made.provenance])


def inside(figure: Figure) -> bool:
    """Whether all that is drawn lies within the picture."""
    figure.draw_without_rendering()
    box, page = figure.get_tightbbox(), figure.bbox_inches
    slack = 0.02
    return box.x0 >= -slack and box.y0 >= -slack and box.x1 <= page.width + slack and box.y1 <= page.height + slack


@pytest.mark.each
@pytest.mark.parametrize("what", MADE)
@pytest.mark.parametrize("name", CHARTS)
def test_nothing_is_cut_off(name: str, what: str) -> None:
    assert inside(figure_with(name, MADE[what]))


def test_zeros_get_a_strip_of_their_own_under_every_positive_value() -> None:
    with sheet(6.4, 4.8) as figure:
        axes = figure.subplots()
        set_scale(axes, "y", "zero", np.array([0.0, 3e-9, np.nan, 2e-4]))
        axes.figure.draw_without_rendering()
        labels = [tick.get_text() for tick in axes.get_yticklabels()]
        heights = axes.transAxes.inverted().transform(
            axes.transData.transform([(0, y) for y in (0, 1e-9, 1e-8, 1e-4, 1e-3)])
        )
    zero, least, second, fourth, last = heights[:, 1]
    assert 0 < zero < least < last < 1
    assert second - least == pytest.approx(last - fourth), "above the strip decades are alike"
    assert least - zero > 0.5 * (second - least)
    assert labels[0] == "exactly 0"


def test_k_and_v_stand_at_absolute_positions_with_the_prompts_end_marked() -> None:
    figure = figure_with("kv_by_position", MADE["usual"])
    panels = [axes for axes in figure.axes if axes.images and axes.get_ylabel() == "layer"]
    assert [_title(axes) for axes in panels] == ["K", "V"]
    for axes in panels:
        assert [label.get_text() for label in axes.get_xticklabels()] == [f"{place}" for place in range(8)]
        assert {line.get_xdata()[0] for line in axes.lines} == {3.5}
        assert axes.images[-1].get_array().mask[:, :4].all()


def _title(axes: Any) -> str:
    return str(axes.get_title(loc="left")).replace("\n", " ")
