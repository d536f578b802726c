"""The figures of patching: they show the numbers of the tables, zeros and what leaves the range included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from kvinterp.errors import InputError
from kvinterp.patching import Decomposition, Sweep
from kvinterp.report.decomposition import decomposition_figure
from kvinterp.report.recovery import DIVERGING, recovery_figure, step_figure, sweep_figures
from kvinterp.report.style import save
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
            "d_before": 1e-7,
            "d_after": 1e-7 * (1 - value),
        }
        for (layer, head), group in values.items()
        for example, value in enumerate(group)
    ]
    controls = pd.DataFrame([{"control": name, "recovery": share} for name, share in (("self", 0.0), ("floor", 1.0))])
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


def _title(axes: Any) -> str:
    return axes.get_title(loc="left").replace("\n", " ").replace("\u202f", " ")


def _texts(axes: Any) -> list[str]:
    return [text.get_text().replace("\u202f", " ") for text in axes.texts]


def test_a_heatmap_shows_medians_and_marks_what_leaves_its_range() -> None:
    values = {(0, 0): [0.5, 0.1, 0.6], (0, 1): [-3.0, -2.0, -4.0], (1, 0): [0.0, 0.0, 0.0], (1, 1): [float("nan")] * 3}
    figure = recovery_figure(_sweep(values))
    axes = figure.axes[0]
    shown = np.ma.filled(axes.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(shown, [[0.5, -3.0], [0.0, np.nan]])
    assert axes.images[0].norm(0) == 0.5, "white is 0"
    assert (axes.images[0].norm.vmin, axes.images[0].norm.vmax) == (-1, 1)
    assert _texts(axes) == ["50 %", "−300 %▼", "0 %", "n/a"]
    title = _title(axes)
    assert "layer 0, head 0 recovers most, median 50 %" in title
    assert "▼ below −100 %" in title
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("query head", "layer")
    assert "median recovery" in figure.axes[1].get_ylabel() + figure.axes[2].get_ylabel()


def test_kv_heads_are_called_so() -> None:
    assert recovery_figure(_sweep({(0, 0): [0.5]}, "kv-heads", "kv")).axes[0].get_xlabel() == "KV head"


def test_the_map_is_white_in_the_middle_and_as_dark_at_both_ends() -> None:
    assert DIVERGING(0.5)[:3] == pytest.approx((1, 1, 1), abs=0.01)
    ends = [0.3 * r + 0.59 * g + 0.11 * b for r, g, b, _ in (DIVERGING(0.0), DIVERGING(1.0))]
    assert abs(ends[0] - ends[1]) < 0.12
    # Blue against orange: the axis that red-green blindness leaves.
    assert DIVERGING(0.0)[2] < DIVERGING(0.0)[0]
    assert DIVERGING(1.0)[2] > DIVERGING(1.0)[0]


def test_many_heads_are_marked_by_sign_alone() -> None:
    values = {(layer, head): [-0.5 if head % 2 else 0.5] for layer in range(12) for head in range(12)}
    texts = _texts(recovery_figure(_sweep(values)).axes[0])
    assert texts.count("−") == 72
    assert texts.count("") == 72


def test_layers_show_every_example_their_median_and_what_is_beyond() -> None:
    values = {(0, -1): [0.2, 0.4, 0.6], (1, -1): [0.9, -25.0, 0.8], (2, -1): [-200.0, -300.0, -400.0]}
    figure = recovery_figure(_sweep(values, "single", "resid_post"))
    axes = figure.axes[0]
    assert axes.get_ylim() == (-1.15, 1.15)
    points = np.concatenate([line.get_ydata() for line in axes.lines if line.get_marker() == "o"])
    assert sorted(points) == [0.2, 0.4, 0.6, 0.8, 0.9]
    medians = [float(line.get_ydata()[0]) for line in axes.lines if line.get_marker() == "_"]
    assert medians == [0.4, 0.8]
    assert "▼ 1: −2500 %" in _texts(axes)
    assert "−3.0e4 %" in _texts(axes)
    figure.canvas.draw()
    assert next(label.get_text() for label in figure.axes[1].get_xticklabels()).startswith("own tensors")
    assert "layer 1 recovers most, median 80 %" in _title(axes)


def test_blocks_are_labelled_by_their_positions() -> None:
    sweep = _sweep({(-1, 0): [0.1], (-1, 1): [0.7]}, "blocks", "kv", positions=["0:16", "16:32"])
    figure = recovery_figure(sweep)
    figure.canvas.draw()
    labels = [label.get_text() for label in figure.axes[0].get_xticklabels()]
    assert [label for label in labels if label] == ["0:16", "16:32"]
    assert "block 16:32 recovers most" in _title(figure.axes[0])


def test_steps_become_a_heatmap_of_layer_by_step() -> None:
    nothing = float("nan")
    by_step = {(0, 1): [nothing, nothing], (0, 2): [0.1, 0.3], (1, 1): [nothing, nothing], (1, 2): [1.0, nothing]}
    by_step |= {(0, 3): [-4.0, -2.0], (1, 3): [0.6, 0.8]}
    sweep = _sweep({(0, -1): [0.1], (1, -1): [0.8]}, "single", "kv")
    sweep.steps = pd.DataFrame(
        [
            {"sweep": "single", "layer": layer, "step": step, "example": example, "recovery": value}
            for (layer, step), group in by_step.items()
            for example, value in enumerate(group)
        ]
    )
    figure = step_figure(sweep)
    figure.canvas.draw()
    axes = figure.axes[0]
    shown = np.ma.filled(axes.images[0].get_array(), np.nan)
    np.testing.assert_allclose(shown, [[nothing, 0.2, -3.0], [nothing, 1.0, 0.7]])
    assert _texts(axes) == ["n/a", "20 %", "−300 %▼", "n/a", "100 %", "70 %"]
    assert (axes.get_xlabel(), axes.get_ylabel()) == ("decode step", "layer patched")
    assert [label.get_text() for label in axes.get_xticklabels() if label.get_text()] == ["1", "2", "3"]
    assert "layer 1 recovers half or more at 2 of 2 steps" in _title(axes)
    sweep.steps = sweep.steps[sweep.steps["step"] == 2]
    with pytest.raises(InputError, match="no layer by step to draw"):
        step_figure(sweep)


def test_equal_paths_and_empty_sweeps_are_said() -> None:
    figure = recovery_figure(_sweep({(0, -1): [float("nan")]}, "single", "resid_post"))
    said = _title(figure.axes[0])
    assert "nothing can be recovered" in said
    assert "try another dtype" in said
    assert "split_k(4,float16)" in said
    assert _texts(figure.axes[0]) == ["n/a"]
    poor = recovery_figure(_sweep({(0, -1): [-0.2]}, "single", "resid_post"))
    assert "none recovers" in poor.axes[0].get_title(loc="left")
    empty = _sweep({(0, -1): [0.1]}, "single")
    empty.recovery = empty.recovery.iloc[:0]
    with pytest.raises(InputError, match="no row to draw"):
        recovery_figure(empty)


def _decomposition(scale: float = 1.0) -> Decomposition:
    anew, fresh = {2: 2e-8, 3: 4e-8}, {1: 5e-8}
    parts = {"total": lambda s: 1e-7 * s, "anew": lambda s: anew.get(s, 0), "fresh": lambda s: fresh.get(s, 0)}
    most = ["none", "fresh", "anew", "spread"] if scale else ["none"] * 4
    rows = [
        {
            "example": e,
            "step": s,
            "total_l2": s * scale,
            "most": most[s],
            **dict.fromkeys(("null", "alone", "kept"), 0.0),
            **{name: part(s) * scale for name, part in parts.items()},
        }
        for e in range(2)
        for s in range(4)
    ]
    layers = [{**row, "layer": layer} for row in rows for layer in range(3)]
    return Decomposition(pd.DataFrame(rows), pd.DataFrame(layers), {"suffix": 8, **PROVENANCE})


def test_exact_zeros_of_the_split_stand_in_their_own_strip() -> None:
    figure = decomposition_figure(_decomposition())
    above, below = figure.axes[:2]
    lines = {line.get_label(): line.get_ydata() for line in above.lines if not line.get_label().startswith("_")}
    null = next(y for label, y in lines.items() if label.startswith("null"))
    total = next(y for label, y in lines.items() if label.startswith("total"))
    np.testing.assert_allclose(total[1:], [1e-7, 2e-7, 3e-7])
    assert total[0] == null[0]
    assert (null < 1e-8).all()
    assert (null > 0).all(), "on a logarithmic axis a zero has no height of its own"
    points = np.concatenate([line.get_ydata() for line in above.lines if line.get_alpha() == 0.35])
    assert (points > 0).all(), "every example's zeros stand in the strip too"
    assert (points == null[0]).sum() == 2 * (1 + 2 + 3 + 4 + 4 + 4)
    assert {label.partition(":")[0] for label in lines} == {"total", "fresh", "alone", "anew", "kept", "null"}
    figure.canvas.draw()
    assert "exactly 0" in [label.get_text() for label in above.get_yticklabels()]
    assert "nats" in above.get_ylabel()
    assert below.get_xlabel() == "layer"
    # Step 1: fresh; step 2: anew; at step 3 no part is as long as the others together.
    assert _title(above) == ("More than all other parts together, of 6 steps that differ: fresh at 2, anew at 2; none at 2")
    assert _title(below).startswith("At the median step")


def test_a_split_of_nothing_says_so() -> None:
    figure = decomposition_figure(_decomposition(0.0))
    said = _title(figure.axes[0])
    assert "nothing to split" in said
    assert "try another dtype" in said
    empty = _decomposition()
    empty.steps = empty.steps.iloc[:0]
    with pytest.raises(InputError, match="no step to draw"):
        decomposition_figure(empty)


def test_both_are_saved_with_what_made_them(tmp_path: Path) -> None:
    from PIL import Image

    drawn = sweep_figures(_sweep({(0, 0): [0.5]})) | {"decomposition": decomposition_figure(_decomposition())}
    assert list(drawn) == ["recovery", "decomposition"]
    for name, figure in drawn.items():
        with Image.open(save(figure, tmp_path / "new" / f"{name}.png")) as picture:
            assert PROVENANCE["weights"] in picture.text["Description"]  # type: ignore[attr-defined]
            assert picture.width < 1400
