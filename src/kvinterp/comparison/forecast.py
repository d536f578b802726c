"""What a comparison will take, said before it starts."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

from kvinterp.comparison.tables import Differences
from kvinterp.models.adapter import ModelInfo
from kvinterp.models.sites import CACHE_SITES, RESIDUAL_SITES

log = logging.getLogger("kvinterp")

MUCH = 2**30
"""Bytes from which on it is said as a warning."""
COPIES = 4.5
"""Blocks, columns, tables and the examples' own tables are there at once for a moment: 1.5 million rows of kv, whose numbers
alone are 123 MB, were seen to raise a process's peak by 558 MB."""


@dataclasses.dataclass(frozen=True)
class Forecast:
    """The most rows that the tables of a comparison can get, and what they take.

    Attributes:
        prompts: How many are compared.
        steps: Most steps of a prompt.
        rows: By the name of the table.
    """

    prompts: int
    steps: int
    rows: Mapping[str, int]

    @property
    def bytes(self) -> int:
        """Memory of the tables: 8 bytes a number, and their parts while they are joined."""
        columns = Differences.columns()
        return int(COPIES * sum(8 * len(columns[name]) * count for name, count in self.rows.items()))

    def __str__(self) -> str:
        """The line that is said."""
        whole = f", of which the whole kv {self.rows['kv']:,}" * bool(self.rows["kv"])
        return (
            f"comparing {self.prompts} prompt{'s' * (self.prompts != 1)} at up to {self.steps} steps: tables of at most "
            f"{sum(self.rows.values()):,} rows{whole}, about {_size(float(self.bytes))} of memory"
        )


def forecast(
    facts: ModelInfo, sites: Sequence[str], layers: int, prompts: Sequence[int], steps: int, cache_errors: str
) -> Forecast:
    """What a comparison will take at most.

    Args:
        facts: The model's.
        sites: What is compared.
        layers: How many layers are.
        prompts: Tokens of each prompt.
        steps: Most steps of a prompt.
        cache_errors: One of :data:`kvinterp.comparison.cache_errors.CACHE_ERRORS`.
    """
    count = len(prompts) * steps
    vectors = layers * facts.kv_heads * len([site for site in sites if site in CACHE_SITES])
    # Step s reads the prompt and s tokens; after a flip positions are counted apart from before it.
    pairs = sum(steps * tokens + steps * (steps - 1) // 2 for tokens in prompts)
    rows = {
        "steps": count,
        "layers": count * layers * len([site for site in sites if site in RESIDUAL_SITES]),
        "heads": count * layers * facts.query_heads * ("pattern" in sites),
        "routing": count * layers * ("experts" in sites),
        "kv_steps": count * vectors,
        "kv_positions": 2 * vectors * sum(tokens + steps - 1 for tokens in prompts),
        "kv": pairs * vectors * (cache_errors == "whole"),
    }
    return Forecast(len(prompts), steps, rows)


def say(found: Forecast) -> None:
    """Logs it, as a warning where it is much."""
    much = found.bytes >= MUCH
    advice = "; cache_errors='aggregated' is linear in the steps" * bool(found.rows["kv"]) * much
    log.log(logging.WARNING if much else logging.INFO, "%s%s", found, advice)


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
