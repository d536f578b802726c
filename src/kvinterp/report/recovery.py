"""The figures of patching: recovery by layer, head or position with its controls.

Like those of a comparison they are drawn from tidy tables alone, without pyplot; :func:`kvinterp.report.save` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import FuncFormatter

from kvinterp.errors import InputError
from kvinterp.patching import Sweep
from kvinterp.reading.numbers import percent
from kvinterp.reading.patching import recovery_title, step_title
from kvinterp.reading.results import only
from kvinterp.reading.vocabulary import RECOVERED
from kvinterp.report.axes import mapped, percents, place_title, stacked, whole_numbers
from kvinterp.report.ink import ink_on
from kvinterp.report.style import SERIES, made_with, sheet

#: White at 0, orange below, blue above: told apart by the colour-blind; in grey the sign in each cell tells.
DIVERGING = LinearSegmentedColormap.from_list("recovery", ["#8f3a00", "#e08a4a", "#ffffff", "#4a90c2", "#003f6b"])
_HEADS = ("heads", "kv-heads")
_LAYERS = ("single", "cumulative", "cumulative-from")
_EDGE = 1.15
_WRITTEN_CELLS = 96


def recovery_figure(sweep: Sweep) -> Figure:
    """Recovery of every patch of a sweep, with its controls beside it.

    Sweeps over heads become a heatmap of layer by head (the median over examples, white at 0); all others one mark a layer
    or block of positions: each example, the median and the quartiles. What leaves the range of ±100 % is marked at the edge
    with its number.

    Args:
        sweep: What :func:`kvinterp.sweep` returned.

    Raises:
        InputError: The sweep holds no row.
    """
    frame = sweep.recovery
    if frame.empty:
        raise InputError("the sweep holds no row to draw: give it a prompt that decodes at least one step.")
    kinds = list(dict.fromkeys(frame["sweep"]))
    controls = sweep.controls if "control" in sweep.controls else sweep.controls.iloc[:0]
    heights = [3.0 if kind in _HEADS else 2.6 for kind in kinds] + [1.7] * bool(len(controls))
    with sheet(6.4, 0.7 + sum(heights)) as figure:
        parts = stacked(figure, heights)
        for part, kind in zip(parts, kinds, strict=False):
            (_draw_heads if kind in _HEADS else _draw_marks)(part, only(frame, sweep=kind), kind, sweep.provenance)
        if len(controls):
            _draw_controls(parts[-1], controls)
        marked = ("▼ n: n examples below the range, their median",) if len(controls) or set(kinds) - {*_HEADS} else ()
        made_with(figure, sweep.provenance, (*_what(sweep.provenance), *marked))
    return figure


def step_figure(sweep: Sweep) -> Figure:
    """Median recovery of a sweep over layers as a heatmap of layer by decode step, white at 0.

    Args:
        sweep: What :func:`kvinterp.sweep` returned, over layers and with more than one step counted.

    Raises:
        InputError: The sweep is not over layers, or counts one step only.
    """
    kinds = _stepped(sweep)
    if not kinds:
        raise InputError("the sweep has no layer by step to draw: sweep single or cumulative, with more than one step.")
    with sheet(6.4, 0.7 + 2.4 * len(kinds)) as figure:
        for part, kind in zip(stacked(figure, [1.0] * len(kinds)), kinds, strict=True):
            _draw_by_step(part, only(sweep.steps, sweep=kind), kind, sweep.provenance)
        counted = sweep.steps.groupby("step")["example"].nunique()
        few = f", {counted.iloc[-1]} at the last step" if counted.iloc[-1] < counted.max() else ""
        signs = ("−: below 0, ▼: below −100 %, ▲: above 100 %", "×, n/a: no difference to recover in any example")
        made_with(figure, sweep.provenance, (*_what(sweep.provenance), f"examples: {counted.max()}{few}", *signs))
    return figure


def sweep_figures(sweep: Sweep) -> dict[str, Figure]:
    """The figures ``recovery``, and ``recovery_by_step`` where layers were swept over more than one step.

    Raises:
        InputError: The sweep holds no row.
    """
    by_step = {"recovery_by_step": step_figure(sweep)} if _stepped(sweep) else {}
    return {"recovery": recovery_figure(sweep), **by_step}


# Recovery --------------------------------------------------------------------------------------------------------------


def _draw_heads(target: FigureBase, frame: pd.DataFrame, kind: str, provenance: Mapping[str, Any]) -> None:
    axes = target.subplots()
    table = frame[frame["defined"]].groupby(["layer", "head"])["recovery"].median().unstack()
    layers, heads = (range(int(frame[name].min()), int(frame[name].max()) + 1) for name in ("layer", "head"))
    values = table.reindex(index=layers, columns=heads).to_numpy(dtype=float)
    query = provenance["site"] in ("q", "z", "pattern")
    beyond = _draw_map(target, axes, values, (layers, heads), provenance)
    axes.set(xlabel="query head" if query else "KV head", ylabel="layer")
    place_title(axes, recovery_title(frame, kind, provenance["distance"]) + beyond)


def _draw_by_step(target: FigureBase, frame: pd.DataFrame, kind: str, provenance: Mapping[str, Any]) -> None:
    axes = target.subplots()
    table = frame.groupby(["layer", "step"])["recovery"].median().unstack()
    layers, steps = list(table.index), list(table.columns)
    _draw_map(target, axes, table.to_numpy(dtype=float), (layers, steps), provenance)
    axes.set(xlabel="decode step", ylabel=_LAYER_LABELS[kind])
    place_title(axes, step_title(table, kind, provenance["distance"]))


def _draw_map(
    target: FigureBase,
    axes: Axes,
    values: np.ndarray,
    numbers: tuple[Sequence[int], Sequence[int]],
    provenance: Mapping[str, Any],
) -> str:
    """A heatmap of recovery with its colour bar; returns what the title has to add."""
    image = mapped(axes, values, Normalize(-1, 1), DIVERGING)
    for row, column in np.ndindex(*values.shape):
        value = float(values[row, column])
        mark = "▼" if value < -1 else "▲" if value > 1 else ""
        write_recovery(axes, row, column, value, values.size <= _WRITTEN_CELLS, mark)
    for shown, axis in zip(numbers, (axes.yaxis, axes.xaxis), strict=True):
        whole_numbers(axis, 16)
        axis.set_major_formatter(FuncFormatter(lambda at, _, shown=shown: _numbered(at, shown)))
    known = values[np.isfinite(values)]
    low, high = bool((known < -1).any()), bool((known > 1).any())
    extend = "both" if low and high else "min" if low else "max" if high else "neither"
    bar = target.colorbar(image, ax=axes, pad=0.02, aspect=24, extend=extend)
    percents(bar.ax.yaxis)
    bar.set_label(f"median recovery of\nthe {RECOVERED[provenance['distance']]}")
    bar.ax.grid(visible=False)
    return "; ▼ below −100 %" if low else ""


def write_recovery(axes: Axes, row: int, column: int, value: float, written: bool, mark: str = "") -> None:
    """What stands in a cell of a map of recovery: the number with a mark behind it, or where there is no room a sign alone."""
    if not np.isfinite(value):
        axes.text(column, row, "n/a" if written else "×", ha="center", va="center", fontsize=6, color="#555555")
        return
    text = f"{percent(value)}{mark}" if written else mark or ("−" if value < -0.005 else "")
    axes.text(column, row, text, ha="center", va="center", fontsize=6.5, color=ink_on(DIVERGING((value + 1) / 2)))


def _draw_marks(target: FigureBase, frame: pd.DataFrame, kind: str, provenance: Mapping[str, Any]) -> None:
    axes = target.subplots()
    place = "positions" if kind == "blocks" else "layer"
    groups = {str(name): group for name, group in frame.groupby(place, sort=False)}
    _marks(axes, list(groups.values()), SERIES[0])
    names = list(groups)
    whole_numbers(axes.xaxis, 12)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda at, _: _numbered(at, names)))
    label = "cache positions patched, in all layers" if kind == "blocks" else _LAYER_LABELS[kind].replace("\n", " ")
    axes.set(xlabel=label, ylabel=f"recovery of the {RECOVERED[provenance['distance']]}")
    _range(axes)
    place_title(axes, recovery_title(frame, kind, provenance["distance"]))


def _draw_controls(target: FigureBase, controls: pd.DataFrame) -> None:
    axes = target.subplots()
    names = [name for name in _CONTROLS if (controls["control"] == name).any()]
    names += [name for name in dict.fromkeys(controls["control"]) if name not in names]
    groups = [only(controls, control=name) for name in names]
    _marks(axes, groups, SERIES[3])
    axes.set_xticks(range(len(names)), [_CONTROLS.get(name, name.replace(" ", "\n")) for name in names], fontsize=7)
    axes.set(ylabel="recovery")
    _range(axes)
    place_title(axes, "Controls: what the answer can be trusted by")


_LAYER_LABELS = {
    "single": "layer patched",
    "cumulative": "last layer patched,\nfrom layer 0 on",
    "cumulative-from": "first layer patched,\nto the last",
}

#: A number that may stand on a line.
_ON_WHITE: dict[str, Any] = {"zorder": 5, "bbox": {"facecolor": "#ffffff", "edgecolor": "none", "alpha": 0.85, "pad": 0.8}}

_CONTROLS = {
    "self": "own tensors\n(expected 0)",
    "other-prompt": "from another\nprompt",
    "floor": "last residual\n(floor)",
    "all-positions": "residual at\nall positions",
}


def _marks(axes: Axes, groups: Sequence[pd.DataFrame], series: Any) -> None:
    """Each example as a point, the median as a large mark, the quartiles as a line; beyond the range, the number."""
    axes.axhline(0, color="#000000", linewidth=0.8, zorder=1)
    axes.axhline(1, color="#777777", linewidth=0.8, linestyle=(0, (2, 2)), zorder=1)
    axes.set_xlim(-0.5, len(groups) - 0.5)
    width = min(7.0, 150 / max(len(groups), 1))
    for at, group in enumerate(groups):
        values = group["recovery"].to_numpy(dtype=float)
        values = values[np.isfinite(values)]
        if not len(values):
            axes.annotate("n/a", (at, 0), ha="center", va="bottom", fontsize=6.5, color="#555555")
            continue
        low, middle, high = np.quantile(values, (0.25, 0.5, 0.75))
        inside = values[np.abs(values) <= _EDGE]
        axes.plot(np.full(len(inside), at), inside, "o", color=series.color, markersize=2.8, alpha=0.45, markeredgewidth=0)
        if len(values) > 1:
            axes.vlines(at, *np.clip((low, high), -_EDGE, _EDGE), color=series.color, linewidth=1.6, zorder=2)
        if abs(middle) <= _EDGE:
            axes.plot(at, middle, "_", color=series.color, markersize=width + 6, markeredgewidth=2.2, zorder=3)
        else:
            edge = _EDGE if middle > 0 else -_EDGE
            axes.plot(at, edge * 0.96, "^" if middle > 0 else "v", color=series.color, markersize=6, zorder=3)
            if len(groups) <= 16:
                axes.annotate(percent(middle), (at, edge * 0.8), ha="center", va="center", fontsize=6.5, **_ON_WHITE)
        for out, sign in ((values < -_EDGE, -1), (values > _EDGE, 1)):
            if out.any() and len(groups) <= 16 and abs(middle) <= _EDGE:
                text = f"{'▼' if sign < 0 else '▲'} {int(out.sum())}: {percent(float(np.median(values[out])))}"
                axes.annotate(text, (at, sign * 0.98), ha="center", va="center", fontsize=6, **_ON_WHITE)


def _range(axes: Axes) -> None:
    axes.set_ylim(-_EDGE, _EDGE)
    axes.set_yticks([-1, -0.5, 0, 0.5, 1])
    percents(axes.yaxis)


def _numbered(at: float, names: Sequence[Any]) -> str:
    index = round(at)
    return str(names[index]) if abs(at - index) < 1e-6 and 0 <= index < len(names) else ""


def _stepped(sweep: Sweep) -> list[str]:
    """The sweeps over layers in which more than one step is counted."""
    if sweep.steps.empty:
        return []
    counted = sweep.steps.groupby("sweep", sort=False)["step"].nunique()
    return [kind for kind, steps in counted.items() if kind in _LAYERS and steps > 1]


def _what(provenance: Mapping[str, Any]) -> tuple[str, str]:
    return f"{provenance['site']} at {provenance['positions']} positions", f"steps: {provenance['steps']}"
