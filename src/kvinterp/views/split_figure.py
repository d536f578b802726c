"""The figure of a decomposition: which part of the difference there is at each step and in each layer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd
from matplotlib.figure import Figure, FigureBase
from matplotlib.ticker import MaxNLocator

from kvinterp.errors import InputError
from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE
from kvinterp.patching import PARTS, Decomposition
from kvinterp.views.plots import save
from kvinterp.views.sheet import canvas, made_with, stacked
from kvinterp.views.style import SERIES, looks, place_title, zero_aware

__all__ = ["decomposition_figure", "save_decomposition_figure"]

_PARTS = {
    "total": "total: cached against recompute",
    "fresh": "fresh: this step's row, computed alone",
    "alone": "alone: K and V of decoded rows, computed alone",
    "anew": "anew: K and V of old rows, remade by recompute",
    "kept": "kept: K and V kept otherwise than written",
    "null": "null: recompute among more rows, no cache",
}


def decomposition_figure(decomposition: Decomposition) -> Figure:
    """The parts of the difference by step (KL of the logits) and by layer (residual stream), with the total and the null.

    Both axes are logarithmic; what is exactly 0 stands in a strip of its own below them.

    Args:
        decomposition: What :func:`kvinterp.decompose` returned.

    Raises:
        InputError: It holds no step.
    """
    steps = decomposition.steps
    if steps.empty:
        raise InputError("the decomposition holds no step to draw: give it a prompt that decodes at least one.")
    later = decomposition.layers[decomposition.layers["step"] > 0]
    with looks():
        figure = canvas((6.4, 6.6 if len(later) else 3.8))
        parts = stacked(figure, [1.2, 1.0] if len(later) else [1.0])
        _draw_steps(parts[0], steps)
        if len(later):
            _draw_layers(parts[1], later)
        made_with(figure, decomposition.about, (f"null control: {decomposition.about.get('suffix', '?')} more tokens",))
    return figure


def save_decomposition_figure(decomposition: Decomposition, folder: str | Path) -> list[Path]:
    """Writes the figure of a decomposition into a folder, which is made where it is not there.

    Args:
        decomposition: What :func:`kvinterp.decompose` returned.
        folder: Where to.

    Returns:
        The file, ``decomposition.png``.

    Raises:
        InputError: The decomposition holds no step, or the file cannot be written.
    """
    return [save(decomposition_figure(decomposition), Path(folder) / "decomposition.png")]


def _draw_steps(target: FigureBase, steps: pd.DataFrame) -> None:
    axes = target.subplots()
    height = zero_aware(axes, [steps[part] for part in _PARTS])
    for index, (part, name) in enumerate(_PARTS.items()):
        series, shift = SERIES[index], (index - 2.5) * 0.1
        axes.plot(
            steps["step"] + shift, height(steps[part]), series.marker, color=series.color, markersize=2.4, alpha=0.35,
            markeredgewidth=0, zorder=2,
        )  # fmt: skip
        median = steps.groupby("step")[part].median()
        axes.plot(median.index + shift, height(median), **_line(index), label=name, zorder=3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=True, min_n_ticks=1))
    several = steps["example"].nunique() > 1
    axes.set(
        xlabel="decode step (0 is the token the prefill decides)",
        ylabel="KL of next-token distributions (nats)" + (",\nmedian and every example" if several else ""),
    )
    place_title(axes, _split_title(steps))
    handles, labels = axes.get_legend_handles_labels()
    target.legend(handles, labels, loc="outside lower center", ncols=2, fontsize=7.5)


def _draw_layers(target: FigureBase, layers: pd.DataFrame) -> None:
    axes = target.subplots()
    quartiles = {part: layers.groupby("layer")[part].quantile([0.25, 0.5, 0.75]).unstack() for part in _PARTS}
    height = zero_aware(axes, [table.to_numpy() for table in quartiles.values()])
    for index, (part, table) in enumerate(quartiles.items()):
        x = table.index + (index - 2.5) * 0.07
        low, middle, high = (height(table[q]) for q in (0.25, 0.5, 0.75))
        axes.vlines(x, low, high, color=SERIES[index].color, linewidth=1.4, zorder=2)
        axes.plot(x, middle, **_line(index), label=part, zorder=3)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=16, integer=True, min_n_ticks=1))
    axes.set(xlabel="layer", ylabel="relative L2 difference of resid_post\n(median, quartiles; steps from 1 on)")
    place_title(axes, _layer_title(quartiles))


def _split_title(steps: pd.DataFrame) -> str:
    later = steps[steps["step"] > 0]
    if later.empty or not (later["total_l2"] > 0).any():
        return f"The logits are bitwise equal at every step: there is nothing to split. {TO_SEE_A_DIFFERENCE}"
    differing = later[later["total_l2"] > 0]
    counts = differing["most"].value_counts()
    led = [f"{part} at {counts[part]}" for part in counts.index if part in PARTS]
    said = f"More than all other parts together, of {len(differing)} steps that differ: {', '.join(led)}"
    spread = int(counts.get("spread", 0))
    if not led:
        return f"No part is more than all others together at any of {len(differing)} steps that differ"
    return said + f"; none at {spread}" * bool(spread)


def _layer_title(quartiles: Mapping[str, pd.DataFrame]) -> str:
    found = []
    for part in PARTS:
        median = quartiles[part][0.5]
        first = median.index[median > 0]
        if len(first):
            found.append(f"{part} is first above 0 at layer {first[0]}")
    if not found:
        return "At the median step every part is 0 in every layer"
    return f"At the median step {', '.join(found)}" + "; the other parts are 0" * (len(found) < len(PARTS))


def _line(index: int) -> dict[str, Any]:
    hollow = {"markerfacecolor": "#ffffff"} if index % 2 else {}
    return {**SERIES[index].drawn(), "linewidth": 1.4, "markersize": 4, **hollow}
