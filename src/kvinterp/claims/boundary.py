"""Claims about when a token flips and how far apart the texts then are (FP16 paper, sections 5.2 and 6.4)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics
from kvinterp.claims.base import PAPER, Claim, Found, NotTestableError, Tables, larger, larger_of_intervals
from kvinterp.claims.behaviour import decodes_of

RESAMPLES = 500
FEWEST = 10
"""Fewer examples that flip, or that do not, are no correlation and no ranking."""


def _flipped(tables: Tables, protocol: str, *columns: str) -> pd.DataFrame:
    """Decodes that flip."""
    decodes = decodes_of(tables, protocol, "mean_kl", *columns)
    found = decodes.dropna(subset=["flip_index", "mean_kl", *columns])
    if (count := found["unit"].nunique()) < FEWEST:
        raise NotTestableError(f"a token flips in {count} examples, and fewer than {FEWEST} are no correlation")
    return found


def _ranked(rows: pd.DataFrame, column: str) -> pd.Series:
    """Ranks within each model and strategy as normal scores, so that what differs between these is no correlation."""
    share = rows.groupby("condition")[column].transform(lambda of: (of.rank() - 0.5) / len(of))
    return pd.Series(stats.norm.ppf(share), index=rows.index)


def _correlation(rows: pd.DataFrame, *given: str) -> Found:
    columns = [_ranked(rows, name) for name in ("flip_index", "mean_kl", *given)]
    test = metrics.correlation(columns[0], columns[1], rows["unit"], *columns[2:], resamples=RESAMPLES)
    return _one_sided(test, test.effect < 0)


def _one_sided(test: metrics.Test, on_its_side: bool) -> Found:
    """What a two-sided test says of a claim about one side, given whether the effect lies there."""
    if not np.isfinite(test.p):
        raise NotTestableError(test.why)
    holds = test.p / 2 if on_its_side else 1 - test.p / 2
    return Found.of(test, holds=holds, fails=1 - holds)


def earlier_flips_more_kl(tables: Tables) -> Found:
    """Decodes that flip earlier have more KL."""
    return _correlation(_flipped(tables, "matched")).beside(_papers(_flipped(tables, "free")))


def _papers(rows: pd.DataFrame, above: float = -1.0) -> float:
    """Pearson's correlation of flip step and mean KL, averaged over models."""
    found = []
    for _, group in rows[rows["flip_index"] > above].groupby("model"):
        if len(group) > 3 and np.ptp(group["flip_index"]) > 0 and np.ptp(group["mean_kl"]) > 0:
            found.append(stats.pearsonr(group["flip_index"], group["mean_kl"]).statistic)
    return float(np.mean(found)) if found else float("nan")


def stronger_without_the_first(tables: Tables) -> Found:
    """The correlation is stronger without decodes that flip at once."""
    matched = _flipped(tables, "matched")
    # The paper's step 0 is the first that a cached path computes alone, ours is 1.
    restricted = matched[matched["flip_index"] > 1]
    if restricted["unit"].nunique() < FEWEST:
        raise NotTestableError(f"fewer than {FEWEST} examples flip after step 1")
    x, y = (_ranked(matched, name).to_numpy() for name in ("flip_index", "mean_kl"))
    later = (matched["flip_index"] > 1).to_numpy(float)

    def stronger(x: np.ndarray, y: np.ndarray, kept: np.ndarray) -> float:
        return _r(x, y) - _r(x[kept > 0], y[kept > 0])

    if np.ptp(y) == 0:
        raise NotTestableError("the matched KL does not vary")
    low, high = metrics.clustered_interval(stronger, matched["unit"].to_numpy(), x, y, later, resamples=RESAMPLES)
    found = Found(stronger(x, y, later), low, high, int(matched["unit"].nunique()))
    free = _flipped(tables, "free")
    return larger_of_intervals(found, 0.0).beside(_papers(free) - _papers(free, above=1))


def _r(x: np.ndarray, y: np.ndarray) -> float:
    return float(np.corrcoef(x, y)[0, 1]) if len(x) > 3 and np.ptp(x) * np.ptp(y) > 0 else float("nan")


def explained_by_the_margin(tables: Tables) -> Found:
    """With the margin held constant, flip step and KL no longer go together."""
    raw, rows = earlier_flips_more_kl(tables), _flipped(tables, "matched", "smallest_margin")
    found = _correlation(rows, "smallest_margin")
    if raw.holds > 0.05:
        raise NotTestableError("flip step and matched KL do not go together in the first place")
    # Two one-sided tests with the interval's own error.
    error = (found.high - found.low) / (2 * stats.norm.ppf(0.975))
    above, below = (float(stats.norm.sf(side)) for side in ((found.matched + 0.2) / error, (0.2 - found.matched) / error))
    outside = min(1.0, 2 * min(1 - above, 1 - below))
    free = _correlation(_flipped(tables, "free", "smallest_margin"), "smallest_margin")
    return Found(found.matched, found.low, found.high, found.n, free.matched, max(above, below), outside)


def early_third_has_more_kl(tables: Tables) -> Found:
    """The third that flips first has a higher mean KL than the third that flips last."""
    ratios = {protocol: _thirds(_flipped(tables, protocol)) for protocol in ("matched", "free")}
    return ratios["matched"].beside(ratios["free"].matched)


def _thirds(rows: pd.DataFrame) -> Found:
    # Each condition on its own scale; an exact 0 has no logarithm.
    above = rows[rows["mean_kl"] > 0]
    logs = np.log(above["mean_kl"])
    logs -= logs.groupby(above["condition"]).transform("mean")
    place = _ranked(above, "flip_index").rank(pct=True)
    ends = (place <= 1 / 3) | (place > 2 / 3)
    test = metrics.slope(place[ends] <= 1 / 3, logs[ends], above.loc[ends, "unit"])
    why = f"{len(rows) - len(above)} of {len(rows)} decodes have a KL of exactly 0 and are left out" * (
        len(above) < len(rows)
    )
    return dataclasses.replace(_one_sided(test, test.effect > 0), why=why).through(np.exp)


def margin_tells_the_flip(tables: Tables) -> Found:
    """Decodes that come nearer to a tie are those that flip."""
    decodes = decodes_of(tables, "matched", "smallest_margin").dropna(subset=["smallest_margin"])
    near = -_ranked(decodes, "smallest_margin")
    of_unit = decodes.assign(near=near, flips=decodes["flip_index"].notna()).groupby("unit")
    nearest, flips = of_unit["near"].max(), of_unit["flips"].max()
    if min(flips.sum(), (~flips).sum()) < FEWEST:
        of = f"a token flips in {int(flips.sum())} of {len(flips)} examples"
        raise NotTestableError(f"{of}, and fewer than {FEWEST} of either kind are no ranking")
    test = metrics.mann_whitney(nearest[flips], nearest[~flips])
    return _one_sided(test, test.effect > 0.5)


def margin_delays_the_flip(tables: Tables) -> Found:
    """A larger margin goes with a later first flip, decodes that never flip counted."""
    decodes = decodes_of(tables, "matched", "smallest_margin", "steps").dropna(subset=["smallest_margin"])
    event = decodes["flip_index"].notna()
    when = decodes["flip_index"].fillna(decodes["steps"] - 1)
    test = metrics.cox(when, event, _ranked(decodes, "smallest_margin"), decodes["unit"])
    return _one_sided(test, test.effect < 1)


def flips_come_at_once(tables: Tables) -> Found:
    """Most first flips come in the first eighth of the steps."""
    decodes = decodes_of(tables, "matched", "steps")
    rows = decodes.dropna(subset=["flip_index"])
    if rows.empty:
        raise NotTestableError("no token flips")
    early = (rows["flip_index"] <= decodes["steps"].max() / 8).astype(float)
    return larger(early, rows["unit"], 0.5, of="share").beside(float(early.mean()))


_RUN = "censored regression of flip time on margin and matched KL, 700 problems, on the paper's GPU"

CLAIMS = (
    Claim(
        "early-more-kl", PAPER, "6.4, table 3", "The earlier a token flips, the higher the mean KL.",
        "r below 0 in all models",
        "correlation of flip step and mean KL (its protocol: Pearson, free, mean of the models; control: ranks)",
        "holds where that with matched KL is below 0, does not where it is above", _RUN, earlier_flips_more_kl,
    ),
    Claim(
        "restricted", PAPER, "4.4, 6.4, table 3", "Without decodes that flip at once the correlation is stronger.",
        "stronger in 2 of 3 models", "correlation over all decodes less that over those that flip later",
        "holds above 0, does not below; restriction of range weakens a correlation by itself", _RUN, stronger_without_the_first,
    ),
    Claim(
        "uncertainty", PAPER, "1, 6.4", "Early flips and high KL are joint consequences of uncertainty, not of each other.",
        "8 of 9 conditions", "partial correlation of flip step and mean KL, the smallest margin held (its protocol: free)",
        "holds where it is shown to lie within -0.2 to 0.2 though the correlation itself is below 0; does not outside",
        _RUN, explained_by_the_margin,
    ),
    Claim(
        "terciles", PAPER, "5.2, 6.4", "The third that flips first has more KL than the third that flips last.",
        "8 of 9 conditions", "KL of the first third as a multiple of the last third's, geometric mean (its protocol: free)",
        "holds above 1, does not below", _RUN, early_third_has_more_kl,
    ),
    Claim(
        "margin-tells", PAPER, "2.3, 7.1", "What decides a flip is the distance to the decision boundary.",
        "", "area under the curve: the smallest margin as predictor of a flip",
        "holds above 0.5, does not below, example by example (Mann and Whitney)",
        "margins at every step on the paper's models", margin_tells_the_flip,
    ),
    Claim(
        "margin-delays", PAPER, "6.4", "Examples near the decision boundary flip early.",
        "", "hazard ratio of a first flip for one standard deviation more margin",
        "holds below 1, does not above (Cox, decodes without a flip censored)", _RUN, margin_delays_the_flip,
    ),
    Claim(
        "flips-at-once", PAPER, "4.4", "The step of the first flip is heavily skewed towards the first steps.",
        "", "share of first flips in the first eighth of the steps",
        "holds above a half, does not below", _RUN, flips_come_at_once,
    ),
)  # fmt: skip
