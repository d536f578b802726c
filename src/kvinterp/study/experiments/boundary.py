"""Measure when the first token flips, against how far apart the paths are and how sure the model was.

This is the FP16 paper's decision boundary analysis (arXiv 2604.15409, sections 5.2 and 6.4), on the decodes of
``behaviour``. The paper finds early flips where the mean KL is high, but that mean includes the text after the flip.
Shown beside it are the KL before the flip and in the matched protocol, where both paths get the same tokens;
regressions in which a decode that never flips counts for as long as it lasted; and how well the margin between the two
largest logits predicts which step flips.
"""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from kvinterp.common.numbers import between, counted, number
from kvinterp.common.result import Result
from kvinterp.findings import Chart, Panel, finding, only
from kvinterp.study.behaviour.boundary import FIRST, boundary_tables
from kvinterp.study.cells import joined
from kvinterp.study.experiments.base import Charts, Parts, Rows, Tables
from kvinterp.study.experiments.behaviour import Behaviour
from kvinterp.study.experiments.options import option, withheld


@dataclasses.dataclass(frozen=True)
class Boundary(Behaviour):
    """Do tokens flip early where the paths are far apart, or where the model is not sure?"""

    DRAWN: ClassVar = ("boundary",)
    TABLES: ClassVar = ("boundary", "boundary_flips", "terciles", "hazard", "prediction")

    # The decodes are those of behaviour, under the same keys; its controls are not asked for.
    controls: int = withheld(0)
    above: int = option(
        9, "The paper's second restriction: count only flips after this step; its step 8 is 9 here.", min=FIRST
    )

    def tables(self, parts: Parts) -> Tables:
        """What the decodes say of their flips."""
        decodes = joined({key: each for key, each in parts.items() if "decodes" in each[0]})
        return boundary_tables(decodes["decodes"], decodes["steps"], self.above)

    # What was found ----------------------------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How well the margin tells a flip, and why the paper's correlation needs no cause."""
        table = result.tables["prediction"]
        areas = table["auc"].dropna()
        flips = f"{counted(len(result.tables['boundary_flips']), 'decode')} flip a token"
        if areas.empty:
            return [f"{flips}: no margin tells anything of flips."]
        area = between([float(value) for value in areas])
        return [
            f"{flips}. A small margin tells the step of a flip from others with an area under the curve of {area}.",
            "An early flip leaves more steps of two texts, so that its free KL is higher by counting alone.",
        ]

    def rows(self, tables: Tables) -> Rows:
        """How the step of the flip goes with each KL, how well the margin tells a flip, and how many are foretold."""
        rows: Rows = []
        for row in tables["boundary"].to_dict("records"):
            if row["quantity"] in QUANTITIES and row["method"] in METHODS:
                what = f"{METHODS[row['method']]} of flip step and {QUANTITIES[row['quantity']]}"
                rows.append(finding(what, row["value"], (row["low"], row["high"]), row["n"], "flips", p=row["p"], note=row["why"],
                                    model=row["model"], strategy=row["strategy"]))  # fmt: skip
        for row in tables["terciles"].dropna(subset=["ratio"]).to_dict("records"):
            if row["quantity"] in QUANTITIES:
                what = f"{QUANTITIES[row['quantity']]}, the earliest third of flips over the latest"
                rows.append(finding(what, row["ratio"], (row["low"], row["high"]), row.get("n", 0), "flips", "times",
                                    model=row["model"], strategy=row["strategy"]))  # fmt: skip
        for row in tables["prediction"].to_dict("records"):
            labels = {"model": row["model"], "strategy": row["strategy"]}
            rows.append(finding("steps that are a first flip", row["flips"] / max(row["steps"], 1), n=row["steps"], unit="steps",
                                measure="%", **labels))  # fmt: skip
            if not row["flips"]:
                continue
            hazard = only(tables["hazard"], **labels, margin="of the step").iloc[0]
            rows += [
                finding("median margin at a flip", row["margin_at_flip"], n=row["flips"], unit="flips", measure="logits",
                        note=f"{number(row['margin_elsewhere'])} elsewhere", **labels),
                finding("area under the curve of flips by margin", row["auc"], (row["auc_low"], row["auc_high"]), row["n"],
                        "examples", **labels),
                finding("odds of a flip, a logit more of margin", hazard["hr"], (hazard["low"], hazard["high"]), row["n"],
                        "examples", "times", note=hazard["why"], **labels),
            ]  # fmt: skip
            # Of drawn tokens another boundary decides than that of the two highest logits.
            if row["strategy"] == "greedy":
                rows.append(finding("first flips foretold from margin and logit noise", row["foretold"], n=row["n"],
                                    unit="examples", note=f"{row['flips']} are counted", **labels))  # fmt: skip
        return rows

    def charts(self, result: Result) -> Charts:
        """The step of the first flip against the mean KL."""
        tables, notes, charts = result.tables, self.notes(result), {}
        if len(flips := tables["boundary_flips"]):
            long = (
                flips.reset_index(drop=True)
                .melt(["flip_index", "model"], list(TITLES), "quantity", "kl")
                .dropna(subset=["kl"])
            )
            charts["boundary_flips"] = Chart("When a token flips, and how far apart the paths are", [
                Panel(long, "flip_index", "kl", "points", color="model", facet="quantity", titles=TITLES,
                      label=f"mean KL (nats) of {len(flips)} decodes", xlabel="step of the first flipped token"),
            ], notes)  # fmt: skip
        return charts


TITLES = {
    "mean_kl": "free, all steps",
    "mean_kl_before_flip": "free, up to the flip",
    "matched_mean_kl": "matched, all steps",
}
QUANTITIES = {"mean_kl": "the free KL", "mean_kl_before_flip": "the KL up to the flip", "matched_mean_kl": "the matched KL"}
METHODS = {"pearson": "Pearson's correlation", "partial": "correlation, the smallest margin held constant,"}
