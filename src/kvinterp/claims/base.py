"""What a claim is, what is found of it, and the few rules that verdicts go by.

A rule compares one number, the effect, with one bound. "Larger than x" holds where the effect is shown to be above x, does not
where it is shown to be below what the source claims (x itself, or its smallest reported effect), and is open between: an interval
that reaches both sides has shown nothing. What is shown is a one-sided p-value for each side; claims_of corrects them for being
many. A claim about every case, or about none, needs no test: one counterexample refutes it. That something is not significant
refutes nothing: an interval within a stated bound does.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics

HOLDS, FAILS, OPEN = "holds here", "does not hold here", "not testable here"
"""The verdicts."""
PAPER, NEWS, ISSUE = "FP16 paper", "news", "transformers issue"
"""The sources of most claims; the issue is transformers#46190."""
LEAST = metrics.FEWEST
"""Fewer independent units (examples, seeds of made-up numbers) decide nothing."""
MANY = 30
"""So many units without a counterexample are asked for before "every" or "none" is taken to hold; the share of
exceptions may then still be a ninth (Clopper and Pearson)."""

Tables: TypeAlias = Mapping[str, pd.DataFrame]


class NotTestableError(Exception):
    """The tables cannot tell; the message says why."""


@dataclasses.dataclass(frozen=True)
class Found:
    """What the tables show of a claim.

    Attributes:
        matched: The effect under the control, in the unit of the claim's ``measure``.
        low: Lower end of its 95% interval.
        high: Its upper end.
        n: Independent units.
        paper: The same number as the source's protocol has it; NaN where the tables do not hold it.
        holds: One-sided p-value against the claim's being false.
        fails: One-sided p-value against its being true.
        verdict: The verdict where no test is needed; empty where the p-values decide.
        why: What else is to be said: how it was decided, or why it cannot be.
    """

    matched: float = np.nan
    low: float = np.nan
    high: float = np.nan
    n: int = 0
    paper: float = np.nan
    holds: float = np.nan
    fails: float = np.nan
    verdict: str = ""
    why: str = ""

    @classmethod
    def of(cls, test: metrics.Test, **more: Any) -> Found:
        """The effect of a test, with its interval and its units; the verdict is the caller's."""
        return cls(test.effect, test.low, test.high, test.n, **more)

    def through(self, function: Callable[[float], float]) -> Found:
        """With the effect and its ends on another scale; the p-values are of the same statement."""
        # Added to 0, a negative zero is a plain one.
        with np.errstate(divide="ignore"):
            matched, *ends = (0.0 + float(function(value)) for value in (self.matched, self.low, self.high))
        return dataclasses.replace(self, matched=matched, low=min(ends), high=max(ends))

    def beside(self, paper: float, why: str = "") -> Found:
        """With the number of the source's protocol, and a remark."""
        return dataclasses.replace(self, paper=float(paper), why=why or self.why)


@dataclasses.dataclass(frozen=True)
class Claim:
    """A claim of a source.

    Attributes:
        id: A short name of its own.
        source: ``FP16 paper``, ``news``, ``cache-error paper``, ``drift post`` or ``transformers issue``.
        section: Where it stands there.
        claim: What is claimed, in our words.
        value: The source's number, as it prints it; empty where the text we have lost it.
        measure: What the numbers of both columns here are.
        rule: When it holds and when it does not.
        settles: What would settle it on the source's own hardware and models.
        look: Finds it in the tables.
        if_equal: ``false`` where the claim would be wrong if both paths computed the same; ``true`` where it would be right;
            ``open`` where it is about something else.
        construction: Why the rule gives its verdict whatever is measured, where it does: such a verdict is no evidence, and no
            first line counts it.
    """

    id: str
    source: str
    section: str
    claim: str
    value: str
    measure: str
    rule: str
    settles: str
    look: Callable[[Tables], Found]
    if_equal: str = "false"
    construction: str = ""


def told_again(claims: Sequence[Claim], of: str, source: str = NEWS, section: str = "summary", **told: str) -> Claim:
    """A claim that another source makes too: the same test, counted once.

    Args:
        claims: Where the first is.
        of: Its id.
        source: The other source.
        section: Where it stands there.
        told: What else differs: id, claim, value.
    """
    (first,) = (claim for claim in claims if claim.id == of)
    return dataclasses.replace(first, source=source, section=section, **told)  # type: ignore[arg-type]


# Tables ----------------------------------------------------------------------------------------------------------------


def table(tables: Tables, name: str, *columns: str) -> pd.DataFrame:
    """A table with rows and these columns.

    Raises:
        NotTestableError: It is not there.
    """
    found = tables.get(name)
    if found is None:
        raise NotTestableError(f"there is no table {name}")
    missing = [column for column in columns if column not in found]
    if missing:
        raise NotTestableError(f"table {name} has no column {' and no column '.join(missing)}")
    if found.empty:
        raise NotTestableError(f"table {name} has no rows")
    return found


def average(rows: pd.DataFrame, column: str) -> float:
    """The mean over rows, NaN without rows."""
    return float(rows[column].astype(float).mean()) if len(rows) else np.nan


def known(rows: pd.DataFrame, *columns: str) -> pd.DataFrame:
    """The rows where all of these are finite.

    Raises:
        NotTestableError: There are none.
    """
    finite = np.isfinite(rows[list(columns)].astype(float)).all(axis=1)
    if not finite.any():
        raise NotTestableError(f"no row has a number of {' and '.join(columns)}")
    return rows[finite]


def of_models(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    """The rows of models that have one of these words in their name."""
    return rows[rows["model"].astype(str).str.lower().str.contains("|".join(names))]


def check_enough(n: int, said: str) -> None:
    """Raises NotTestableError, with what is said of their number, where units are fewer than :data:`LEAST`."""
    if n < LEAST:
        raise NotTestableError(f"{said}, and fewer than {LEAST} decide nothing")


# Rules -----------------------------------------------------------------------------------------------------------------


Units: TypeAlias = metrics.Column
"""What each row belongs to; each unit counts once."""


def larger(values: metrics.Column, units: Units, than: float, claimed: float | None = None, of: str = "median") -> Found:
    """A number is above a bound: holds if shown to be, does not if shown to be below what is claimed.

    Of the median, units above the bound are counted, which is exact for any distribution: of a mean of what spreads over orders
    of magnitude, or is alike but for a few, Student's test says "holds" falsely in up to 70% of studies
    (``benchmarks/calibration.py``).

    Args:
        values: One number a row.
        units: What each row belongs to.
        than: What it must be above.
        claimed: The smallest with which the claim would still be right; the bound unless given.
        of: ``"median"`` of the units' means; ``"mean"`` of them, by Student's test, for scores and their differences, whose
            median is often 0; ``"share"`` of rows that are 1 and not 0, by Clopper and Pearson's of what they are worth.

    Raises:
        NotTestableError: There are fewer than :data:`LEAST` units.
    """
    claimed = than if claimed is None else claimed
    means = pd.Series(np.asarray(values, float)).groupby(np.asarray(units)).mean().dropna().to_numpy()
    check_enough(len(means), f"the number of independent units is {len(means)}")
    if of == "median":
        over = metrics.typical(means)
        # What lies on the bound itself lies on no side, unless so many do.
        reach = means > claimed if claimed == than and over.n >= MANY else means >= claimed
        holds, fails = (
            float(stats.binomtest(int(those.sum()), over.n, alternative=side).pvalue)
            for those, side in ((means > than, "greater"), (reach, "less"))
        )
        return Found(over.median, over.low, over.high, over.n, holds=holds, fails=fails)
    if of == "share":
        test = metrics.rate_of(values, units)
        n, count = test.statistic, test.effect * test.statistic
        holds = stats.beta.cdf(than, count, n - count + 1) if count > 0 else 1.0
        fails = stats.beta.sf(claimed, count + 1, n - count) if count < n else 1.0
        return Found.of(test, holds=float(holds), fails=float(fails))
    test = metrics.mean_of(means)
    if test.why:
        # There is no spread to test against, but so many units on one side of the bound: the sign test.
        why = f"all {test.n} units have the same value"
        return _of_signs(Found(test.effect, test.effect, test.effect, test.n, why=why), than, claimed)
    above, below = (
        metrics.mean_of(means, against=bound, alternative=side).p for bound, side in ((than, "greater"), (claimed, "less"))
    )
    return Found.of(test, holds=above, fails=below)


def _of_signs(found: Found, than: float, claimed: float, flags: float = 0) -> Found:
    """With one-sided p-values of units that are all alike: each had an even chance to lie on the other side of the bound.

    Of flags, and of differences of flags, it is the chance that none of so many is another where the mean is at the bound: forty
    that never happened leave a share of a twentieth possible. ``flags`` is the share of units that one of the number stands for.
    """
    # What lies on the bound itself lies on no side: so many are asked for as before "never" is taken to hold.
    effect, below = found.matched, found.matched < claimed or (found.matched == than == claimed and found.n >= MANY)

    def chance(bound: float) -> float:
        share = flags * abs(bound - effect)
        return float(max(0.5**found.n, (1 - share) ** found.n if 0 < share < 1 else 0.0))

    return dataclasses.replace(found, holds=chance(than) if effect > than else 1.0, fails=chance(claimed) if below else 1.0)


def smaller(values: metrics.Column, units: Units, than: float, claimed: float | None = None, of: str = "median") -> Found:
    """A number is below a bound; see :func:`larger`, of the numbers turned round."""
    turn: Callable[[Any], Any] = (lambda share: 1 - share) if of == "share" else operator.neg
    found = larger(turn(np.asarray(values, float)), units, turn(than), None if claimed is None else turn(claimed), of)
    return found.through(turn)


def ratio(
    above: metrics.Column, below: metrics.Column, units: metrics.Column, than: float, claimed: float | None = None
) -> Found:
    """Like :func:`larger` of how many times larger one number of a unit is than another, both at least 0.

    Units in which both are exactly 0 have no ratio: they are left out, and it is said how many.
    """
    pairs = (
        pd.DataFrame({"a": np.asarray(above, float), "b": np.asarray(below, float)})
        .groupby(np.asarray(units))
        .mean()
        .dropna()
    )
    kept = pairs[(pairs > 0).any(axis=1)]
    said = f"in {len(pairs) - len(kept)} of {len(pairs)} units both are exactly 0" if len(kept) < len(pairs) else ""
    check_enough(
        len(kept), "; ".join(filter(None, (said, f"the number of independent units that have a ratio is {len(kept)}")))
    )
    with np.errstate(divide="ignore"):
        found = larger(kept["a"].to_numpy() / kept["b"].to_numpy(), kept.index, than, claimed)
    return dataclasses.replace(found, why=said)


def inside(values: metrics.Column, units: Units, low: float, high: float, of: str = "median") -> Found:
    """A number lies between two bounds: two one-sided tests, both of which must reject."""
    one, other = larger(values, units, low, of=of), smaller(values, units, high, of=of)
    outside = min(1.0, 2 * min(one.fails, other.fails))
    return dataclasses.replace(one, holds=max(one.holds, other.holds), fails=outside)


def pooled(rows: pd.DataFrame, value: str, low: str = "low", high: str = "high", n: str = "n") -> Found:
    """The mean of several numbers that have intervals, without a verdict.

    Its interval has the mean ends of theirs: no shorter than it should be, however the numbers depend on each other. Its n is the
    smallest of theirs.
    """
    there = known(rows, value, low, high)
    return Found(average(there, value), average(there, low), average(there, high), int(there[n].min()))


def larger_of_intervals(found: Found, than: float, claimed: float | None = None, flags: float = 0) -> Found:
    """Like :func:`larger` of a number whose 95% interval is all that is known: its error is taken from the interval's length.

    Args:
        found: The number.
        than: What it must be above.
        claimed: The smallest with which the claim would still be right; the bound unless given.
        flags: Where it is a mean of flags, or of their differences, as a share of something: that something.

    Raises:
        NotTestableError: It is of fewer than :data:`LEAST` units, or has no interval.
    """
    claimed = than if claimed is None else claimed
    check_enough(found.n, f"the number of independent units is {found.n}")
    # Bootstrap intervals have the normal distribution's length; with Student's tails few units count as few.
    error, spread = (found.high - found.low) / (2 * stats.norm.ppf(0.975)), stats.t(found.n - 1)
    if not np.isfinite(error):
        raise NotTestableError("it has no interval")
    if error < 1e-9:
        # What the last bits of a mean leave is no width.
        return _of_signs(
            dataclasses.replace(found, why="the interval has no width: all units are alike"), than, claimed, flags
        )
    holds, fails = spread.sf((found.matched - than) / error), spread.cdf((found.matched - claimed) / error)
    return dataclasses.replace(found, holds=float(holds), fails=float(fails))


def smaller_of_intervals(found: Found, than: float, claimed: float | None = None, flags: float = 0) -> Found:
    """The number is below a bound; see :func:`larger_of_intervals`."""
    turned = larger_of_intervals(found.through(operator.neg), -than, None if claimed is None else -claimed, flags)
    return turned.through(operator.neg)


def never(happened: metrics.Column, units: metrics.Column) -> Found:
    """Something never happens: one case refutes it, :data:`MANY` units without one are taken to hold it.

    Args:
        happened: Whether it did, row by row.
        units: What each row belongs to.
    """
    by_unit = pd.Series(np.asarray(happened, bool)).groupby(np.asarray(units)).max()
    n, count = len(by_unit), int(by_unit.sum())
    if count:
        why = f"it happened in {count} of {n} units"
        return Found.of(metrics.share_of(by_unit.to_numpy()), verdict=FAILS, why=why)
    why = "" if n >= MANY else f"it happened in none of {n} units, and fewer than {MANY} are too few to say never"
    return Found(0.0, 0.0, metrics.share_of(np.zeros(n)).high, n, verdict=HOLDS if n >= MANY else OPEN, why=why)
