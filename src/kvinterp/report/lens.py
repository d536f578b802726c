"""The figures of a logit lens along both paths, and of what wrote the difference of their logits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from kvinterp.comparison.attribution import REST, LogitAttribution
from kvinterp.comparison.lens import LogitLens
from kvinterp.reading.numbers import against, counted
from kvinterp.reading.results import only
from kvinterp.report.axes import color_bar, log_norm, mapped, medians, place_title, shift_of, whole_numbers, zero_aware
from kvinterp.report.style import line_of, of_models, sheet


def lens_figures(lens: LogitLens) -> dict[str, Figure]:
    """:func:`lens_figure` by the name of its file; nothing where no step was decoded after the prefill."""
    return {} if lens.overview().empty else {"logit_lens": lens_figure(lens)}


def attribution_figures(attribution: LogitAttribution) -> dict[str, Figure]:
    """:func:`attribution_figure` by the name of its file; nothing where no step was decoded after the prefill."""
    return {} if attribution.overview().empty else {"logit_attribution": attribution_figure(attribution)}


def lens_figure(lens: LogitLens) -> Figure:
    """KL between the paths' readings behind every layer: a point a step, a line for the median, exact zeros in a strip."""
    later = lens.table[lens.table["step"] > 0]
    with sheet(6.0, 3.6) as figure:
        axes = figure.subplots()
        height = zero_aware(axes, [later["kl"]])
        medians(axes, later, "kl", height, 0, "median over steps", size=3, alpha=0.35, by="layer")
        whole_numbers(axes.xaxis, 12)
        paths = lens.provenance["paths"]
        axes.set(
            xlabel="layer (-1: what enters the first; the last: the paths' own logits)",
            ylabel=f"KL({paths['a']} || {paths['b']}), nats".replace("[", "\n["),
        )
        steps = later[["example", "step"]].drop_duplicates()
        place_title(
            axes, f"KL of the residual streams read as logits, {counted(len(steps), 'decode step')} and their median"
        )
        _signed(figure, lens.provenance)
    return figure


def attribution_figure(attribution: LogitAttribution) -> Figure:
    """Length of what each head, attention and MLP wrote of the difference, layer by layer, and of what no layer wrote."""
    means = attribution.overview()
    heads = only(means, part="head")
    steps = len(attribution.table.loc[attribution.table["step"] > 0, ["example", "step"]].drop_duplicates())
    with sheet(6.4, 6.2 if len(heads) else 3.4) as figure:
        left, right = figure.subplots(2, 1) if len(heads) else (None, figure.subplots())
        if left is not None:
            values = heads.pivot(index="layer", columns="head", values="l2").to_numpy(float)
            image = mapped(left, values, log_norm(values))
            color_bar(figure, image, left, "L2 over the vocabulary")
            left.set(xlabel="query head (blank: exactly 0)", ylabel="layer")
            whole_numbers(left.xaxis, 12)
            whole_numbers(left.yaxis, 12)
            place_title(
                left, f"What each head wrote of the logits' difference, mean over {counted(steps, 'decode step')}", 1.6
            )
        _parts(right, means)
        _signed(figure, attribution.provenance)
    return figure


def _parts(axes: Axes, means: pd.DataFrame) -> None:
    rest = means[means["part"].isin((*REST, "embed"))].set_index("part")["l2"]
    height = zero_aware(axes, [means["l2"]])
    for index, (part, name) in enumerate({"attn": "attention", "mlp": "MLP"}.items()):
        line = only(means, part=part)
        axes.plot(line["layer"] + shift_of(index, 2), height(line["l2"]), **line_of(index), label=name)
    layers = int(means["layer"].max())
    for at, part in enumerate(rest.index, start=layers + 2):
        axes.plot([at], height([rest[part]]), **line_of(2))
    ticks = [*np.unique(np.linspace(0, layers, min(layers + 1, 4)).astype(int)), *range(layers + 2, layers + 2 + len(rest))]
    axes.set_xticks(ticks, [*map(str, ticks[: len(ticks) - len(rest)]), *rest.index], rotation=30, ha="right")
    axes.set(xlabel="layer; then what no layer wrote", ylabel="L2 over the vocabulary")
    axes.legend(loc="best")
    place_title(axes, "What attention and MLP of each layer wrote, and what no layer did")


def _signed(figure: Figure, provenance: Mapping[str, Any]) -> None:
    of_models(figure, [provenance], [f"{against(provenance)}, matched"])
