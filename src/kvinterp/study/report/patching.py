"""The figures of patching, for whoever has a sweep or a decomposition in a notebook."""

from __future__ import annotations

from matplotlib.figure import Figure

from kvinterp.errors import InputError
from kvinterp.patching import Decomposition, Sweep
from kvinterp.study.findings.of_patching import charts_of_decomposition, charts_of_sweep
from kvinterp.study.report.charts import drawn


def sweep_figures(sweep: Sweep) -> dict[str, Figure]:
    """The figures ``recovery``, and ``recovery_by_step`` where layers were swept over more than one step.

    Args:
        sweep: What :func:`kvinterp.sweep` returned.

    Raises:
        InputError: The sweep holds no row.
    """
    charts = charts_of_sweep(sweep)
    if not charts:
        raise InputError("the sweep holds no row to draw: give it a prompt that decodes at least one step.")
    return {name: drawn(chart, [sweep.provenance]) for name, chart in charts.items()}


def recovery_figure(sweep: Sweep) -> Figure:
    """Recovery of every patch of a sweep, with its controls: the median over examples, and every example where there is room.

    Args:
        sweep: What :func:`kvinterp.sweep` returned.

    Raises:
        InputError: The sweep holds no row.
    """
    return sweep_figures(sweep)["recovery"]


def step_figure(sweep: Sweep) -> Figure:
    """Median recovery of a sweep over layers as a heatmap of layer by decode step, white at 0.

    Args:
        sweep: What :func:`kvinterp.sweep` returned, over layers and with more than one step counted.

    Raises:
        InputError: The sweep is not over layers, or counts one step only.
    """
    found = sweep_figures(sweep).get("recovery_by_step")
    if found is None:
        raise InputError("the sweep has no layer by step to draw: sweep single or cumulative, with more than one step.")
    return found


def decomposition_figure(decomposition: Decomposition) -> Figure:
    """The parts of the difference by step (KL of the logits) and by layer (residual stream), with the total and the null.

    What is exactly 0 stands in a strip of its own below the logarithmic axis.

    Args:
        decomposition: What :func:`kvinterp.decompose` returned.

    Raises:
        InputError: It holds no step.
    """
    for chart in charts_of_decomposition(decomposition).values():
        return drawn(chart, [decomposition.provenance])
    raise InputError("the decomposition holds no step to draw: give it a prompt that decodes at least one.")
