"""What a comparison found: how often and how far the logits differ, how sure its tokens were, and where inside they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvinterp.common.numbers import against, counted, every, machine_of, most, number
from kvinterp.comparison.facts import (
    alike,
    decoded,
    let_go_of,
    means_of,
    right_answers,
    site_of,
    sites_of,
)
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
    return [*_of_logits(comparison), *_of_answers(comparison), *_of_first(comparison), *_of_layers(comparison),
            *_of_attention(comparison), *_of_routing(comparison), *_of_cache(comparison), *left]  # fmt: skip


def _of_logits(comparison: Comparison) -> Iterator[Finding]:
    steps, examples = comparison.same_text(comparison.steps), comparison.examples
    known = steps.dropna(subset=["max_abs_logit"])
    differ = (known["max_abs_logit"] > 0).to_numpy()
    advice = TO_SEE_A_DIFFERENCE.rstrip(".") if steps["step"].any() and not comparison.provenance.get("lets_go") else ""
    first = f"first at step {int(known.loc[differ, 'step'].min())}" if differ.any() else advice
    if "compared" in steps:
        none, without = len(steps) - len(known), int(steps["kl"].isna().sum())
        first = f"compared at {steps['compared'].min()} to {steps['compared'].max()} tokens a step"
        first += f"; KL not given at {without} of {counted(len(steps), 'step')}, where some token's log-prob is not"
        first += f"; no token is given by both sides at {counted(none, 'step')}" if none else ""
    yield share_of("steps whose logits differ", differ, known["example"], unit="steps", note=first)
    yield finding("largest difference of a logit", steps["max_abs_logit"].max(), n=len(steps), unit="steps")
    mean = f"mean {number(float(steps['kl'].mean()))} over all steps, largest {number(float(steps['kl'].max()))}"
    yield median_of("median of a prompt's mean KL", steps.groupby("example")["kl"].mean(), measure="nats", note=mean)
    after = comparison.steps.drop(steps.index)
    if len(after):
        what = "mean KL behind a flip, where the two texts differ"
        yield finding(what, after["kl"].mean(), n=len(after), unit="steps", measure="nats")
    flips = examples["flip_index"].notna().to_numpy()
    first = f"the earliest at step {int(examples['flip_index'].min())}" if flips.any() else ""
    yield share_of("prompts in which a token flips", flips, note=first)
    margins = steps[["margin_a", "margin_b"]].min(axis=1, skipna=False)
    # A token drawn by lot is not decided by the margin.
    if comparison.provenance["strategy"] == "greedy" and np.isfinite(margins).any():
        smallest = margins[np.isfinite(margins)].min()
        yield finding("smallest margin of a decision", smallest, n=len(steps), unit="steps", measure="logits")
    later = steps[(steps["step"] > 0) & (steps["kl"] > 0)]
    for name, of in (("step", "the step"), ("margin_a", "path a's margin")) if len(later) >= _ENOUGH else ():
        known = [own["kl"].corr(own[name], method="spearman") for _, own in later.groupby("example") if _varies(own, name)]
        if known:
            yield median_of(f"median rank correlation of KL and {of}, over the steps of a prompt", known, note="")


def _of_answers(comparison: Comparison) -> Iterator[Finding]:
    for path, right in right_answers(comparison).items():
        yield share_of("prompts answered right", right, path=path)


_ENOUGH = 20
"""Steps that a correlation is of, at least."""


def _varies(steps: pd.DataFrame, name: str) -> bool:
    return min(steps["kl"].nunique(), steps[name].nunique()) > 2


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
    table = decoded(comparison, "layers", "site", "layer", "example", "relative_l2")
    for site in dict.fromkeys(filter(None, [site_of(comparison), *sites_of(comparison)])):
        rows = table[table["site"] == site]
        medians = rows.groupby("layer")["relative_l2"].median().dropna()
        if medians.empty:
            continue
        above = medians.index[medians > 0]
        for layer in dict.fromkeys([*above[:1], medians.index[-1]]):
            note = "the first layer above 0" if layer in above[:1] else ""
            by = rows[rows["layer"] == layer].groupby("example")["relative_l2"].median()
            yield median_of(f"median relative L2 of {site}", by, note=note, layer=layer)


def _of_attention(comparison: Comparison) -> Iterator[Finding]:
    means = means_of(comparison, "heads", ("layer", "head"), "kl").dropna()
    if means.empty:
        return
    derived = "derived beside a fused kernel, which shows no pattern" if "pattern" in comparison.derived else ""
    largest, _ = most(means, ("layer", "head"))
    layer, head = means.idxmax() if largest > 0 else (np.nan, np.nan)
    what = "largest mean KL of an attention head"
    prompts = sum(rows["example"].nunique() for rows in alike(comparison, "heads", "example"))
    yield finding(what, largest, n=prompts, measure="nats", note=derived, layer=layer, head=head)


def _of_routing(comparison: Comparison) -> Iterator[Finding]:
    table = decoded(comparison, "routing", "example", "layer", "changed", "difference", "margin_a", "margin_b")
    if table.empty:
        return
    margins = table[["margin_a", "margin_b"]].min(axis=1)
    # A logit of each of two experts may move that far.
    near = (margins > 0) & (margins <= 2 * table["difference"])
    said = {
        "choices of experts that change": (table["changed"], ""),
        "ties of the last expert chosen with the first left out": (margins == 0, ""),
        "near-ties of them": (
            near,
            "nearer than twice the largest difference of a logit, so that this could change the choice",
        ),
        "choices that the logits alone do not decide": (margins < 0, "a bias or groups of experts decide too"),
    }
    for name, (events, note) in said.items():
        if name == "choices that the logits alone do not decide" and not events.any():
            continue
        yield share_of(name, events, table["example"], unit="choices", note=note)
    for layer, mine in table.groupby("layer"):
        least = number(float(mine[["margin_a", "margin_b"]].min(axis=None)))
        note = f"smallest margin {least}, largest difference of a router's logit {number(float(mine['difference'].max()))}"
        yield share_of(
            "choices of experts that change", mine["changed"], mine["example"], unit="choices", note=note, layer=layer
        )


def _of_cache(comparison: Comparison) -> Iterator[Finding]:
    means, sums = means_of(comparison, "kv_positions", ("tensor", "layer", "kv_head"), "relative_error"), []
    if means.empty and comparison.count("kv_positions"):
        note = "there is no step after the prefill at which both paths hold the same text"
        yield finding("K and V vectors that differ", np.nan, note=note)
    prompt = comparison.examples.set_index("example")["prompt_tokens"]
    for rows in alike(comparison, "kv_positions", "example", "position", "vectors", "differing", "ulp_mean"):
        counts = rows[["vectors", "differing"]].assign(units=rows["ulp_mean"] * rows["vectors"])
        sums.append(counts.groupby(rows["position"] >= rows["example"].map(prompt)).sum())
    for later, (vectors, differing, units) in pd.concat(sums).groupby(level=0).sum().iterrows():
        name, count, differing = "decoded tokens" if later else "prompt", int(vectors), int(differing)
        if count:
            # Vectors that are equal are 0 units apart, so that they add nothing to the sum.
            units = units / differing if differing else 0.0
            note = f"those differ by {number(units)} units in the last place on average" if differing else ""
            yield finding(
                f"K and V vectors of the {name} that differ",
                differing / count,
                n=count,
                unit="vectors",
                measure="%",
                note=note,
            )
    if means.max() > 0:
        tensor, layer, head = means.idxmax()
        vectors = int(sum(each["vectors"].sum() for each in sums))
        yield finding("largest mean relative error of K and V", means.max(), n=vectors, unit="vectors",
                      tensor=tensor, layer=layer, head=head)  # fmt: skip
    for side, gone, of, _ in let_go_of(comparison):
        room = "" if gone else "it had room for all"
        yield finding("cache rows let go of by the last step", gone / of, n=of, unit="rows", measure="%", note=room,
                      path=comparison.provenance["paths"][side])  # fmt: skip


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


# Several comparisons ---------------------------------------------------------------------------------------------------

_LABELS = {
    "model": lambda about: str(about["model"]).removeprefix("zoo:"),
    "kind": lambda about: about["kind"],
    "protocol": lambda about: about["protocol"],
    "pair": against,
    "strategy": lambda about: about["strategy"],
    "dtype": lambda about: about["dtype"],
}


def labelled(comparisons: Sequence[Comparison]) -> list[tuple[dict[str, str], Comparison]]:
    """Each comparison with what tells it from the others."""
    varying = [name for name, of in _LABELS.items() if len({of(one.provenance) for one in comparisons}) > 1]
    return [({name: _LABELS[name](one.provenance) for name in varying}, one) for one in comparisons]


def rows_between(comparisons: Sequence[Comparison]) -> list[Finding]:
    """The findings of all comparisons, each with what tells it from the others."""
    return [{**labels, **row} for labels, one in labelled(comparisons) for row in rows_of_comparison(one)]


# Charts ----------------------------------------------------------------------------------------------------------------

NAMES = {
    "kl_by_step": "KL by step",
    "drift_by_layer": "drift by layer",
    "attention_by_head": "attention KL by layer and head",
    "kv_by_position": "K and V error by position",
    "routing_by_step": "changed choices of experts by layer and step",
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
        "routing_by_step": (_routing_by_step(first), "Share of prompts whose choice of experts changes"),
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
        frame = decoded(one, "layers", "site", "layer", "relative_l2", first=_first(one, "layers"))
        for site, mine in frame.groupby("site", sort=False) if len(frame) else ():
            line = mine.groupby("layer")["relative_l2"].quantile([0.25, 0.5, 0.75]).unstack()
            name = label if frame["site"].nunique() == 1 else ", ".join(filter(None, (label, str(site))))
            lines.append(line.set_axis(["low", "median", "high"], axis=1).reset_index().assign(line=name, site=site))
    if not lines:
        return []
    table = pd.concat(lines, ignore_index=True)
    sites = list(dict.fromkeys(table["site"]))
    what = sites[0] if len(sites) == 1 else "the residual stream"
    return [Panel(table, "layer", "median", color="line", label=f"relative L2 difference\nof {what}")]


def _attention_by_head(comparison: Comparison) -> list[Panel]:
    first = _first(comparison, "heads")
    means = means_of(comparison, "heads", ("layer", "head"), "kl", first).rename("kl").reset_index()
    if means.empty:
        return []
    return [Panel(means, "head", "layer", "map", "kl", label="mean KL of attention (nats)", xlabel="query head")]


def _kv_by_position(comparison: Comparison) -> list[Panel]:
    there = {int(n) for rows in alike(comparison, "kv_positions", "example") for n in rows["example"].unique()}
    if not there:
        return []
    drawn = comparison.examples[comparison.examples["example"].isin(there)]
    example = int(drawn.sort_values("steps", kind="stable")["example"].iloc[-1])
    prompt = int(comparison.examples.set_index("example")["prompt_tokens"].loc[example])
    keys = ("tensor", "layer", "position")
    pieces = alike(comparison, "kv_positions", "example", *keys, "vectors", "relative_error")
    rows = pd.concat([each[each["example"] == example] for each in pieces])
    table = mean_error(rows, keys).rename("error").reset_index()
    positions = range(table["position"].min(), table["position"].max() + 1)
    # Positions that no row was held at by both are there, without a value.
    places = pd.MultiIndex.from_product([dict.fromkeys(table["tensor"]), dict.fromkeys(table["layer"]), positions],
                                        names=["tensor", "layer", "position"])  # fmt: skip
    table = table.set_index(list(places.names)).reindex(places).reset_index()
    return [Panel(table, "position", "layer", "map", "error", facet="tensor", columns=1, label="mean relative error",
                  level=prompt if prompt in positions else None,
                  xlabel=f"absolute cache position (prompt {example}; white: exactly equal)")]  # fmt: skip


def _routing_by_step(comparison: Comparison) -> list[Panel]:
    table = decoded(comparison, "routing", "layer", "changed")
    if table.empty:
        return []
    share = table.astype({"changed": float}).groupby(["layer", "step"])["changed"].mean().reset_index()
    return [Panel(share, "step", "layer", "map", "changed", label="share of prompts", xlabel="decode step (white: none)")]


def _first(comparison: Comparison, table: str) -> int:
    """The first step that is drawn: 1, or 0 where a table has no other at which both paths hold the same text."""
    return int(any(map(len, alike(comparison, table, "step"))))
