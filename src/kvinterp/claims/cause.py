"""Claims about the cause: FP16 arithmetic and the order of additions (FP16 paper, sections 2.2, 5.2 and 6.3)."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.claims.base import (
    FAILS,
    HOLDS,
    ISSUE,
    MANY,
    NEWS,
    OPEN,
    PAPER,
    Claim,
    Found,
    NotTestableError,
    Tables,
    check_enough,
    inside,
    known,
    larger,
    ratio,
    table,
    told_again,
)


def _rung(tables: Tables, dtype: str, kernels: str = "native", protocol: str = "matched") -> pd.DataFrame:
    columns = ("model", "id", "dtype", "kernels", "protocol", "failed", "flipped", "mean_kl", "max_abs_logit")
    ladder = table(tables, "ladder", *columns)
    ladder = ladder[~ladder["failed"].astype(bool)]
    found = ladder[(ladder["dtype"] == dtype) & (ladder["kernels"] == kernels) & (ladder["protocol"] == protocol)]
    if found.empty:
        raise NotTestableError(f"the ladder has no rung of {dtype} with {kernels} kernels")
    return found


def _flipped(rung: pd.DataFrame) -> pd.Series:
    return rung["flipped"].astype(bool).groupby(rung["id"]).max()


def float32_flips_nothing(tables: Tables) -> Found:
    """Float32 leaves no flip where float16 has some."""
    half, single = (_flipped(_rung(tables, dtype)) for dtype in ("float16", "float32"))
    found, n = Found.of(metrics.share_of(single.to_numpy())), len(single)
    if single.any():
        return dataclasses.replace(found, verdict=FAILS, why=f"{int(single.sum())} of {n} examples flip in float32")
    if not half.any():
        raise NotTestableError(f"no token flips in float16 either, in {len(half)} examples: there is nothing to leave out")
    why = f"{int(half.sum())} of {len(half)} examples flip in float16 and none of {n} in float32"
    if n < MANY:
        return dataclasses.replace(found, verdict=OPEN, why=f"{why}, of which fewer than {MANY} are too few")
    return dataclasses.replace(found, verdict=HOLDS, why=why)


def _beside_float32(tables: Tables, dtype: str, column: str) -> pd.DataFrame:
    rungs = [_rung(tables, each) for each in (dtype, "float32")]
    rows = rungs[0].merge(rungs[1], on=["model", "id"], suffixes=("_half", "_single"))
    rows = rows[rows[f"{column}_half"] > 0]
    if rows.empty:
        raise NotTestableError(f"the paths are bitwise equal in {dtype}: there is nothing that float32 could make smaller")
    return rows


def float32_does_not_help(tables: Tables) -> Found:
    """Logits differ about as much in float32 as in bfloat16."""
    rows = _beside_float32(tables, "bfloat16", "max_abs_logit")
    return ratio(rows["max_abs_logit_single"], rows["max_abs_logit_half"], rows["id"], 0.5).through(np.reciprocal)


def _orders(tables: Tables, column: str) -> Found:
    """The orders of magnitude by which float32 makes a number smaller than float16 does."""
    rows = _beside_float32(tables, "float16", column)
    found, beside = ratio(rows[f"{column}_half"], rows[f"{column}_single"], rows["id"], 1e8).through(np.log10), np.nan
    if "decodes" in tables:
        # The paper's ratio: its free-running mean KL over the float32 floor.
        free = tables["decodes"]
        free = free.loc[free["protocol"] == "free", "mean_kl"].astype(float).mean()
        floor = rows["mean_kl_single"].mean()
        beside = np.log10(free / floor) if free > 0 and floor > 0 else np.nan
    return found.beside(beside)


def _fixed_order(tables: Tables, if_gone: str, if_left: str) -> Found:
    rungs = [_rung(tables, "float16", kernels) for kernels in ("native", "batch_invariant")]
    differs, left = (rung.groupby("id")["max_abs_logit"].max() > 0 for rung in rungs)
    if not differs.any():
        raise NotTestableError("the paths are bitwise equal in float16 with the machine's own kernels")
    found, n = Found.of(metrics.share_of(left.to_numpy()), paper=float(differs.mean())), len(left)
    if left.any():
        why = f"{int(left.sum())} of {n} examples differ in a fixed order too"
        if if_left == HOLDS:
            check_enough(n, why)
        return dataclasses.replace(found, verdict=if_left, why=why)
    check_enough(n, f"no example of {n} differs in a fixed order")
    why = f"none of {n} examples differs in a fixed order, {int(differs.sum())} of {len(differs)} do otherwise"
    return dataclasses.replace(found, verdict=if_gone, why=why)


def float32_is_the_only_fix(tables: Tables) -> Found:
    """Every other way in 16 bits leaves flips where float16 has some."""
    if not _flipped(_rung(tables, "float16")).any():
        raise NotTestableError("no token flips in float16 with the machine's own kernels: there is nothing to fix")
    halves = tables["ladder"][tables["ladder"]["dtype"].isin(["float16", "bfloat16"])]
    kinds = [kind for kind in halves.groupby(["dtype", "kernels"]).groups if kind != ("float16", "native")]
    ways = {f"{kernels} kernels in {dtype}": _flipped(_rung(tables, dtype, kernels)) for dtype, kernels in kinds}
    if not ways:
        raise NotTestableError("the ladder has no other way in 16 bits")
    least = min(ways, key=lambda name: (ways[name].mean(), -len(ways[name])))
    left, n = int(ways[least].sum()), len(ways[least])
    verdict = HOLDS if left else FAILS if n >= MANY else OPEN
    why = f"under {least} {left} of {n} examples flip"
    check_enough(n, why)
    return Found.of(metrics.share_of(ways[least].to_numpy()), verdict=verdict, why=why)


# Sums, writing, and what follows -----------------------------------------------------------------------------------------


def _sums(tables: Tables, product: str) -> pd.DataFrame:
    sums = table(tables, "accumulation", "product", "length", "head_dim", "accumulate", "seed", "mean_relative")
    return sums[(sums["product"] == product) & (sums["accumulate"] == "float16")]


def _grown(sums: pd.DataFrame, over: str, low: float, high: float) -> pd.Series:
    by = sums[sums[over].isin([low, high])].groupby(["seed", over])["mean_relative"].mean().unstack(over)
    if by.shape[1] < 2:
        raise NotTestableError(f"no sums of {over.replace('_', ' ')} {low:g} and {high:g}")
    return by[high] / by[low]


def sums_do_not_grow(tables: Tables) -> Found:
    """The error of a sum over 128 positions is that of one over 16."""
    values, scores = _sums(tables, "values"), _sums(tables, "scores")
    ratio = _grown(values, "length", 16, 128)
    return inside(ratio, ratio.index, 0.8, 1.25).beside(_grown(scores, "length", 16, 128).median())


def sums_go_with_the_head(tables: Tables) -> Found:
    """The error of a score grows with the width of a head."""
    sums = _sums(tables, "scores")
    widths = sums["head_dim"].astype(float)
    ratio = _grown(sums.assign(head_dim=widths), "head_dim", widths.min(), widths.max())
    return larger(ratio, ratio.index, 1.25)


def written_alone_differs(tables: Tables) -> Found:
    """K and V differ where they are written, in most prompts."""
    written = table(tables, "kv_write", "kernels", "prompt", "relative_error")
    by = written[written["kernels"] == "native"].groupby("prompt")["relative_error"].max()
    return larger(by > 0, by.index, 0.5, of="share")


def errors_compound(tables: Tables) -> Found:
    """One layer's rounding is larger at the last layer, relative to the stream."""
    rows = table(tables, "propagation", "model", "prompt", "source", "layer", "l2_growth", "relative_growth")
    rows = rows[rows["source"] == 0]
    last = known(rows[rows["layer"] == rows.groupby("model")["layer"].transform("max")], "l2_growth", "relative_growth")
    paper = float(np.exp(np.log(last.loc[last["l2_growth"] > 0, "l2_growth"]).mean()))
    return larger(last["relative_growth"], last["prompt"], 1.0).beside(paper)


_RUN = "the precision ladder with a fixed order of additions in float16 on the paper's GPU"
_SAME_ORDER = (
    "kernels of a fixed order are made to give a row the same bits alone and among others: both paths compute the same"
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "fp32-no-flips", PAPER, "abstract, 6.3, table 2", "In FP32 no token flips.",
        "0.0%, n not given", "share of examples with a flip in float32",
        f"does not hold with one flip; holds with none in {MANY} examples while float16 flips some",
        "as many examples as flip in FP16, with the interval beside the zero", float32_flips_nothing,
    ),
    Claim(
        "eight-orders", PAPER, "abstract, 6.3", "FP32 makes KL smaller by more than eight orders of magnitude.",
        "more than 8",
        "orders of magnitude between float16's and float32's mean KL (its protocol: free KL over the float32 floor)",
        "holds where the matched ratio (median over prompts) is above eight orders, does not where it is below", _RUN,
        lambda tables: _orders(tables, "mean_kl"),
    ),
    Claim(
        "eight-orders-logits", NEWS, "summary", "FP32 makes the divergence smaller by eight orders of magnitude.",
        "8", "orders of magnitude between the largest logit differences (KL goes with their square)",
        "holds above eight orders, does not below", _RUN, lambda tables: _orders(tables, "max_abs_logit"),
    ),
    Claim(
        "float32-as-large", ISSUE, "summary, 2", "The error is as large in float32 as in bfloat16: precision is not its cause.",
        "0.125 in both", "largest logit difference in bfloat16 as a multiple of that in float32, median over prompts",
        "holds below 2, does not above", "the issue's model and prompts of its own beside the one that it gives",
        float32_does_not_help,
    ),
    Claim(
        "order-causes", PAPER, "abstract, 2.2", "FP16 sums taken in another order are the sole cause.",
        "sole driver",
        "share of examples that differ in float16 in one fixed order (its protocol: with the machine's own kernels)",
        "holds where a fixed order leaves no difference and the machine's own kernels make one; does not where one is left",
        _RUN, lambda tables: _fixed_order(tables, HOLDS, FAILS), construction=_SAME_ORDER,
    ),
    Claim(
        "format-causes", PAPER, "6.3", "Not the mechanism but the format, FP16, makes the divergence: it suffices.",
        "dominant and sufficient",
        "share of examples that differ in float16 in one fixed order (its protocol: machine's own kernels)",
        "holds where float16 in a fixed order still differs, does not where it does not though other kernels do",
        _RUN, lambda tables: _fixed_order(tables, FAILS, HOLDS), construction=_SAME_ORDER,
    ),
    Claim(
        "fp32-only-fix", PAPER, "7.4", "FP32 is the only current fix.",
        "", "share of examples that flip under the way in 16 bits that leaves the fewest",
        f"does not hold with one other way in 16 bits that leaves no flip in {MANY} examples; holds where each leaves some",
        _RUN, float32_is_the_only_fix, construction=_SAME_ORDER,
    ),
    Claim(
        "sums-flat", PAPER, "5.2, 6.3", "The relative error of attention's sums does not depend on the length.",
        "flat from 16 to 128",
        "error over 128 positions as a multiple of that over 16 (its protocol: scores, which add over the head)",
        "of sums over positions, added in float16: holds within 0.8 to 1.25, does not outside",
        "arithmetic: it needs no hardware", sums_do_not_grow, if_equal="open",
    ),
    Claim(
        "sums-head", PAPER, "6.3, 7.2", "The error is determined by the width of a head.",
        "", "error of a score of the widest head as a multiple of the narrowest's",
        "holds above 1.25, does not below", "arithmetic: it needs no hardware", sums_go_with_the_head, if_equal="open",
    ),
    Claim(
        "born-at-writing", PAPER, "5.2", "The error originates where K and V are written, one token alone or jointly.",
        "", "share of prompts in which K or V differ where the input is bitwise the same", "holds above a half, does not below",
        "the same with the GPU's own kernels", written_alone_differs,
    ),
    Claim(
        "compounds", PAPER, "5.2", "One layer's rounding compounds over the layers.",
        "", "error at the last layer as a multiple of that at layer 0, relative to the stream (its protocol: absolute L2)",
        "holds above 1, does not below", "the same on the paper's models", errors_compound, if_equal="open",
    ),
)  # fmt: skip
CLAIMS += (
    told_again(
        CLAIMS, "fp32-no-flips", id="news-fp32", value="0",
        claim="FP32 eliminates token flips, which pinpoints the cause.",
    ),
)  # fmt: skip
