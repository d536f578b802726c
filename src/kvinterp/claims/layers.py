"""Claims about which layers and heads the divergence arises in (FP16 paper, sections 2.4, 6.2 and 7.2)."""

from __future__ import annotations

import itertools

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.claims.base import (
    FAILS,
    HOLDS,
    ISSUE,
    LEAST,
    MANY,
    OPEN,
    PAPER,
    Claim,
    Found,
    NotTestableError,
    Tables,
    average,
    check_enough,
    known,
    larger,
    larger_of_intervals,
    never,
    of_models,
    pooled,
    ratio,
    smaller,
    table,
    told_again,
)

BARE = "relative_l2_without_top3"
"""What is left of a drift beside the stream's size and its three largest dimensions."""
SHARP = 2.0
"""A jump is a layer whose drift is more than twice that of the layer before."""
LEVEL, MOST = 0.05, 0.95
"""That of each layer's test, and the share of the layers that counts as nearly every one."""


def _drift(tables: Tables, protocol: str, *columns: str) -> pd.DataFrame:
    rows = table(tables, "layer_drift", "model", "example", "step", "layer", "protocol", *columns)
    # Step 0 is the prefill's, the same computation on both paths.
    return rows[(rows["protocol"] == protocol) & (rows["step"] > 0)]


def _named(rows: pd.DataFrame, *names: str) -> pd.DataFrame:
    found = of_models(rows, *names)
    if found.empty:
        raise NotTestableError(f"it is of {' and '.join(names)} models, and there is none of those")
    return found


def _by_layer(rows: pd.DataFrame, column: str) -> pd.DataFrame:
    """A row a model and example, a column a layer: the mean over steps."""
    return rows.groupby(["model", "example", "layer"])[column].mean().unstack("layer")


def sharp_at_layer_1(tables: Tables) -> Found:
    """Llama and Mistral models jump at layer 1."""
    by = _by_layer(_named(_drift(tables, "matched", BARE), "llama", "mistral"), BARE)
    if not {0, 1} <= set(by.columns):
        raise NotTestableError("there is no drift of layers 0 and 1")
    found = ratio(by[1], by[0], by.index.get_level_values("example"), SHARP)
    # The paper's number: the ratio of the mean absolute distances.
    means = _named(_drift(tables, "free", "l2"), "llama", "mistral").groupby("layer")["l2"].mean()
    return found.beside(means.get(1, np.nan) / means.get(0, np.nan))


def gemma_is_flat(tables: Tables) -> Found:
    """No layer of the Gemma model drifts much more than another."""
    by = _by_layer(_named(_drift(tables, "matched", BARE), "gemma"), BARE)
    by, units = by[(by > 0).all(axis=1)], len(by)
    if by.shape[1] < 2 or by.empty:
        raise NotTestableError("no example of the Gemma model drifts in all layers")
    means = _named(_drift(tables, "free", "l2"), "gemma").groupby("layer")["l2"].mean()
    spread = np.log(by.max(axis=1) / by.min(axis=1))
    found = smaller(spread, spread.index.get_level_values("example"), np.log(SHARP)).through(np.exp)
    why = found.why if len(by) == units else f"{units - len(by)} of {units} do not drift in every layer, and are left out"
    return found.beside(float(means.max() / means.min()) if means.min() > 0 else np.nan, why)


def last_layer_jumps(tables: Tables) -> Found:
    """The last layer's drift is more than twice that of the one before."""
    rows = _drift(tables, "matched", BARE)
    at = rows["layer"] - rows.groupby("model")["layer"].transform("max")
    by = rows.assign(at=at).groupby(["model", "example", "at"])[BARE].mean().unstack("at")
    if -1 not in by:
        raise NotTestableError("no model has two layers")
    return ratio(by[0], by[-1], by.index.get_level_values("example"), SHARP)


def decorrelated(tables: Tables) -> Found:
    """The streams are hardly alike at layer 0 already."""
    rows, free = (_drift(tables, protocol, "cosine") for protocol in ("matched", "free"))
    first = known(rows[rows["layer"] == 0], "cosine")
    return smaller(first["cosine"], first["example"], 0.9).beside(average(free[free["layer"] == 0], "cosine"))


def rows_hold_the_same_token(tables: Tables) -> Found:
    """At every step whose drift is measured in the free protocol both paths have read the same tokens."""
    rows = table(tables, "layer_drift_rows", "model", "protocol", "rows", "removed")
    free = rows[rows["protocol"] == "free"]
    count, removed = int(free["rows"].sum()), int(free["removed"].sum())
    if not count:
        raise NotTestableError("no row is of the free protocol")
    n = int(table(tables, "layer_drift", "example")["example"].nunique())
    check_enough(n, f"there are {n} examples")
    why = f"{removed} of {count} rows are of steps at which the paths had read other tokens"
    return Found(n=n, paper=removed / count, verdict=FAILS if removed else HOLDS, why=why)


def prefill_is_identical(tables: Tables) -> Found:
    """At the step that the prefill decides the streams of both paths are bitwise equal, in every layer."""
    rows = table(tables, "layer_drift", "example", "step", "protocol", "l2")
    first = known(rows[(rows["step"] == 0) & (rows["protocol"] == "matched")], "l2")
    return never(first["l2"] > 0, first["example"])


def layers_are_significant(tables: Tables) -> Found:
    """Nearly every layer's drift differs from that of the layer before."""
    tests = table(tables, "layer_tests", "model", "layer", "contrast", "test", "n", "p_bh", "measure")
    tests = tests[tests["measure"].isin(["l2", BARE]) & (tests["contrast"] == "previous layer") & tests["p_bh"].notna()]
    paired = tests[tests["test"].str.contains("ilcoxon")]
    if paired.empty or paired["n"].min() < LEAST:
        # Of five pairs Wilcoxon's test gives 0.0625 at best.
        raise NotTestableError(f"no layer is tested against the one before over {LEAST} examples, pair by pair")
    beside = tests[tests["test"].str.contains("itney") & (tests["measure"] == "l2")]
    bare = paired[paired["measure"] == BARE] if BARE in set(paired["measure"]) else paired
    n, significant = int(bare["n"].min()), bare["p_bh"] <= LEVEL
    share, same = float(significant.mean()), _same_as_before(tables)
    why = f"{int(significant.sum())} of {len(bare)} layers, corrected by Benjamini and Hochberg over all of them; "
    why += f"{same.sum()} of {len(same)} are shown to be within a tenth of the layer before"
    verdict = HOLDS if share >= MOST else FAILS if 1 - same.mean() < MOST else OPEN
    found = Found(share, n=n, verdict=verdict, why=why)
    return found.beside(float((beside["p_bh"] <= LEVEL).mean()) if len(beside) else np.nan)


def _same_as_before(tables: Tables) -> np.ndarray:
    """Whether each layer's drift, by model, is shown to be within a tenth of the one before, corrected for all of them."""
    found = []
    for _, rows in _by_layer(_drift(tables, "matched", BARE), BARE).groupby("model"):
        of = rows.dropna(axis=1, how="all")
        for before, layer in itertools.pairwise(of):
            try:
                found.append(max(ratio(of[a], of[b], of.index, 1.1).fails for a, b in ((before, layer), (layer, before))))
            except NotTestableError:
                found.append(1.0)
    return metrics.corrected(found, "holm") <= LEVEL


# Heads that share K and V ----------------------------------------------------------------------------------------------


def errors_of_a_group_go_together(tables: Tables) -> Found:
    """Attention errors of heads that share K and V go together more than those of heads that do not."""
    rows = table(tables, "head_correlation", "layer", "kind", "r", "low", "high", "n")
    kinds = {name: rows[rows["kind"] == name] for name in ("within", "within - across")}
    if kinds["within - across"].empty:
        raise NotTestableError("table head_correlation has no difference of within and across")
    found = larger_of_intervals(pooled(kinds["within - across"], "r"), 0.0, 0.1)
    return found.beside(average(kinds["within"], "r"))


def one_error_reaches_the_group(tables: Tables) -> Found:
    """An error in one KV head touches as many query heads as share it, and no other."""
    rows = table(tables, "gqa", "prompt", "heads_touched", "query_heads_per_kv_head")
    touched = rows["heads_touched"] / rows["query_heads_per_kv_head"]
    n = int(rows["prompt"].nunique())
    check_enough(n, f"errors were planted in {n} prompts")
    verdict = HOLDS if (touched == 1).all() else FAILS
    why = f"{int((touched == 1).sum())} of {len(rows)} planted errors touch just these"
    return Found(float(touched.mean()), float(touched.min()), float(touched.max()), n, verdict=verdict, why=why)


def sharing_amplifies(tables: Tables) -> Found:
    """The more query heads share a KV head, the larger what one error does to the attention output."""
    rows = table(tables, "gqa", "prompt", "query_heads_per_kv_head", "attn_out")
    if rows["query_heads_per_kv_head"].nunique() < 2:
        raise NotTestableError("all models share K and V among as many heads")
    by = rows.groupby(["prompt", "query_heads_per_kv_head"])["attn_out"].median().unstack().dropna()
    by = by[(by > 0).all(axis=1)]
    slopes = [np.polyfit(np.log2(by.columns.to_numpy(float)), np.log2(row), 1)[0] for row in by.to_numpy()]
    return larger(slopes, by.index, 0.0)


def shared_heads_differ_more(tables: Tables) -> Found:
    """Errors drawn for each KV head move a model further than itself with K and V heads repeated until none is shared."""
    columns = ("model", "repeated", "query_heads_per_kv_head", "kernels", "id", "rms_logit")
    rows = table(tables, "repeated_heads", *columns)
    alone = rows[rows["query_heads_per_kv_head"] == 1]
    both = rows[rows["repeated"] == 1].merge(alone, on=["model", "kernels", "id"], suffixes=("_shared", "_alone"))
    drawn, native = (both[both["kernels"] == name] for name in ("native+normal(0,0.01)", "native"))
    if drawn.empty:
        raise NotTestableError("no errors were drawn for the KV heads of a model and of itself with repeated heads")
    found = ratio(drawn["rms_logit_shared"], drawn["rms_logit_alone"], drawn["id"], 1.0, 1.1)
    return found.beside(native["rms_logit_shared"].mean() / native["rms_logit_alone"].mean())


_RUN = "drift without the largest three dimensions, at steps whose input tokens agree, on the paper's models"
_SAME = "one model with its K and V heads repeated: another ratio and the same function"

CLAIMS: tuple[Claim, ...] = (
    Claim(
        "layer-1", PAPER, "6.2", "In LLaMA-2 and Mistral the drift jumps at layer 1.",
        "to 362 and 902 in L2", "drift of layer 1 as a multiple of layer 0's (its protocol: absolute L2, free)",
        "of relative drift without the three largest dimensions: holds above twice, does not below",
        _RUN, sharp_at_layer_1,
    ),
    Claim(
        "last-layer-jumps", ISSUE, "summary, 3", "The error grows through the layers and jumps at the last one.",
        "0.031 to 0.25, normalised at the last", "drift of the last layer as a multiple of the one before",
        "of relative drift without the three largest dimensions, before the last norm: holds above twice, does not below",
        "the streams of the issue's model before its last norm", last_layer_jumps,
    ),
    Claim(
        "gemma-flat", PAPER, "6.2", "In Gemma the drift is flat over all layers.",
        "1.0 to 1.4 in L2", "largest layer's drift as a multiple of the smallest's (its protocol: absolute L2, free)",
        "of relative drift without the three largest dimensions: holds below twice, does not above", _RUN, gemma_is_flat,
    ),
    Claim(
        "decorrelated", PAPER, "6.2", "After one layer the hidden states of the two paths are nearly decorrelated.",
        "cosine 0.49, 0.015, 0.85", "cosine of the streams after layer 0, same input tokens",
        "holds below 0.9, does not above", "the input token of both paths beside every cosine", decorrelated,
    ),
    Claim(
        "prefill-identical", PAPER, "5.2", "The prefill produces identical states on both paths, in every layer.",
        "identical", "share of examples whose streams differ at the step that the prefill decides",
        f"does not hold with one example that differs in one layer; holds with none in {MANY} examples",
        "the same on the paper's GPU, with its attention", prefill_is_identical, if_equal="true",
    ),
    Claim(
        "drift-is-rounding", PAPER, "5.2, 6.2", "Drift between free-running paths shows how rounding errors propagate.",
        "", "its protocol: share of the free protocol's rows at which the paths had read other tokens",
        "does not hold with one such row; holds with none", _RUN, rows_hold_the_same_token, if_equal="true",
        construction="the free protocol feeds the same tokens wherever no token flips, and other ones after every flip",
    ),
    Claim(
        "layers-significant", PAPER, "4.4, 6.2", "Nearly every layer changes the drift significantly.",
        "25 of 26 layers of Gemma",
        "share of layers significant against the layer before (its protocol: Mann-Whitney on absolute L2)",
        "holds at 95% of the layers or more by Wilcoxon's test, paired by example; does not where more than 5% are shown to be "
        "within a tenth of the layer before; open where so few pairs can give no p-value of 5%", _RUN, layers_are_significant,
    ),
    Claim(
        "group-errors", PAPER, "1, 2.4", "Query heads that share K and V have correlated errors, others independent ones.",
        "", "correlation of attention errors within a KV group less that across groups (its protocol: within)",
        "holds above 0, does not where it is shown to be below 0.1", _SAME, errors_of_a_group_go_together,
    ),
    Claim(
        "group-broadcast", PAPER, "1, 2.4", "One error in a KV head reaches every query head that shares it, and only these.",
        "R heads", "query heads touched, as a multiple of those that share", "holds where it is one for every planted error",
        "arithmetic: it needs no hardware", one_error_reaches_the_group, if_equal="open",
        construction="which query heads read a KV head is what grouped-query attention is",
    ),
    Claim(
        "gqa-amplifies", PAPER, "2.4, 7.4", "The more query heads share a KV head, the more divergence one error makes.",
        "4:1 above 1:1", "doublings of the attention output's error with each doubling of the ratio",
        "holds above 0, does not below", _SAME, sharing_amplifies, if_equal="open",
        construction="the more query heads read the planted error, the more of the attention output holds it",
    ),
    Claim(
        "gqa-self", PAPER, "2.4, 7.2", "Grouped-query attention makes the paths differ more than multi-head attention does.",
        "Mistral above LLaMA-2",
        "RMS logit difference by errors of one size, drawn for each KV head, as a multiple of that with K and V heads repeated "
        "(its protocol: by rounding, which repeated heads repeat)",
        "holds above 1, does not where it is shown to be below 1.1", _SAME, shared_heads_differ_more,
        if_equal="open",
    ),
)  # fmt: skip
CLAIMS += (
    told_again(
        CLAIMS, "layer-1", id="news-layer-1", value="",
        claim="Models with grouped-query attention diverge sharply at the first layer.",
    ),
)  # fmt: skip
