"""What a claim is, what is found of it, and the few rules that verdicts go by.

A rule compares one number, the effect, with one bound. "Larger than x" holds where the effect is shown to be above x, does not
where it is shown to be below what the source claims (x itself, or its smallest reported effect), and is open between: an interval
that reaches both sides has shown nothing. What is shown is a one-sided p-value for each side; claims_of corrects them for being
many. A claim about every case, or about none, needs no test: one counterexample refutes it. That something is not significant
refutes nothing: an interval within a stated bound does.
"""

from __future__ import annotations

import contextlib
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
LEAST = metrics.FEWEST
"""Fewer independent units (examples, seeds of made-up numbers) decide nothing."""
LEVEL = 0.05
"""The chance that any verdict of a table which rests on a test is wrong, to each side."""
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
        flags: Where the effect is a mean of flags, or of their differences, as a share of something: that something.
        p: Of ``holds`` and ``fails`` the one that counts.
        p_corrected: The same, corrected for all tests of the table.
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
    flags: float = 0
    p: float = np.nan
    p_corrected: float = np.nan

    @classmethod
    def of(cls, test: metrics.Test, **more: Any) -> Found:
        """The effect of a test, with its interval and its units; the verdict is the caller's."""
        return cls(test.effect, test.low, test.high, test.n, **more)

    def but(self, **more: Any) -> Found:
        """The same with something else."""
        return dataclasses.replace(self, **more)

    def saying(self, more: str) -> Found:
        """The same with more to be said."""
        return self.but(why="; ".join(filter(None, (self.why, more))))

    def through(self, function: Callable[[float], float]) -> Found:
        """With the effect and its ends on another scale; the p-values are of the same statement."""
        # Added to 0, a negative zero is a plain one.
        matched, *ends = (0.0 + float(function(value)) for value in (self.matched, self.low, self.high))
        return self.but(matched=matched, low=float(np.min(ends)), high=float(np.max(ends)))


@dataclasses.dataclass(frozen=True, eq=False)
class Ask:
    """What a claim asks of tables, as data.

    Attributes:
        rule: Judges numbers against bounds: one of the rules below.
        read: Reads the numbers and their units out of tables.
        bound: What the number is held against; None where the rule counts cases.
        paper: Reads the number under the source's protocol; tables that do not hold it leave it out.
        options: What else the rule is given, by name.
        scale: Takes the effect to the unit in which it is told.
    """

    rule: Callable[..., Found]
    read: Callable[[Tables], Sequence[Any]]
    bound: float | tuple[float, float] | None = None
    paper: Callable[[Tables], float] | None = None
    options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    scale: Callable[[float], float] | None = None

    def __call__(self, tables: Tables) -> Found:
        """What the tables show.

        Raises:
            NotTestableError: They cannot tell.
        """
        bounds = () if self.bound is None else (self.bound,)
        found = self.rule(*self.read(tables), *bounds, **self.options)
        found = found.through(self.scale) if self.scale else found
        with contextlib.suppress(NotTestableError):
            paper = self.paper(tables) if self.paper else np.nan
            found = found.but(paper=paper if np.isfinite(paper) else np.nan)
        return found


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
        look: Finds it in the tables: an :class:`Ask`, or a function where no rule says it.
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
    construction: str = ""


def told_again(claims: Sequence[Claim], of: str, **told: str) -> Claim:
    """A claim that another source makes too: the same test, counted once.

    Args:
        claims: Where the first is.
        of: Its id.
        told: What else differs: id, claim, value; the source is the news' summary unless given.
    """
    (first,) = (claim for claim in claims if claim.id == of)
    return dataclasses.replace(first, **{"source": "news", "section": "summary", **told})  # type: ignore[arg-type]


def check(testable: Any, otherwise: str) -> None:
    """Raises NotTestableError, with what is said, where something is not so."""
    if not testable:
        raise NotTestableError(otherwise)


def check_enough(n: int, said: str = "", least: int = LEAST) -> None:
    """Raises NotTestableError, with what is said of their number, where units are fewer than the least."""
    said = said or f"the number of independent units is {n}"
    check(n >= least, f"{said}, and fewer than {least} decide nothing")


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
        of: ``"median"`` of the units' means; ``"mean"`` of them, for scores and their differences, whose median is often
            0, open below :data:`MANY` units; ``"share"`` of rows that are 1 and not 0, by Clopper and Pearson's of what they are
            worth.

    Raises:
        NotTestableError: There are fewer than :data:`LEAST` units.
    """
    claimed = than if claimed is None else claimed
    means = pd.Series(np.asarray(values, float)).groupby(np.asarray(units)).mean().dropna().to_numpy()
    check_enough(len(means))
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
    if test.n < MANY:
        why = f"a mean of {test.n} units is no evidence where scores are skewed: from {MANY} on it is judged"
        return Found.of(test, verdict=OPEN, why=why)
    # Twice the one-sided p: what the interval excludes, and no more.
    above, below = (
        min(1.0, 2 * metrics.mean_of(means, against=bound, alternative=side).p)
        for bound, side in ((than, "greater"), (claimed, "less"))
    )
    return Found.of(test, holds=above, fails=below)


def _of_signs(found: Found, than: float, claimed: float) -> Found:
    """With one-sided p-values of units that are all alike: each had an even chance to lie on the other side of the bound.

    Of flags, and of differences of flags, it is the chance that none of so many is another where the mean is at the bound: forty
    that never happened leave a share of a twentieth possible.
    """
    # What lies on the bound itself lies on no side: so many are asked for as before "never" is taken to hold.
    effect, below = found.matched, found.matched < claimed or (found.matched == than == claimed and found.n >= MANY)

    def chance(bound: float) -> float:
        share = found.flags * abs(bound - effect)
        return float(max(0.5**found.n, (1 - share) ** found.n if 0 < share < 1 else 0.0))

    return found.but(holds=chance(than) if effect > than else 1.0, fails=chance(claimed) if below else 1.0)


def smaller(values: metrics.Column, units: Units, than: float, claimed: float | None = None, of: str = "median") -> Found:
    """A number is below a bound; see :func:`larger`, of the numbers turned round."""
    turn: Callable[[Any], Any] = (lambda share: 1 - share) if of == "share" else operator.neg
    found = larger(turn(np.asarray(values, float)), units, turn(than), None if claimed is None else turn(claimed), of)
    return found.through(turn)


def ratio(above: metrics.Column, below: metrics.Column, units: Units, than: float, claimed: float | None = None) -> Found:
    """Like :func:`larger` of how many times larger one number of a unit is than another, both at least 0.

    Units in which both are exactly 0 have no ratio: they are left out, and it is said how many.
    """
    pairs = pd.DataFrame({"a": np.asarray(above, float), "b": np.asarray(below, float)})
    pairs = pairs.groupby(np.asarray(units)).mean().dropna()
    kept = pairs[(pairs > 0).any(axis=1)]
    said = f"in {len(pairs) - len(kept)} of {len(pairs)} units both are exactly 0" if len(kept) < len(pairs) else ""
    check_enough(
        len(kept), "; ".join(filter(None, (said, f"the number of independent units that have a ratio is {len(kept)}")))
    )
    return larger(kept["a"] / kept["b"], kept.index, than, claimed).but(why=said)


def inside(values: metrics.Column, units: Units, bounds: tuple[float, float], of: str = "median") -> Found:
    """A number lies between two bounds: two one-sided tests, both of which must reject."""
    one, other = larger(values, units, bounds[0], of=of), smaller(values, units, bounds[1], of=of)
    outside = min(1.0, 2 * min(one.fails, other.fails))
    return one.but(holds=max(one.holds, other.holds), fails=outside)


def larger_of_intervals(found: Found, than: float, claimed: float | None = None) -> Found:
    """Like :func:`larger` of a number whose 95% interval is all that is known: its error is taken from the interval's length.

    Args:
        found: The number.
        than: What it must be above.
        claimed: The smallest with which the claim would still be right; the bound unless given.

    Raises:
        NotTestableError: It is of fewer than :data:`LEAST` units, or has no interval.
    """
    claimed = than if claimed is None else claimed
    check_enough(found.n)
    # Bootstrap intervals have the normal distribution's length; with Student's tails few units count as few.
    error, spread = (found.high - found.low) / (2 * stats.norm.ppf(0.975)), stats.t(found.n - 1)
    check(np.isfinite(error + found.matched), "it has no interval")
    if error < 1e-9:
        # What the last bits of a mean leave is no width.
        return _of_signs(found.but(why="the interval has no width: all units are alike"), than, claimed)
    holds, fails = spread.sf((found.matched - than) / error), spread.cdf((found.matched - claimed) / error)
    return found.but(holds=float(holds), fails=float(fails))


def smaller_of_intervals(found: Found, than: float) -> Found:
    """The number is below a bound; see :func:`larger_of_intervals`."""
    return larger_of_intervals(found.through(operator.neg), -than).through(operator.neg)


def one_sided(test: metrics.Test, on_its_side: bool) -> Found:
    """What a two-sided test says of a claim about one side, given whether the effect lies there.

    Raises:
        NotTestableError: The test has no p-value.
    """
    check(np.isfinite(test.p), test.why)
    holds = test.p / 2 if on_its_side else 1 - test.p / 2
    return Found.of(test, holds=holds, fails=1 - holds)


def never(happened: metrics.Column, units: Units) -> Found:
    """Something never happens: one case refutes it, :data:`MANY` units without one are taken to hold it.

    Args:
        happened: Whether it did, row by row.
        units: What each row belongs to.
    """
    by_unit = pd.Series(np.asarray(happened, bool)).groupby(np.asarray(units)).max().to_numpy(bool)
    n, count = len(by_unit), int(by_unit.sum())
    verdict, why = FAILS, f"it happened in {count} of {n} units"
    if not count:
        verdict, why = (HOLDS, "") if n >= MANY else (OPEN, f"{why}, and fewer than {MANY} are too few to say never")
    return Found.of(metrics.share_of(by_unit), verdict=verdict, why=why)


def always(happened: metrics.Column, units: Units) -> Found:
    """Something always happens, see :func:`never` of its not happening; the number is the share of rows in which it does."""
    exceptions = ~np.asarray(happened, bool)
    found, share = never(exceptions, units), metrics.rate_of(happened, units)
    why = f"{exceptions.sum()} of {len(exceptions)} rows are exceptions" if exceptions.any() else found.why
    return found.but(matched=share.effect, low=share.low, high=share.high, why=why)
