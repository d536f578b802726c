"""Run the FP16 paper's root-cause experiments and one on grouped-query attention: a table and a figure each."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.data import TASKS
from kvinterp.findings import COLUMNS
from kvinterp.study.experiments.accumulation import Accumulation
from kvinterp.study.experiments.choices import handed
from kvinterp.study.experiments.gqa import Gqa
from kvinterp.study.experiments.kit import (
    FEW,
    Charts,
    Finding,
    InputError,
    OfModels,
    Parts,
    Result,
    Rows,
    Tables,
    between,
    load_prompts,
    only,
    option,
    stacked,
)
from kvinterp.study.experiments.kv_write import KvWrite
from kvinterp.study.experiments.ladder import Ladder
from kvinterp.study.experiments.propagation import Propagation

if TYPE_CHECKING:
    from kvinterp.study.cells import Cell


class RootCause(OfModels):
    """Are FP16 sums taken in another order the cause of the divergence?"""

    STEPS = ("ladder_steps",)
    TABLES = (
        "accumulation",
        "propagation",
        "kv_write",
        "ladder",
        "gqa",
    )

    few_prompts: int = option(FEW, "For propagation, kv-write and gqa: how many of the prompts to run.", min=1)
    ladder_prompts: int = option(6, "For ladder: how many of the prompts to run.", min=1)
    ladder_steps: int = option(16, "For ladder: the most tokens to decode per prompt.", min=1)
    seeds: int = option(1, "How many sets of prompts to generate, each with its own seed.", min=1)

    def parts(self, seed: int = 0) -> tuple[OfModels, ...]:
        """The experiments that it runs, on one of its sets of prompts."""
        shared: dict[str, Any] = {field.name: getattr(self, field.name) for field in dataclasses.fields(OfModels)}
        shared["prompts"] = prompts_of_seed(self.prompts, seed)
        own_choices: dict[type[OfModels], dict[str, Any]] = {
            # What is summed there is drawn: it has seeds of its own, and no prompts.
            **({Accumulation: {}} if seed == 0 else {}),
            Propagation: {"most": self.few_prompts},
            KvWrite: {"most": self.few_prompts},
            Ladder: {"most": self.ladder_prompts, "steps": self.ladder_steps},
            Gqa: {"most": self.few_prompts},
        }
        return tuple(handed(kind, shared, choices) for kind, choices in own_choices.items())

    def check(self) -> None:
        """What each of them asks."""
        super().check()
        for seed in range(self.seeds):
            for part in self.parts(seed):
                part.check()

    def cells(self) -> list[Cell]:
        """The cells of all of them."""
        return [
            dataclasses.replace(cell, key=_key(cell.key, seed), told=f"root cause: {cell.told}" * (seed == 0))
            for seed in range(self.seeds)
            for part in self.parts(seed)
            for cell in part.cells()
        ]

    def tables(self, parts: Parts) -> Tables:
        """The tables of all of them, with the seed of the prompts where there are several."""
        tables_of_parts = []
        for seed in range(self.seeds):
            for part in self.parts(seed):
                keys = (_key(cell.key, seed) for cell in part.cells())
                made = {key: parts[key] for key in keys if key in parts}
                tables_of_parts.append({name: self._of_seed(table, seed) for name, table in part.tables(made).items()})
        return stacked(tables_of_parts)

    def _of_seed(self, table: pd.DataFrame, seed: int) -> pd.DataFrame:
        """A table with the seed, and with numbers of prompts that no other seed's have."""
        if self.seeds == 1:
            return table
        numbers = table[table.columns.intersection(["prompt", "example"])] + seed * len(load_prompts(self.prompts))
        return table.assign(**numbers, data_seed=seed)

    # What was found ----------------------------------------------------------------------------------------------------

    def among(self, tables: Tables) -> list[OfModels]:
        """The experiments that have a table."""
        return [part for part in self.parts() if len(tables.get(part.TABLES[0], ()))]

    def headline(self, result: Result) -> list[str]:
        """What the ladder found first: it takes the cause away; then what each other found."""
        first = sorted(self.among(result.tables), key=lambda part: not isinstance(part, Ladder))
        return [line for part in first for line in part.headline(result)]

    def rows(self, result: Result) -> Rows:
        """The findings of all of them; of several sets of prompts, how far they lie apart."""
        rows, estimates = self._rows(result), dict[tuple[Any, ...], list[float]]()
        by_seed = {name: table for name, table in result.tables.items() if "data_seed" in table}
        for seed in sorted({seed for table in by_seed.values() for seed in table["data_seed"]}):
            for row in self._rows(Result({name: only(table, data_seed=seed) for name, table in by_seed.items()})):
                estimates.setdefault(_place(row), []).append(row["estimate"])
        for row in rows:
            if len(of_seeds := estimates.get(_place(row), ())) > 1:
                apart = f"each of {len(of_seeds)} sets of prompts: {between(of_seeds)}"
                row["note"] = "; ".join(filter(None, (apart, row["note"])))
        return rows

    def _rows(self, result: Result) -> list[Finding]:
        return [row for part in self.among(result.tables) for row in part.rows(result) or ()]

    def charts(self, result: Result) -> Charts:
        """Those of all of them."""
        return {name: chart for part in self.among(result.tables) for name, chart in part.charts(result).items()}


def _place(row: Mapping[str, Any]) -> tuple[Any, ...]:
    """What a finding is and what it is of."""
    return tuple((name, value) for name, value in row.items() if name == "finding" or name not in COLUMNS)


def _key(key: str, seed: int) -> str:
    """The key of a cell on the prompts of a seed."""
    return f"{key}-of-{seed}" if seed else key


def prompts_of_seed(prompts: str, seed: int) -> str:
    """The text form of generated prompts, drawn with a seed so much further on.

    Raises:
        InputError: They are not generated, so that there is one set of them.
    """
    if not seed:
        return prompts
    match = re.fullmatch(r"(\w+):(\d+)(?::(\d+))?", prompts.strip())
    if match is None or match[1] not in TASKS:
        raise InputError(
            f"seeds was given with prompts {prompts!r}, of which there is one set: give generated ones such as arithmetic:20."
        )
    name, count, first = match.groups()
    return f"{name}:{count}:{int(first or 0) + seed}"
