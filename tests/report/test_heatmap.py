"""The figures of patching: they show the numbers of the tables, zeros and what leaves the range included."""

from __future__ import annotations

import itertools
import re
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from kvinterp.findings import findings_of, lines_of
from kvinterp.patching import ANEW, PARTS, Decomposition, Sweep
from kvinterp.patching.findings import (
    charts_of_decomposition,
    charts_of_sweep,
    headline_of_decomposition,
    headline_of_sweep,
    rows_of_decomposition,
)
from kvinterp.study.report.charts import drawn
from kvinterp.study.report.style import DIVERGING
from synthetic import ABOUT

PROVENANCE = {key: value for key, value in ABOUT.items() if key not in ("paths", "protocol", "strategy", "seed")}


def _sweep(
    values: dict[tuple[int, int], list[float]], kind: str = "heads", site: str = "z", positions: Any = None
) -> Sweep:
    rows = [
        {
            "sweep": kind,
            "site": site,
            "layer": layer,
            "head": head,
            "positions": "newest" if positions is None else positions[head],
            "example": example,
            "recovery": value,
            "defined": bool(np.isfinite(value)),
            "equal": not np.isfinite(value),
            "why": "" if np.isfinite(value) else "the paths' logits are bitwise equal: take others.",
            "d_before": 1e-7,
            "d_after": 1e-7 * (1 - value),
        }
        for (layer, head), group in values.items()
        for example, value in enumerate(group)
    ]
    controls = pd.DataFrame(
        [{"control": name, "recovery": share, "steps": 1} for name, share in (("self", 0.0), ("floor", 1.0))]
    )
    provenance = {
        "site": site,
        "sweep": kind,
        "direction": "into-recompute",
        "protocol": "matched",
        "steps": "every",
        "distance": "kl",
        "paths": {"cached": "cached", "recompute": "recompute"},
        "positions": "newest",
        **PROVENANCE,
    }
    return Sweep(pd.DataFrame(rows), pd.DataFrame(), controls, provenance)


def recovery_figure(sweep: Sweep, name: str = "recovery") -> Figure:
    return drawn(charts_of_sweep(sweep)[name], [sweep.provenance])


def decomposition_figure(split: Decomposition) -> Figure:
    return drawn(charts_of_decomposition(split)["decomposition"], [split.provenance])


def _texts(axes: Any) -> list[str]:
    return [text.get_text().replace("\u202f", " ") for text in axes.texts]


def test_a_heatmap_shows_medians_and_marks_what_leaves_its_range() -> None:
    values = {(0, 0): [0.5, 0.1, 0.6], (0, 1): [-3.0, -2.0, -4.0], (1, 0): [0.0, 0.0, 0.0], (1, 1): [float("nan")] * 3}
    figure = recovery_figure(_sweep(values))
    axes = figure.axes[0]
    shown = np.ma.filled(axes.images[-1].get_array(), np.nan)
    np.testing.assert_array_equal(shown, [[0.5, -3.0], [0.0, np.nan]])
    assert axes.images[-1].norm(0) == 0.5, "white is 0"
    assert (axes.images[-1].norm.vmin, axes.images[-1].norm.vmax) == (-1, 1)
    assert _texts(axes) == ["50 %", "−300 %", "0 %", "n/a"]
    (said,) = headline_of_sweep(_sweep({place: group for place, group in values.items() if group[0] == group[0]}))
    assert said == "Layer 0, head 0 recovers most: 50\u202f% of the KL (z, into-recompute, 3 prompts)."
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("query head", "layer")
    assert any("median recovery" in each.get_ylabel() for each in figure.axes[1:])


def test_the_map_is_white_in_the_middle_and_as_dark_at_both_ends() -> None:
    assert DIVERGING(0.5)[:3] == pytest.approx((1, 1, 1), abs=0.01)
    ends = [0.3 * r + 0.59 * g + 0.11 * b for r, g, b, _ in (DIVERGING(0.0), DIVERGING(1.0))]
    assert abs(ends[0] - ends[1]) < 0.12
    # Blue against orange: the axis that red-green blindness leaves.
    assert DIVERGING(0.0)[2] < DIVERGING(0.0)[0]
    assert DIVERGING(1.0)[2] > DIVERGING(1.0)[0]


def test_layers_show_every_example_their_median_and_what_is_beyond() -> None:
    values = {(0, -1): [0.2, 0.4, 0.6], (1, -1): [0.9, -25.0, 0.8], (2, -1): [-200.0, -300.0, -400.0]}
    sweep = _sweep(values, "single", "resid_post")
    axes = recovery_figure(sweep).axes[0]
    assert axes.get_ylim()[1] > 1.05
    points, medians = (line.get_ydata() for line in axes.lines if len(line.get_ydata()) in (9, 3))
    assert sorted(points) == [-1.05] * 4 + [0.2, 0.4, 0.6, 0.8, 0.9], "what is beyond stands at the edge"
    assert medians.tolist() == [0.4, 0.8, -1.05]
    assert _texts(axes) == ["▼ −3.0e4 %"], "with its number"
    assert headline_of_sweep(sweep)[0].startswith("Layer 1 recovers most: 80\u202f% of the KL")
    together = _sweep(values, "cumulative", "resid_post")
    assert headline_of_sweep(together)[0].startswith("Layers 0 to 1 together recover most: 80\u202f%")


def _decomposition(scale: float = 1.0) -> Decomposition:
    sizes: dict[str, Any] = {
        "total": lambda s: 1e-7 * s,
        "anew": lambda s: {2: 2e-8, 3: 4e-8}.get(s, 0),
        "fresh": lambda s: {1: 5e-8}.get(s, 0),
    }
    most = ["none", "fresh", "anew", "spread"] if scale else ["none"] * 4
    names = ("total", "null", *PARTS, *ANEW, "cache")
    rows = []
    for example, step in itertools.product(range(2), range(4)):
        row = {name: sizes.get(name, lambda s: 0.0)(step) * scale for name in names}
        row |= {f"{name}_l2": row[name] for name in names} | {f"null_{name}_l2": 0.5 for name in ("fresh", "anew", "cache")}
        rows.append({"example": example, "step": step, "most": most[step], "share": 1.0, **row, "total_l2": step * scale})
    layers = [{**row, "layer": layer} for row in rows for layer in range(3)]
    about = {"suffix": 8, "paths": {"cached": "cached", "recompute": "recompute"}, **PROVENANCE}
    return Decomposition(pd.DataFrame(rows), pd.DataFrame(layers), about)


def test_exact_zeros_of_the_split_stand_in_their_own_strip() -> None:
    figure = decomposition_figure(_decomposition())
    above, below = figure.axes[:2]
    lines = {line.get_label(): line.get_ydata() for line in above.lines if not line.get_label().startswith("_")}
    null = next(y for label, y in lines.items() if label.startswith("null"))
    total = next(y for label, y in lines.items() if label.startswith("total"))
    np.testing.assert_allclose(total[1:], [1e-7, 2e-7, 3e-7])
    assert total[0] == null[0]
    assert (null < 1e-8).all()
    heights = above.transAxes.inverted().transform(above.transData.transform([(0, y) for y in (0.0, 1e-7)]))[:, 1]
    assert 0 < heights[0] < heights[1] - 0.05, "it is seen, below the smallest number"
    points = np.concatenate([line.get_ydata() for line in above.lines if line.get_alpha() == 0.35])
    assert (points >= 0).all(), "every example's zeros stand in the strip too"
    assert (points == null[0]).sum() == 2 * (1 + 2 + 3 + 4 + 4 + 4)
    assert {label.partition(":")[0] for label in lines} == {"total", "fresh", "alone", "anew", "kept", "null"}
    figure.canvas.draw()
    assert "exactly 0" in [label.get_text() for label in above.get_yticklabels()]
    assert "nats" in above.get_ylabel()
    assert below.get_xlabel() == "layer"
    # Step 1: fresh; step 2: anew; at step 3 no part is as long as the others together.
    first, second = headline_of_decomposition(_decomposition())
    assert first == (
        "The logits differ at 6 of 6 decode steps of 2 prompts. Most of the difference comes from this step's row, computed alone "
        "(fresh), at 2; K and V of old rows, remade by recompute (anew), at 2."
    )
    assert second == (
        "Computing rows alone, as a cache does, makes no difference at 4 of the 6 steps, and no more than its null control at 2 more."
    )
    found = "\n".join(lines_of(findings_of(rows_of_decomposition(_decomposition()))))
    assert re.search(r"fresh: mean L2 of the logits 1.7\W*×\W*10⁻⁸ \(n = 6 steps, null 0.5\)", found)
    assert "most of the difference at 2 steps; no cache makes it" in found
    assert PARTS["alone"] not in found, "a part that is not there"
