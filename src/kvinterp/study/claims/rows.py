"""Shared ways to read out of a study's tables what a claim is about: one number a row, and the unit that the row belongs to.

What is read is data: a table, an expression of its columns, and a condition on its rows, both as pandas' ``eval`` and ``query``
have them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, TypeAlias

import numpy as np
import pandas as pd

from kvinterp.study.claims.base import Found, NotTestableError, Tables, check

Rows: TypeAlias = Callable[[pd.DataFrame], pd.DataFrame]
"""Leaves some of the rows that it is given."""
MATCHED, FREE = "protocol == 'matched'", "protocol == 'free'"
BARE = "relative_l2_without_top3"
"""What is left of a drift beside the stream's size and its three largest dimensions."""
UNITS = ("id", "example", "prompt", "text", "seed")
"""The first of these that a table has names its units: what all models, strategies, seeds and steps of a prompt share."""


def rows(tables: Tables, name: str, where: str = "") -> pd.DataFrame:
    """The rows of a table that meet a condition, with the ``unit`` of each; of decodes with their ``condition`` too.

    Raises:
        NotTestableError: There are none.
    """
    found = tables.get(name)
    if found is None:
        raise NotTestableError(f"there is no table {name}")
    found = found.query(where, engine="python") if where else found
    check(len(found), f"table {name} has no row" + f" with {where}" * bool(where))
    if name == "decodes":
        found = found.assign(condition=found["model"] + " " + found["strategy"])
    return found.assign(unit=found.get(next((column for column in UNITS if column in found), "")))


@dataclasses.dataclass(frozen=True)
class Column:
    """A number of each row, and the units that the rows belong to.

    Attributes:
        table: Of which table.
        value: An expression of its columns; rows where it is no finite number are left out.
        where: Which rows.
        of: Functions that leave some of these rows, one after the other.
        within: Columns; rows that are alike in them become one number.
        how: Which number: ``mean``, ``median``, ``max``.
    """

    table: str
    value: str
    where: str = ""
    of: tuple[Rows, ...] = ()
    within: tuple[str, ...] = ()
    how: str = "mean"

    def rows(self, tables: Tables) -> pd.DataFrame:
        """The rows that count, with the number of each as ``value``.

        Raises:
            NotTestableError: There are none.
        """
        found = rows(tables, self.table, self.where)
        found = found.assign(value=found.eval(self.value, engine="python").astype(float))
        for leave in self.of:
            found = leave(found)
        found = found[np.isfinite(found["value"])]
        check(len(found), f"no row of table {self.table} has a number of {self.value}")
        return found.groupby(list(self.within))["value"].agg(self.how).reset_index() if self.within else found

    def wide(self, tables: Tables, *across: str) -> pd.DataFrame:
        """The numbers, a column for each value of some of ``within``."""
        return self.rows(tables).set_index(list(self.within))["value"].unstack(list(across))

    def __call__(self, tables: Tables) -> tuple[pd.Series, pd.Series]:
        """The numbers, and the unit of each."""
        found = self.rows(tables)
        return found["value"], found["unit"]

    def mean(self, tables: Tables) -> float:
        """The mean of the numbers."""
        return float(self.rows(tables)["value"].mean())

    def median(self, tables: Tables) -> float:
        """Their median."""
        return float(self.rows(tables)["value"].median())

    def geometric_mean(self, tables: Tables) -> float:
        """The geometric mean of those above 0."""
        values = self.rows(tables)["value"]
        return float(np.exp(np.log(values[values > 0]).mean()))

    def papers_mean(self, tables: Tables) -> float:
        """The mean of numbers of decodes as the FP16 paper counts these: greedy ones as often as the others have seeds."""
        found = self.rows(tables)
        return float(np.average(found["value"], weights=greedy_copies(found)))


FLIPS = Column("decodes", "flip_index.notna()", MATCHED)
GREEDY_FLIPS = Column("decodes", "flip_index.notna()", f"{MATCHED} and strategy == 'greedy'")
"""Whether a token flips in a decode."""


@dataclasses.dataclass(frozen=True)
class Pair:
    """Two numbers of whatever has both."""

    above: Column
    below: Column
    on: tuple[str, ...] = dataclasses.field(default=("model", "unit"), kw_only=True)

    def rows(self, tables: Tables) -> pd.DataFrame:
        """What has both, each number as ``value_above`` and ``value_below``."""
        both = [each.rows(tables)[[*self.on, "value"]] for each in (self.above, self.below)]
        return both[0].merge(both[1], on=list(self.on), suffixes=("_above", "_below"))

    def __call__(self, tables: Tables) -> tuple[pd.Series, pd.Series, pd.Series]:
        """Both numbers, and the unit of each pair."""
        found = self.rows(tables)
        return found["value_above"], found["value_below"], found["unit"]

    def quotients(self, tables: Tables) -> tuple[pd.Series, pd.Series]:
        """How many times larger the first is, and the unit of each pair."""
        above, below, units = self(tables)
        return above / below, units

    def median(self, tables: Tables) -> float:
        """The median of how many times larger."""
        return float(self.quotients(tables)[0].median())

    def of_means(self, tables: Tables) -> float:
        """The mean of the first as a multiple of that of the second, over all rows of each."""
        return float(np.divide(self.above.mean(tables), self.below.mean(tables)))


def greedy_copies(decodes: pd.DataFrame) -> pd.Series:
    """How often the FP16 paper counts each decode: a greedy one as often as there are seeds of the others."""
    greedy = decodes["strategy"] == "greedy"
    return greedy.map({True: max(decodes.loc[~greedy, "seed"].nunique(), 1), False: 1})


def flipped(found: pd.DataFrame) -> pd.DataFrame:
    """The decodes in which a token flips."""
    check(found["flip_index"].notna().any(), "no token flips")
    return found[found["flip_index"].notna()]


def differing(found: pd.DataFrame) -> pd.DataFrame:
    """The rows whose number is above 0."""
    check((found["value"] > 0).any(), "the paths are bitwise equal: there is nothing that could be smaller")
    return found[found["value"] > 0]


def of_gemma(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of Gemma models."""
    gemma = found["model"].str.lower().str.contains("gemma")
    check(gemma.any(), "it is of Gemma models, and there is none")
    return found[gemma]


def last_layer(found: pd.DataFrame, back: int = 0) -> pd.DataFrame:
    """The rows of each model's last layer, or of one that lies so many before it."""
    return found[found["layer"] == found.groupby("model")["layer"].transform("max") - back]


def interval(found: pd.DataFrame, value: str) -> Found:
    """The mean of several numbers that have intervals, without a verdict.

    Its interval has the mean ends of theirs: no shorter than it should be, however the numbers depend on each other. Its n is the
    smallest of theirs.

    Raises:
        NotTestableError: No row has all three.
    """
    known = found.dropna(subset=[value, "low", "high"])
    check(len(known), f"no row has a number of {value}, low and high")
    middle, low, high = known[[value, "low", "high"]].mean()
    return Found(middle, low, high, known["n"].min())


# Of one table ----------------------------------------------------------------------------------------------------------


def rung(dtype: str, value: str, kernels: str = "native", *of: Rows) -> Column:
    """A number of each model and prompt on a rung of the ladder."""
    return Column("ladder", value, f"failed == False and {MATCHED} and dtype == {dtype!r} and kernels == {kernels!r}", of)


def orders(column: str) -> Pair:
    """What float16 and float32 make of a number, where the paths differ in float16."""
    return Pair(rung("float16", column, "native", differing), rung("float32", column))


def over_the_floor(tables: Tables) -> float:
    """The paper's orders of magnitude: its free-running mean KL over the float32 floor."""
    floor = orders("mean_kl").rows(tables)["value_below"].mean()
    return float(np.log10(Column("decodes", "mean_kl", FREE).mean(tables) / floor))


def patched(sweep: str, protocol: str, *of: Rows, site: str = "resid_post", **more: Any) -> Column:
    """Recoveries of a site; the residual stream is patched into the recompute path, K and V into the cached one."""
    direction = "into-cached" if site == "kv" else "into-recompute"
    where = f"site == {site!r} and sweep == {sweep!r} and direction == {direction!r} and {protocol} and defined"
    return Column("recovery", "recovery", where, (alike, *of), **more)


def alike(found: pd.DataFrame) -> pd.DataFrame:
    """The paper patches the newest position at the first decode step; its control every position at every step."""
    free = found["protocol"].eq("free").all()
    if not free and "positions" in found and (found["site"] == "resid_post").all() and (found["positions"] == "all").any():
        found = found[found["positions"] == "all"]
    if "step_set" in found and found["step_set"].nunique() > 1:
        found = found[(found["step_set"] == "first") == free]
    return found


def below_last(found: pd.DataFrame) -> pd.DataFrame:
    """The rows of all layers but each model's last."""
    return found.drop(last_layer(found).index)


def score(tables: Tables, policy: str, metric: str = "instructions") -> tuple[Found]:
    """A policy's score as a share of the control's, with its interval."""
    found = rows(tables, "scores", f"policy == {policy!r} and metric == {metric!r}")
    # llama.cpp, which the source used, computes the prompt on what it has stored.
    row = preferred(found, found["reading"] == "stored").iloc[0]
    scored = Found(row["percent"], row["percent_low"], row["percent_high"], int(row["prompts"]), flags=row["control"])
    return (scored.through(lambda percent: percent / 100),)


def effect(tables: Tables, factor: str) -> tuple[Found]:
    """What a factor does to the instructions followed, as a share of those that the control follows."""
    found = rows(tables, "contrasts", f"metric == 'instructions' and contrast.str.match('{factor}(, |$)')")
    control = float(rows(tables, "scores", "metric == 'instructions'")["control"].max())
    check(control > 0, "the control follows no instruction")
    row = preferred(found, found["contrast"].str.contains("prefill=stored")).iloc[0]
    estimate = Found(row["difference"], row["low"], row["high"], int(row["prompts"]), flags=control)
    return (estimate.through(lambda difference: difference / control),)


def preferred(found: pd.DataFrame, those: pd.Series) -> pd.DataFrame:
    """Some of the rows where there are any of these, all otherwise."""
    return found[those] if those.any() else found
