"""What drift by layer and attention by head come to over examples: means, growth, tests and correlations with intervals.

The steps of one example are not independent, so each example is one number: the mean over its steps. Intervals are from
resampling examples.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp import metrics
from kvinterp.metrics.inference import corrected
from kvinterp.metrics.massive import SUFFIX

CONTRASTS = {
    "previous layer": "the drift at a layer against that at the layer before",
    "layer 0": "the drift at a layer against that at layer 0",
    "same-path null": "the drift at a layer against the recompute path's own there, when it computes the same rows among more",
}
"""What a layer's drift is compared with."""
GROWING = ("l2", "relative_l2", f"l2{SUFFIX}", f"relative_l2{SUFFIX}")
"""The measures that are asked whether they grow: the paper's, relative to the stream, and both beside its largest dimensions."""


def means_of(rows: pd.DataFrame, measures: Sequence[str]) -> pd.DataFrame:
    """The mean drift by layer.

    Args:
        rows: A row an example, step and layer.
        measures: Columns of it.

    Returns:
        One row a layer and measure: mean and median over examples, the median's 95% interval (low, high); zeros,
        those of exactly 0; n (examples). NaN where none has a number.
    """
    rows_of_layers = []
    for measure in measures:
        for layer, values in _layers(rows, measure):
            rows_of_layers.append((layer, measure, *metrics.typical(values)))
    return pd.DataFrame(rows_of_layers, columns=["layer", "measure", *metrics.Typical._fields])


def amplification_of(rows: pd.DataFrame) -> pd.DataFrame:
    """How many times the drift of a layer is that of the layer before.

    Args:
        rows: A row an example, step and layer.

    Returns:
        One row a layer and measure of :data:`GROWING`: ratio, the median of the examples' own, its 95% interval (low, high) and
        n, the examples that drift in the layer before; NaN where there is none.
    """
    rows_of_layers = []
    for measure in GROWING:
        layers = dict(_layers(rows, measure))
        for layer, values in layers.items():
            before = layers.get(layer - 1, values * np.nan)
            grown = metrics.typical((values / before.where(before > 0)).dropna())
            rows_of_layers.append((layer, measure, grown.median, *grown.interval, grown.n))
    return pd.DataFrame(rows_of_layers, columns=["layer", "measure", "ratio", "low", "high", "n"])


def layer_tests_of(rows: pd.DataFrame, null: pd.DataFrame, contrasts: Sequence[str]) -> pd.DataFrame:
    """Whether a layer's drift differs from what it is compared with: unpaired as in the paper, and paired by example.

    The layers of one example are not independent samples, which Mann-Whitney takes them for; the signed ranks of Wilcoxon are
    of each example's own difference.

    Args:
        rows: A row an example, step and layer, of several models.
        null: The same of the same-path null.
        contrasts: Of :data:`CONTRASTS`.

    Returns:
        One row a model, layer, measure, contrast and test: n (examples), statistic, p, p_bh, corrected over all layers of all
        models that are tested alike, effect, and effect_of, what that is. p is NaN where nothing differs.
    """
    rows_of_tests = []
    for model, drift in rows.groupby("model", sort=False):
        null_drift = null[null["model"] == model]
        for measure, contrast in itertools.product(GROWING, contrasts):
            layers, nulls = (dict(_layers(one, measure)) for one in (drift, null_drift))
            for layer, values in layers.items():
                against = {
                    "previous layer": layers.get(layer - 1),
                    "layer 0": layers.get(0) if layer else None,
                    "same-path null": nulls.get(layer),
                }[contrast]
                if against is None:
                    continue
                here, there = pd.concat([values, against], axis=1).dropna().to_numpy().T
                labels = model, layer, measure, contrast
                rows_of_tests += [(*labels, name, len(here), *test(here, there), of) for name, test, of in _TESTS]
    columns = ["model", "layer", "measure", "contrast", "test", "n", "statistic", "p", "effect", "effect_of"]
    table = pd.DataFrame(rows_of_tests, columns=columns)
    alike = table.groupby(["measure", "contrast", "test"], sort=False)["p"]
    table["p_bh"] = alike.transform(lambda p: corrected(p.to_numpy(float), "bh"))
    return table


def pairs_of(heads: pd.DataFrame, sharing: int) -> pd.DataFrame:
    """How the attention errors of two heads go together over the steps of one example.

    Args:
        heads: A row an example, step, layer and query head: kl.
        sharing: How many query heads share a KV head.

    Returns:
        One row an example, layer and kind of pair (``within`` a KV group, ``across`` groups): r, the mean of Spearman's
        correlation over the pairs of heads, and pairs, how many have one; NaN and 0 where none varies.
    """
    pairs = []
    for (example, layer), group in heads.groupby(["example", "layer"], sort=False):
        table = group.pivot(index="step", columns="head", values="kl")
        matrix = table.corr("spearman", min_periods=4).to_numpy()
        groups = table.columns.to_numpy() // sharing
        one, other = np.triu_indices(len(groups), 1)
        for kind, chosen in (("within", groups[one] == groups[other]), ("across", groups[one] != groups[other])):
            known = matrix[one, other][chosen]
            known = known[np.isfinite(known)]
            r = known.mean() if len(known) else np.nan
            pairs.append((example, layer, kind, r, len(known)))
    return pd.DataFrame(pairs, columns=["example", "layer", "kind", "r", "pairs"])


def head_correlations_of(pairs: pd.DataFrame) -> pd.DataFrame:
    """The correlation of head errors within KV groups and across them, and their difference.

    Both hold what all heads of a step share: a later step has more keys, and one that differs at all differs in every head.
    Only the difference is of the KV head that some share.

    Args:
        pairs: As :func:`pairs_of` gives them.

    Returns:
        One row a layer and kind (``within``, ``across``, ``within - across``): r, the mean over examples, low, high (95%
        interval over examples, none for fewer than :data:`kvinterp.metrics.FEWEST`) and n (examples that have it).
    """
    correlations = []
    for layer, group in pairs.groupby("layer", sort=False):
        table = group.pivot(index="example", columns="kind", values="r")
        table["within - across"] = table["within"] - table["across"]
        for kind, values in table[["within", "across", "within - across"]].items():
            over = metrics.mean_of(values.dropna())
            correlations.append((layer, kind, values.mean(), over.low, over.high, over.n))
    return pd.DataFrame(correlations, columns=["layer", "kind", "r", "low", "high", "n"])


def _layers(rows: pd.DataFrame, measure: str) -> Iterator[tuple[int, pd.Series]]:
    """Each layer with the mean of every example, by example."""
    means = rows.groupby(["layer", "example"])[measure].mean()
    for layer in means.index.unique("layer"):
        yield int(layer), means[layer].dropna()


def _mann_whitney(here: np.ndarray, against: np.ndarray) -> tuple[float, float, float]:
    """U, p, and the chance that one of the first is larger than one of the others."""
    if len(here) < 2 or np.ptp([*here, *against]) == 0:
        return (np.nan,) * 3
    test = stats.mannwhitneyu(here, against)
    return test.statistic, test.pvalue, test.statistic / (len(here) * len(against))


def _wilcoxon(here: np.ndarray, against: np.ndarray) -> tuple[float, float, float]:
    """The sum of the ranks where the first is larger, p, and the rank-biserial correlation of the pairs."""
    there = (here - against)[here != against]
    if not len(there):
        return (np.nan,) * 3
    ranks = stats.rankdata(np.abs(there))
    effect = (np.sign(there) * ranks).sum() / ranks.sum()
    return ranks[there > 0].sum(), stats.wilcoxon(here - against).pvalue, effect


_TESTS = (
    ("Mann-Whitney", _mann_whitney, "chance that x is larger than y"),
    ("Wilcoxon", _wilcoxon, "rank-biserial correlation"),
)
