"""Every test against another computation of the same thing: a closed form, every permutation, or a simulation."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pandas as pd
import pytest
from scipy import optimize, special, stats
from statsmodels.stats.multitest import multipletests

from kvinterp import metrics
from kvinterp.errors import InputError


def drawn(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def clustered(seed: int = 0, clusters: int = 30, rows: int = 4) -> pd.DataFrame:
    """Numbers that share a part within each cluster, an outcome and a path."""
    rng = drawn(seed)
    own = rng.normal(size=clusters)
    names = np.repeat(np.arange(clusters), rows)
    x = own[names] + rng.normal(size=len(names))
    y = 0.5 * x + own[names] + rng.normal(size=len(names))
    return pd.DataFrame({"cluster": names, "x": x, "y": y, "z": rng.normal(size=len(names)) + x})


# Pairs -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("only_a", "only_b", "same"), [(9, 2, 30), (0, 6, 5), (4, 4, 0), (1, 0, 20)])
def test_mcnemar_by_the_binomial_coefficients(only_a, only_b, same):
    a = np.r_[np.ones(only_a), np.zeros(only_b), np.arange(same) % 2].astype(bool)
    b = np.r_[np.zeros(only_a), np.ones(only_b), np.arange(same) % 2].astype(bool)
    differing = only_a + only_b
    tail = sum(math.comb(differing, k) for k in range(min(only_a, only_b) + 1)) / 2**differing
    found = metrics.mcnemar(a, b)
    assert found.n == len(a)
    assert found.p == pytest.approx(min(1, 2 * tail), rel=1e-12)
    assert found.effect == pytest.approx(a.mean() - b.mean(), abs=1e-15)
    assert found.low <= found.effect <= found.high


def test_mcnemar_is_the_sign_flip_test_of_single_pairs():
    """Every exchange of the labels of 11 pairs, counted out."""
    rng = drawn(3)
    a, b = rng.random(11) < 0.8, rng.random(11) < 0.3
    d = a.astype(int) - b.astype(int)
    sums = [abs(np.dot(signs, d)) for signs in itertools.product((-1, 1), repeat=len(d))]
    p = np.mean(np.array(sums) >= abs(d.sum()))
    assert metrics.mcnemar(a, b).p == pytest.approx(p, rel=1e-12)
    assert metrics.sign_flips(d).p == pytest.approx(p, rel=1e-12)


def test_sign_flips_of_clusters_by_every_exchange():
    table = clustered(1, clusters=9)
    means = table.groupby("cluster")["y"].mean().to_numpy()
    sums = [abs(np.dot(signs, means)) for signs in itertools.product((-1, 1), repeat=9)]
    p = np.mean(np.array(sums) >= abs(means.sum()) - 1e-12)
    found = metrics.sign_flips(table["y"], table["cluster"])
    assert found.n == 9
    assert found.p == pytest.approx(p, rel=1e-12)
    assert found.effect == pytest.approx(means.mean(), rel=1e-12)


def test_mean_of_by_its_formula():
    table = clustered(2)
    means = table.groupby("cluster")["x"].mean()
    error = means.std(ddof=1) / math.sqrt(len(means))
    found = metrics.mean_of(table["x"], table["cluster"])
    assert found.statistic == pytest.approx(means.mean() / error, rel=1e-12)
    dof = len(means) - 1
    half = stats.t(dof).ppf(0.975) * error
    # Hall's ends, where his transformation of their distance equals Student's quantile.
    skew = stats.skew(means, bias=False)

    def transformed(end):
        value = (means.mean() - end) / means.std(ddof=1)
        bent = value + skew * value**2 / 3 + skew**2 * value**3 / 27 + skew / (6 * len(means))
        return math.sqrt(len(means)) * bent

    ends = [optimize.brentq(lambda end, at=at: transformed(end) - at, -9, 9) for at in stats.t(dof).ppf((0.975, 0.025))]
    wider = min(ends[0], means.mean() - half), max(ends[1], means.mean() + half)
    assert (found.low, found.high) == pytest.approx(wider, rel=1e-9)
    assert wider != pytest.approx(tuple(ends)), "one end is Student's"
    # The distribution of Student's t through the incomplete beta function.
    each = [special.betainc(dof / 2, 0.5, dof / (dof + t * t)) for t in (found.statistic, transformed(0.0))]
    assert found.p == pytest.approx(max(each), rel=1e-9)


def test_mean_of_a_skewed_score_is_held():
    """Student's interval alone misses on one side."""
    rng, truth = drawn(11), math.exp(0.5)
    samples = [rng.lognormal(size=30) for _ in range(400)]
    held = np.mean([found.low <= truth <= found.high for found in map(metrics.mean_of, samples)])
    students = [stats.ttest_1samp(sample, 0).confidence_interval(0.95) for sample in samples]
    assert held > np.mean([ends.low <= truth <= ends.high for ends in students]) + 0.02


# Groups ----------------------------------------------------------------------------------------------------------------


def test_welch_by_its_formula():
    rng = drawn(8)
    x, y = rng.normal(1, 3, 12), rng.normal(0, 1, 25)
    vx, vy = x.var(ddof=1) / 12, y.var(ddof=1) / 25
    dof = (vx + vy) ** 2 / (vx**2 / 11 + vy**2 / 24)
    t = (x.mean() - y.mean()) / math.sqrt(vx + vy)
    found = metrics.welch(x, y)
    assert found.statistic == pytest.approx(t, rel=1e-12)
    assert found.p == pytest.approx(special.betainc(dof / 2, 0.5, dof / (dof + t * t)), rel=1e-9)
    half = stats.t(dof).ppf(0.975) * math.sqrt(vx + vy)
    assert (found.low, found.high) == pytest.approx((x.mean() - y.mean() - half, x.mean() - y.mean() + half), rel=1e-9)


def test_copies_of_a_row_tell_a_clustered_test_nothing():
    """Greedy decoding under five seeds is one decode five times; Welch's p would fall with every copy."""
    order, values = np.arange(30.0), drawn(10).random(30) + np.linspace(0.3, 0, 30)
    once = metrics.terciles(order, values)
    names = np.tile(np.arange(30), 5)
    five = metrics.terciles(np.tile(order, 5), np.tile(values, 5), names)
    taken_as_rows = metrics.terciles(np.tile(order, 5), np.tile(values, 5))
    assert five.n == once.n == 30
    assert five.p == pytest.approx(once.p, rel=0.35)
    assert taken_as_rows.p < once.p / 50
    one, copies = (metrics.correlation(np.tile(order, k), np.tile(values, k), np.tile(np.arange(30), k)) for k in (1, 5))
    assert copies.effect == pytest.approx(one.effect, rel=1e-9)
    assert (copies.low, copies.high) == pytest.approx((one.low, one.high), abs=1e-9)


# Several tests and shares ----------------------------------------------------------------------------------------------


def test_corrections_by_their_definitions():
    p = np.array([0.001, 0.04, 0.03, np.nan, 0.8, 0.012])
    known = np.sort(p[np.isfinite(p)])
    m = len(known)
    holm = np.minimum(1, np.maximum.accumulate([(m - k) * value for k, value in enumerate(known)]))
    bh = np.minimum.accumulate([m / (k + 1) * known[k] for k in range(m)][::-1])[::-1]
    for method, sorted_values in (("bonferroni", np.minimum(1, m * known)), ("holm", holm), ("bh", bh)):
        names = {"bonferroni": "bonferroni", "holm": "holm", "bh": "fdr_bh"}
        by_statsmodels = multipletests(p[np.isfinite(p)], method=names[method])[1]
        assert metrics.corrected(p, method)[np.isfinite(p)] == pytest.approx(by_statsmodels, rel=1e-12)
        expected = dict(zip(known, sorted_values, strict=True))
        found = metrics.corrected(p, method)
        assert np.isnan(found[3])
        assert [found[k] for k in range(6) if k != 3] == pytest.approx([expected[p[k]] for k in range(6) if k != 3])


# Dependence ------------------------------------------------------------------------------------------------------------


def test_a_correlation_by_scipy():
    table = clustered(12)
    for method, theirs in (("pearson", stats.pearsonr), ("spearman", stats.spearmanr)):
        found, expected = metrics.correlation(table["x"], table["y"], method=method), theirs(table["x"], table["y"])
        assert (found.effect, found.p) == pytest.approx((expected.statistic, expected.pvalue), rel=1e-9)


def test_the_clustered_slope_by_the_sandwich():
    table = clustered(14, clusters=12)
    design = np.column_stack([table["x"], np.ones(len(table))])
    bread = np.linalg.inv(design.T @ design)
    beta = bread @ design.T @ table["y"].to_numpy()
    residual = table["y"].to_numpy() - design @ beta
    meat = np.zeros((2, 2))
    for name in range(12):
        of = (table["cluster"] == name).to_numpy()
        score = design[of].T @ residual[of]
        meat += np.outer(score, score)
    n, clusters = len(table), 12
    covariance = bread @ meat @ bread * clusters / (clusters - 1) * (n - 1) / (n - 2)
    t = beta[0] / math.sqrt(covariance[0, 0])
    found = metrics.slope(table["x"], table["y"], table["cluster"])
    assert (found.n, found.effect, found.statistic) == pytest.approx((12, beta[0], t), rel=1e-9)
    assert found.p == pytest.approx(2 * stats.t(11).sf(abs(t)), rel=1e-9)


SAME, NAMES = np.ones(12), np.repeat(np.arange(6), 2)


def test_a_rate_in_clusters_is_worth_fewer_trials_where_they_go_together():
    rng = np.random.default_rng(0)
    names = np.repeat(np.arange(40), 10)
    alone = rng.random(400) < 0.2
    found, exact = metrics.rate_of(alone.astype(float), names), metrics.share_of(alone)
    assert found.effect == exact.effect
    assert found.high - found.low == pytest.approx(exact.high - exact.low, rel=0.2)
    # Where a cluster's rows are all alike it is worth one trial, which Clopper and Pearson's of the clusters is of.
    together, of_clusters = np.repeat(alone[:40], 10), metrics.share_of(alone[:40])
    found = metrics.rate_of(together.astype(float), names)
    assert (found.low, found.high) == pytest.approx((of_clusters.low, of_clusters.high), abs=0.03)
    # The same as counts and trials.
    counts = metrics.rate_of(np.bincount(names, together), np.arange(40), np.full(40, 10.0))
    assert (counts.low, counts.high) == pytest.approx((found.low, found.high), rel=0.02)
    none, whole = (metrics.rate_of(np.full(400, value), names) for value in (0.0, 1.0))
    zero = metrics.share_of(np.zeros(40))
    assert (none.low, none.high) == pytest.approx((zero.low, zero.high))
    assert (whole.low, whole.high) == pytest.approx((1 - zero.high, 1.0))
    assert np.isnan(metrics.rate_of(np.ones(5), np.arange(5)).low)
    # A cluster without a trial says nothing.
    assert np.isnan(metrics.rate_of([0, 0, 0, 0, 0, 1], range(6), [0, 0, 0, 0, 0, 1]).low)
    for events, names, given in (
        ([7], [0], {"trials": [1]}),
        ([-1], [0], {}),
        ([0, 1], ["a", None], {}),
    ):
        with pytest.raises(InputError):
            metrics.rate_of(events, names, **given)
