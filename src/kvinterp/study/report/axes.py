"""What figures share inside their axes: titles, scales with a place for exact zeros, ticks, legends, marks and maps."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullFormatter, NullLocator

from kvinterp.common.numbers import percent, power
from kvinterp.study.report.style import CMAP

Height = Callable[[Any], Any]
"""From values to heights on an axis, see :func:`zero_aware`."""

# Titles, ticks and legends ---------------------------------------------------------------------------------------------


def headed(figure: Figure, text: str) -> None:
    """A title over all panels, broken where it would leave the figure."""
    wrapped = broken(text, int(figure.get_figwidth() * 11))
    figure.suptitle(wrapped, x=0.01, ha="left", fontsize=10, fontweight="bold")


def broken(text: str, width: int = 34) -> str:
    """A label in lines of so many characters, so that no name pushes the axes out of their figure."""
    return "\n".join(textwrap.wrap(text, width))


def whole_numbers(axis: Any, ticks: int = 8) -> None:
    """Ticks of an axis at whole numbers only, so many at most."""
    axis.set_major_locator(MaxNLocator(nbins=ticks, integer=True, min_n_ticks=1))


def percents(axis: Any) -> None:
    """Ticks that say shares in percent."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: percent(value)))


def powers_of_two(axes: Axes, places: Sequence[int], **how: Any) -> None:
    """An x axis on which a doubling is a step, with ticks at these places."""
    axes.set_xscale("log", base=2)
    axes.set_xticks(places, [str(place) for place in places], **how)


def on_lines(axes: Axes) -> None:
    """Grid lines for what stands in lines one under the other."""
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")


def beside(panels: Sequence[Axes], label: str) -> None:
    """Panels side by side on one scale: its label and its numbers stand at the first."""
    panels[0].set_ylabel(label)
    for axes in panels[1:]:
        axes.tick_params(labelleft=False)


def log_ticks(axis: Any) -> None:
    """A logarithmic axis whose ticks are plain numbers: text is not parsed for mathematics."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend_outside(target: Figure | Any, axes: Axes, columns: int = 5, side: str = "lower", **how: Any) -> None:
    """A legend of the axes under all axes of a figure, or above them where its small print stands below."""
    handles, labels = axes.get_legend_handles_labels()
    place: Any = f"outside {side} center"
    labels = [broken(label, 44) for label in labels]
    target.legend(handles, labels, loc=place, ncols=min(len(labels), columns), **how)


def stacked(figure: Figure, heights: Sequence[float]) -> list[FigureBase]:
    """Parts of a figure one under the other."""
    return list(figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)[:, 0])


# Scales ----------------------------------------------------------------------------------------------------------------


def zero_aware(axes: Axes, values: Sequence[Any], along: str = "y") -> Height:
    """A logarithmic axis on which exact zeros have a place of their own: a grey strip under the smallest decade.

    Args:
        axes: The axes.
        values: All the numbers that will be drawn, in any number of arrays; NaN is ignored.
        along: Which axis: ``"x"`` or ``"y"``.

    Returns:
        A function from values to heights: positive ones as they are, zeros in the strip.
    """
    upright = along == "y"
    axis, limits = (axes.yaxis, axes.set_ylim) if upright else (axes.xaxis, axes.set_xlim)
    span, line = (axes.axhspan, axes.axhline) if upright else (axes.axvspan, axes.axvline)
    parts = [np.asarray(v, dtype=float).reshape(-1) for v in values]
    flat = np.concatenate(parts) if parts else np.zeros(0)
    flat = flat[np.isfinite(flat)]
    positive = flat[flat > 0]
    if not positive.size:
        limits(-1, 1)
        axis.set_major_locator(FixedLocator([0.0]))
        axis.set_major_formatter(FuncFormatter(lambda *_: "exactly 0"))
        span(-0.25, 0.25, color="#eeeeee", zorder=0, linewidth=0)
        return lambda given: np.asarray(given, dtype=float)
    low, high = np.floor(np.log10(positive.min())), np.ceil(np.log10(positive.max()))
    high = max(high, low + 1)
    (axes.set_yscale if upright else axes.set_xscale)("log")
    stride = max(1, int(np.ceil((high - low) / 6)))
    decades = [10.0**e for e in np.arange(low, high + 1, stride)]
    has_zero = bool((flat == 0).any())
    height = (high - low) * 0.12
    strip = 10 ** (low - height)
    if has_zero:
        span(10 ** (low - 1.5 * height), 10 ** (low - height / 2), color="#e8e8e8", zorder=0, linewidth=0)
        line(10 ** (low - height / 2), color="#999999", linewidth=0.6, linestyle=(0, (2, 2)), zorder=1)
    bottom = 10 ** (low - (1.5 * height if has_zero else 0.04 * (high - low)))
    limits(bottom, 10 ** (high + 0.04 * (high - low)))
    axis.set_major_locator(FixedLocator([strip, *decades] if has_zero else decades))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(FuncFormatter(lambda at, _: "exactly 0" if has_zero and at <= strip * 1.001 else power(at)))
    return lambda given: np.where(np.asarray(given, dtype=float) == 0, strip, np.asarray(given, dtype=float))


def log_norm(values: np.ndarray) -> LogNorm:
    """A logarithmic scale of the values above 0."""
    positive = values[values > 0]
    low, high = (positive.min(), positive.max()) if positive.size else (1e-9, 1e-8)
    return LogNorm(low, high if high > low else low * 10)


def color_bar(target: FigureBase, image: Any, axes: Any, label: str) -> None:
    """The colour bar of a logarithmic scale."""
    bar = target.colorbar(image, ax=axes, pad=0.02, aspect=30)
    bar.set_label(broken(label, 20))
    bar.ax.grid(visible=False)
    bar.ax.yaxis.set_minor_locator(NullLocator())
    low, high = np.log10([image.norm.vmin, image.norm.vmax])
    decades = [10.0**exponent for exponent in np.arange(np.ceil(low), np.floor(high) + 1)]
    few = len(decades) < 2
    bar.ax.yaxis.set_major_locator(FixedLocator([10**low, 10**high] if few else decades))
    bar.ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.1e}" if few else power(value)))


def mapped(axes: Axes, values: np.ndarray, norm: Any, cmap: Any = None, **how: Any) -> Any:
    """A heatmap with the first row below; without a map of its own what is not above 0 stays white."""
    axes.grid(visible=False)
    if cmap is None:
        cmap = CMAP.with_extremes(bad="#ffffff")
        values = np.ma.masked_where(~(values > 0), values)
    return axes.imshow(values, norm=norm, cmap=cmap, aspect="auto", origin="lower", interpolation="nearest", **how)
