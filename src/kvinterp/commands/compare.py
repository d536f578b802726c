"""Run a model along two paths on the same prompts and say what differs, step by step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from kvinterp.commands.kit import (
    DRAWN,
    Cell,
    CellResults,
    OfModel,
    Result,
    Rows,
    Tables,
    finding,
    numbered,
    option,
    shared,
)
from kvinterp.common import words
from kvinterp.comparison import PARTS, TABLES, Comparison, compare_each, recordable
from kvinterp.errors import KvinterpError
from kvinterp.models.hook_names import sites_of
from kvinterp.models.inputs import chosen_layers

log = logging.getLogger("kvinterp")


class Compare(OfModel, of="kvinterp.comparison.comparing:compare", without=("continuation",)):
    """How far apart are two paths of one model, at which step, layer, head and cache position?"""

    FILES = ("prompts.jsonl",)
    PARTIAL = "yes"

    prompts: str = shared("prompts")
    protocol: Any = option(among=words.Protocol)
    max_new_tokens: Any = option(min=1)
    seed: Any = option(only=DRAWN)
    record: Any = option()
    layers: Any = option(
        example="0,2,-1",
        only=(
            lambda asked: asked.record != "",
            "no site is recorded; leave it out, or name sites with --record",
        ),
    )
    stop: Any = option(among=words.Stop)
    batch_size: Any = option(decides="nothing", min=1)
    cache_errors: Any = option(
        among=words.CacheErrors,
        only=(
            lambda asked: asked.records_cache(),
            "K and V are not recorded; leave it out, or add kv to --record",
        ),
    )

    def cells(self) -> list[Cell]:
        """A cell a prompt."""
        return [Cell(f"example-{number}", self.compared) for number in range(len(self.prompt_list))]

    def compared(self, keys: Sequence[str], keep: Callable[..., None]) -> None:
        """Compares some of the prompts, and keeps each as its batch is finished."""
        adapter, recorded = self.adapter(), self._recorded()
        for site in filter(adapter.derives, recorded["record"]):
            log.info(
                "%s is derived beside attention %r, which runs as it is and shows none",
                site,
                adapter.facts.attention,
            )
        for site, reason in recorded.pop("left_out").items():
            log.info("%s is not recorded: %s", site, reason.split(": ")[0])
        prompts, numbers = self.prompt_list, numbered(keys)

        def kept(number: int, part: Comparison) -> None:
            keep(numbers[number], {name: getattr(part, name) for name in PARTS}, part.provenance)

        chosen = [prompts[number] for number in numbers]
        settings = {**self.arguments(), **recorded}
        compare_each(kept, adapter, chosen, examples=list(numbers), **settings)

    def settings(self) -> dict[str, Any]:
        """With the sites and layers that this model can give."""
        return {**super().settings(), **self._recorded()}

    def reduce(self, results: CellResults) -> Result:
        """The comparison of all prompts that are finished, in the order of their numbers."""
        in_order = (results[key] for _, key in sorted(numbered(results).items()))
        comparison = Comparison.joined(
            Comparison(**tables, provenance=about) for tables, about in in_order
        )
        comparison.prompts = self.prompt_list
        for row in comparison.failures.to_dict("records"):
            log.warning("prompt %s is left out: %s", row["id"], row["message"])
        return comparison

    # What was found -------------------------------------------------------------------------------

    def rows(self, comparison: Any) -> Rows:
        """How far the paths are apart, how often a token flips, and where inside; what could not be
        recorded, and why.
        """
        left_out = (comparison.settings or {}).get("left_out", {})
        lacking = [
            finding("not recorded", float("nan"), note=why, site=site)
            for site, why in left_out.items()
        ]
        return [*comparison.rows(), *lacking]

    def page_parts(self, comparison: Any) -> list[Any]:
        """The texts of both paths."""
        from kvinterp.report.tokens import changes

        return changes({"": comparison})

    def has_page(self, comparison: Any) -> bool:
        """Whether any prompt could be compared."""
        return not comparison.steps.empty

    def sentences(self, comparison: Any) -> list[str]:
        """Where the paths differ."""
        if comparison.steps.empty:
            summary = Path(comparison.folder or "") / "summary.json"
            raise KvinterpError(
                f"none of the {len(comparison.failures)} prompts could be compared; {summary} says why."
            )
        return comparison.where().splitlines()  # type: ignore[no-any-return]

    def result_of(self, tables: Tables, summary: Mapping[str, Any]) -> Result:
        """The comparison of its tables, once they are what a comparison has."""
        if missing := [name for name in TABLES if name not in tables]:
            raise ValueError(f"{missing[0]}.parquet is not among its tables")
        about = summary["provenance"]
        if not isinstance(about, Mapping) or not {"paths", "protocol", "strategy"} <= about.keys():
            raise ValueError("summary.json does not say which paths were compared")
        for column in ("kl", "max_abs_logit"):
            pd.to_numeric(tables["steps"][column])
        return Comparison.read(tables, summary)

    def check(self) -> None:
        """Checks the sites to be recorded too, before a model is loaded."""
        super().check()
        sites_of(self.record or "")

    def records_cache(self) -> bool:
        """Whether K or V is among the sites that were named; where none were it is."""
        return self.record is None or any(
            site.startswith("cache") for site in sites_of(self.record)
        )

    def _recorded(self) -> dict[str, Any]:
        adapter = self.adapter()
        layers = chosen_layers(adapter, self.layers)
        sites, left_out = recordable(adapter, self.record, layers)
        return {"record": list(sites), "layers": list(layers), "left_out": left_out}
