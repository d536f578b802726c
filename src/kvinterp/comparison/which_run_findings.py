"""What the run that wrote a text and its recomputation are found to differ by: sentences, rows and
the figure of :class:`kvinterp.comparison.which_run.WhichRun`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pandas as pd

from kvinterp import metrics
from kvinterp.common.numbers import counted, number
from kvinterp.findings import Chart, Finding, Panel, finding, median_of

if TYPE_CHECKING:
    from kvinterp.comparison.which_run import WhichRun


def headline_of_runs(result: WhichRun) -> list[str]:
    """How far the run that wrote the texts is from its recomputation, beside the null, and what
    changes for a reader.
    """
    streams = result.distances.query("site == 'resid_post'")
    written, prompt = (streams[streams["part"] == part] for part in ("generated", "prompt"))
    if written.empty:
        return ["No text was written: nothing was fed behind a prompt."]
    size, null = written["relative_l2"].median(), written["null"].median()
    beside = (
        f"{number(size / null)} times the null, {number(null)}" if null else _null_of_0(written)
    )
    said = (
        f"The run that wrote {counted(result.distances['example'].nunique(), 'text')} ({result.provenance['run']}) is not its "
        f"recomputation: residual streams at generated positions differ by {number(size)} of their norm (median; {beside}), at "
        f"prompt positions by {number(prompt['relative_l2'].median())}."
    )
    if not streams["relative_l2"].any():
        said = "The run that wrote the texts and its recomputation have the same residual streams, bit for bit."
    table = (
        result.readouts.query("part == 'generated'")
        .groupby("readout", sort=False)[["changed", "null"]]
        .mean()
    )
    shares = "; ".join(
        f"{name} {_share(row.changed)} (null {_share(row.null)})" for name, row in table.iterrows()
    )
    return [said, f"What changes at a generated position: {shares}."]


def _null_of_0(rows: pd.DataFrame) -> str:
    """Says what a null whose median is 0 is, and no more."""
    if rows["null"].isna().all():
        return "no null: the texts fill the context"
    count = counted(len(rows[["example", "position"]].drop_duplicates()), "position")
    if rows["null"].any():
        return (
            f"the null's median over {count} is exactly 0, its largest {number(rows['null'].max())}"
        )
    return f"the null is exactly 0: two recomputations have the same bits at all {count}"


def _share(share: float) -> str:
    return f"{100 * share:.3g}%"


def rows_of_runs(result: WhichRun) -> Iterator[Finding]:
    """The distance of each site and part, and each readout over all layers and in the layer where
    it changes most.
    """
    for (site, part), table in result.distances.groupby(["site", "part"], sort=False):
        # The null of the same kind: the median over texts of their means.
        null = table.groupby("example")["null"].mean().median()
        yield median_of(
            "mean distance of a text from its recomputation, median of texts", table["relative_l2"], table["example"],
            null=null, unit="texts", measure="of the norm", site=site, part=part,
        )  # fmt: skip
    written = result.readouts.query("part == 'generated'")
    for readout, table in written.groupby("readout", sort=False):
        mean = metrics.mean_of(table["changed"], table["example"])
        worst = table.groupby("layer")["changed"].mean()
        note = f"most in layer {worst.idxmax()}, {_share(worst.max())}" if worst.max() else ""
        yield finding(
            "share that differs at a generated position", mean.effect, (mean.low, mean.high), table["example"].nunique(),
            "texts", "%", null=table["null"].mean(), note=note, readout=readout,
        )  # fmt: skip


def charts_of_runs(result: WhichRun) -> dict[str, Chart]:
    """Distance and readouts by layer, each beside its null."""
    keys = ["site", "layer"]
    medians = result.distances.groupby([*keys, "part"], as_index=False)[
        ["relative_l2", "null"]
    ].median()
    nulls = medians.query("part == 'generated'").assign(
        relative_l2=lambda table: table["null"], part="null"
    )
    distances = pd.concat([medians, nulls], ignore_index=True)
    means = result.overview().melt(["readout", "layer"], ["changed", "null"], "run", "share")
    shares = means.groupby(["readout", "layer", "run"], as_index=False)["share"].mean()
    panels = [
        Panel(distances, "layer", "relative_l2", "line", color="part", facet="site", label="distance / norm\n(median)"),
        Panel(shares, "layer", "share", "line", color="run", facet="readout", label="share that differs\n(mean)",
              names={"changed": "generated", "null": "null"}),
    ]  # fmt: skip
    return {"which_run": Chart("The run that wrote the text, beside its recomputation", panels)}
