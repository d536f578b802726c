"""What a comparison found: how often and how far the logits differ, how sure its tokens were, and where inside they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvinterp.common.numbers import against, counted, every, machine_of, number
from kvinterp.comparison.facts import decoded, let_go_of, means_of
from kvinterp.errors import in_one_line
from kvinterp.findings import Chart, Panel
from kvinterp.findings.rows import Finding, finding, findings_of, lines_of, median_of, share_of
from kvinterp.metrics.recovery import ONLY_THE_PREFILL, TO_SEE_A_DIFFERENCE
from kvinterp.metrics.statistics import mean_error

if TYPE_CHECKING:
    from kvinterp.comparison.comparison import Comparison


def rows_of_comparison(comparison: Comparison) -> list[Finding]:
    """The findings of one comparison, of the steps at which both paths hold the same text unless they say otherwise."""
    left = [finding("prompt left out", np.nan, note=row["message"], prompt=row["id"])
            for row in comparison.failures.to_dict("records")]  # fmt: skip
    if comparison.steps.empty:
        return left
    return [*_of_logits(comparison), *_of_first(comparison), *_of_layers(comparison), *_of_attention(comparison),
            *_of_routing(comparison), *_of_cache(comparison), *left]  # fmt: skip


def _of_logits(comparison: Comparison) -> Iterator[Finding]:
    steps, examples = comparison.same_text(comparison.steps), comparison.examples
    known = steps.dropna(subset=["max_abs_logit"])
    differ = (known["max_abs_logit"] > 0).to_numpy()
    advice = TO_SEE_A_DIFFERENCE.rstrip(".") if steps["step"].any() and not comparison.provenance.get("lets_go") else ""
    note = f"first at step {int(known.loc[differ, 'step'].min())}" if differ.any() else advice
    if "compared" in steps:
        without, none = int(steps["kl"].isna().sum()), len(steps) - len(known)
        note = f"compared at {steps['compared'].min()} to {steps['compared'].max()} tokens a step"
        note += f"; KL not given at {without} of {counted(len(steps), 'step')}, where some token's log-prob is not"
        note += f"; no token is given by both sides at {counted(none, 'step')}" if none else ""
    yield share_of("steps whose logits differ", differ, known["example"], unit="steps", note=note)
    yield finding("largest difference of a logit", steps["max_abs_logit"].max(), n=len(steps), unit="steps")
    note = f"mean {number(float(steps['kl'].mean()))} over all steps, largest {number(float(steps['kl'].max()))}"
    yield median_of("median of a prompt's mean KL", steps.groupby("example")["kl"].mean(), measure="nats", note=note)
    after = comparison.steps.drop(steps.index)
    if len(after):
        what = "mean KL behind a flip, where the two texts differ"
        yield finding(what, after["kl"].mean(), n=len(after), unit="steps", measure="nats")
    flips = examples["flip_index"].notna().to_numpy()
    note = f"the earliest at step {int(examples['flip_index'].min())}" if flips.any() else ""
    yield share_of("prompts in which a token flips", flips, note=note)
    margins = steps[["margin_a", "margin_b"]].min(axis=1, skipna=False)
    # A token drawn by lot is not decided by the margin.
    if comparison.provenance["strategy"] == "greedy" and np.isfinite(margins).any():
        smallest = margins[np.isfinite(margins)].min()
        yield finding("smallest margin of a decision", smallest, n=len(steps), unit="steps", measure="logits")


def _of_first(comparison: Comparison) -> Iterator[Finding]:
    """Of two traces, where in the order of the computation they part."""
    first = comparison.provenance.get("first")
    if first:
        same = f"{', '.join(first['same'])} of this layer" if first["same"] else ""
        note = f"{same or 'everything recorded before it'} {'and what was recorded before ' if same else ''}"
        note += f"{'are' if same else 'is'} the same bits"
        name = first["site"].upper() if first["site"] in ("q", "k", "v") else first["site"]
        yield finding("first recorded tensor that differs, relative L2", first["error"], n=1, unit="prompts",
                      layer=first["layer"], tensor=name, note=note)  # fmt: skip


def _of_layers(comparison: Comparison) -> Iterator[Finding]:
    for site, rows in decoded(comparison, "layers").groupby("site", sort=False):
        medians = rows.groupby("layer")["relative_l2"].median().dropna()
        above = medians.index[medians > 0]
        for layer in dict.fromkeys([*above[:1], *medians.index[-1:]]):
            note = "the first layer above 0" if layer in above[:1] else ""
            by = rows[rows["layer"] == layer].groupby("example")["relative_l2"].median()
            yield median_of(f"median relative L2 of {site}", by, note=note, layer=layer)


def _of_attention(comparison: Comparison) -> Iterator[Finding]:
    means = means_of(comparison, "heads", ("layer", "head"), "kl").dropna()
    if means.empty:
        return
    derived = "derived beside a fused kernel, which shows no pattern" if "pattern" in comparison.derived else ""
    layer, head = means.idxmax() if means.max() > 0 else (np.nan, np.nan)
    prompts = decoded(comparison, "heads")["example"].nunique()
    yield finding("largest mean KL of an attention head", means.max(), n=prompts, measure="nats", note=derived, layer=layer,
                  head=head)  # fmt: skip


def _of_routing(comparison: Comparison) -> Iterator[Finding]:
    table = decoded(comparison, "routing")
    if len(table):
        changed = table.loc[table["changed"].astype(bool), "layer"]
        note = f"first in layer {changed.min()}" if len(changed) else ""
        yield share_of("choices of experts that change", table["changed"], table["example"], unit="choices", note=note)


def _of_cache(comparison: Comparison) -> Iterator[Finding]:
    rows = decoded(comparison, "kv_positions")
    if rows.empty:
        if len(comparison.kv_positions):
            note = "there is no step after the prefill at which both paths hold the same text"
            yield finding("K and V vectors that differ", np.nan, note=note)
        return
    prompt = comparison.examples.set_index("example")["prompt_tokens"]
    for later, some in rows.groupby(rows["position"] >= rows["example"].map(prompt)):
        name, count, differing = (
            "decoded tokens" if later else "prompt",
            int(some["vectors"].sum()),
            int(some["differing"].sum()),
        )
        # Vectors that are equal are 0 units apart, so that they add nothing to the sum.
        units = (some["ulp_mean"] * some["vectors"]).sum() / max(differing, 1)
        note = f"those differ by {number(units)} units in the last place on average" if differing else ""
        yield finding(f"K and V vectors of the {name} that differ", differing / count, n=count, unit="vectors", measure="%",
                      note=note)  # fmt: skip
    means = means_of(comparison, "kv_positions", ("tensor", "layer", "kv_head"), "relative_error")
    if means.max() > 0:
        tensor, layer, head = means.idxmax()
        yield finding("largest mean relative error of K and V", means.max(), n=int(rows["vectors"].sum()), unit="vectors",
                      tensor=tensor, layer=layer, head=head)  # fmt: skip
    for side, gone, of in let_go_of(comparison):
        yield finding("cache rows let go of by the last step", gone / of, n=of, unit="rows", measure="%",
                      note="" if gone else "it had room for all", path=comparison.provenance["paths"][side])  # fmt: skip


def headline_of(comparisons: Sequence[Comparison]) -> list[str]:
    """Whether the prompt itself differs, whether the paths agree bit for bit and whether a token flips, in a sentence each."""
    steps = pd.concat([one.same_text(one.steps) for one in comparisons])
    differing = steps[steps["max_abs_logit"] > 0]
    examples = pd.concat([one.examples for one in comparisons])
    flips, decodes = examples["flip_index"].dropna(), counted(len(examples), "decode")
    if differing.empty and not steps["step"].any():
        return [ONLY_THE_PREFILL]
    if steps["max_abs_logit"].isna().all():
        return ["Nothing can be compared: no token is given by both sides."]
    steps = steps.dropna(subset=["max_abs_logit"])
    pairs = {" and ".join(one.provenance["paths"].values()) for one in comparisons}
    who = pairs.pop() if len(pairs) == 1 else "The two paths"
    largest = number(float(differing["max_abs_logit"].max()))
    first = [one.provenance["prompt_differs"]["said"] for one in comparisons if "prompt_differs" in one.provenance]
    return [
        *first[:1],
        f"{who} give the same logits, bit for bit, at {every(len(steps), 'step')}."
        if differing.empty
        else f"{who} give different logits at {len(differing)} of {counted(len(steps), 'step')}, by {largest} at most.",
        f"In {len(flips)} of {decodes} another token is chosen, the earliest at step {int(flips.min())}."
        if len(flips)
        else f"No token changes in {decodes}.",
    ]


OWN_GENERATE = (
    "TransformerLens's own generate() feeds its cache in a loop of its own, which no path here is: kvinterp audit tries it."
)


def where(comparison: Comparison) -> list[str]:
    """What was compared and whether it differs, then every finding, a line each."""
    about = comparison.provenance
    setting = ", ".join(about[name] for name in ("kind", "dtype", "protocol"))
    said = ["no prompt could be compared."] if comparison.steps.empty else headline_of([comparison])
    machine = f"; {machine_of(about)}" if "device" in about else ""
    head = f"{against(about)} on {about['model']} ({setting}{machine}): {' '.join(said)}"
    own = [OWN_GENERATE] if about["kind"] in ("hooked", "bridge") else []
    return [in_one_line(head), *lines_of(findings_of(rows_of_comparison(comparison))), *own]


# Charts ----------------------------------------------------------------------------------------------------------------

NAMES = {
    "kl_by_step": "KL by step",
    "drift_by_layer": "drift by layer",
    "attention_by_head": "attention KL by layer and head",
    "kv_by_position": "K and V error by position",
}


def charts_of_comparisons(comparisons: Mapping[str, Comparison]) -> dict[str, Chart]:
    """One chart of each kind that the tables can give, by the names in :data:`NAMES`.

    Args:
        comparisons: Comparisons of one model by what tells them apart; all share the charts of KL and drift, the first gives
            those of attention and of K and V.
    """
    label, first = next(iter(comparisons.items()))
    derived = " (derived)" * ("pattern" in first.derived)
    drawn: dict[str, tuple[list[Panel], str]] = {
        "kl_by_step": (_kl_by_step(comparisons), "KL at each step (points: prompts; lines: medians)"),
        "drift_by_layer": (_drift_by_layer(comparisons), "Difference of the residual stream (median, quartiles)"),
        "attention_by_head": (_attention_by_head(first), f"Mean attention KL by layer and head{derived}"),
        "kv_by_position": (_kv_by_position(first), "Error of K and V by position (dashes: the prompt ends)"),
    }
    of = f", {label}" if label and len(comparisons) == 1 else ""
    return {name: Chart(f"{title}{of}", panels) for name, (panels, title) in drawn.items() if panels}


def _kl_by_step(comparisons: Mapping[str, Comparison]) -> list[Panel]:
    frames = [one.steps.assign(label=label) for label, one in comparisons.items() if len(one.steps)]
    if not frames:
        return []
    table = pd.concat(frames, ignore_index=True)
    table["first"] = table["flipped"] & ~table["after_flip"]
    return [Panel(table, "step", "kl", "medians", color="label", mark=("first", "first flipped token"), label="KL (nats)",
                  xlabel="decode step (0 is the token the prefill decides)")]  # fmt: skip


def _drift_by_layer(comparisons: Mapping[str, Comparison]) -> list[Panel]:
    lines = []
    for label, one in comparisons.items():
        frame = decoded(one, "layers", _first(one, "layers"))
        for site, mine in frame.groupby("site", sort=False):
            line = mine.groupby("layer")["relative_l2"].quantile([0.25, 0.5, 0.75]).unstack()
            name = label if frame["site"].nunique() == 1 else ", ".join(filter(None, (label, str(site))))
            lines.append(line.set_axis(["low", "median", "high"], axis=1).reset_index().assign(line=name, site=site))
    if not lines:
        return []
    table = pd.concat(lines, ignore_index=True)
    sites = table["site"].unique()
    what = sites[0] if len(sites) == 1 else "the residual stream"
    return [Panel(table, "layer", "median", color="line", label=f"relative L2 difference\nof {what}")]


def _attention_by_head(comparison: Comparison) -> list[Panel]:
    means = means_of(comparison, "heads", ("layer", "head"), "kl", _first(comparison, "heads")).rename("kl").reset_index()
    if means.empty:
        return []
    return [Panel(means, "head", "layer", "map", "kl", label="mean KL of attention (nats)", xlabel="query head")]


def _kv_by_position(comparison: Comparison) -> list[Panel]:
    rows, examples = decoded(comparison, "kv_positions"), comparison.examples
    if rows.empty:
        return []
    drawn = examples[examples["example"].isin(rows["example"])].sort_values("steps", kind="stable").iloc[-1]
    prompt, keys = int(drawn["prompt_tokens"]), ("tensor", "layer", "position")
    table = mean_error(rows[rows["example"] == drawn["example"]], keys).rename("error").reset_index()
    positions = range(table["position"].min(), table["position"].max() + 1)
    # Positions that no row was held at by both are there, without a value.
    places = pd.MultiIndex.from_product([table["tensor"].unique(), table["layer"].unique(), positions], names=keys)
    table = table.set_index([*keys]).reindex(places).reset_index()
    return [Panel(table, "position", "layer", "map", "error", facet="tensor", columns=1, label="mean relative error",
                  level=prompt if prompt in positions else None,
                  xlabel=f"absolute cache position (prompt {drawn['example']}; white: exactly equal)")]  # fmt: skip


def _first(comparison: Comparison, table: str) -> int:
    """The first step that is drawn: 1, or 0 where a table has no other at which both paths hold the same text."""
    return int(len(decoded(comparison, table)) > 0)
