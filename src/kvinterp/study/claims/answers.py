"""How claims about which path answers right more often are found in a study's tables: the statistics of paired answers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.study.claims.base import (
    FAILS,
    LEAST,
    LEVEL,
    OPEN,
    Found,
    Tables,
    check,
    check_enough,
    inside,
    larger,
    one_sided,
    smaller_of_intervals,
)
from kvinterp.study.claims.rows import FREE, Column, greedy_copies, rows

SMALLEST = 0.011
"""The smallest difference in accuracy that the paper reports as significant: LLaMA-2 under top-p, 2.8% against 1.7%."""
ALMOST = 8 / 9
"""The share of conditions that the paper reports."""
PROBLEMS, SEEDS, CONDITIONS = 700, 5, 9
"""The paper's: problems of a condition, seeds of each problem, conditions that are corrected for."""


def _answered(tables: Tables) -> pd.DataFrame:
    """Decodes of both paths whose answers are known: ``difference`` is 1, 0 or -1."""
    decodes = rows(tables, "decodes", f"{FREE} and correct_a.notna() and correct_b.notna()")
    return decodes.assign(difference=decodes["correct_a"].astype(float) - decodes["correct_b"].astype(float))


def _papers(answered: pd.DataFrame) -> pd.DataFrame:
    """The paper's rows: greedy decodes once for every seed."""
    return answered.loc[answered.index.repeat(greedy_copies(answered))]


def more_often_right(tables: Tables) -> Found:
    """Over all conditions the cached path is right more often."""
    answered = _answered(tables)
    columns, paper = (answered["difference"], answered["unit"]), _papers(answered)["difference"].mean()
    found = larger(*columns, 0.0, SMALLEST, of="mean").but(paper=paper)
    if not answered["difference"].any():
        # No answer differs. What was never seen may still be as common as so many leave it.
        bound = metrics.share_of(np.zeros(found.n)).high
        why = f"no answer of {found.n} examples differs, which leaves a difference of up to {bound:.1%}"
        return Found(0.0, -bound, bound, found.n, paper, verdict=FAILS if bound < SMALLEST else OPEN, why=why)
    # One-sided: the exchange of paths is symmetric.
    exchanged = metrics.sign_flips(*columns)
    return found.but(holds=max(one_sided(exchanged, exchanged.effect > 0).holds, found.holds))


def in_almost_all_conditions(tables: Tables) -> Found:
    """In eight of nine conditions the cached path is right more often."""
    answered = _answered(tables)
    by = answered.groupby(["unit", "condition"])["difference"].mean().unstack("condition").dropna().to_numpy()
    check(
        by.shape[1] >= 3 and len(by) >= LEAST,
        f"there are {by.shape[1]} conditions of {len(by)} examples: 3 and {LEAST} are the least",
    )
    check(by.any(), "no answer differs between the paths")
    share = _share_above(by.mean(0))
    ends = metrics.clustered_interval(
        lambda *conditions: _share_above(np.stack(conditions, -1).mean(0)), np.arange(len(by)), *by.T
    )
    paper = _share_above(_papers(answered).groupby("condition")["difference"].mean())
    holds = _exchanged(by, share) if share >= ALMOST else 1.0
    return Found(share, *ends, len(by), paper, holds, _too_many_below(by))


def _share_above(means: metrics.Column) -> float:
    """The share of conditions whose mean is above 0, a mean of 0 counting half."""
    return float((np.sign(means) + 1).mean() / 2)


def _exchanged(by: np.ndarray, seen: float, resamples: int = 4999) -> float:
    """How often exchanging the paths of whole examples gives so large a share."""
    signs = np.random.default_rng(0).choice([-1, 1], size=(resamples, len(by)))
    reached = (np.sign(signs @ by) + 1).mean(-1) / 2 >= seen - 1e-12
    return float((1 + reached.sum()) / (1 + resamples))


def _too_many_below(by: np.ndarray) -> float:
    """The p-value of so many conditions being below 0 that fewer than almost all are above.

    That of the least of them, times how many could be it: a partial conjunction (Benjamini and Heller 2008), right however the
    conditions depend on each other.
    """
    tests = [metrics.sign_flips(column) for column in by.T]
    below = sorted(one_sided(test, test.effect < 0).holds for test in tests)
    needed = len(below) - int(np.ceil(ALMOST * len(below) - 1e-12)) + 1
    return float(min(1.0, (len(below) - needed + 1) * below[needed - 1]))


def significant_by_condition(tables: Tables) -> Found:
    """All conditions but one differ significantly."""
    groups = [group for _, group in _answered(tables).groupby("condition", sort=False)]
    tests = [metrics.sign_flips(group["difference"], group["unit"]) for group in groups]
    papers = [metrics.mcnemar(*_papers(group)[["correct_a", "correct_b"]].astype(bool).to_numpy().T).p for group in groups]
    smallest = min(test.n for test in tests)
    check(smallest >= LEAST, f"a condition has {smallest} examples: {LEAST} are the least")
    corrected, rows_alone = (metrics.corrected(p, "bonferroni") for p in ([test.p for test in tests], papers))
    significant, enough = int((corrected <= LEVEL).sum()), max(len(tests) - 1, 1)
    found = Found(significant / len(tests), n=smallest, paper=float((rows_alone <= LEVEL).mean()))
    if significant >= enough:
        # Each is corrected for all conditions; the largest of those that count is what the verdict rests on.
        return found.but(holds=float(np.sort(corrected)[enough - 1]))
    # That a condition is not significant shows nothing; that it lies within the smallest difference reported does.
    reach = np.array([_reach(group.groupby("unit")["difference"].mean(), LEVEL / len(tests)) for group in groups])
    within = int((reach < SMALLEST).sum())
    why = f"{len(tests) - significant} of {len(tests)} conditions are not significant, and {within} are shown to be within "
    why += f"{SMALLEST:.1%} (the widest of their intervals reaches to {reach.max():.1%})"
    return found.but(verdict=FAILS if len(tests) - within < enough else OPEN, why=why)


def _reach(differences: pd.Series, level: float) -> float:
    """How far from 0 the interval of a mean difference over units reaches; where none differs what so many leave possible."""
    if not differences.any():
        return metrics.share_of(np.zeros(len(differences)), 1 - level).high
    found = metrics.mean_of(differences, confidence=1 - level)
    return max(-found.low, found.high)


def powered(tables: Tables) -> Found:
    """The source's 700 problems, each decoded under five seeds, suffice for the differences that it reports."""
    answered = _answered(tables)
    answered = answered.assign(square=answered["difference"] ** 2)
    by = answered.groupby(["condition", "unit"]).agg(
        sum=("difference", "sum"), squares=("square", "sum"), rows=("seed", "size")
    )
    several = by[by["rows"] > 1].reset_index("unit")
    count = several.loc[several["squares"] > 0, "unit"].nunique()
    check_enough(count, f"answers differ in {count} of the problems that were decoded under several seeds")
    units, columns = several["unit"], several[["sum", "squares", "rows"]].to_numpy(float).T
    ends = metrics.clustered_interval(_spread, units.to_numpy(), *columns, resamples=500)
    found = Found(_spread(*columns), *ends, units.nunique()).through(
        lambda spread: metrics.detectable_mean(PROBLEMS, spread, LEVEL / CONDITIONS)
    )
    alone = max(SMALLEST, float(columns[1].sum() / columns[2].sum())) ** 0.5
    rows_alone = metrics.detectable_mean(PROBLEMS * SEEDS, alone, LEVEL / CONDITIONS)
    return smaller_of_intervals(found, SMALLEST).but(paper=rows_alone)


def _spread(sums: np.ndarray, squares: np.ndarray, rows: np.ndarray) -> float:
    """The standard deviation of a problem's mean difference over :data:`SEEDS` seeds, from how seeds go together here."""
    # A difference of so much needs as many answers that differ.
    each, pairs = max(SMALLEST, squares.sum() / rows.sum()), ((sums**2 - squares).sum() / (rows * (rows - 1)).sum())
    return float(np.sqrt((each + (SEEDS - 1) * max(pairs, 0.0)) / SEEDS))


def one_path_is_nearer(tables: Tables) -> Found:
    """One of the paths is nearer to float64 more often than the other."""
    cached, units = Column("oracle", "nearer == 'a'", "nearer != 'equal'")(tables)
    shares = cached.groupby(units).mean()
    check_enough(len(shares), f"the paths are not equally near in {len(shares)} examples")
    test = metrics.sign_flips(cached - 0.5, units)
    if shares.nunique() == 1 and shares.isin((0, 1)).all():
        # All agree: Clopper and Pearson's interval, since there is no spread.
        return Found.of(metrics.share_of(shares), holds=test.p)
    # A tenth to either side is what still passes for no direction.
    near_half = inside(cached, units, (0.4, 0.6), of="share")
    return near_half.but(holds=test.p, fails=near_half.holds)
