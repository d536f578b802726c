"""Claims about how often and how far decoding from a cache parts from recomputing the prefix (FP16 paper, 5.1 and 6.1)."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.claims.base import (
    FAILS,
    HOLDS,
    MANY,
    PAPER,
    Claim,
    Found,
    NotTestableError,
    Tables,
    average,
    known,
    larger,
    larger_of_intervals,
    never,
    pooled,
    ratio,
    smaller,
    smaller_of_intervals,
    table,
    told_again,
)


def decodes_of(tables: Tables, protocol: str, *columns: str) -> pd.DataFrame:
    """The decodes of a protocol, with ``unit``: the prompt, which all models, strategies and seeds share; and ``condition``."""
    found = table(tables, "decodes", "model", "strategy", "seed", "example", "protocol", "flip_index", *columns)
    found = found[found["protocol"] == protocol]
    if found.empty:
        raise NotTestableError(f"table decodes has no row of the {protocol} protocol")
    unit = found["id" if "id" in found else "example"].astype(str)
    return found.assign(unit=unit, condition=found["model"].astype(str) + " " + found["strategy"].astype(str))


def of_greedy_copies(decodes: pd.DataFrame) -> pd.Series:
    """How often the paper counts each decode: a greedy one as often as there are seeds of the others."""
    sampled = decodes.loc[decodes["strategy"] != "greedy", "seed"].nunique()
    return pd.Series(np.where(decodes["strategy"] == "greedy", max(sampled, 1), 1), index=decodes.index)


def _flips(tables: Tables, strategy: str | None = None) -> pd.DataFrame:
    found = decodes_of(tables, "matched")
    if strategy is not None:
        found = found[found["strategy"] == strategy]
        if found.empty:
            raise NotTestableError(f"nothing was decoded with {strategy}")
    return found.assign(flips=found["flip_index"].notna())


# Divergence ------------------------------------------------------------------------------------------------------------


def _every(flips: pd.DataFrame) -> Found:
    stays = never(~flips["flips"], flips["unit"])
    ends = metrics.rate_of(flips["flips"].astype(float), flips["unit"])
    found = dataclasses.replace(stays, matched=ends.effect, low=ends.low, high=ends.high)
    why = stays.why if not (~flips["flips"]).any() else f"{int((~flips['flips']).sum())} of {len(flips)} decodes never part"
    weight = of_greedy_copies(flips)
    return found.beside(float((flips["flips"] * weight).sum() / weight.sum()), why)


def greedy_parts_too(tables: Tables) -> Found:
    """Some greedy decode parts, while a path run twice does not."""
    flips, nulls = _flips(tables, "greedy"), table(tables, "nulls", "null", "differing_steps")
    again = nulls.loc[nulls["null"] == "same path twice", "differing_steps"]
    if again.empty:
        raise NotTestableError("no path was run twice")
    by_unit = flips.groupby("unit")["flips"].max()
    n, verdict = len(by_unit), FAILS
    if again.sum():
        why = "a path that is run twice differs from itself"
    elif by_unit.any():
        verdict, why = HOLDS, f"{int(by_unit.sum())} of {n} examples part under greedy decoding"
    elif n < MANY:
        raise NotTestableError(f"none of {n} greedy decodes parts, and fewer than {MANY} are too few to say that none does")
    else:
        why = f"none of {n} greedy decodes parts"
    return Found.of(metrics.share_of(by_unit.to_numpy()), paper=average(flips, "flips"), verdict=verdict, why=why)


def recompute_agrees_with_itself(tables: Tables) -> Found:
    """The recompute path computes the same row among more rows, which it must if the cache is what makes the difference."""
    found = _of_null(tables, "longer suffix")
    if decodes_of(tables, "matched", "max_abs_logit")["max_abs_logit"].max() == 0:
        raise NotTestableError("the paths do not differ, so that there is no difference to put down to anything")
    return found


def _of_null(tables: Tables, name: str) -> Found:
    nulls = table(tables, "nulls", "null", "steps", "differing_steps", "n")
    of = nulls[nulls["null"] == name]
    if of.empty or not of["steps"].sum():
        raise NotTestableError(f"the null {name!r} was not run")
    n, differing = int(of["n"].max()), int(of["differing_steps"].sum())
    share = differing / int(of["steps"].sum())
    if differing:
        return Found(share, n=n, verdict=FAILS, why=f"{differing} of {int(of['steps'].sum())} steps differ")
    if n < MANY:
        raise NotTestableError(f"no step of {n} examples differs, and fewer than {MANY} are too few to say never")
    return Found(0.0, 0.0, metrics.share_of(np.zeros(n)).high, n, verdict=HOLDS)


def seeds_do_not_matter(tables: Tables) -> Found:
    """Few examples part under some seeds only."""
    flips = _flips(tables)
    flips = flips[flips["strategy"] != "greedy"]
    by = flips.groupby(["unit", "model", "strategy"])["flips"].agg(["mean", "size"])
    by = by[by["size"] > 1].reset_index()
    if by.empty:
        raise NotTestableError("no example was decoded under two seeds")
    if not by["mean"].any():
        raise NotTestableError("no sampled decode parts")
    sometimes = by["mean"].between(0, 1, inclusive="neither").astype(float)
    return smaller(sometimes, by["unit"], 0.05, of="share").beside(float(sometimes.mean()))


# KL --------------------------------------------------------------------------------------------------------------------

LARGE = 10.0
"""Nats; the paper's means are 10.68 to 12.83."""
SMALL = 1.05
"""A ratio of mean KLs that still counts as none: the paper calls 1.01 small and 1.07 not."""


def _kl(tables: Tables, than: float, column: str = "mean_kl") -> Found:
    decodes, free = (known(decodes_of(tables, protocol, column), column) for protocol in ("matched", "free"))
    paper = float(np.average(free[column], weights=of_greedy_copies(free)))
    return larger(decodes[column], decodes["unit"], than).beside(paper)


def kl_is_within_the_bound(tables: Tables) -> Found:
    """A diverging decode's mean KL is one that its largest logit difference allows."""
    free = decodes_of(tables, "free", "mean_kl", "kl_bound")
    free = free[free["flip_index"].notna()]
    if free.empty:
        raise NotTestableError("no free decode parts from the other path's")
    free = known(free, "mean_kl", "kl_bound")
    above = (free["mean_kl"] > free["kl_bound"]).astype(float)
    return smaller(above, free["unit"], 0.5, of="share").beside(float(above.mean()))


def kl_grows(tables: Tables) -> Found:
    """The KL of rounding is larger over the last quarter of the steps than over the first."""
    rows, free = (decodes_of(tables, protocol, "early_kl", "late_kl") for protocol in ("matched", "free"))
    found = ratio(rows["late_kl"], rows["early_kl"], rows["unit"], 1.0, 1.5)
    means = free[["late_kl", "early_kl"]].mean()
    return found.beside(means["late_kl"] / means["early_kl"] if means["early_kl"] > 0 else np.nan)


def js_goes_with_kl(tables: Tables) -> Found:
    """Decodes of more KL have more JS."""
    found = []
    for protocol in ("free", "matched"):
        decodes = known(decodes_of(tables, protocol, "mean_kl", "mean_js"), "mean_kl", "mean_js")
        test = metrics.correlation(
            decodes["mean_kl"], decodes["mean_js"], decodes["unit"], method="spearman", resamples=300
        )
        found.append(Found.of(test, why=test.why))
    if found[1].why:
        raise NotTestableError(found[1].why)
    return larger_of_intervals(found[1], 0.5).beside(found[0].matched)


def gemma_parts_furthest(tables: Tables) -> Found:
    """The Gemma model has the highest mean KL, strategy by strategy."""
    sides = {}
    for protocol in ("matched", "free"):
        by = _by_model(tables, protocol)
        gemma = [name for name in by if "gemma" in str(name).lower()]
        others = by.drop(columns=gemma)
        if not gemma or others.empty:
            raise NotTestableError("it is of a Gemma model beside others, and these are " + ", ".join(map(str, by.columns)))
        sides[protocol] = by[gemma].mean(axis=1), others[others.mean().idxmax()]
    (one, other), (papers, others_) = sides["matched"], sides["free"]
    return ratio(one, other, by.index, 1.0).beside(papers.mean() / others_.mean() if others_.mean() > 0 else np.nan)


def _by_model(tables: Tables, protocol: str, *within: str) -> pd.DataFrame:
    """Mean KL by prompt, a column a model; of the prompts that all decoded."""
    decodes = known(decodes_of(tables, protocol, "mean_kl"), "mean_kl")
    return decodes.groupby(["unit", "model", *within])["mean_kl"].mean().unstack(["model", *within]).dropna()


def strategy_matters_in_one_model(tables: Tables) -> Found:
    """In exactly one model do strategies change the mean KL, in the others they are shown not to."""
    by = _by_model(tables, "matched", "strategy")
    names = list(by.columns.unique("model"))
    if len(names) < 2 or by.columns.get_level_values("strategy").nunique() < 2:
        raise NotTestableError("it is of several models under several strategies")
    sides, largest = [], []
    for name in names:
        found = [ratio(by[name][a], by[name][b], by.index, SMALL) for a, b in itertools.permutations(by[name], 2)]
        # Some pair lies beyond the bound, corrected for the pairs; or each is shown to lie within.
        sides.append((min(1.0, len(found) * min(one.holds for one in found)), max(one.fails for one in found)))
        largest.append(max(one.matched for one in found))
    matters, same = np.array(sides).T
    one = int(matters.argmin())
    holds = max(min(1.0, len(names) * matters[one]), np.delete(same, one).max())
    fails = min(1.0, 2 * min(len(names) * np.sort(matters)[1], same.max()))
    why = "largest over smallest: " + ", ".join(f"{name} {size:.3g}" for name, size in zip(names, largest, strict=True))
    return Found(max(largest), n=len(by), holds=float(holds), fails=float(fails), why=why)


def as_many_as_rows(tables: Tables) -> Found:
    """The error of a mean KL is that of as many independent runs as there are pairs: copies and seeds count."""
    free = known(decodes_of(tables, "free", "mean_kl"), "mean_kl")
    free = free.loc[free.index.repeat(of_greedy_copies(free).astype(int))]
    free = free[free["mean_kl"] > 0].assign(log=lambda rows: np.log(rows["mean_kl"]))
    found = []
    for _, group in free.groupby(["model", "strategy"]):
        by = (
            group.assign(square=group["log"] ** 2)
            .groupby("unit")
            .agg(mean=("log", "mean"), rows=("log", "size"), squares=("square", "sum"))
        )
        if len(by) >= MANY and group["log"].std() > 0:
            columns = by.to_numpy().T
            ends = metrics.clustered_interval(_errors, np.arange(len(by)), *columns, resamples=300)
            found.append({"value": _errors(*columns), "low": ends.low, "high": ends.high, "n": len(by)})
    if not found:
        raise NotTestableError(f"no condition has {MANY} examples whose KL varies")
    return smaller_of_intervals(pooled(pd.DataFrame(found), "value"), 1.1).beside(1.0)


def _errors(means: np.ndarray, rows: np.ndarray, squares: np.ndarray) -> float:
    """The error of a mean over clusters, as a multiple of that over rows that are taken as independent."""
    count = rows.sum()
    by_row = (squares.sum() / count - ((rows * means).sum() / count) ** 2) / (count - 1)
    return float(np.sqrt(means.var(ddof=1) / len(means) / by_row)) if by_row > 0 else float("nan")


_RUN = "the paper's models and 700 problems on its GPU, greedy once, both protocols: kvinterp study --preset paper"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "diverges-always", PAPER, "abstract, 6.1", "Cached and recomputed decoding write different texts in every run.",
        "100% of 31,500", "share of decodes that part",
        f"does not hold with one decode that never parts; holds with none in at least {MANY} examples",
        _RUN, lambda tables: _every(_flips(tables)),
    ),
    Claim(
        "diverges-greedy", PAPER, "abstract, 6.1", "So they do in every run under greedy decoding.",
        "100%", "share of greedy decodes that part", "as diverges-always, greedy decodes alone",
        _RUN, lambda tables: _every(_flips(tables, "greedy")),
    ),
    Claim(
        "not-sampling", PAPER, "4.2, 6.1", "Greedy decoding parts too, so sampling is not the cause.",
        "100% of greedy runs", "share of examples whose greedy decode parts",
        f"holds with one greedy decode that parts while a path run twice never differs; does not with none in {MANY} examples",
        "the same two runs on the paper's GPU", greedy_parts_too,
    ),
    Claim(
        "deterministic", PAPER, "1, 7.1", "The same input on the same hardware gives the same result on each path.",
        "always", "share of steps at which a path run twice differs",
        f"does not hold with one differing step; holds with none in {MANY} examples",
        "each path twice on the paper's GPU, with and without deterministic algorithms",
        lambda tables: _of_null(tables, "same path twice"), if_equal="true",
    ),
    Claim(
        "cache-is-the-source", PAPER, "3.4", "The execution path with a cache is exactly what makes the difference.",
        "isolated", "share of steps at which the recompute path differs from itself among more rows",
        f"does not hold with one such step, which has no cache in it; holds with none in {MANY} examples while the paths differ",
        "the recompute path with a longer suffix on the paper's GPU", recompute_agrees_with_itself,
    ),
    Claim(
        "seed-independent", PAPER, "1, 5.2", "Whether an example parts does not depend on the seed.",
        "always-diverges in all", "share of examples that part under some seeds only",
        "holds below 5%, does not above", _RUN, seeds_do_not_matter,
    ),
    Claim(
        "kl-large", PAPER, "6.1, table 1", "Rounding moves the two distributions more than 10 nats apart on average.",
        "10.68 to 12.83 nats", "median KL in nats (its protocol: mean, free, greedy counted as often as there are seeds)",
        "holds where the matched median is above 10 nats, does not where it is below", _RUN,
        lambda tables: _kl(tables, LARGE),
    ),
    Claim(
        "kl-not-text", PAPER, "6.1", "Mean KL over all steps measures redistribution by rounding, not other texts.",
        "10.68 to 12.83 nats", "share of diverging decodes whose mean KL is more than their largest logit difference allows",
        "holds where fewer than half exceed half the square of it (measured while inputs are the same), does not where more do",
        "the largest logit difference beside every mean KL, on the paper's GPU", kl_is_within_the_bound,
    ),
    Claim(
        "kl-persists", PAPER, "6.1, figure 1", "KL stays high to the last step and does not approach zero.",
        "about 10 nats", "median KL over the last quarter of the steps, nats (its protocol: mean, free)",
        "holds where the matched median is above 1 nat, does not where it is below", _RUN,
        lambda tables: _kl(tables, 1.0, "late_kl"),
    ),
    Claim(
        "kl-accumulates", PAPER, "6.1, figure 1", "Rounding errors accumulate over the decode steps instead of cancelling.",
        "", "KL over the last quarter of the steps as a multiple of the first's, median (its protocol: free, means)",
        "holds above 1, does not where it is shown to be below 1.5", _RUN, kl_grows,
    ),
    Claim(
        "js-confirms", PAPER, "4.3, 6.1", "JS goes the way of KL, so the pattern is no artefact of KL's unbounded range.",
        "same trend", "Spearman correlation of a decode's mean JS with its mean KL",
        "holds above 0.5, does not below", "nothing: no other measurement is in it", js_goes_with_kl,
        construction="JS and KL are functions of the same two distributions, small together and large together",
    ),
    Claim(
        "gemma-highest", PAPER, "6.1", "Gemma's paths are furthest apart under every strategy.",
        "12.66 to 12.83 nats", "KL of the Gemma model as a multiple of the highest of the others, median over prompts",
        "holds where the matched ratio is above 1, does not where it is below", _RUN, gemma_parts_furthest,
    ),
    Claim(
        "one-strategy-model", PAPER, "6.1", "Within a model the strategy hardly changes KL, except in one, Mistral.",
        "11.46 against 10.70 in Mistral", "KL of one strategy as a multiple of another's, median, the largest of all",
        "holds where one model's ratio is shown to be above 1.05 and all of the others' within it; does not where two models' "
        "are above it, or all within",
        _RUN, strategy_matters_in_one_model,
    ),
    Claim(
        "n-is-3500", PAPER, "5.1, 6.1", "A condition's mean KL rests on 3,500 independent run pairs.",
        "3,500; CI ±0.05 nats", "error of a mean of log KL over examples, as a multiple of that over rows",
        "holds below 1.1, does not above", "the same rows, clustered by problem", as_many_as_rows, if_equal="open",
    ),
)  # fmt: skip
CLAIMS += (
    told_again(
        CLAIMS, "diverges-always", id="news-100", value="100%",
        claim="The texts differ in every case tested, which proves that caching is not equivalent.",
    ),
)  # fmt: skip
