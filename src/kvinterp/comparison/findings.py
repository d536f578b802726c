"""The findings and charts of a comparison: how often and how far logits differ, token margins, and
where inside it differs.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvinterp.common.numbers import against, counted, every, machine_of, number
from kvinterp.comparison.facts import decoded, evicted_rows, means_of
from kvinterp.errors import in_one_line
from kvinterp.findings import (
    Chart,
    Finding,
    Panel,
    finding,
    findings_of,
    in_words,
    lines_of,
    median_of,
    share_of,
)
from kvinterp.metrics.recovery import ONLY_THE_PREFILL, TO_SEE_A_DIFFERENCE
from kvinterp.metrics.statistics import mean_error

if TYPE_CHECKING:
    from kvinterp.comparison.comparison import Comparison


TO_SEE_WHAT_CARRIES_IT = (
    "what carries that kv.localise(model, prompt, cached=...) says, by layer and as K or V, and kvinterp patch --site "
    "cache_k"
)


def rows_of_comparison(comparison: Comparison) -> list[Finding]:
    """The findings of one comparison, over the steps at which both paths hold the same text unless
    they say otherwise.
    """
    left = [finding("prompt left out", np.nan, note=row["message"], prompt=row["id"])
            for row in comparison.failures.to_dict("records")]  # fmt: skip
    if comparison.steps.empty:
        return left
    parts = (
        _logit_rows,
        _first_tensor_rows,
        _layer_rows,
        _attention_rows,
        _cache_rows,
    )
    return [*(row for part in parts for row in part(comparison)), *left]


def _flips_of(comparison: Comparison) -> Finding:
    """The share of tokens that flip where both paths are fed the same ones, else of prompts in
    which one does.
    """
    steps, flips = comparison.steps, comparison.examples["flip_index"].notna()
    if comparison.provenance["protocol"] == "free":
        return share_of("prompts in which a token flips", flips.to_numpy())
    return share_of(
        "tokens that flip", steps["flipped"].to_numpy(), steps["example"], unit="tokens"
    )


def _median_kl(comparison: Comparison) -> Finding:
    steps = comparison.same_text(comparison.steps)
    note = f"mean {number(float(steps['kl'].mean()))} over all steps, largest {number(float(steps['kl'].max()))}"
    by_prompt = steps.groupby("example")["kl"].mean()
    return median_of("median of a prompt's mean KL", by_prompt, measure="nats", note=note)


def _saved(comparison: Comparison) -> tuple[str, dict[str, int]]:
    """The side whose cache takes fewer bytes, and the bytes of both with the context; nothing where
    they take as many.
    """
    sizes = comparison.provenance.get("cache_bytes", {})
    if not sizes or sizes["a"] == sizes["b"]:
        return "", {}
    return min("ab", key=sizes.__getitem__), sizes


def _logit_rows(comparison: Comparison) -> Iterator[Finding]:
    steps, examples = comparison.same_text(comparison.steps), comparison.examples
    compared = steps.dropna(subset=["max_abs_logit"])
    differ = (compared["max_abs_logit"] > 0).to_numpy()
    advice = (
        TO_SEE_A_DIFFERENCE.rstrip(".")
        if steps["step"].any() and not comparison.provenance.get("lets_go")
        else ""
    )
    note = f"first at step {int(compared.loc[differ, 'step'].min())}" if differ.any() else advice
    if "compared" in steps:
        without, none = int(steps["kl"].isna().sum()), len(steps) - len(compared)
        note = f"compared at {steps['compared'].min()} to {steps['compared'].max()} tokens a step"
        note += f"; KL not given at {without} of {counted(len(steps), 'step')}, where some token's log-prob is not"
        note += f"; no token is given by both sides at {counted(none, 'step')}" if none else ""
    yield share_of(
        "steps whose logits differ", differ, compared["example"], unit="steps", note=note
    )
    yield finding(
        "largest difference of a logit", steps["max_abs_logit"].max(), n=len(steps), unit="steps"
    )
    if null := comparison.provenance.get("null"):
        yield finding("the same of two recomputations", null["max_abs_logit"], n=null["positions"], unit="positions",
                      note="one of a longer text")  # fmt: skip
    yield _median_kl(comparison)
    after = comparison.steps.drop(steps.index)
    if len(after):
        name = "mean KL behind a flip, where the two texts differ"
        yield finding(name, after["kl"].mean(), n=len(after), unit="steps", measure="nats")
    flips = examples["flip_index"].notna().to_numpy()
    note = f"the earliest at step {int(examples['flip_index'].min())}" if flips.any() else ""
    yield share_of("prompts in which a token flips", flips, note=note)
    if "cache_bytes" in comparison.provenance and comparison.provenance["protocol"] != "free":
        yield _flips_of(comparison)
    side, sizes = _saved(comparison)
    if side:
        least, most = sorted((sizes["a"], sizes["b"]))
        note = f"{least:,} bytes instead of {most:,} for K and V of {sizes['context']:,} positions in all layers"
        yield finding("bytes of the cache that are saved", 1 - least / most, measure="%", note=note,
                      path=comparison.provenance["paths"][side])  # fmt: skip
    margins = steps[["margin_a", "margin_b"]].min(axis=1, skipna=False)
    # The margin does not decide a sampled token.
    if comparison.provenance["strategy"] == "greedy" and np.isfinite(margins).any():
        smallest = margins[np.isfinite(margins)].min()
        yield finding(
            "smallest margin of a decision", smallest, n=len(steps), unit="steps", measure="logits"
        )


def _beyond_rounding(comparison: Comparison) -> dict[str, Any] | None:
    """Where two models are first further apart than rounding, if that was measured; empty where
    they nowhere are.
    """
    about = comparison.provenance.get("two_models")
    return None if about is None or "jump" not in about else about["jump"] or {}


def _first_tensor_rows(comparison: Comparison) -> Iterator[Finding]:
    """Names the first tensor of two traces, in the order of the computation, that differs; of two
    models, beyond rounding.
    """
    first, jump = comparison.provenance.get("first"), _beyond_rounding(comparison)
    if jump is not None:
        if jump and jump["site"] != "logits":
            note = (
                f"{number(jump['apart'] / jump['rounding'])} times what rounding does"
                if jump["rounding"]
                else ""
            )
            yield finding("first recorded tensor that differs by more than rounding, relative L2",
                          jump["apart"] / jump["size"], n=1, unit="prompts", layer=jump["layer"],
                          tensor=_tensor_name(jump["site"]), note=note)  # fmt: skip
    elif first:
        before = "everything recorded before it is"
        if first["same"]:
            before = f"{', '.join(first['same'])} of this layer and what was recorded before are"
        yield finding("first recorded tensor that differs, relative L2", first["error"], n=1, unit="prompts",
                      layer=first["layer"], tensor=_tensor_name(first["site"]), note=f"{before} the same bits")  # fmt: skip


def _tensor_name(site: str) -> str:
    return site.upper() if site in ("q", "k", "v") else site


def _layer_rows(comparison: Comparison) -> Iterator[Finding]:
    about = comparison.provenance.get("two_models", {})
    for site, rows in decoded(comparison, "layers").groupby("site", sort=False):
        medians = rows.groupby("layer")["relative_l2"].median().dropna()
        above, what = medians.index[medians > 0], "the first layer above 0"
        if "jump" in about:
            far = {
                row["layer"]
                for row in about["distances"]
                if row["site"] == site and row["apart"] > row["rounding"]
            }
            above, what = medians.index[medians.index.isin(far)], "the first layer beyond rounding"
        for layer in dict.fromkeys([*above[:1], *medians.index[-1:]]):
            note = what if layer in above[:1] else ""
            by = rows[rows["layer"] == layer].groupby("example")["relative_l2"].median()
            yield median_of(f"median relative L2 of {site}", by, note=note, layer=layer)


def _attention_rows(comparison: Comparison) -> Iterator[Finding]:
    means = means_of(comparison, "heads", ("layer", "head"), "kl").dropna()
    if means.empty:
        return
    derived = (
        "derived beside a fused kernel, which shows no pattern"
        if "pattern" in comparison.derived
        else ""
    )
    layer, head = means.idxmax() if means.max() > 0 else (np.nan, np.nan)
    prompts = decoded(comparison, "heads")["example"].nunique()
    yield finding("largest mean KL of an attention head", means.max(), n=prompts, measure="nats", note=derived, layer=layer,
                  head=head)  # fmt: skip


def _cache_rows(comparison: Comparison) -> Iterator[Finding]:
    rows = decoded(comparison, "kv_positions")
    if rows.empty:
        if len(comparison.kv_positions):
            note = "there is no step after the prefill at which both paths hold the same text"
            yield finding("K and V vectors that differ", np.nan, note=note)
        return
    prompt = comparison.examples.set_index("example")["prompt_tokens"]
    for decoded_tokens, group in rows.groupby(rows["position"] >= rows["example"].map(prompt)):
        name = "decoded tokens" if decoded_tokens else "prompt"
        count, differing = int(group["vectors"].sum()), int(group["differing"].sum())
        # Equal vectors are 0 units apart and add nothing to the sum.
        units = (group["ulp_mean"] * group["vectors"]).sum() / max(differing, 1)
        note = (
            f"those differ by {number(units)} units in the last place on average"
            if differing
            else ""
        )
        yield finding(f"K and V vectors of the {name} that differ", differing / count, n=count, unit="vectors", measure="%",
                      note=note)  # fmt: skip
    means = means_of(comparison, "kv_positions", ("tensor", "layer", "kv_head"), "relative_error")
    if means.max() > 0:
        tensor, layer, head = means.idxmax()
        # A few huge channels make a vector long and its relative error small, however much
        # attention minds it.
        note = f"of a vector's own length, which is no share of the logits' difference: {TO_SEE_WHAT_CARRIES_IT}"
        yield finding("largest mean relative error of K and V", means.max(), n=int(rows["vectors"].sum()), unit="vectors",
                      tensor=tensor, layer=layer, head=head, note=note)  # fmt: skip
    for side, evicted, total in evicted_rows(comparison):
        yield finding("cache rows let go of by the last step", evicted / total, n=total, unit="rows", measure="%",
                      note="" if evicted else "it had room for all", path=comparison.provenance["paths"][side])  # fmt: skip


def _beside_null(null: Mapping[str, Any] | None, largest: float, steps: int) -> str:
    """Says in a sentence how large a difference of a logit is beside that of two recomputations;
    empty where none were made.

    The largest of N steps is compared with the largest of n positions: of numbers whose tail is no
    heavier than that of 1/x it is N/n times as large, so that far it is said to be of the same
    size.
    """
    if not null:
        return ""
    between = null["max_abs_logit"]
    if not between:
        return "Two recomputations of the same positions give the same bits."
    if largest <= between * max(1.0, steps / null["positions"]):
        return f"About the size of rounding: two recomputations of the same positions differ by {number(between)}."
    times = number(largest / between)
    return f"That is {times} times what two recomputations of the same positions differ by ({number(between)})."


def _cost_said(comparison: Comparison) -> list[str]:
    """Says what a cache of its own format costs and saves: tokens that flip, the KL, and bytes."""
    flips, kl, about = _flips_of(comparison), _median_kl(comparison), comparison.provenance
    count, rate, typical = round(flips["estimate"] * flips["n"]), in_words(flips), in_words(kl)
    within = (
        f" ({rate['estimate']}, 95% interval {rate['interval']})"
        if rate["interval"]
        else f" ({rate['estimate']})"
    )
    first = f"In {count} of {counted(flips['n'], 'prompt')} a token flips{within}."
    if about["protocol"] != "free":
        reached = comparison.examples["flip_index"].notna().to_numpy()
        ends = in_words(share_of("", reached))["interval"]
        where = (
            f", in {int(reached.sum())} of {counted(len(reached), 'prompt')}"
            if count or not rate["interval"]
            else ""
        )
        # Tokens of few prompts have no interval of their own.
        where += f" (95% interval {ends})" if where and not rate["interval"] else ""
        flip = "flips" if count == 1 else "flip"
        first = f"{count} of {counted(flips['n'], 'token')} {flip}{within}{where}."
    interval = f" (95% interval {typical['interval']})" if typical["interval"] else ""
    sentences = [first, f"The median of a prompt's mean KL is {typical['estimate']}{interval}."]
    side, sizes = _saved(comparison)
    if side:
        other = "ba"["ab".index(side)]
        share = f"{100 * (1 - sizes[side] / sizes[other]):.3g}%"
        path, than = about["paths"][side], about["paths"][other]
        than = than if than.startswith("cached") else "the model's own cache"
        sentences.append(
            f"For a context of {sizes['context']:,} tokens {path} stores {sizes[side]:,} bytes of K and V, {than} "
            f"{sizes[other]:,}: {sizes[other] - sizes[side]:,} bytes ({share}) are saved."
        )
    return sentences


def headline_of(comparison: Comparison) -> list[str]:
    """Says in a sentence each whether the prompt itself differs, the paths agree bit for bit, and a
    token flips.
    """
    steps, examples, about = (
        comparison.same_text(comparison.steps),
        comparison.examples,
        comparison.provenance,
    )
    differing = steps[steps["max_abs_logit"] > 0]
    flips, decodes = examples["flip_index"].dropna(), counted(len(examples), "decode")
    if differing.empty and not steps["step"].any():
        return [ONLY_THE_PREFILL]
    if steps["max_abs_logit"].isna().all():
        return ["Nothing can be compared: no token is given by both sides."]
    steps = steps.dropna(subset=["max_abs_logit"])
    subject, largest = (
        " and ".join(about["paths"].values()),
        float(differing["max_abs_logit"].max()),
    )
    differ = f"{len(differing)} of {counted(len(steps), 'step')}, by {number(largest)} at most"
    if "cache_bytes" in about:
        same = f"The logits are the same, bit for bit, at {every(len(steps), 'step')}."
        return [
            *_cost_said(comparison),
            same if differing.empty else f"The logits differ at {differ}.",
        ]
    beside = _beside_null(about.get("null"), largest, len(steps))
    return [
        *([about["prompt_differs"]["said"]] if "prompt_differs" in about else []),
        f"{subject} give the same logits, bit for bit, at {every(len(steps), 'step')}."
        if differing.empty
        else f"{subject} give different logits at {differ}.",
        *[beside] * bool(beside),
        (
            f"In {len(flips)} of {decodes} another token is chosen, the earliest at step {int(flips.min())}."
            if len(flips)
            else f"No token changes in {decodes}."
        )
        + " kvinterp audit says whether that is rounding or a bug." * bool(beside),
    ]


OWN_GENERATE = (
    "TransformerLens's own generate() feeds its cache in a loop of its own, which no path here is: "
    "kvinterp audit tries it."
)


def where(comparison: Comparison) -> list[str]:
    """Lists what was compared and whether it differs, then every finding, a line each."""
    about = comparison.provenance
    setting = ", ".join(about[name] for name in ("kind", "dtype", "protocol"))
    sentences = (
        ["no prompt could be compared."] if comparison.steps.empty else headline_of(comparison)
    )
    machine = f"; {machine_of(about)}" if "device" in about else ""
    head = f"{against(about)} on {about['model']} ({setting}{machine}): {' '.join(sentences)}"
    hint = [OWN_GENERATE] * (about["kind"] in ("hooked", "bridge"))
    dropped = [
        f"{about['paths'][side]} drops rows, and {said}."
        for side, said in about.get("compressed", {}).items()
    ]
    dropped += [said["said"] for said in [about.get("two_models")] if said]
    dropped += about.get("matches", [])
    return [
        in_one_line(head),
        *dropped,
        *lines_of(findings_of(rows_of_comparison(comparison))),
        *hint,
    ]


# Charts -------------------------------------------------------------------------------------------


def charts_of_comparison(comparison: Comparison) -> dict[str, Chart]:
    """Makes one chart of each kind that the tables allow, by the name of its figure."""
    derived = " (derived)" * ("pattern" in comparison.derived)
    panels_and_titles: dict[str, tuple[list[Panel], str]] = {
        "kl_by_step": (
            _kl_by_step(comparison),
            "KL at each step (points: prompts; lines: medians)",
        ),
        "drift_by_layer": (_drift_by_layer(comparison), "Difference by layer (median, quartiles)"),
        "attention_by_head": (
            _attention_by_head(comparison),
            f"Mean attention KL by layer and head{derived}",
        ),
        "kv_by_position": (
            _kv_by_position(comparison),
            "Error of K and V by position (dashes: the prompt ends)",
        ),
    }
    protocol = comparison.provenance["protocol"]
    return {
        name: Chart(f"{title}, {protocol}", panels)
        for name, (panels, title) in panels_and_titles.items()
        if panels
    }


def _kl_by_step(comparison: Comparison) -> list[Panel]:
    steps = comparison.steps
    if steps.empty:
        return []
    table = steps.assign(
        label=comparison.provenance["protocol"], first=steps["flipped"] & ~steps["after_flip"]
    )
    return [Panel(table, "step", "kl", "medians", color="label", mark=("first", "first flipped token"), label="KL (nats)",
                  xlabel="decode step (0 is the token the prefill decides)")]  # fmt: skip


def _drift_by_layer(comparison: Comparison) -> list[Panel]:
    rows, protocol = (
        decoded(comparison, "layers", _first_step(comparison, "layers")),
        comparison.provenance["protocol"],
    )
    lines = []
    for site, of_site in rows.groupby("site", sort=False):
        line = of_site.groupby("layer")["relative_l2"].quantile([0.25, 0.5, 0.75]).unstack()
        lines.append(
            line.set_axis(["low", "median", "high"], axis=1)
            .reset_index()
            .assign(line=f"{protocol}, {site}")
        )
    if not lines:
        return []
    table, name = pd.concat(lines, ignore_index=True), "each site"
    if len(lines) == 1:
        table, name = table.assign(line=protocol), rows["site"].iloc[0]
    return [
        Panel(table, "layer", "median", color="line", label=f"relative L2 difference\nof {name}")
    ]


def _attention_by_head(comparison: Comparison) -> list[Panel]:
    means = (
        means_of(comparison, "heads", ("layer", "head"), "kl", _first_step(comparison, "heads"))
        .rename("kl")
        .reset_index()
    )
    if means.empty:
        return []
    return [
        Panel(
            means,
            "head",
            "layer",
            "map",
            "kl",
            label="mean KL of attention (nats)",
            xlabel="query head",
        )
    ]


def _kv_by_position(comparison: Comparison) -> list[Panel]:
    rows, examples = decoded(comparison, "kv_positions"), comparison.examples
    if rows.empty:
        return []
    example = (
        examples[examples["example"].isin(rows["example"])]
        .sort_values("steps", kind="stable")
        .iloc[-1]
    )
    prompt, keys = int(example["prompt_tokens"]), ("tensor", "layer", "position")
    table = (
        mean_error(rows[rows["example"] == example["example"]], keys).rename("error").reset_index()
    )
    positions = range(table["position"].min(), table["position"].max() + 1)
    # Positions that the two paths never both held stay in the chart, without a value.
    cells = pd.MultiIndex.from_product(
        [table["tensor"].unique(), table["layer"].unique(), positions], names=keys
    )
    table = table.set_index([*keys]).reindex(cells).reset_index()
    return [Panel(table, "position", "layer", "map", "error", facet="tensor", columns=1, label="mean relative error",
                  level=prompt if prompt in positions else None,
                  xlabel=f"absolute cache position (prompt {example['example']}; blank: exactly equal)")]  # fmt: skip


def _first_step(comparison: Comparison, table: str) -> int:
    """The first step of a chart: 1, or 0 if the table has no later step at which both paths hold
    the same text.
    """
    return int(len(decoded(comparison, table)) > 0)
