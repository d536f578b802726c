"""The figures of a comparison, drawn from its tidy tables alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure

from kvinterp.comparison import Comparison
from kvinterp.study.findings import Chart
from kvinterp.study.findings.of_comparison import NAMES as FIGURES
from kvinterp.study.findings.of_comparison import charts_of_comparisons, ladder_of_comparisons
from kvinterp.study.report.charts import drawn

Labelled = Mapping[str, Comparison]


def figures(comparisons: Labelled) -> dict[str, Figure]:
    """One figure of each kind that the tables can give, by the names in :data:`FIGURES`.

    Args:
        comparisons: Comparisons of one model by what tells them apart; all share the figures of KL and drift, the first
            gives those of attention and of K and V.
    """
    provenances = [one.provenance for one in comparisons.values()]
    return {name: drawn(chart, provenances) for name, chart in charts_of_comparisons(comparisons).items()}


def figure_named(name: str, comparisons: Labelled) -> Figure:
    """The figure of one of the names in :data:`FIGURES`."""
    return drawn(charts_of_comparisons(comparisons)[name], [one.provenance for one in comparisons.values()])


def overview(kl: Labelled, drift: Labelled, attention: Labelled, kv: Labelled) -> Figure:
    """The four figures in one, for a page that has room for one picture: of each what it shows, by what tells them apart."""
    given = dict(zip(FIGURES, (kl, drift, attention, kv), strict=False))
    charts = [charts_of_comparisons(lines)[name] for name, lines in given.items()]
    panels = [panel if panel.facet else dataclasses.replace(panel, table=panel.table.assign(shown=chart.title), facet="shown")
              for chart in charts for panel in chart.panels]  # fmt: skip
    provenances = [one.provenance for lines in given.values() for one in lines.values()]
    return drawn(Chart("Two executions of one computation", panels), provenances)


def precision_ladder(rungs: Mapping[str, Sequence[Comparison]]) -> Figure:
    """Largest logit difference by dtype, with each dtype's unit roundoff beside it.

    Args:
        rungs: For each model its comparisons, one a dtype, on the same prompts.
    """
    return drawn(ladder_of_comparisons(rungs), [one.provenance for group in rungs.values() for one in group])
