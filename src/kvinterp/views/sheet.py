"""The sheet that the figures of patching are drawn on: its parts, and the small print of what they were made with."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure, FigureBase

__all__ = ["canvas", "made_with", "stacked"]


def canvas(size: tuple[float, float]) -> Figure:
    """An empty figure of a size in inches, which no session of pyplot knows."""
    figure = Figure(figsize=size, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def stacked(figure: Figure, heights: Sequence[float]) -> list[FigureBase]:
    """Parts of a figure one under the other."""
    made = figure.subfigures(len(heights), 1, height_ratios=heights, squeeze=False)
    return list(made[:, 0])


def made_with(figure: Figure, about: Mapping[str, Any], more: Sequence[str]) -> None:
    """Writes under a figure what it was made with, and keeps it for :func:`kvinterp.views.save`."""
    made = about["provenance"]
    paths = about.get("paths", {"cached": "cached", "recompute": "recompute"})
    parts = [
        f"{paths['cached']} and {paths['recompute']}",
        *([about["direction"]] if "direction" in about else []),
        *([about["protocol"]] if "protocol" in about else []),
        *more,
        str(made["model"]),
        f"{made['kind']} ({made['attention']})",
        made["dtype"],
        f"weights {made['weights']}",
        *(f"{title} {made[name]}" for title, name in _VERSIONS.items()),
        f"{made['device']}, threads: {made['threads']}",
    ]
    text = "\n".join(textwrap.wrap(" · ".join(parts), 134))
    figure.supxlabel(text, x=0.01, ha="left", fontsize=5.5, color="#555555")
    figure.provenance = [dict(about)]  # type: ignore[attr-defined]  # kept for save()


_VERSIONS = {
    "torch": "torch",
    "transformers": "transformers",
    "TransformerLens": "transformer_lens",
    "kvinterp": "kvinterp",
}
