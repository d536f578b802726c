"""One path beside several others: a comparison of each pair, and their tables as one, with a column for the pair."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pandas as pd

from kvinterp.common.numbers import models_of
from kvinterp.common.result import Result, signed
from kvinterp.comparison.comparison import PARTS, TABLES, Comparison
from kvinterp.data import Prompt
from kvinterp.errors import unknown


@dataclasses.dataclass(repr=False)
class Comparisons(Result):
    """A path beside several others. Its tables are those of a :class:`Comparison`, with a first column ``pair``, the other path.

    ``found["recompute@float64"]`` is the comparison with that path, and ``for one in found`` goes through all.

    Attributes:
        pairs: The comparisons, of the same prompts under the same choices.
    """

    VERB: ClassVar = "compare-several"

    pairs: Sequence[Comparison]

    def __iter__(self) -> Iterator[Comparison]:
        """The comparison of each pair."""
        return iter(self.pairs)

    def __len__(self) -> int:
        """How many pairs there are."""
        return len(self.pairs)

    def __getitem__(self, b: str) -> Comparison:
        """The comparison with a path, by its text form."""
        named = {pair.provenance["paths"]["b"]: pair for pair in self.pairs}
        if b not in named:
            raise unknown("path that was compared", b, named)
        return named[b]

    def __getattr__(self, name: str) -> pd.DataFrame:
        if name not in PARTS:
            raise AttributeError(f"Comparisons have no {name!r}: their tables are {', '.join(PARTS)}.")
        return self._tables[name]

    def __dir__(self) -> list[str]:
        """The tables too."""
        return [*super().__dir__(), *PARTS]

    @functools.cached_property
    def _tables(self) -> dict[str, pd.DataFrame]:
        return {name: self._joined(name) for name in PARTS}

    def _joined(self, name: str) -> pd.DataFrame:
        parts = [getattr(pair, name).copy(deep=False) for pair in self.pairs]
        for part, pair in zip(parts, self.pairs, strict=True):
            part.insert(0, "pair", pair.provenance["paths"]["b"])
            part.attrs = {}
        return pd.concat(parts, ignore_index=True)

    @property
    def provenance(self) -> dict[str, Any]:
        """What they share; ``paths`` has all."""
        first = self.pairs[0].provenance
        shared = {
            name: first[name] for name in first if all(pair.provenance.get(name) == first[name] for pair in self.pairs)
        }
        return {**shared, "paths": {"a": first["paths"]["a"], "b": [pair.provenance["paths"]["b"] for pair in self.pairs]}}

    @property
    def prompts(self) -> Sequence[Prompt]:
        """The prompts, which all share."""
        return self.pairs[0].prompts

    def __repr__(self) -> str:
        """What they are of, in one line."""
        about = self.provenance
        paths = f"{about['paths']['a']} against {', '.join(about['paths']['b'])}"
        return f"<Comparisons of {models_of([about])}: {paths}, {len(self.steps)} steps of {len(self.pairs[0].examples)} prompts>"

    def where(self) -> str:
        """What :meth:`Comparison.where` says of each pair."""
        return "\n".join(pair.where() for pair in self.pairs)

    def overview(self) -> pd.DataFrame:
        """One row a pair: how many steps differ, how many prompts flip, KL in nats and the largest logit difference."""
        rows = []
        for pair in self.pairs:
            found = pair.summary()
            row = {name: found[name] for name in ("examples", "steps", "bitwise_equal_steps", "mean_kl", "max_abs_logit")}
            flips = int(pair.examples["flip_index"].notna().sum())
            rows.append(
                {"pair": pair.provenance["paths"]["b"], **row, "prompts_that_flip": flips, "failed": len(pair.failures)}
            )
        return pd.DataFrame(rows)

    def written(self) -> tuple[dict[str, pd.DataFrame], dict[str, Any]]:
        """The joined tables, and the summary of each pair."""
        summaries = [pair.written()[1] for pair in self.pairs]
        tables = {name: self._tables[name] for name in TABLES}
        return signed(tables, self.provenance), {
            "pairs": summaries,
            "reading": [pair.where().splitlines()[0] for pair in self.pairs],
            "provenance": self.provenance,
        }

    @classmethod
    def read(cls, tables: Mapping[str, pd.DataFrame], summary: Mapping[str, Any]) -> Comparisons:
        """The comparisons of their tables."""
        pairs = []
        for told in summary["pairs"]:
            b = told["provenance"]["paths"]["b"]
            mine = {
                name: table[table["pair"] == b].drop(columns="pair").reset_index(drop=True)
                for name, table in tables.items()
                if name in TABLES
            }
            pairs.append(Comparison.read(mine, told))
        return cls(pairs)
