"""Measure how far apart the residual streams of the two paths are in each layer, where both got the
same tokens.

The FP16 paper's layer drift analysis (arXiv 2604.15409, section 6.2) reports the absolute L2
distance of hidden states at decode step 1, and a jump at layer 1. Each path gets its own tokens
there, so the cosines of 0.49 and 0.015 at layer 0 can come from two different tokens. Here every
row counts only if both paths had read the same tokens, and the result says how many rows that rule
removed. Beside the absolute distance you get the distance relative to the stream, the angle, and
all three without the three largest dimensions, since massive activations also make such a jump. The
null is the recompute path against itself, with the same rows among more rows.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from kvinterp.commands.kit import (
    DRAWN,
    Adapter,
    Cell,
    CellResults,
    Chart,
    Charts,
    InputError,
    OfModels,
    Panel,
    Result,
    Rows,
    Tables,
    between,
    compare_examples,
    counted,
    finding,
    finding_from,
    joined,
    metrics,
    numbered,
    only,
    option,
    paths_of,
    shared,
)
from kvinterp.comparison import Comparison, recordable
from kvinterp.metrics.inference import corrected
from kvinterp.metrics.massive import SUFFIX
from kvinterp.models.inputs import encode_all
from kvinterp.paths import run

EVERY_STEP, ONE_STEP, NULL = "every decode step", "decode step 1", "same-path null"
"""Which rows a mean is of: all that a path decodes after the prefill, or those of the paper; and
what is held against them.
"""
CONTRASTS = {
    "previous layer": "the layer before",
    "layer 0": "layer 0",
    NULL: "the recompute path among more rows",
}
"""What the drift at a layer is held against."""
LEVEL = 0.05
"""Below this corrected p-value two things are told apart."""
NAMES = {
    "l2": "L2",
    "relative_l2": "relative L2",
    f"l2{SUFFIX}": "L2 without the three largest dimensions",
    f"relative_l2{SUFFIX}": "relative L2 without the three largest dimensions",
}
"""The measures that are asked whether they grow: the paper's, relative to the stream, and both
beside its largest dimensions.
"""
MEASURES = tuple(metric.column for metric in metrics.OF_KIND["residual"])
RULES = (
    ("matched", "same tokens"),
    ("free", "same tokens"),
    ("free", "none"),
    (NULL, "same tokens"),
)
"""What means are of: a protocol (or the null), and which of its rows."""
AT = ["model", "example"]


class LayerDrift(OfModels):
    """In which layer do the paths come apart, and does it grow from layer to layer?"""

    NOTED = ("kernels", "strategy", "seed", "max_new_tokens")

    dtype: str = shared("dtype")
    strategy: str = shared("strategy")
    seed: int = shared("seed", only=DRAWN)
    kernels: str = shared("kernels")
    max_new_tokens: int = shared("max_new_tokens", 32, min=2)
    step: int = option(
        2,
        "Which of our steps is the paper's decode step 1. We count the prefill's token as step 0.",
        min=1,
    )
    divergent: int = option(
        10, "How many examples to select as the paper does: those with the highest mean KL.", min=1
    )
    contrast: tuple[str, ...] = option(
        tuple(CONTRASTS),
        "What each layer is tested against: previous layer, layer 0 or same-path null; may be given several times.",
        among=tuple(CONTRASTS),
    )
    suffix: int = option(8, "How many tokens the null adds after the text.", min=1)

    def check(self) -> None:
        """Everything that can be looked at before a model is loaded."""
        super().check()
        if self.step >= self.max_new_tokens:
            raise InputError(
                f"step={self.step} is never decoded with max_new_tokens={self.max_new_tokens}, where the last step is "
                f"{self.max_new_tokens - 1}: decode more tokens or name an earlier step."
            )

    def cells(self) -> list[Cell]:
        """A cell a model and example."""
        cells, prompts = [], self.prompt_list
        for number, model, adapter in self.numbered_models():
            encode_all(adapter, prompts, self.max_new_tokens + self.suffix)
            for example in range(len(prompts)):
                cells.append(
                    Cell(f"layer-drift-{number}-{example}", self.drifted, {"model": model})
                )
        return cells

    def drifted(self, keys: Sequence[str], keep: Callable[..., None], model: str) -> None:
        """Compares the paths on some examples of one model, and keeps what each gave.

        Until the first flip both protocols feed the same tokens, so that only an example that flips
        is run free too.
        """
        adapter, prompts = self.adapter(model), self.prompt_list
        paths = paths_of(self.kernels)
        known, _ = recordable(adapter, None, range(adapter.facts.layers))
        sites = [site for site in known if site in ("resid_post", "pattern")]
        with adapter.one_call():
            for example, key in numbered(keys).items():
                prompt = prompts[example]
                options = self.choices("strategy", "seed", "max_new_tokens") | {
                    "examples": [example]
                }
                matched = free = compare_examples(adapter, prompt, *paths, record=sites, **options)
                tables = {"examples": matched.failures}
                if matched.failures.empty:
                    if matched.examples["flip_index"].notna().any():
                        free = compare_examples(
                            adapter, prompt, *paths, protocol="free", record="resid_post", **options
                        )
                    null = null_drift(adapter, prompt, matched.steps, paths[1], self.suffix).assign(
                        example=example
                    )
                    tables = {**of_example(matched, free), "null": null}
                keep(
                    key,
                    {
                        name: table.assign(model=adapter.facts.name)
                        for name, table in tables.items()
                    },
                )

    def tables(self, results: CellResults) -> Tables:
        """What the examples of all models come to."""
        return tables_of(joined(results), self.step, self.divergent, self.contrast)

    # What was found -------------------------------------------------------------------------------

    def headline(self, result: Result) -> list[str]:
        """How the relative drift changes from the first layer to the last, and what was left
        out.
        """
        tables = result.tables
        every = only(
            tables["drift_by_layer"],
            selection=EVERY_STEP,
            protocol="matched",
            measure="relative_l2",
        )
        null = only(
            tables["drift_by_layer"], selection=EVERY_STEP, protocol=NULL, measure="relative_l2"
        )
        by, of_null = (
            table.sort_values("layer").groupby("model")["median"] for table in (every, null)
        )
        failed = tables["drift_examples"].query("message != ''")
        lines = ["No step was decoded after the prefill: no drift was measured."]
        if len(every) and not (every["mean"] > 0).any():
            lines = [
                "Fed the same tokens, resid_post is bitwise equal in every layer of both paths."
            ]
        elif len(every):
            models = f" over {counted(len(by), 'model')}" * (len(by) > 1)
            lines = [
                f"Fed the same tokens, the two paths' resid_post differ, relative to its length, by {between(by.first())} in "
                f"layer 0 and by {between(by.last())} in the last layer (medians{models})"
                f"{f'; two recomputations differ by {between(of_null.last())} there' if len(null) else ''}."
            ]
        if len(failed):
            lines.append(f"{counted(len(failed), 'example')} left out: {failed['message'].iloc[0]}")
        return lines

    def rows(self, result: Result) -> Rows:
        """Drift in the first and last layer, its growth, what the rule of equal tokens removed, the
        tests, and the heads.
        """
        for model in dict.fromkeys(result.tables["drift_examples"]["model"]):
            tables = {
                name: only(table, model=model)
                for name, table in result.tables.items()
                if "model" in table
            }
            yield from ({"model": model, **row} for row in _rows_of_model(tables))

    def charts(self, result: Result) -> Charts:
        """Drift by layer, the paper's step, growth from layer to layer, and attention by head."""
        tables = result.tables
        means = tables["drift_by_layer"].rename(columns={"median": "drift"})
        if means.empty:
            return {}
        every = only(means, selection=EVERY_STEP)
        every = every[every["protocol"].isin(["matched", NULL])]
        bare = every["measure"].str.endswith(SUFFIX)
        every = every.assign(
            line=every["protocol"].where(~bare, "bare"),
            measure=every["measure"].str.removesuffix(SUFFIX),
        )[~(bare & (every["protocol"] == NULL))]
        streams = {
            "matched": "cached against recompute",
            "bare": "without the three largest dimensions",
            NULL: "null: recompute among more rows, no cache",
        }
        one = only(means, selection=ONE_STEP, protocol="free")
        rules = {
            "none": "every row, as in the paper",
            "same tokens": "rows where both read the same tokens",
        }
        panel = functools.partial(Panel, x="layer", facet="model")
        label = "of resid_post\n(median, 95% interval)"
        growth = tables["amplification"].dropna(subset=["ratio"])
        return {
            "layer_drift": Chart(
                "Drift of the residual stream by layer, both paths fed the same tokens",
                [panel(only(every, measure=m), y="drift", color="line", names=streams, label=f"{NAMES[m]} {label}")
                 for m in ("l2", "relative_l2")],
            ),
            "layer_drift_decode_step_1": Chart(
                "The paper's decode step 1, each path fed its own text",
                [panel(only(one, measure=m), y="drift", color="rule", names=rules, label=f"{m} {label}",
                       scale="linear" if m == "cosine" else "zero") for m in ("l2", "cosine")],
            ),
            "layer_drift_amplification": Chart(
                "Growth of the drift from layer to layer",
                [panel(growth, y="ratio", color="measure", names=NAMES, level=1,
                       label="drift over that of the layer before\n(median example, 95% interval)")],
            ),
            "layer_drift_heads": Chart(
                "Attention by head",
                [Panel(tables["head_kl"], "head", "layer", "map", color="kl", facet="model", xlabel="query head",
                       label="mean attention KL (nats);\nblank: exactly 0")],
            ),
        }  # fmt: skip


def _rows_of_model(tables: Tables) -> Rows:
    """The findings of one model."""
    means = tables["drift_by_layer"]
    matched, null = (only(means, selection=EVERY_STEP, protocol=name) for name in ("matched", NULL))
    at = ["measure", "layer"]
    matched = matched.merge(null[[*at, "median"]], "left", at, suffixes=("", "_of_null"))
    of_row = functools.partial(finding_from, unit="examples")
    for measure, name in list(NAMES.items())[:3] if len(matched) else ():
        for row in (
            only(matched, measure=measure).iloc[[0, -1]].drop_duplicates("layer").to_dict("records")
        ):
            yield of_row(
                row,
                f"median {name} of resid_post",
                "median",
                null=row["median_of_null"],
                layer=row["layer"],
            )
    grown = tables["amplification"].dropna(subset=["ratio"])
    l2 = only(grown, measure="l2").set_index("layer")
    if len(l2):
        # Among the layers before which enough examples drift, where there is one.
        enough = l2[l2["n"] >= metrics.FEWEST]
        most = (enough if len(enough) else l2)["ratio"].idxmax()
        for row in only(grown, layer=most).to_dict("records"):
            what = f"growth of {NAMES[row['measure']]}, in the layer where L2 grows most"
            yield of_row(row, what, "ratio", measure="times", layer=most)
    for row in only(tables["layer_drift_rows"], protocol="free").to_dict("records"):
        what = f"rows of other tokens, each path fed its own text, {row['selection']}"
        yield finding(what, row["removed"] / row["rows"], n=row["rows"], unit="rows", measure="%",
                      note="left out of every other number")  # fmt: skip
    cosine = only(means, selection=ONE_STEP, protocol="free", measure="cosine")
    for row in only(cosine, layer=cosine["layer"].min()).to_dict("records"):
        which = "every row" if row["rule"] == "none" else "rows of the same tokens"
        what = f"median cosine at the paper's decode step 1, {which}"
        yield of_row(row, what, "median", layer=row["layer"])
    for (contrast, test), table in only(tables["layer_tests"], measure="l2").groupby(
        ["contrast", "test"], sort=False
    ):
        effect, middle = (
            table.loc[table["p_bh"] < LEVEL, "effect"],
            0.5 if test == "Mann-Whitney" else 0.0,
        )
        yield finding(f"layers with more L2 than {CONTRASTS[contrast]}", (effect > middle).sum(), n=len(table), unit="layers",
                      test=test, note=f"BH at {LEVEL:g}; less in {(effect < middle).sum()}")  # fmt: skip
    heads = tables["head_kl"]
    if len(heads):
        largest = heads.loc[heads["kl"].idxmax()]
        labels = dict(largest[["layer", "head"]]) if largest["kl"] > 0 else {}
        derived = (
            "derived beside the kernel, which shows no pattern"
            if (heads["pattern"] == "derived").any()
            else ""
        )
        yield finding("largest mean attention KL of a head", largest["kl"], n=largest["n"], unit="examples", measure="nats",
                      note=derived, **labels)  # fmt: skip


# One example --------------------------------------------------------------------------------------


def of_example(matched: Comparison, free: Comparison) -> Tables:
    """The tables of one example.

    Args:
        matched: Both paths on the same tokens, with resid_post, and the patterns where the model
            shows them.
        free: Each on its own; the same where nothing flips.
    """
    columns = ["example", "step", "layer", *MEASURES]
    heads = matched.heads[matched.heads["step"] > 0]
    other_text = free.layers["after_flip"].astype(bool) & (free.provenance["protocol"] == "free")
    examples = matched.examples[["example", "id", "prompt_tokens", "steps", "flip_index"]]
    return {
        "drift": matched.layers[columns],
        "removed": free.layers.loc[other_text, columns],
        "heads": heads.groupby(["example", "layer", "head", "pattern"], as_index=False)[
            "kl"
        ].mean(),
        "examples": examples.assign(
            free_steps=free.examples["steps"].to_numpy(),
            mean_kl=free.examples["mean_kl"].to_numpy(),
            matched_mean_kl=matched.examples["mean_kl"].to_numpy(),
            message="",
        ),
    }


def null_drift(
    adapter: Adapter, prompt: Any, steps: pd.DataFrame, path: str, suffix: int
) -> pd.DataFrame:
    """The recompute path against itself: the newest row of each step, among its prefix and among
    the whole text and more.

    Args:
        adapter: The model.
        prompt: The prompt.
        steps: The table ``steps`` of the comparison, whose tokens are fed.
        path: The recompute path.
        suffix: Tokens behind the text, so that the last step has company too; a causal model does
            not see them.

    Returns:
        One row a step from 1 on and layer, with every measure of drift.
    """
    fed = steps["token_a"].tolist()[:-1]
    settings: dict[str, Any] = {"record": "resid_post", "stop": "length"}
    alone = run(adapter, prompt, path, continuation=fed, max_new_tokens=len(steps), **settings)
    text = [*alone.prompt, *fed]
    longer = run(
        adapter,
        [*text, *(text * suffix)[:suffix]],
        path,
        max_new_tokens=1,
        positions="all",
        **settings,
    )
    newest = slice(len(alone.prompt) - 1, len(text))
    tables = []
    for layer in range(adapter.facts.layers):
        drift = metrics.measured(
            "residual", longer["resid_post", layer][0][newest], alone["resid_post", layer]
        )
        measures = {name: values.tolist() for name, values in drift.items()}
        tables.append(pd.DataFrame({"step": range(len(steps)), "layer": layer, **measures})[1:])
    return pd.concat(tables, ignore_index=True)


# All examples -------------------------------------------------------------------------------------


def tables_of(parts: Tables, step: int, divergent: int, contrasts: Sequence[str]) -> Tables:
    """The tables of all models.

    Args:
        parts: Those of the examples: drift, removed, heads, examples, null.
        step: The step of the paper's selection.
        divergent: Of how many examples it is.
        contrasts: What a layer is tested against.
    """
    examples, matched = (
        parts["examples"],
        parts["drift"].assign(protocol="matched", same_tokens=True),
    )
    flips = matched[AT].merge(examples, "left", AT)["flip_index"].to_numpy(float)
    # Up to a flip, the step of the flip too, both protocols feed the same tokens: the rows are the
    # same to the bit.
    free = matched[~(matched["step"].to_numpy() > flips)].assign(protocol="free")
    every = pd.concat(
        [matched, free, parts["removed"].assign(protocol="free", same_tokens=False)],
        ignore_index=True,
    )
    every = every.astype({"same_tokens": bool})
    highest = examples.dropna(subset=["mean_kl"]).sort_values(
        "mean_kl", ascending=False, kind="stable"
    )
    highest = highest.groupby("model", sort=False).head(divergent)
    decoded = pd.concat(
        [every[every["step"] > 0], parts["null"].assign(protocol=NULL, same_tokens=True)],
        ignore_index=True,
    )
    at_step = (decoded["step"] == step) & decoded.set_index(AT).index.isin(
        highest.set_index(AT).index
    )
    selections = {EVERY_STEP: decoded, ONE_STEP: decoded[at_step]}
    means = [
        _by_model(only(table if rule == "none" else only(table, same_tokens=True), protocol=protocol), means_of)
        .assign(protocol=protocol, selection=selection, rule=rule)
        for (selection, table), (protocol, rule) in itertools.product(selections.items(), RULES)
    ]  # fmt: skip
    counts = pd.concat(
        table[table["protocol"] != NULL].assign(selection=name, removed=~table["same_tokens"])
        for name, table in selections.items()
    ).groupby(["model", "protocol", "selection"], sort=False)["removed"]
    matched = matched[matched["step"] > 0]
    heads = parts["heads"].groupby(["model", "layer", "head", "pattern"], sort=False)["kl"]
    return {
        "layer_drift": every.loc[
            every["same_tokens"], ["model", "protocol", "example", "step", "layer", *MEASURES]
        ],
        "layer_drift_rows": counts.agg(rows="size", removed="sum").reset_index(),
        "drift_by_layer": pd.concat(means, ignore_index=True),
        "layer_tests": layer_tests_of(matched, parts["null"], contrasts),
        "amplification": _by_model(matched, amplification_of),
        # Each example counts once.
        "head_kl": heads.agg(kl="mean", n="size").reset_index(),
        "drift_examples": examples.assign(divergent=examples.index.isin(highest.index)),
    }


def _by_model(
    table: pd.DataFrame, function: Callable[[pd.DataFrame], pd.DataFrame]
) -> pd.DataFrame:
    tables = [
        function(part).assign(model=model) for model, part in table.groupby("model", sort=False)
    ]
    frame = pd.concat(tables or [function(table).assign(model="")], ignore_index=True)
    return frame[["model", *frame.columns.drop("model")]]


# One model: the steps of one example are not independent, so each example is one number, the mean o


def _by_example(rows: pd.DataFrame, measure: str) -> pd.DataFrame:
    """The mean of every example over its steps, a column a layer."""
    return rows.groupby(["layer", "example"])[measure].mean().unstack("layer")


def means_of(rows: pd.DataFrame, measures: Sequence[str] = MEASURES) -> pd.DataFrame:
    """The mean drift by layer.

    Args:
        rows: A row an example, step and layer.
        measures: Columns of it.

    Returns:
        One row a layer and measure: mean and median over examples, the median's 95% interval (low,
        high); zeros, those of exactly 0; n (examples). NaN where none has a number.
    """
    means = [
        (layer, measure, *metrics.typical(values))
        for measure in measures
        for layer, values in _by_example(rows, measure).items()
    ]
    return pd.DataFrame(means, columns=["layer", "measure", *metrics.Typical._fields])


def amplification_of(rows: pd.DataFrame) -> pd.DataFrame:
    """How many times the drift of a layer is that of the layer before.

    Args:
        rows: A row an example, step and layer.

    Returns:
        One row a layer and measure of :data:`NAMES`: ratio, the median of the examples' own, its
        95% interval (low, high) and n, the examples that drift in the layer before; NaN where there
        is none.
    """
    ratios = []
    for measure in NAMES:
        drift = _by_example(rows, measure)
        before = drift.shift(axis=1)
        for layer, grown in (drift / before.where(before > 0)).items():
            over = metrics.typical(grown)
            ratios.append((layer, measure, over.median, *over.interval, over.n))
    return pd.DataFrame(ratios, columns=["layer", "measure", "ratio", "low", "high", "n"])


def layer_tests_of(
    rows: pd.DataFrame, null: pd.DataFrame, contrasts: Sequence[str]
) -> pd.DataFrame:
    """Whether a layer's drift differs from what it is compared with: unpaired as in the paper, and
    paired by example.

    The layers of one example are not independent samples, which Mann-Whitney takes them for; the
    signed ranks of Wilcoxon are of each example's own difference.

    Args:
        rows: A row an example, step and layer, of several models.
        null: The same of the same-path null.
        contrasts: Of :data:`CONTRASTS`.

    Returns:
        One row a model, layer, measure, contrast and test: n (examples), statistic, p, p_bh,
        corrected over all layers of all models that are tested alike, effect, and effect_of, what
        that is. p is NaN where nothing differs.
    """
    tested = []
    for model, measure, contrast in itertools.product(rows["model"].unique(), NAMES, contrasts):
        drift, against = (_by_example(only(table, model=model), measure) for table in (rows, null))
        if contrast != NULL:
            first = pd.DataFrame(dict.fromkeys(drift, drift[0]))
            against = (drift.shift(axis=1) if contrast == "previous layer" else first).drop(
                columns=0
            )
        for layer in against:
            here, there = pd.concat([drift[layer], against[layer]], axis=1).dropna().to_numpy().T
            labels = model, layer, measure, contrast
            tested += [
                (*labels, name, len(here), *test(here, there), of) for name, test, of in _TESTS
            ]
    columns = [
        "model",
        "layer",
        "measure",
        "contrast",
        "test",
        "n",
        "statistic",
        "p",
        "effect",
        "effect_of",
    ]
    table = pd.DataFrame(tested, columns=columns)
    alike = table.groupby(["measure", "contrast", "test"], sort=False)["p"]
    table["p_bh"] = alike.transform(lambda p: corrected(p.to_numpy(float), "bh"))
    return table


def _mann_whitney(here: np.ndarray, against: np.ndarray) -> tuple[float, float, float]:
    """U, p, and the chance that one of the first is larger than one of the others."""
    if len(here) < 2 or np.ptp([*here, *against]) == 0:
        return (np.nan,) * 3
    test = stats.mannwhitneyu(here, against)
    return test.statistic, test.pvalue, test.statistic / (len(here) * len(against))


def _wilcoxon(here: np.ndarray, against: np.ndarray) -> tuple[float, float, float]:
    """The sum of the ranks where the first is larger, p, and the rank-biserial correlation of the
    pairs.
    """
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
