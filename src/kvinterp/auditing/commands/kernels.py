"""Measure which of a model's operations change their bits with the number of rows, the number of
keys or the batch.
"""

from __future__ import annotations

from typing import Any

from kvinterp.auditing.shape_dependence import KernelsTable, kernels_table
from kvinterp.commands.kit import (
    Cell,
    CellResult,
    CellResults,
    Chart,
    Charts,
    Experiment,
    Panel,
    Result,
    Rows,
    argument,
    finding_from,
    option,
    shared,
)


class Kernels(
    Experiment, of="kvinterp.auditing.shape_dependence:kernels_table", without=("length",)
):
    """Which operations depend on the shape they are called with?"""

    RESULT = KernelsTable

    model: str = argument("zoo:mistral-mini", "zoo:NAME, a checkpoint folder or a hub id.")
    random_init: bool = shared("random_init")
    kind: str = shared("kind")
    dtype: str = shared("dtype")
    device: str | None = shared("device")
    attention: str | None = shared("attention")
    remote_code: bool = shared("remote_code")
    sizes: Any = option(example="1,2,17,64")

    def cells(self) -> list[Cell]:
        """One cell: the operations are those of one forward."""
        return [Cell("kernels", self.measured)]

    def measured(self) -> CellResult:
        """The kernels table of a model."""
        table = kernels_table(self.adapter(), **self.arguments())
        return table.tables, {"first": table.first, "provenance": table.provenance}

    def model_settings(self, name: str | None = None) -> dict[str, Any]:
        """The model, which may be of a config alone."""
        names = (
            "model",
            "random_init",
            "kind",
            "dtype",
            "seed",
            "device",
            "attention",
            "remote_code",
        )
        return {"loader": "kvinterp.auditing.commands.audit:subject", **self.choices(*names)}

    def reduce(self, results: CellResults) -> Result:
        """The table, and the first operation that differs."""
        tables, about = results["kernels"]
        return KernelsTable(tables["kernels"], about["first"], about["provenance"])

    def headline(self, table_of_kernels: Any) -> list[str]:
        """How many operations depend on the shape they are called with, and where the first of them
        stands.
        """
        first, _, rest = str(table_of_kernels).partition(". ")
        return [f"{first}, with {table_of_kernels.provenance['kernels']} kernels.", rest]

    def rows(self, table_of_kernels: Any) -> Rows:
        """A row an operation and what was varied: those whose bits change first."""
        table = table_of_kernels.summary().sort_values(
            "max_ulp_of_row", ascending=False, kind="stable"
        )
        options: dict[str, Any] = {
            "by": ("operation", "shape", "varied"),
            "unit": "calls",
            "measure": "ULP",
        }
        what = "largest difference, in units of a row's largest number"
        for row in table.to_dict("records"):
            away = f", not with {row['flags_that_fix']}" * bool(row["flags_that_fix"])
            note = (
                "same bits"
                if row["same_bits"]
                else f"other bits from {row['first_size_that_differs']:g} on{away}"
            )
            note += "; a back end that the model does not call" * (row["calls"] == 0)
            yield finding_from(row, what, "max_ulp_of_row", **options, n=row["calls"], note=note)

    def charts(self, table_of_kernels: Any) -> Charts:
        """How far the bits of each operation move, by what was varied."""
        table = table_of_kernels.summary()
        table["line"] = table["operation"] + ", " + table["shape"]
        panel = Panel(
            table,
            "max_ulp_of_row",
            "line",
            "dots",
            color="varied",
            label="ULP of a row's largest number",
        )
        return {"kernels": Chart("How far other sizes move an operation's numbers", [panel])}
