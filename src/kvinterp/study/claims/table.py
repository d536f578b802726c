"""The claims as data: whose, where, in our words, with which number, when it holds, what would settle it, and what is asked.

What is asked of the tables is an a ``claims.base.Ask``: a rule, the numbers that it judges, and its bound. Where no rule
says it, it is a function of :mod:`kvinterp.study.claims.functions`.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from kvinterp.study.claims import answers, functions
from kvinterp.study.claims.base import (
    FAILS,
    HOLDS,
    MANY,
    Ask,
    Claim,
    always,
    inside,
    larger,
    larger_of_intervals,
    never,
    ratio,
    smaller,
    smaller_of_intervals,
    told_again,
)
from kvinterp.study.claims.rows import (
    BARE,
    FLIPS,
    FREE,
    GREEDY_FLIPS,
    MATCHED,
    Column,
    Pair,
    Rows,
    below_last,
    differing,
    effect,
    flipped,
    last_layer,
    of_gemma,
    orders,
    over_the_floor,
    patched,
    rung,
    score,
)

PAPER, NEWS, ISSUE = "FP16 paper", "news", "transformers issue"
ERRORS, DRIFT = "cache-error paper", "drift post"
"""The sources; the issue is transformers#46190."""

# How often and how far the paths part (FP16 paper, 5.1 and 6.1) -------------------------------------------------------

_DECODED = "the paper's models and 700 problems on its GPU, greedy once, both protocols: kvinterp study --preset paper"

_ABOVE = Column("decodes", "mean_kl > kl_bound", f"{FREE} and mean_kl.notna() and kl_bound.notna()", (flipped,))


def _kl(protocol: str, column: str = "mean_kl") -> Column:
    return Column("decodes", column, protocol)


def _growth(protocol: str) -> Pair:
    return Pair(_kl(protocol, "late_kl"), _kl(protocol, "early_kl"), on=("condition", "seed", "unit"))


_PATHS = (
    Claim(
        "diverges-always", PAPER, "abstract, 6.1", "Cached and recomputed decoding write different texts in every run.",
        "100% of 31,500", "share of decodes that part",
        f"does not hold with one decode that never parts; holds with none in at least {MANY} examples",
        _DECODED, Ask(always, FLIPS, paper=FLIPS.papers_mean),
    ),
    Claim(
        "diverges-greedy", PAPER, "abstract, 6.1", "So they do in every run under greedy decoding.",
        "100%", "share of greedy decodes that part", "as diverges-always, greedy decodes alone",
        _DECODED, Ask(always, GREEDY_FLIPS, paper=GREEDY_FLIPS.papers_mean),
    ),
    Claim(
        "not-sampling", PAPER, "4.2, 6.1", "Greedy decoding parts too, so sampling is not the cause.",
        "100% of greedy runs", "share of examples whose greedy decode parts",
        f"holds with one greedy decode that parts while a path run twice never differs; does not with none in {MANY} examples",
        "the same two runs on the paper's GPU", functions.greedy_parts_too,
    ),
    Claim(
        "deterministic", PAPER, "1, 7.1", "The same input on the same hardware gives the same result on each path.",
        "always", "share of steps at which a path run twice differs",
        f"does not hold with one differing step; holds with none in {MANY} examples",
        "each path twice on the paper's GPU, with and without deterministic algorithms",
        partial(functions.of_null, name="same path twice"),
    ),
    Claim(
        "cache-is-the-source", PAPER, "3.4", "The execution path with a cache is exactly what makes the difference.",
        "isolated", "share of steps at which the recompute path differs from itself among more rows",
        f"does not hold with one such step, which has no cache in it; holds with none in {MANY} examples while the paths differ",
        "the recompute path with a longer suffix on the paper's GPU",
        partial(functions.of_null, name="longer suffix", differ=True),
    ),
    Claim(
        "seed-independent", PAPER, "1, 5.2", "Whether an example parts does not depend on the seed.",
        "always-diverges in all", "share of examples that part under some seeds only",
        "holds below 5%, does not above", _DECODED, functions.seeds_do_not_matter,
    ),
    Claim(
        "kl-large", PAPER, "6.1, table 1", "Rounding moves the two distributions more than 10 nats apart on average.",
        "10.68 to 12.83 nats", "median KL in nats (its protocol: mean, free, greedy counted as often as there are seeds)",
        "holds where the matched median is above 10 nats, does not where it is below", _DECODED,
        Ask(larger, _kl(MATCHED), 10.0, _kl(FREE).papers_mean),
    ),
    Claim(
        "kl-not-text", PAPER, "6.1", "Mean KL over all steps measures redistribution by rounding, not other texts.",
        "10.68 to 12.83 nats", "share of diverging decodes whose mean KL is more than their largest logit difference allows",
        "holds where fewer than half exceed half the square of it (measured while inputs are the same), does not where more do",
        "the largest logit difference beside every mean KL, on the paper's GPU",
        Ask(smaller, _ABOVE, 0.5, _ABOVE.mean, options={"of": "share"}),
    ),
    Claim(
        "kl-persists", PAPER, "6.1, figure 1", "KL stays high to the last step and does not approach zero.",
        "about 10 nats", "median KL over the last quarter of the steps, nats (its protocol: mean, free)",
        "holds where the matched median is above 1 nat, does not where it is below", _DECODED,
        Ask(larger, _kl(MATCHED, "late_kl"), 1.0, _kl(FREE, "late_kl").papers_mean),
    ),
    Claim(
        "kl-accumulates", PAPER, "6.1, figure 1", "Rounding errors accumulate over the decode steps instead of cancelling.",
        "", "KL over the last quarter of the steps as a multiple of the first's, median (its protocol: free, means)",
        "holds above 1, does not where it is shown to be below 1.5", _DECODED,
        Ask(ratio, _growth(MATCHED), 1.0, _growth(FREE).of_means, options={"claimed": 1.5}),
    ),
    Claim(
        "js-confirms", PAPER, "4.3, 6.1", "JS goes the way of KL, so the pattern is no artefact of KL's unbounded range.",
        "same trend", "Spearman correlation of a decode's mean JS with its mean KL",
        "holds above 0.5, does not below", "nothing: no other measurement is in it", functions.js_goes_with_kl,
        construction="JS and KL are functions of the same two distributions, small together and large together",
    ),
    Claim(
        "gemma-highest", PAPER, "6.1", "Gemma's paths are furthest apart under every strategy.",
        "12.66 to 12.83 nats", "KL of the Gemma model as a multiple of the highest of the others, median over prompts",
        "holds where the matched ratio is above 1, does not where it is below", _DECODED, functions.gemma_parts_furthest,
    ),
    Claim(
        "one-strategy-model", PAPER, "6.1", "Within a model the strategy hardly changes KL, except in one, Mistral.",
        "11.46 against 10.70 in Mistral", "KL of one strategy as a multiple of another's, median, the largest of all",
        "holds where one model's ratio is shown to be above 1.05 and all of the others' within it; does not where two models' "
        "are above it, or all within",
        _DECODED, functions.strategy_matters_in_one_model,
    ),
    Claim(
        "n-is-3500", PAPER, "5.1, 6.1", "A condition's mean KL rests on 3,500 independent run pairs.",
        "3,500; CI ±0.05 nats", "error of a mean of log KL over examples, as a multiple of that over rows",
        "holds below 1.1, does not above", "the same rows, clustered by problem", functions.as_many_as_rows,
    ),
)  # fmt: skip

# Which path answers right more often (1, 6.1 and 7.4; the news summary) -----------------------------------------------

_ANSWERED = (
    "greedy once and sampled decodes clustered by problem, 700 problems, texts cut at the next question, on the paper's GPU"
)

_ANSWERS = (
    Claim(
        "more-accurate", PAPER, "1, 6.1, 7.4", "The cached path answers right more often: the bias is systematic.",
        "+1.1 to +4.8 points in 8 conditions, -0.2 in one", "share right on the cached path less that on the other",
        "holds where exchanging the paths of whole examples shows it above 0; does not where it is shown to be below 1.1 points",
        _ANSWERED, answers.more_often_right,
    ),
    Claim(
        "eight-of-nine", PAPER, "abstract, 6.1", "It does so in almost every condition (model and strategy).",
        "8 of 9", "share of conditions in which the cached path is right more often, ties half",
        "holds at eight of nine or more where exchanged paths of whole examples give so many by chance too rarely, since "
        "conditions share problems; does not where the share's interval ends below eight of nine",
        _ANSWERED, answers.in_almost_all_conditions,
    ),
    Claim(
        "mcnemar", PAPER, "6.1, table 1", "The difference is significant in all conditions but one, corrected for nine.",
        "8 of 9",
        "share of conditions that are significant (its protocol: exact McNemar over all rows; control: examples exchanged)",
        "holds where all but one are; does not where two or more are shown to be within 1.1 points; open where they are only not "
        "significant",
        "discordant counts of the nine conditions, greedy over 700 and not 3,500 pairs", answers.significant_by_condition,
    ),
    Claim(
        "powered", PAPER, "5.1", "The comparisons have enough power for the differences reported.",
        "16 of 18 comparisons",
        "smallest difference that 700 problems of five seeds show with 80% (under its protocol: 3,500 rows taken as independent)",
        "from how often answers differ here, and under several seeds of a problem together: holds where it is shown to be below "
        "1.1 points, the smallest reported as significant; does not above",
        "power before the fact, over independent problems", answers.powered,
    ),
    Claim(
        "direction", PAPER, "6.1, 7.4", "The divergence has a direction, so one of the paths should be nearer to the truth.",
        "", "share of examples in which the cached path is nearer to float64, of those where they are not equally near",
        "holds where it is shown to be other than a half; does not where its interval lies within 0.4 to 0.6",
        "float64 beside both paths on the paper's models", answers.one_path_is_nearer,
    ),
)  # fmt: skip

# In which layers and heads the paths part (2.4, 6.2 and 7.2) ----------------------------------------------------------

_STREAMS = "drift without the largest three dimensions, at steps whose input tokens agree, on the paper's models"
_SAME = "one model with its K and V heads repeated: another ratio and the same function"


_LAYER_1, _LAYER_0 = (
    Column("layer_drift", BARE, f"{MATCHED} and {functions.SHARP} and layer == {layer}", within=("model", "unit"))
    for layer in (1, 0)
)


def _drift(*of: Rows) -> Column:
    return Column("layer_drift", BARE, f"{MATCHED} and step > 0", of, ("model", "unit"))


def _cosine(protocol: str) -> Column:
    return Column("layer_drift", "cosine", f"{protocol} and step > 0 and layer == 0")


_WITHIN = Column("head_correlation", "r", "kind == 'within'")


def _repeated(kernels: str) -> Pair:
    """What shared heads do, and what the same do once none is shared."""
    ways = (f"kernels == {kernels!r} and {heads} == 1" for heads in ("repeated", "query_heads_per_kv_head"))
    return Pair(*(Column("repeated_heads", "rms_logit", way) for way in ways))


_LAYERS = (
    Claim(
        "layer-1", PAPER, "6.2", "In LLaMA-2 and Mistral the drift jumps at layer 1.",
        "to 362 and 902 in L2", "drift of layer 1 as a multiple of layer 0's (its protocol: absolute L2, free)",
        "of relative drift without the three largest dimensions: holds above twice, does not below",
        _STREAMS,
        Ask(ratio, Pair(_LAYER_1, _LAYER_0), 2.0, functions.papers_jump),
    ),
    Claim(
        "last-layer-jumps", ISSUE, "summary, 3", "The error grows through the layers and jumps at the last one.",
        "0.031 to 0.25, normalised at the last", "drift of the last layer as a multiple of the one before",
        "of relative drift without the three largest dimensions, before the last norm: holds above twice, does not below",
        "the streams of the issue's model before its last norm",
        Ask(ratio, Pair(_drift(last_layer), _drift(partial(last_layer, back=1))), 2.0),
    ),
    Claim(
        "gemma-flat", PAPER, "6.2", "In Gemma the drift is flat over all layers.",
        "1.0 to 1.4 in L2", "largest layer's drift as a multiple of the smallest's (its protocol: absolute L2, free)",
        "of relative drift without the three largest dimensions: holds below twice, does not above",
        _STREAMS, functions.gemma_is_flat,
    ),
    Claim(
        "decorrelated", PAPER, "6.2", "After one layer the hidden states of the two paths are nearly decorrelated.",
        "cosine 0.49, 0.015, 0.85", "cosine of the streams after layer 0, same input tokens",
        "holds below 0.9, does not above", "the input token of both paths beside every cosine",
        Ask(smaller, _cosine(MATCHED), 0.9, _cosine(FREE).mean),
    ),
    Claim(
        "prefill-identical", PAPER, "5.2", "The prefill produces identical states on both paths, in every layer.",
        "identical", "share of examples whose streams differ at the step that the prefill decides",
        f"does not hold with one example that differs in one layer; holds with none in {MANY} examples",
        "the same on the paper's GPU, with its attention",
        Ask(never, Column("layer_drift", "l2 > 0", f"{MATCHED} and step == 0 and l2.notna()")),
    ),
    Claim(
        "drift-is-rounding", PAPER, "5.2, 6.2", "Drift between free-running paths shows how rounding errors propagate.",
        "", "its protocol: share of the free protocol's rows at which the paths had read other tokens",
        "does not hold with one such row; holds with none", _STREAMS, functions.rows_hold_the_same_token,
        construction="the free protocol feeds the same tokens wherever no token flips, and other ones after every flip",
    ),
    Claim(
        "layers-significant", PAPER, "4.4, 6.2", "Nearly every layer changes the drift significantly.",
        "25 of 26 layers of Gemma",
        "share of layers significant against the layer before (its protocol: Mann-Whitney on absolute L2)",
        "holds at 95% of the layers or more by Wilcoxon's test, paired by example; does not where more than 5% are shown to be "
        "within a tenth of the layer before; open where so few pairs can give no p-value of 5%",
        _STREAMS, functions.layers_are_significant,
    ),
    Claim(
        "group-errors", PAPER, "1, 2.4", "Query heads that share K and V have correlated errors, others independent ones.",
        "", "correlation of attention errors within a KV group less that across groups (its protocol: within)",
        "holds above 0, does not where it is shown to be below 0.1", _SAME,
        Ask(larger_of_intervals, functions.errors_of_a_group, 0.0, _WITHIN.mean, options={"claimed": 0.1}),
    ),
    Claim(
        "group-broadcast", PAPER, "1, 2.4", "One error in a KV head reaches every query head that shares it, and only these.",
        "R heads", "query heads touched, as a multiple of those that share", "holds where it is one for every planted error",
        "arithmetic: it needs no hardware", functions.one_error_reaches_the_group,
        construction="which query heads read a KV head is what grouped-query attention is",
    ),
    Claim(
        "gqa-amplifies", PAPER, "2.4, 7.4", "The more query heads share a KV head, the more divergence one error makes.",
        "4:1 above 1:1", "doublings of the attention output's error with each doubling of the ratio",
        "holds above 0, does not below", _SAME, functions.sharing_amplifies,
        construction="the more query heads read the planted error, the more of the attention output holds it",
    ),
    Claim(
        "gqa-self", PAPER, "2.4, 7.2", "Grouped-query attention makes the paths differ more than multi-head attention does.",
        "Mistral above LLaMA-2",
        "RMS logit difference by errors of one size, drawn for each KV head, as a multiple of that with K and V heads repeated "
        "(its protocol: by rounding, which repeated heads repeat)",
        "holds above 1, does not where it is shown to be below 1.1", _SAME,
        Ask(ratio, _repeated("native+normal(0,0.01)"), 1.0, _repeated("native").of_means, options={"claimed": 1.1}),
    ),
)  # fmt: skip

# What the cause is (2.2, 5.2 and 6.3) ---------------------------------------------------------------------------------

_LADDER = "the precision ladder with a fixed order of additions in float16 on the paper's GPU"
_SAME_ORDER = (
    "kernels of a fixed order are made to give a row the same bits alone and among others: both paths compute the same"
)

_BFLOAT16 = Pair(rung("float32", "max_abs_logit"), rung("bfloat16", "max_abs_logit", "native", differing))
_WRITTEN = Column("kv_write", "relative_error > 0", "kernels == 'native'", within=("unit",), how="max")


def _sums(product: str, one: str, other: str) -> Pair:
    """The error of float16 sums of one kind as a multiple of that of another."""
    where = f"accumulate == 'float16' and product == {product!r} and"
    return Pair(
        *(Column("accumulation", "mean_relative", f"{where} {which}", within=("unit",)) for which in (one, other)),
        on=("unit",),
    )


def _longer(product: str) -> Pair:
    return _sums(product, "length == 128", "length == 16")


_WIDER = _sums("scores", "head_dim == head_dim.max() > head_dim.min()", "head_dim == head_dim.min()")


def _grown(column: str) -> Column:
    return Column("propagation", column, "source == 0", (last_layer,))


_CAUSES = (
    Claim(
        "fp32-no-flips", PAPER, "abstract, 6.3, table 2", "In FP32 no token flips.",
        "0.0%, n not given", "share of examples with a flip in float32",
        f"does not hold with one flip; holds with none in {MANY} examples while float16 flips some",
        "as many examples as flip in FP16, with the interval beside the zero", functions.float32_flips_nothing,
    ),
    Claim(
        "eight-orders", PAPER, "abstract, 6.3", "FP32 makes KL smaller by more than eight orders of magnitude.",
        "more than 8",
        "orders of magnitude between float16's and float32's mean KL (its protocol: free KL over the float32 floor)",
        "holds where the matched ratio (median over prompts) is above eight orders, does not where it is below", _LADDER,
        Ask(ratio, orders("mean_kl"), 1e8, over_the_floor, scale=np.log10),
    ),
    Claim(
        "eight-orders-logits", NEWS, "summary", "FP32 makes the divergence smaller by eight orders of magnitude.",
        "8", "orders of magnitude between the largest logit differences (KL goes with their square)",
        "holds above eight orders, does not below", _LADDER,
        Ask(ratio, orders("max_abs_logit"), 1e8, over_the_floor, scale=np.log10),
    ),
    Claim(
        "float32-as-large", ISSUE, "summary, 2", "The error is as large in float32 as in bfloat16: precision is not its cause.",
        "0.125 in both", "largest logit difference in bfloat16 as a multiple of that in float32, median over prompts",
        "holds below 2, does not above", "the issue's model and prompts of its own beside the one that it gives",
        Ask(ratio, _BFLOAT16, 0.5, scale=np.reciprocal),
    ),
    Claim(
        "order-causes", PAPER, "abstract, 2.2", "FP16 sums taken in another order are the sole cause.",
        "sole driver",
        "share of examples that differ in float16 in one fixed order (its protocol: with the machine's own kernels)",
        "holds where a fixed order leaves no difference and the machine's own kernels make one; does not where one is left",
        _LADDER, partial(functions.fixed_order, if_gone=HOLDS, if_left=FAILS), construction=_SAME_ORDER,
    ),
    Claim(
        "format-causes", PAPER, "6.3", "Not the mechanism but the format, FP16, makes the divergence: it suffices.",
        "dominant and sufficient",
        "share of examples that differ in float16 in one fixed order (its protocol: machine's own kernels)",
        "holds where float16 in a fixed order still differs, does not where it does not though other kernels do",
        _LADDER, partial(functions.fixed_order, if_gone=FAILS, if_left=HOLDS), construction=_SAME_ORDER,
    ),
    Claim(
        "fp32-only-fix", PAPER, "7.4", "FP32 is the only current fix.",
        "", "share of examples that flip under the way in 16 bits that leaves the fewest",
        f"does not hold with one other way in 16 bits that leaves no flip in {MANY} examples; holds where each leaves some",
        _LADDER, functions.float32_is_the_only_fix, construction=_SAME_ORDER,
    ),
    Claim(
        "sums-flat", PAPER, "5.2, 6.3", "The relative error of attention's sums does not depend on the length.",
        "flat from 16 to 128",
        "error over 128 positions as a multiple of that over 16 (its protocol: scores, which add over the head)",
        "of sums over positions, added in float16: holds within 0.8 to 1.25, does not outside",
        "arithmetic: it needs no hardware",
        Ask(inside, _longer("values").quotients, (0.8, 1.25), _longer("scores").median),
    ),
    Claim(
        "sums-head", PAPER, "6.3, 7.2", "The error is determined by the width of a head.",
        "", "error of a score of the widest head as a multiple of the narrowest's",
        "holds above 1.25, does not below", "arithmetic: it needs no hardware",
        Ask(ratio, _WIDER, 1.25),
    ),
    Claim(
        "born-at-writing", PAPER, "5.2", "The error originates where K and V are written, one token alone or jointly.",
        "", "share of prompts in which K or V differ where the input is bitwise the same", "holds above a half, does not below",
        "the same with the GPU's own kernels",
        Ask(larger, _WRITTEN, 0.5, options={"of": "share"}),
    ),
    Claim(
        "compounds", PAPER, "5.2", "One layer's rounding compounds over the layers.",
        "", "error at the last layer as a multiple of that at layer 0, relative to the stream (its protocol: absolute L2)",
        "holds above 1, does not below", "the same on the paper's models",
        Ask(larger, _grown("relative_growth"), 1.0, _grown("l2_growth").geometric_mean),
    ),
)  # fmt: skip

# When tokens flip, and how far apart the texts then are (5.2 and 6.4) -------------------------------------------------

_TIMES = "censored regression of flip time on margin and matched KL, 700 problems, on the paper's GPU"

_EARLY = Column("decodes", "flip_index <= steps.max() / 8", MATCHED, (flipped,))

_FLIPPED = (
    Claim(
        "early-more-kl", PAPER, "6.4, table 3", "The earlier a token flips, the higher the mean KL.",
        "r below 0 in all models",
        "correlation of flip step and mean KL (its protocol: Pearson, free, mean of the models; control: ranks)",
        "holds where that with matched KL is below 0, does not where it is above", _TIMES, functions.earlier_flips_more_kl,
    ),
    Claim(
        "restricted", PAPER, "4.4, 6.4, table 3", "Without decodes that flip at once the correlation is stronger.",
        "stronger in 2 of 3 models", "correlation over all decodes less that over those that flip later",
        "holds above 0, does not below; restriction of range weakens a correlation by itself",
        _TIMES, functions.stronger_without_the_first,
    ),
    Claim(
        "uncertainty", PAPER, "1, 6.4", "Early flips and high KL are joint consequences of uncertainty, not of each other.",
        "8 of 9 conditions", "partial correlation of flip step and mean KL, the smallest margin held (its protocol: free)",
        "holds where it is shown to lie within -0.2 to 0.2 though the correlation itself is below 0; does not outside",
        _TIMES, functions.explained_by_the_margin,
    ),
    Claim(
        "terciles", PAPER, "5.2, 6.4", "The third that flips first has more KL than the third that flips last.",
        "8 of 9 conditions", "KL of the first third as a multiple of the last third's, geometric mean (its protocol: free)",
        "holds above 1, does not below", _TIMES, functions.early_third_has_more_kl,
    ),
    Claim(
        "margin-tells", PAPER, "2.3, 7.1", "What decides a flip is the distance to the decision boundary.",
        "", "area under the curve: the smallest margin as predictor of a flip",
        "holds above 0.5, does not below, example by example (Mann and Whitney)",
        "margins at every step on the paper's models", functions.margin_tells_the_flip,
    ),
    Claim(
        "margin-delays", PAPER, "6.4", "Examples near the decision boundary flip early.",
        "", "hazard ratio of a first flip for one standard deviation more margin",
        "holds below 1, does not above (Cox, decodes without a flip censored)", _TIMES, functions.margin_delays_the_flip,
    ),
    Claim(
        "flips-at-once", PAPER, "4.4", "The step of the first flip is heavily skewed towards the first steps.",
        "", "share of first flips in the first eighth of the steps",
        "holds above a half, does not below", _TIMES,
        Ask(larger, _EARLY, 0.5, _EARLY.mean, options={"of": "share"}),
    ),
)  # fmt: skip

# What carries the difference (6.5 and 7.3) ----------------------------------------------------------------------------

_PATCHED = (
    "K and V patched directly, in both directions, beside all positions of the residual stream, on the paper's models"
)

_EACH: dict[str, Any] = {"within": ("model", "unit"), "how": "median"}
"""The median over layers."""

_CARRIERS = (
    Claim(
        "residual-single", PAPER, "abstract, 6.5", "Patching the residual stream of one layer recovers almost nothing.",
        "below 1% (median)", "median recovery over layers (its protocol: one position and step, free; control: all, matched)",
        "holds below 5%, does not above", _PATCHED,
        Ask(smaller, patched("single", MATCHED, **_EACH), 0.05, patched("single", FREE).median),
    ),
    Claim(
        "residual-all", PAPER, "abstract, 6.5", "Patching the residual stream of all layers makes the paths differ more.",
        "negative in 3 of 3 models",
        "median recovery, all layers (its protocol: mean, one position and step, free; control: all but the last layer, matched)",
        "holds below 0, does not above; the last layer's stream is all that the unembedding reads, and recovers everything",
        _PATCHED,
        Ask(smaller, patched("cumulative", MATCHED, below_last, last_layer), 0.0,
            patched("cumulative", FREE, last_layer).mean),
    ),
    Claim(
        "gemma-partial", PAPER, "6.5", "In Gemma one layer's residual stream recovers something.",
        "+5.75% (median)", "median recovery over layers of the Gemma model", "holds above 0, does not below",
        _PATCHED,
        Ask(larger, patched("single", MATCHED, of_gemma, **_EACH), 0.0, patched("single", FREE, of_gemma).median),
    ),
    Claim(
        "cache-carries", PAPER, "abstract, 6.5, 7.3", "The state of the cache is what carries the divergence.",
        "by elimination", "recovery with K and V of all layers put into the cached path",
        "holds above a half, does not below", _PATCHED,
        Ask(larger, patched("cumulative", MATCHED, last_layer, site="kv"), 0.5),
    ),
    Claim(
        "earlier-rows-carry", PAPER, "1, 6.5", "Errors written at each step stay in the cache and affect all later ones.",
        "", "share of what earlier rows hold, of that and of computing the newest row alone (L2 of logits)",
        "holds above a half, does not below", _PATCHED,
        Ask(larger, Column("decomposition", "state_l2 / (fresh_l2 + state_l2)", "step > 0"), 0.5),
    ),
)  # fmt: skip

# What a less exact cache does: errors put into K and V, and chains of restatements (two other sources) ----------------

_ERRORS = "1,000 and more prompts paired with the control on the source's model (Llama-3.2-1B-Instruct)"
_CHAINS = "30 texts and more, 10 seeds each, with other seeds of the same precision beside them, on the source's models"

_POLICIES = (
    Claim(
        "q8-instructions", ERRORS, "table 1", "8-bit quantisation keeps nearly all of instruction following.",
        "98%", "instructions followed, as a share of the control's", "holds above 90%, does not below",
        _ERRORS, Ask(larger_of_intervals, partial(score, policy="q8_0"), 0.9),
    ),
    Claim(
        "q4-words", ERRORS, "6.1, table 2", "4-bit quantisation guesses more next words than no quantisation.",
        "115%", "words guessed, as a share of the control's", "holds above 100%, does not below",
        _ERRORS, Ask(larger_of_intervals, partial(score, policy="q4_0", metric="next_token"), 1.0),
    ),
    Claim(
        "uniform-noise", ERRORS, "table 3", "Uniform noise within the value's own size costs instruction following.",
        "83%", "instructions followed, as a share of the control's", "holds below 95%, does not above",
        _ERRORS, Ask(smaller_of_intervals, partial(score, policy="uniform(-1,1)"), 0.95),
    ),
    Claim(
        "flipped-signs", ERRORS, "5.5, 6.4", "At the same magnitude, errors that flip signs are catastrophic.",
        "", "effect of flipped signs at a matched mean square on instructions followed, as a share of the control's",
        "holds where it costs more than half, does not where it costs less; the source gives no bound",
        _ERRORS, Ask(smaller_of_intervals, partial(effect, factor="flips"), -0.5),
    ),
    Claim(
        "skewed-errors", ERRORS, "5.5", "At the same magnitude, errors with a mean other than zero are catastrophic.",
        "", "effect of a shifted mean at a matched mean square on instructions followed, as a share of the control's",
        "holds where it costs more than half, does not where it costs less; the source gives no bound",
        _ERRORS, Ask(smaller_of_intervals, partial(effect, factor="shift"), -0.5),
    ),
    Claim(
        "kept-within-bounds", ERRORS, "7", "Errors up to uniform(-1.5,1.5) or normal(0,0.5) keep 80% of the accuracy.",
        "80%", "instructions followed under the worse of the two, as a share of the control's",
        "holds where both are shown to be above 80%, does not where one is shown to be below",
        _ERRORS, functions.kept_within_bounds,
    ),
    Claim(
        "exact-chains", DRIFT, "results", "Chains of restatements keep more of the text with 16 bits than with 8.",
        "17 of 22 models, +0.09",
        "last similarity under q8_0 (int8 where that was not run) less that without a policy; texts are the units",
        "holds below 0, does not above", _CHAINS, functions.exact_cache_keeps_more,
    ),
    Claim(
        "keys-matter", DRIFT, "background, insights", "Keys are more sensitive to low precision than values.",
        "", "last similarity with one policy on K alone less that with it on V alone; texts are the units",
        "holds below 0, does not above", _CHAINS, functions.keys_matter_more,
    ),
    Claim(
        "not-monotone", DRIFT, "results", "More precision is not better for every model.",
        "+0.62 to -0.36", "effect of 8 bits on the last similarity, the best model's less the worst's",
        "holds where one model is shown to be above 0 and one below, corrected for all models; does not where all have one sign",
        _CHAINS, functions.models_disagree,
    ),
)  # fmt: skip

CLAIMS: tuple[Claim, ...] = (
    *_PATHS,
    told_again(
        _PATHS, "diverges-always", id="news-100", value="100%",
        claim="The texts differ in every case tested, which proves that caching is not equivalent.",
    ),
    *_ANSWERS,
    told_again(
        _ANSWERS, "eight-of-nine", id="news-accuracy", value="8 of 9",
        claim="Caching often gives higher accuracy, so the divergence has a predictable direction.",
    ),
    *_LAYERS,
    told_again(
        _LAYERS, "layer-1", id="news-layer-1", value="",
        claim="Models with grouped-query attention diverge sharply at the first layer.",
    ),
    *_CAUSES,
    told_again(
        _CAUSES, "fp32-no-flips", id="news-fp32", value="0",
        claim="FP32 eliminates token flips, which pinpoints the cause.",
    ),
    *_FLIPPED,
    *_CARRIERS,
    told_again(
        _CARRIERS, "residual-all", id="news-residual", value="",
        claim="Manipulating the residual stream cannot recover the cache-free trajectory.",
    ),
    *_POLICIES,
)  # fmt: skip
