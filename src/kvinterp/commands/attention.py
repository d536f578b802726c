"""Show the attention of two paths at one step side by side, head by head, in circuitsvis.

With ``--generated`` it is that of a whole text as ``generate`` wrote it, beside a forward over the
finished text. ``attention.html`` holds every head three times (each path, and the difference) and
needs nothing else: it works offline.
"""

from __future__ import annotations

from typing import Any

from kvinterp.commands.kit import (
    Cell,
    CellResult,
    CellResults,
    Chart,
    Charts,
    OfModel,
    Panel,
    Result,
    Rows,
    finding_from,
    number,
    option,
)
from kvinterp.recording import generated
from kvinterp.report.attention import BOTH_RUNS, attention_comparison, finding_of

PAGE = "attention.html"
_TWO_PATHS = (
    lambda asked: asked.generated is None,
    "a generation is shown beside its recomputation; leave it out",
)


class Attention(
    OfModel,
    of="kvinterp.report.attention:attention_comparison",
    without=("source", "other", "heads", "example", "tokens", "positions", "cells", "fit"),
):
    """Which heads attend elsewhere on the other path?"""

    FILES = (PAGE,)

    prompts: str = option(
        "arithmetic:1", "A text, or a file or generator of prompts, of which the first is shown."
    )
    generated: int | None = option(
        None,
        "Show the attention of a whole generation of so many tokens, beside a forward over the finished text.",
        min=2,
    )
    step: Any = option(4, min=0, only=_TWO_PATHS)
    layers: Any = option(example="0,2,-1")
    a: Any = option(only=_TWO_PATHS)
    b: Any = option(only=_TWO_PATHS)
    most: Any = option()

    def cells(self) -> list[Cell]:
        """One cell: a page is of one prompt and step."""
        return [Cell("page", self.compared)]

    def compared(self) -> CellResult:
        """The heads of one prompt, and the page that shows them."""
        adapter, prompt = self.adapter(), self.prompt_list[0]
        if self.generated is None:
            shown = attention_comparison(adapter, prompt, **self.arguments())
        else:
            (text,) = generated(
                adapter, prompt, "pattern", self.layers, max_new_tokens=self.generated
            )
            shown = attention_comparison(text, most=self.most)
        return {"heads": shown.heads}, {"page": shown.page.html(), "step": shown.page.step}

    def reduce(self, results: CellResults) -> Result:
        """The table of heads, and the page beside it."""
        ((tables, about),) = results.values()
        return Result(
            tables, {"provenance": self.provenances(), "step": about["step"]}, {PAGE: about["page"]}
        )

    def headline(self, result: Result) -> list[str]:
        """How many heads differ, and which most."""
        return [f"{finding_of(result.tables['heads'], *self._shown(result))} {PAGE} shows them."]

    def _shown(self, result: Result) -> tuple[int, str, str]:
        """The step, and what stands beside what."""
        step = result.contents()[1].get("step", self.step)
        return step, *((self.a, self.b) if self.generated is None else BOTH_RUNS)

    def rows(self, result: Result) -> Rows:
        """The heads with the largest KL."""
        return [
            finding_from(row, "attention KL of the newest row", "kl", ("layer", "head"), measure="nats",
                    note=f"largest row {number(row['largest_row_kl'])} at position {row['largest_row']}")
            for row in result.tables["heads"].query("largest_row_kl > 0").head(8).to_dict("records")
        ]  # fmt: skip

    def charts(self, result: Result) -> Charts:
        """The KL of every head."""
        label = "KL of the newest row (nats);\nblank: exactly 0"
        panel = Panel(
            result.tables["heads"], "head", "layer", "map", "kl", xlabel="query head", label=label
        )
        step, a, b = self._shown(result)
        return {"attention": Chart(f"Attention of {a} against {b} at step {step}", [panel])}
