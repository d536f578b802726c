"""The FP16 paper's figures as panels, and its tables as the page words them, a row of ours above one of the paper's.

What is drawn was computed in ``paper_tables.py`` and ``boundary.py``; ``papers/studies/paper.py`` puts panels into charts
and tables onto the page.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.commands.kit import Panel, Tables, counted, ends_of, number
from kvinterp.common.numbers import ends_said
from kvinterp.papers.behaviour.paper_tables import ENDS, METHODS, PROTOCOLS


def bars_of(table: pd.DataFrame) -> pd.DataFrame:
    """Table 2 as Figure 3 draws it: a row a model, precision and protocol."""
    return pd.DataFrame([
        {"line": f"{bare(row['model'])}, {precision.upper()} (n = {row['n']})", "protocol": protocol}
        | dict(zip(("kl", "low", "high"), (row[f"{name}{end}"] for end in ENDS), strict=True))
        for row, precision in itertools.product(table.to_dict("records"), ("fp16", "fp32"))
        for protocol, name in (("free", f"{precision}_kl"), ("matched", f"same_tokens_{precision}_kl"))
    ])  # fmt: skip


def views_of(tables: Tables) -> list[Panel]:
    """The four views of Figure 4: flip step and KL, early against late flips, correlations, and the
    decision boundary.
    """
    names = {"mean_kl": PROTOCOLS["free"], "matched_mean_kl": PROTOCOLS["matched"]}
    flips, thirds, correlations, margins = (
        tables[f"figure_4_{name}"] for name in ("flips", "thirds", "correlations", "prediction")
    )
    points = flips.melt(["flip_index", "model"], list(names), "quantity", "kl").dropna(
        subset=["kl"]
    )
    prompts = flips.groupby("model", sort=False)["example"].nunique()
    of = {model: f"{bare(model)}: {counted(int(count), 'flip')} (n = {prompts[model]})" for model, count in
          flips["model"].value_counts(sort=False).items()}  # fmt: skip
    thirds = thirds.assign(line=_lines(thirds, "strategy", "n_prompts"))
    at = {"margin_at_flip": "at a first flip", "margin_elsewhere": "at other steps"}
    margins = margins.assign(line=_lines(margins, "strategy", "n", "flips"))
    margins = pd.concat(
        [ends_of(margins, name).rename(columns={name: "margin"}).assign(at=name) for name in at]
    )
    correlations = correlations[correlations["method"].isin(METHODS)]
    correlations = correlations.assign(
        line=_lines(correlations.replace({"method": METHODS}), "method", "n_prompts")
    )
    dots = functools.partial(Panel, y="line", kind="dots")
    return [
        Panel(points, "flip_index", "kl", "points", color="model", names=of, facet="quantity", titles=names,
              label="mean KL (nats)", xlabel="step of the first flip"),
        dots(thirds, "ratio", color="quantity", names=names, scale="log", level=1, why="why",
             label="mean KL of the earliest third of flips over the latest"),
        dots(correlations, "value", color="quantity", names=names, scale="linear", level=0, why="why",
             label="Pearson's correlation of flip step and mean KL"),
        dots(margins.dropna(subset=["margin"]), "margin", color="at", names=at, scale="linear",
             label="margin of the two highest logits (median over prompts)"),
    ]  # fmt: skip


def _lines(table: pd.DataFrame, what: str, n: str, flips: str = "") -> list[str]:
    """The labels of dots: the model, what a row is of, and how many prompts, and flips, it rests
    on.
    """
    return [
        f"{bare(row['model'])}, {row[what]} "
        + f"(n = {row[n]}{', ' + counted(row[flips], 'flip') if flips else ''})".replace(
            " ", "\u00a0"
        )
        for row in table.to_dict("records")
    ]


def titled(table: pd.DataFrame, n: str) -> dict[str, str]:
    """The titles of panels by model, with how many prompts they rest on."""
    ends = table.groupby("model", sort=False)[n].agg(["min", "max"]) if len(table) else table
    return {
        model: f"{bare(model)}, n = {' to '.join(dict.fromkeys(map(str, each)))}"
        for model, *each in ends.itertuples()
    }


def bare(model: str) -> str:
    """A model's name in a figure."""
    return model.removeprefix("zoo:")


def written(row: Mapping[str, Any], column: str, own: str) -> str:
    """A cell of ours (``own`` is empty) or of the paper: an estimate and its interval; one that
    begins with % is a share.
    """
    if own and column == "model":
        return f"paper: {row['paper']}"
    if own and column == "strategy":
        return str(row[column]).partition("(")[0]
    name = f"{own}{column.removeprefix('%')}"
    value = row.get(name, "")
    if isinstance(value, str):
        return value
    form = _share if column[0] == "%" else "{:.4g}".format if own else number
    return form(value) + ends_said(
        row.get(f"{name}_low"), row.get(f"{name}_high"), " [{}]", form
    ).replace(" to ", ", ")


def _share(value: float) -> str:
    return "–" if pd.isna(value) else f"{100 * value:.3g}%"


SHOWN: dict[str, tuple[str, str, dict[str, str]]] = {
    "table_1": (
        "Divergence, KL and accuracy",
        "The mean's interval is the paper's bootstrap: it takes run pairs as independent, though seeds of a prompt are not and "
        "greedy's are copies. The median's is by order statistics over prompts. They differ because a mean follows the few "
        "decodes that flip early. The control's interval resamples prompts, each once. p is of the difference of the accuracies: "
        "McNemar's exact test where a prompt is decoded once, else sign flips by prompt; Bonferroni over the rows.",
        {
            "Model": "model",
            "Strategy": "strategy",
            "n": "n",
            "Decodes": "decodes",
            "Div. rate": "%div_rate",
            "Mean KL [95% CI]": "mean_kl",
            "Median KL [95% CI]": "median_kl",
            "Cache acc.": "%cache_acc",
            "No-cache acc.": "%no_cache_acc",
            "p (Bonferroni)": "p_bonferroni",
            "Control: mean KL, same tokens": "same_tokens",
        },
    ),
    "table_2": (
        "FP16 against FP32, strategies pooled",
        "With the same tokens as many decodes flip, since up to the first flip both paths read the same. Where the paper's rows "
        "are empty, its numbers are lost in the text that we have.",
        {
            "Model": "model",
            "n": "n",
            "FP16 KL": "fp16_kl",
            "FP32 KL": "fp32_kl",
            "FP16 flip": "%fp16_flip",
            "FP32 flip": "%fp32_flip",
            "Control: FP16 KL, same tokens": "same_tokens_fp16_kl",
            "Control: FP32 KL, same tokens": "same_tokens_fp32_kl",
        },
    ),
    "table_3": (
        "Pearson's correlation of the step of the first flip and the mean KL, strategies pooled",
        "An early flip leaves more steps of two texts, so the correlation is negative by counting; with the same tokens no step "
        "is of two texts. Steps are counted as in the paper: flip 0 is at the first step that a cache decides. The trend is from "
        "Full to Excl. flip 0, where that lies outside the interval of Full.",
        {
            "Model": "model",
            "flips": "flips",
            "n": "n",
            "Full": "full",
            "Excl. flip 0": "without_0",
            "Excl. flips 0 to 8": "without_8",
            "Trend": "trend",
            "Control: full, same tokens": "same_tokens",
        },
    ),
}
"""The tables of the page: what each is, a note, and the columns by their heads."""
