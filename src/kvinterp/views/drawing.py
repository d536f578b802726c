"""What the figures of a comparison share: ticks, legends, scales, and numbers in few characters."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from kvinterp.comparison import Comparison
from kvinterp.views.style import Series, power

__all__ = ["color_bar", "later", "led", "legend_below", "line_of", "log_norm", "shift_of", "short", "whole_numbers"]


def later(comparison: Comparison, frame: pd.DataFrame) -> pd.DataFrame:
    """The steps from 1 on at which both paths hold the same text; step 0 where there is no other."""
    frame = comparison.same_text(frame)
    return frame[frame["step"] > 0] if (frame["step"] > 0).any() else frame


def line_of(series: Series, index: int) -> dict[str, Any]:
    """How a line is drawn."""
    # Later lines are drawn hollow: where two coincide, both are seen.
    hollow = {"markerfacecolor": "#ffffff"} if index % 2 else {}
    return {**series.drawn(), "linewidth": 1.4, "markersize": 4, **hollow}


def short(value: float, digits: int = 1) -> str:
    """A number in few characters: 0.81, or 1.2e-6."""
    return f"{value:.2g}" if value == 0 or 0.01 <= value < 1000 else re.sub(r"e([+-])0*", r"e\1", f"{value:.{digits}e}")


def led(label: str, sentence: str) -> str:
    """A title that begins with what it is about, where that has a name."""
    return f"{label}: {sentence}" if label else sentence[:1].upper() + sentence[1:]


def shift_of(index: int, count: int) -> float:
    """How far a point is moved sideways, so that those of one place are all seen."""
    return 0.0 if count == 1 else (index - (count - 1) / 2) * min(0.16, 0.5 / count)


def whole_numbers(axes: Axes) -> None:
    """Ticks at whole numbers only."""
    axes.xaxis.set_major_locator(MaxNLocator(nbins=8, integer=True, min_n_ticks=1))


def legend_below(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """A legend under the axes."""
    if len(handles):
        columns = len(labels) if sum(map(len, labels)) < 40 else 2
        axes.legend(handles, labels, loc="upper center", bbox_to_anchor=(0.45, -0.17), ncols=columns)


def log_norm(values: np.ndarray) -> LogNorm:
    """A logarithmic scale of the values above 0."""
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1e-9, 1e-8)
    return LogNorm(low, high if high > low else low * 10)


def color_bar(target: FigureBase, image: Any, axes: Any, label: str) -> None:
    """The colour bar of a logarithmic scale."""
    bar = target.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.set_label(label)
    bar.ax.grid(visible=False)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    low, high = np.log10([image.norm.vmin, image.norm.vmax])
    decades = [10.0**exponent for exponent in np.arange(np.ceil(low), np.floor(high) + 1)]
    few = len(decades) < 2
    bar.ax.yaxis.set_major_locator(FixedLocator([10**low, 10**high] if few else decades))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if few else power(value)))
