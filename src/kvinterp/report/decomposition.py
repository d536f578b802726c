"""The figure of a decomposition: which part of the difference there is at each step and in each layer."""

from __future__ import annotations

import pandas as pd
from matplotlib.figure import Figure, FigureBase

from kvinterp.errors import InputError
from kvinterp.patching import Decomposition
from kvinterp.reading.patching import layer_title, split_title
from kvinterp.report.axes import legend_outside, medians, place_title, quartiles, stacked, whole_numbers, zero_aware
from kvinterp.report.style import made_with, sheet

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
    with sheet(6.4, 6.6 if len(later) else 3.8) as figure:
        parts = stacked(figure, [1.2, 1.0] if len(later) else [1.0])
        _draw_steps(parts[0], steps)
        if len(later):
            _draw_layers(parts[1], later)
        null = f"null control: {decomposition.provenance.get('suffix', '?')} more tokens"
        made_with(figure, decomposition.provenance, (null,))
    return figure


def _draw_steps(target: FigureBase, steps: pd.DataFrame) -> None:
    axes = target.subplots()
    height = zero_aware(axes, [steps[part] for part in _PARTS])
    for index, (part, name) in enumerate(_PARTS.items()):
        medians(axes, steps, part, height, index, name, size=2.4, alpha=0.35, shift=(index - 2.5) * 0.1)
    whole_numbers(axes.xaxis, 10)
    several = steps["example"].nunique() > 1
    axes.set(
        xlabel="decode step (0 is the token the prefill decides)",
        ylabel="KL of next-token distributions (nats)" + (",\nmedian and every example" if several else ""),
    )
    place_title(axes, split_title(steps))
    legend_outside(target, axes, 2, fontsize=7.5)


def _draw_layers(target: FigureBase, layers: pd.DataFrame) -> None:
    axes = target.subplots()
    tables = {part: layers.groupby("layer")[part].quantile([0.25, 0.5, 0.75]).unstack() for part in _PARTS}
    height = zero_aware(axes, [table.to_numpy() for table in tables.values()])
    for index, (part, table) in enumerate(tables.items()):
        quartiles(axes, table, height, index, (index - 2.5) * 0.07, part)
    whole_numbers(axes.xaxis, 16)
    axes.set(xlabel="layer", ylabel="relative L2 difference of resid_post\n(median, quartiles; steps from 1 on)")
    place_title(axes, layer_title(tables))
