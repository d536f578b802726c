"""Measure the error of one dot product against its length (root-cause experiment 1 of the FP16 paper)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.models import dtype_named
from kvinterp.study.experiments.kit import (
    Cell,
    Chart,
    Charts,
    OfModels,
    Panel,
    Result,
    Rows,
    between,
    each,
    median_of,
    only,
)
from kvinterp.study.experiments.options import withheld

MEASURES = {"mean_relative": "the terms' magnitudes", "relative_to_result": "the result"}
"""What an error is relative to."""
WIDTHS = (64, 128, 256)
"""The widths of a head that are measured beside those of the models."""


class Accumulation(OfModels):
    """Does the error of a sum grow with its length?"""

    TABLES = ("accumulation",)

    prompts: str = withheld("")

    def headline(self, result: Result) -> list[str]:
        """How the error of the longest sums is beside that of the shortest."""
        ratios = [row["estimate"] for row in self.rows(result) if row["finding"].endswith("the result")]
        low, high = result.tables["accumulation"]["length"].agg(["min", "max"])
        return [
            f"From {low} to {high} positions the error of a sum of random signs, relative to its result, changes "
            f"{between(ratios)}-fold (medians over seeds)."
        ]

    def rows(self, result: Result) -> Rows:
        """How the error of the value product changes from the shortest length to the longest."""
        values = only(result.tables["accumulation"], product="values")
        low, high = values["length"].agg(["min", "max"])
        rows = []
        for column, to in MEASURES.items():
            what = f"error of a sum of {high} terms over that of {low}, relative to {to}"
            for name, group in values.groupby("accumulate", sort=False):
                by = group.pivot(index="seed", columns="length", values=column)
                rows.append(median_of(what, by[high] / by[low], unit="seeds", measure="times", sum_in=name))
        return rows

    def charts(self, result: Result) -> Charts:
        """Error against length, of scores and of values."""
        table = result.tables["accumulation"]
        table = table[table["head_dim"].isna() | (table["head_dim"] == table["head_dim"].min())]
        means = table.groupby(["product", "accumulate", "length"], sort=False)[list(MEASURES)].mean().reset_index()
        names = {name: f"sums kept in {name}" for name in dict.fromkeys(means["accumulate"])}
        options: dict[str, Any] = {"color": "accumulate", "names": names, "facet": "product", "xscale": "doubling"}
        rows = [
            Panel(
                means, "length", column, label=f"error relative to\n{to}", xlabel="sequence length (positions)", **options
            )
            for column, to in MEASURES.items()
        ]
        return {"root_cause_accumulation": Chart("Error of one sum against its length", rows)}

    def cells(self) -> list[Cell]:
        """One cell: no model runs, their heads' widths are what is summed over."""
        widths = sorted({adapter.facts.head_dim for adapter in self.adapters()} | set(WIDTHS))
        return [Cell("accumulation-0", accumulation_error, {"head_dims": widths}, "sums of growing length")]


def accumulation_error(
    lengths: Sequence[int] = (16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
    head_dims: Sequence[int] = (16, 64, 128, 256),
    accumulate: Sequence[str] = ("float16", "bfloat16", "float32"),
    samples: int = 64,
    seeds: Sequence[int] = range(16),
) -> pd.DataFrame:
    """Root-cause experiment 1: relative error of the dot products of attention, one term added after another, against length.

    The paper reports it flat in the sequence length. Attention has two sums: a score adds over the head's width, which a
    longer sequence does not change, and the value product adds over the positions. And an error is relative to something:
    to the magnitudes that were added, or to their sum, which cancellation makes smaller the more terms there are. The
    operands are the same 16-bit numbers for every accumulator, so that what is measured is the sum's own rounding.

    Args:
        lengths: Numbers of positions.
        head_dims: Widths of a head, over which a score adds.
        accumulate: The dtypes running sums are rounded to.
        samples: Dot products of each seed.
        seeds: Seed the operands, standard normal; attention's weights are the softmax of standard normal scores. The same
            operands are given to every accumulator, and several seeds say how much of a difference is the operands' luck.

    Returns:
        One row a product (scores for every head_dim, values), length, accumulator and seed: terms, mean_relative and
        std_relative (to the sum of the terms' magnitudes), relative_to_result (median), in_unit_roundoffs (of
        mean_relative).
    """
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    sums: list[tuple[str, int, int | None]] = [("scores", length, head_dim) for head_dim in head_dims for length in lengths]
    sums += [("values", length, None) for length in lengths]
    tables = []
    for product, length, head_dim in each(sums, "adding up,", "sum"):
        terms = length if head_dim is None else head_dim
        operands = [torch.randn(2, samples, terms, generator=generator) for generator in generators]
        # Every seed's sums side by side: what is added up one after another is as many terms, not as many seeds.
        a, b = torch.cat(operands, dim=1)
        a = torch.softmax(a, -1) if product == "values" else a
        a, b = a.half().double(), b.half().double()
        exact, size = (a * b).sum(-1), (a * b).abs().sum(-1)
        for name in accumulate:
            dtype: Any = dtype_named(name)
            error = (_added_up(a, b, dtype) - exact).abs()
            relative, to_result = ((error / over).view(-1, samples) for over in (size, exact.abs().clamp(min=1e-12)))
            tables.append(pd.DataFrame({
                "product": product,
                "length": length,
                "head_dim": head_dim,
                "accumulate": name,
                "seed": seeds,
                "terms": terms,
                "mean_relative": relative.mean(1),
                "std_relative": [float(row.std()) for row in relative],
                "relative_to_result": to_result.median(1).values,
                "in_unit_roundoffs": relative.mean(1) / unit_roundoff(dtype),
            }).astype({"head_dim": "Int64"}))  # fmt: skip
    return pd.concat(tables, ignore_index=True)


def _added_up(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(a.shape[0], dtype=dtype)
    for x, y in zip(a.unbind(-1), b.unbind(-1), strict=True):
        # The product of two 16-bit numbers is exact in float64: one rounding for the product, one for the sum.
        total = (total.double() + (x * y).to(dtype).double()).to(dtype)
    return total.double()
