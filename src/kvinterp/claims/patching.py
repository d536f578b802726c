"""Claims about what carries the divergence: the residual stream or the cache (FP16 paper, sections 6.5 and 7.3)."""

from __future__ import annotations

import pandas as pd

from kvinterp.claims.base import (
    PAPER,
    Claim,
    Found,
    NotTestableError,
    Tables,
    average,
    known,
    larger,
    of_models,
    smaller,
    table,
    told_again,
)

MOST = 0.5
"""What recovers more than half of the distance is said to carry most of the divergence."""


def _recovered(tables: Tables, site: str, sweep: str, direction: str, protocol: str) -> pd.DataFrame:
    columns = ("model", "example", "site", "sweep", "layer", "direction", "protocol", "recovery", "defined")
    rows = table(tables, "recovery", *columns)
    # The paper patches the newest position at the first decode step; its control every position at every step.
    chosen = (rows["site"] == site) & (rows["sweep"] == sweep) & (rows["direction"] == direction)
    rows = rows[chosen & (rows["protocol"] == protocol) & rows["defined"].astype(bool)]
    if site == "resid_post" and "positions" in rows and protocol == "matched" and (rows["positions"] == "all").any():
        rows = rows[rows["positions"] == "all"]
    if "step_set" in rows and rows["step_set"].nunique() > 1:
        rows = rows[(rows["step_set"] == "first") == (protocol == "free")]
    if rows.empty:
        raise NotTestableError(f"{site} was not patched {sweep} {direction} ({protocol}), or there was nothing to recover")
    return known(rows, "recovery")


def _deepest(rows: pd.DataFrame) -> pd.DataFrame:
    """Those of all layers together: the last of a cumulative sweep."""
    return rows[rows["layer"] == rows.groupby("model")["layer"].transform("max")]


def _medians(rows: pd.DataFrame) -> pd.Series:
    """The median over layers, by model and example."""
    return rows.groupby(["model", "example"])["recovery"].median()


def _papers(tables: Tables, sweep: str) -> pd.DataFrame:
    try:
        return _recovered(tables, "resid_post", sweep, "into-recompute", "free")
    except NotTestableError:
        return pd.DataFrame(columns=["model", "example", "recovery", "layer"])


def one_layer_recovers_nothing(tables: Tables) -> Found:
    """The residual stream of one layer recovers nothing."""
    medians = _medians(_recovered(tables, "resid_post", "single", "into-recompute", "matched"))
    paper = _papers(tables, "single")["recovery"].astype(float).median()
    return smaller(medians, medians.index.get_level_values("example"), 0.05).beside(paper)


def all_layers_make_it_worse(tables: Tables) -> Found:
    """The residual stream of all layers but the last has a negative recovery: patched in, it makes the paths differ more."""
    rows = _recovered(tables, "resid_post", "cumulative", "into-recompute", "matched")
    rows, paper = _deepest(rows.drop(_deepest(rows).index)), _papers(tables, "cumulative")
    if rows.empty:
        raise NotTestableError("no layer but the last was patched")
    return smaller(rows["recovery"], rows["example"], 0.0).beside(average(_deepest(paper), "recovery"))


def gemma_recovers_somewhat(tables: Tables) -> Found:
    """One layer's residual stream recovers something in the Gemma model."""
    rows = of_models(_recovered(tables, "resid_post", "single", "into-recompute", "matched"), "gemma")
    if rows.empty:
        raise NotTestableError("it is of a Gemma model, and there is none")
    medians, paper = _medians(rows), of_models(_papers(tables, "single"), "gemma")
    return larger(medians, medians.index.get_level_values("example"), 0.0).beside(paper["recovery"].astype(float).median())


def the_cache_carries_it(tables: Tables) -> Found:
    """K and V of the other path, put into the cache, take most of the divergence away."""
    rows = _deepest(_recovered(tables, "kv", "cumulative", "into-cached", "matched"))
    return larger(rows["recovery"], rows["example"], MOST)


def earlier_rows_carry_it(tables: Tables) -> Found:
    """What earlier rows hold makes more of the difference than computing the newest row alone."""
    steps = table(tables, "decomposition", "example", "step", "fresh_l2", "state_l2")
    steps = known(steps[steps["step"] > 0], "fresh_l2", "state_l2")
    both = steps["fresh_l2"] + steps["state_l2"]
    share = (steps["state_l2"] / both)[both > 0]
    if share.empty:
        raise NotTestableError("no step of any example differs")
    return larger(share, steps.loc[share.index, "example"], MOST)


_RUN = "K and V patched directly, in both directions, beside all positions of the residual stream, on the paper's models"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "residual-single", PAPER, "abstract, 6.5", "Patching the residual stream of one layer recovers almost nothing.",
        "below 1% (median)", "median recovery over layers (its protocol: one position and step, free; control: all, matched)",
        "holds below 5%, does not above", _RUN, one_layer_recovers_nothing,
    ),
    Claim(
        "residual-all", PAPER, "abstract, 6.5", "Patching the residual stream of all layers makes the paths differ more.",
        "negative in 3 of 3 models",
        "median recovery, all layers (its protocol: mean, one position and step, free; control: all but the last layer, matched)",
        "holds below 0, does not above; the last layer's stream is all that the unembedding reads, and recovers everything",
        _RUN, all_layers_make_it_worse,
    ),
    Claim(
        "gemma-partial", PAPER, "6.5", "In Gemma one layer's residual stream recovers something.",
        "+5.75% (median)", "median recovery over layers of the Gemma model", "holds above 0, does not below",
        _RUN, gemma_recovers_somewhat,
    ),
    Claim(
        "cache-carries", PAPER, "abstract, 6.5, 7.3", "The state of the cache is what carries the divergence.",
        "by elimination", "recovery with K and V of all layers put into the cached path",
        "holds above a half, does not below", _RUN, the_cache_carries_it,
    ),
    Claim(
        "earlier-rows-carry", PAPER, "1, 6.5", "Errors written at each step stay in the cache and affect all later ones.",
        "", "share of what earlier rows hold, of that and of computing the newest row alone (L2 of logits)",
        "holds above a half, does not below", _RUN, earlier_rows_carry_it,
    ),
)  # fmt: skip
CLAIMS += (
    told_again(
        CLAIMS, "residual-all", id="news-residual", value="",
        claim="Manipulating the residual stream cannot recover the cache-free trajectory.",
    ),
)  # fmt: skip
