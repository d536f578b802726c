"""How a claim is found in the tables of a study where no rule says it: a function a claim, named by the claim."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics
from kvinterp.study.claims.base import (
    FAILS,
    HOLDS,
    LEAST,
    LEVEL,
    MANY,
    OPEN,
    Found,
    NotTestableError,
    Tables,
    check,
    check_enough,
    larger,
    larger_of_intervals,
    never,
    one_sided,
    ratio,
    smaller,
    smaller_of_intervals,
)
from kvinterp.study.claims.rows import (
    BARE,
    FREE,
    GREEDY_FLIPS,
    MATCHED,
    Column,
    Pair,
    Rows,
    greedy_copies,
    interval,
    of_gemma,
    preferred,
    rows,
    rung,
    score,
)

# How often and how far the paths part ------------------------------------------------------------------------------------

SMALL = 1.05
"""A ratio of mean KLs that still counts as none: the paper calls 1.01 small and 1.07 not."""


def greedy_parts_too(tables: Tables) -> Found:
    """Some greedy decode parts, while a path run twice does not."""
    flips, units = GREEDY_FLIPS(tables)
    again = rows(tables, "nulls", "null == 'same path twice'")
    parts = never(flips, units).but(paper=float(flips.mean()))
    if again["differing_steps"].any():
        return parts.but(verdict=FAILS, why="a path that is run twice differs from itself")
    check(parts.verdict != OPEN, parts.why)
    # One that parts is no counterexample but what is claimed.
    return parts.but(verdict={FAILS: HOLDS, HOLDS: FAILS}[parts.verdict])


def of_null(tables: Tables, name: str, differ: bool = False) -> Found:
    """A path computes the same again; where the paths must ``differ``, there must be a difference to put down to something."""
    nulls = rows(tables, "nulls", f"null == {name!r} and steps > 0")
    n, steps, differing = int(nulls["n"].max()), int(nulls["steps"].sum()), int(nulls["differing_steps"].sum())
    found = never(np.zeros(n), np.arange(n))
    if differing:
        found = Found(differing / steps, n=n, verdict=FAILS, why=f"{differing} of {steps} steps differ")
    check(found.verdict != OPEN, found.why)
    # The recompute path must agree with itself among more rows if the cache is what makes the difference.
    some = not differ or rows(tables, "decodes", MATCHED)["max_abs_logit"].any()
    check(some, "there is no difference to put down to anything")
    return found


def seeds_do_not_matter(tables: Tables) -> Found:
    """Few examples part under some seeds only."""
    flips = Column("decodes", "flip_index.notna()", f"{MATCHED} and strategy != 'greedy'").rows(tables)
    check(flips["value"].any(), "no sampled decode parts")
    # The spread over one seed is none.
    spread = flips.groupby(["unit", "model", "strategy"])["value"].std().dropna()
    sometimes = (spread > 0).astype(float)
    return smaller(sometimes, sometimes.index.get_level_values("unit"), 0.05, of="share").but(paper=sometimes.mean())


def js_goes_with_kl(tables: Tables) -> Found:
    """Decodes of more KL have more JS."""
    tests = []
    for protocol in (MATCHED, FREE):
        decodes = rows(tables, "decodes", protocol).dropna(subset=["mean_kl", "mean_js"])
        columns = decodes["mean_kl"], decodes["mean_js"], decodes["unit"]
        tests.append(metrics.correlation(*columns, method="spearman", resamples=300))
    check(not tests[0].why, tests[0].why)
    return larger_of_intervals(Found.of(tests[0]), 0.5).but(paper=tests[1].effect)


def _kl_by(tables: Tables, protocol: str, *across: str) -> pd.DataFrame:
    """Mean KL by prompt, a column a model; of the prompts that all decoded."""
    return Column("decodes", "mean_kl", protocol, within=("unit", *across)).wide(tables, *across).dropna()


def gemma_parts_furthest(tables: Tables) -> Found:
    """The Gemma model has the highest mean KL."""
    sides = []
    for protocol in (MATCHED, FREE):
        by = _kl_by(tables, protocol, "model")
        gemma = by.columns.str.lower().str.contains("gemma")
        check(0 < gemma.sum() < len(gemma), f"it is of a Gemma model beside others, and these are {', '.join(by.columns)}")
        others = by.loc[:, ~gemma]
        sides.append((by.loc[:, gemma].mean(axis=1), others[others.mean().idxmax()]))
    (one, other), (papers, highest) = sides
    paper = papers.mean() / highest.mean() if highest.mean() > 0 else np.nan
    return ratio(one, other, one.index, 1.0).but(paper=paper)


def strategy_matters_in_one_model(tables: Tables) -> Found:
    """In exactly one model do strategies change the mean KL, in the others they are shown not to."""
    by = _kl_by(tables, MATCHED, "model", "strategy")
    names = by.columns.unique("model")
    check(len(names) > 1 and by.columns.unique("strategy").size > 1, "it is of several models under several strategies")
    matters, same, largest = [], [], {}
    for name in names:
        found = [ratio(by[name][a], by[name][b], by.index, SMALL) for a, b in itertools.permutations(by[name], 2)]
        # Some pair lies beyond the bound, corrected for the pairs; or each is shown to lie within.
        matters.append(min(1.0, len(found) * min(one.holds for one in found)))
        same.append(max(one.fails for one in found))
        largest[name] = max(one.matched for one in found)
    first, second = np.sort(matters)[:2] * len(names)
    holds = max(min(1.0, first), np.delete(same, np.argmin(matters)).max())
    fails = min(1.0, 2 * min(second, max(same)))
    why = "largest over smallest: " + ", ".join(f"{name} {size:.3g}" for name, size in largest.items())
    return Found(max(largest.values()), n=len(by), holds=float(holds), fails=float(fails), why=why)


def as_many_as_rows(tables: Tables) -> Found:
    """The error of a mean KL is that of as many independent runs as there are pairs: copies and seeds count."""
    free = rows(tables, "decodes", f"{FREE} and mean_kl.notna()")
    free = free.loc[free.index.repeat(greedy_copies(free))].query("mean_kl > 0")
    free = free.assign(log=np.log(free["mean_kl"]), square=np.log(free["mean_kl"]) ** 2)
    found = []
    for _, group in free.groupby("condition"):
        by = group.groupby("unit").agg(mean=("log", "mean"), rows=("log", "size"), squares=("square", "sum"))
        if len(by) >= MANY and group["log"].std() > 0:
            columns = by.to_numpy().T
            low, high = metrics.clustered_interval(_errors, np.arange(len(by)), *columns, resamples=300)
            found.append({"value": _errors(*columns), "low": low, "high": high, "n": len(by)})
    check(found, f"no condition has {MANY} examples whose KL varies")
    return smaller_of_intervals(interval(pd.DataFrame(found), "value"), 1.1).but(paper=1.0)


def _errors(means: np.ndarray, rows: np.ndarray, squares: np.ndarray) -> float:
    """The error of a mean over clusters, as a multiple of that over rows that are taken as independent."""
    count = rows.sum()
    by_row = (squares.sum() / count - ((rows * means).sum() / count) ** 2) / (count - 1)
    return float(np.sqrt(means.var(ddof=1) / len(means) / by_row)) if by_row > 0 else float("nan")


# In which layers and heads the paths part --------------------------------------------------------------------------------

SHARP = "step > 0 and model.str.lower().str.contains('llama|mistral')"
"""Where models of two kinds are said to jump."""
NEARLY_ALL = 0.95
"""The share of the layers that counts as nearly every one."""


def _by_layer(tables: Tables, *of: Rows) -> pd.DataFrame:
    """A row a model and example, a column a layer: the mean over steps."""
    # Step 0 is the prefill's, the same computation on both paths.
    return Column("layer_drift", BARE, f"{MATCHED} and step > 0", of, ("model", "unit", "layer")).wide(tables, "layer")


def papers_jump(tables: Tables) -> float:
    """The mean L2 of layer 1 as a multiple of layer 0's."""
    found = Column("layer_drift", "l2", f"{FREE} and {SHARP}", within=("layer",)).rows(tables)
    means = found.set_index("layer")["value"]
    return float(means.get(1, np.nan) / means.get(0, np.nan))


def gemma_is_flat(tables: Tables) -> Found:
    """No layer of the Gemma model drifts much more than another."""
    every = _by_layer(tables, of_gemma)
    by = every[(every > 0).all(axis=1)]
    check(by.shape[1] > 1 and len(by), "no example of the Gemma model drifts in all layers")
    spread = np.log(by.max(axis=1) / by.min(axis=1))
    found = smaller(spread, by.index.get_level_values("unit"), np.log(2.0)).through(np.exp)
    left_out = len(every) - len(by)
    why = f"{left_out} of {len(every)} do not drift in every layer, and are left out" if left_out else ""
    means = Column("layer_drift", "l2", f"{FREE} and step > 0", (of_gemma,), ("layer",)).rows(tables)["value"]
    return found.but(why=why, paper=float(means.max() / means.min()) if means.min() > 0 else np.nan)


def rows_hold_the_same_token(tables: Tables) -> Found:
    """At every step whose drift is measured in the free protocol both paths have read the same tokens."""
    count, removed = (int(count) for count in rows(tables, "layer_drift_rows", FREE)[["rows", "removed"]].sum())
    n = rows(tables, "layer_drift")["unit"].nunique()
    check_enough(n if count else 0, f"there are {count} rows of {n} examples")
    why = f"{removed} of {count} rows are of steps at which the paths had read other tokens"
    return Found(n=n, paper=removed / count, verdict=FAILS if removed else HOLDS, why=why)


def layers_are_significant(tables: Tables) -> Found:
    """Nearly every layer's drift differs from that of the layer before."""
    tests = rows(tables, "layer_tests", "contrast == 'previous layer' and p_bh.notna()")
    tests = tests[tests["measure"].isin(["l2", BARE])].assign(significant=tests["p_bh"] <= LEVEL)
    paired = tests[tests["test"].str.contains("ilcoxon")]
    # Of five pairs Wilcoxon's test gives 0.0625 at best.
    why = f"no layer is tested against the one before over {LEAST} examples, pair by pair"
    check(paired["n"].min() >= LEAST, why)
    papers = tests[tests["test"].str.contains("itney") & (tests["measure"] == "l2")]
    bare = preferred(paired, paired["measure"] == BARE)
    share, same = float(bare["significant"].mean()), _same_as_before(tables)
    why = f"{bare['significant'].sum()} of {len(bare)} layers, corrected by Benjamini and Hochberg over all of them; "
    why += f"{same.sum()} of {len(same)} are shown to be within a tenth of the layer before"
    verdict = HOLDS if share >= NEARLY_ALL else FAILS if 1 - same.mean() < NEARLY_ALL else OPEN
    return Found(share, n=int(bare["n"].min()), paper=float(papers["significant"].mean()), verdict=verdict, why=why)


def _same_as_before(tables: Tables) -> np.ndarray:
    """Whether each layer's drift, by model, is shown to be within a tenth of the one before, corrected for all of them."""
    found = []
    for _, of_model in _by_layer(tables).groupby("model"):
        by = of_model.dropna(axis=1, how="all")
        for pair in itertools.pairwise(by):
            try:
                found.append(max(ratio(by[a], by[b], by.index, 1.1).fails for a, b in itertools.permutations(pair)))
            except NotTestableError:
                found.append(1.0)
    return metrics.corrected(found, "holm") <= LEVEL


def errors_of_a_group(tables: Tables) -> tuple[Found]:
    """How much more the errors of heads that share K and V go together than those of heads that do not, over all layers."""
    return (interval(rows(tables, "head_correlation", "kind == 'within - across'"), "r"),)


def one_error_reaches_the_group(tables: Tables) -> Found:
    """An error in one KV head touches as many query heads as share it, and no other."""
    touched, prompts = Column("gqa", "heads_touched / query_heads_per_kv_head")(tables)
    n, just = prompts.nunique(), int((touched == 1).sum())
    check_enough(n, f"errors were planted in {n} prompts")
    why = f"{just} of {len(touched)} planted errors touch just these"
    verdict = HOLDS if just == len(touched) else FAILS
    return Found(float(touched.mean()), float(touched.min()), float(touched.max()), n, verdict=verdict, why=why)


def sharing_amplifies(tables: Tables) -> Found:
    """The more query heads share a KV head, the larger what one error does to the attention output."""
    ratio = "query_heads_per_kv_head"
    by = Column("gqa", "attn_out", within=("unit", ratio), how="median").wide(tables, ratio).dropna()
    check(by.shape[1] > 1, "all models share K and V among as many heads")
    by = by[(by > 0).all(axis=1)]
    slopes = [np.polyfit(np.log2(by.columns.to_numpy(float)), np.log2(row), 1)[0] for row in by.to_numpy()]
    return larger(slopes, by.index, 0.0)


# What the cause is -------------------------------------------------------------------------------------------------------


def float32_flips_nothing(tables: Tables) -> Found:
    """Float32 leaves no flip where float16 has some."""
    (half, _), (single, units) = (rung(dtype, "flipped")(tables) for dtype in ("float16", "float32"))
    found = never(single, units)
    check(found.verdict == FAILS or half.any(), "no token flips in float16 either: there is nothing to leave out")
    return found


def fixed_order(tables: Tables, if_gone: str, if_left: str) -> Found:
    """What one fixed order of additions leaves of a difference: the verdict if nothing, and if something."""
    differs, left = (
        rung("float16", "max_abs_logit > 0", kernels).rows(tables).groupby("unit")["value"].max()
        for kernels in ("native", "batch_invariant")
    )
    check(differs.any(), "the paths are bitwise equal in float16 with the machine's own kernels")
    verdict, n = if_left if left.any() else if_gone, len(left)
    why = f"{left.sum():.0f} of {n} examples differ in a fixed order, {differs.sum():.0f} of {len(differs)} do otherwise"
    if if_left == HOLDS or not left.any():
        check_enough(n, why)
    return Found.of(metrics.share_of(left), paper=float(differs.mean()), verdict=verdict, why=why)


def float32_is_the_only_fix(tables: Tables) -> Found:
    """Every other way in 16 bits leaves flips where float16 has some."""
    flips, _ = rung("float16", "flipped")(tables)
    check(flips.any(), "no token flips in float16 with the machine's own kernels: there is nothing to fix")
    others = "dtype in ('float16', 'bfloat16') and (dtype != 'float16' or kernels != 'native')"
    ways = {
        f"{kernels} kernels in {dtype}": rung(dtype, "flipped", kernels).rows(tables).groupby("unit")["value"].max()
        for dtype, kernels in rows(tables, "ladder", others).groupby(["dtype", "kernels"]).groups
    }
    least = min(ways, key=lambda name: (ways[name].mean(), -len(ways[name])))
    left, n = int(ways[least].sum()), len(ways[least])
    why = f"under {least} {left} of {n} examples flip"
    check_enough(n, why)
    return Found.of(metrics.share_of(ways[least]), verdict=HOLDS if left else FAILS if n >= MANY else OPEN, why=why)


# When tokens flip, and how far apart the texts then are ------------------------------------------------------------------

RESAMPLES = 500
FEWEST = 10
"""Fewer examples that flip, or that do not, are no correlation and no ranking."""


def _flipped(tables: Tables, protocol: str, *columns: str) -> pd.DataFrame:
    """Decodes that flip."""
    found = rows(tables, "decodes", protocol).dropna(subset=["flip_index", "mean_kl", *columns])
    count = found["unit"].nunique()
    check(count >= FEWEST, f"a token flips in {count} examples, and fewer than {FEWEST} are no correlation")
    return found


def _ranked(found: pd.DataFrame, column: str) -> pd.Series:
    """Ranks within each model and strategy as normal scores, so that what differs between these is no correlation."""
    share = found.groupby("condition")[column].transform(lambda of: (of.rank() - 0.5) / len(of))
    return pd.Series(stats.norm.ppf(share), index=found.index)


def _correlation(found: pd.DataFrame, *given: str) -> Found:
    x, y, *rest = (_ranked(found, name) for name in ("flip_index", "mean_kl", *given))
    test = metrics.correlation(x, y, found["unit"], *rest, resamples=RESAMPLES)
    return one_sided(test, test.effect < 0)


def earlier_flips_more_kl(tables: Tables) -> Found:
    """Decodes that flip earlier have more KL."""
    return _correlation(_flipped(tables, MATCHED)).but(paper=_papers_r(_flipped(tables, FREE)))


def _papers_r(found: pd.DataFrame) -> float:
    """Pearson's correlation of flip step and mean KL, averaged over models."""
    columns = [(of["flip_index"], of["mean_kl"]) for _, of in found.groupby("model")]
    by_model = [stats.pearsonr(x, y).statistic for x, y in columns if _vary(x, y)]
    return float(np.mean(by_model)) if by_model else np.nan


def _vary(x: metrics.Column, y: metrics.Column) -> bool:
    return len(x) > 3 and np.ptp(x) > 0 and np.ptp(y) > 0


def stronger_without_the_first(tables: Tables) -> Found:
    """The correlation is stronger without decodes that flip at once."""
    matched, free = (_flipped(tables, protocol) for protocol in (MATCHED, FREE))
    # The paper's step 0 is the first that a cached path computes alone, ours is 1.
    later = matched["flip_index"] > 1
    check(matched.loc[later, "unit"].nunique() >= FEWEST, f"fewer than {FEWEST} examples flip after step 1")
    x, y = (_ranked(matched, name).to_numpy() for name in ("flip_index", "mean_kl"))
    check(np.ptp(y) > 0, "the matched KL does not vary")

    def r(x: np.ndarray, y: np.ndarray) -> float:
        return float(np.corrcoef(x, y)[0, 1]) if _vary(x, y) else np.nan

    def stronger(x: np.ndarray, y: np.ndarray, kept: np.ndarray) -> float:
        return r(x, y) - r(x[kept > 0], y[kept > 0])

    columns = x, y, later.to_numpy(float)
    ends = metrics.clustered_interval(stronger, matched["unit"].to_numpy(), *columns, resamples=RESAMPLES)
    found = Found(stronger(*columns), *ends, matched["unit"].nunique())
    return larger_of_intervals(found, 0.0).but(paper=_papers_r(free) - _papers_r(free[free["flip_index"] > 1]))


def explained_by_the_margin(tables: Tables) -> Found:
    """With the margin held constant, flip step and KL no longer go together."""
    raw, found, free = (
        _correlation(_flipped(tables, protocol, *given), *given)
        for protocol, given in ((MATCHED, ()), (MATCHED, ("smallest_margin",)), (FREE, ("smallest_margin",)))
    )
    check(raw.holds <= LEVEL, "flip step and matched KL do not go together in the first place")
    # Two one-sided tests with the interval's own error.
    error = (found.high - found.low) / (2 * stats.norm.ppf(0.975))
    above, below = (float(stats.norm.sf(side)) for side in ((found.matched + 0.2) / error, (0.2 - found.matched) / error))
    outside = min(1.0, 2 * min(1 - above, 1 - below))
    return found.but(paper=free.matched, holds=max(above, below), fails=outside)


def early_third_has_more_kl(tables: Tables) -> Found:
    """The third that flips first has a higher mean KL than the third that flips last."""
    matched, free = (_thirds(_flipped(tables, protocol)) for protocol in (MATCHED, FREE))
    return matched.but(paper=free.matched)


def _thirds(found: pd.DataFrame) -> Found:
    # Each condition on its own scale; an exact 0 has no logarithm.
    above = found[found["mean_kl"] > 0]
    logs = np.log(above["mean_kl"])
    logs -= logs.groupby(above["condition"]).transform("mean")
    place = _ranked(above, "flip_index").rank(pct=True)
    ends = (place <= 1 / 3) | (place > 2 / 3)
    test = metrics.slope(place[ends] <= 1 / 3, logs[ends], above.loc[ends, "unit"])
    none = len(found) - len(above)
    why = f"{none} of {len(found)} decodes have a KL of exactly 0 and are left out" if none else ""
    return one_sided(test, test.effect > 0).but(why=why).through(np.exp)


def margin_tells_the_flip(tables: Tables) -> Found:
    """Decodes that come nearer to a tie are those that flip."""
    decodes = rows(tables, "decodes", f"{MATCHED} and smallest_margin.notna()")
    of_unit = decodes.assign(near=-_ranked(decodes, "smallest_margin"), flips=decodes["flip_index"].notna()).groupby("unit")
    nearest, flips = of_unit["near"].max(), of_unit["flips"].max()
    why = f"a token flips in {flips.sum()} of {len(flips)} examples, and fewer than {FEWEST} of either kind are no ranking"
    check(min(flips.sum(), (~flips).sum()) >= FEWEST, why)
    test = metrics.mann_whitney(nearest[flips], nearest[~flips])
    return one_sided(test, test.effect > 0.5)


def margin_delays_the_flip(tables: Tables) -> Found:
    """A larger margin goes with a later first flip, decodes that never flip counted."""
    decodes = rows(tables, "decodes", f"{MATCHED} and smallest_margin.notna()")
    when = decodes["flip_index"].fillna(decodes["steps"] - 1)
    test = metrics.cox(when, decodes["flip_index"].notna(), _ranked(decodes, "smallest_margin"), decodes["unit"])
    return one_sided(test, test.effect < 1)


# What a less exact cache does --------------------------------------------------------------------------------------------

EIGHT_BITS, FOUR_BITS = ("q8_0", "int8"), ("q4_0", "int4")
"""Arms on K and V, of which the first that was run is judged; q8_0 is Ollama's."""
BOUNDS = ("uniform(-1.5,1.5)", "normal(0,0.5)")
"""The bounds of error within which the source says that 80% is kept."""


def kept_within_bounds(tables: Tables) -> Found:
    """Under both errors that the source names as bounds 80% of the control's score is kept."""
    found = {policy: larger_of_intervals(*score(tables, policy), 0.8) for policy in BOUNDS}
    least = min(found.values(), key=lambda one: one.matched)
    fails = min(1.0, len(found) * min(one.fails for one in found.values()))
    why = " and ".join(f"{one.matched:.0%} under {policy}" for policy, one in found.items())
    return least.but(holds=max(one.holds for one in found.values()), fails=fails, why=why)


CHAIN = ("model", "temperature", "unit", "seed")
"""What a chain under a policy and the one beside it without share; the text is the unit."""


def _last_hop(found: pd.DataFrame) -> pd.DataFrame:
    return found[found["hop"] == found.groupby(list(CHAIN))["hop"].transform("max")]


def _differences(tables: Tables, arm: str) -> pd.DataFrame:
    """The last similarity of each chain under an arm, less that without a policy, as ``difference``."""
    of_arms = (Column("chains", "similarity", f"arm == {name!r}", of=(_last_hop,)) for name in (arm, "cached"))
    both = Pair(*of_arms, on=CHAIN).rows(tables)
    return both.assign(difference=both["value_above"] - both["value_below"])


def _arm(tables: Tables, names: Sequence[str], *on: str) -> str:
    """The first of these arms that was run, with each of these choices where there are any."""
    run = set(rows(tables, "chains")["arm"])
    return next((name for name in names if {name + each for each in on or ("",)} <= run), names[0])


def exact_cache_keeps_more(tables: Tables) -> Found:
    """Chains under 8 bits end further from their first text than without."""
    arm = _arm(tables, EIGHT_BITS)
    both = _differences(tables, arm)
    return smaller(both["difference"], both["unit"], 0.0, of="mean").saying(f"the arm is {arm}")


def keys_matter_more(tables: Tables) -> Found:
    """A policy on K alone costs more similarity than on V alone."""
    name = _arm(tables, (*EIGHT_BITS, *FOUR_BITS), *ON)
    k, v = (_differences(tables, name + on) for on in ON)
    both = k.merge(v, on=list(CHAIN))
    found = smaller(both["difference_x"] - both["difference_y"], both["unit"], 0.0, of="mean")
    return found.saying(f"the arms are those of {name}")


ON = ("(on=k)", "(on=v)")


def models_disagree(tables: Tables) -> Found:
    """For some models the less exact cache is better, for others worse."""
    arm = _arm(tables, EIGHT_BITS)
    by = _differences(tables, arm).groupby(["unit", "model"])["difference"].mean().unstack("model").dropna()
    check(by.shape[1] > 1, "it is of several models, and there is one")
    check_enough(len(by), f"{len(by)} texts were restated by every model", MANY)
    above, below = (
        np.array([metrics.mean_of(by[model], alternative=side).p for model in by]) for side in ("greater", "less")
    )
    check(np.isfinite([above, below]).all(), "in a model no text differs, or all by the same")
    # Both signs occur: some model is above 0 and some below, each corrected for having been chosen. Only one does: all are.
    holds = min(1.0, max(above.min(), below.min()) * by.shape[1])
    fails = min(1.0, 2 * min(above.max(), below.max()))
    means = by.mean()
    apart = metrics.mean_of(by[means.idxmax()] - by[means.idxmin()])
    return Found.of(apart, holds=holds, fails=fails, why=f"the arm is {arm}")
