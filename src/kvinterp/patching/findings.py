"""Findings and charts of sweeps, decompositions and activation patching."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from kvinterp.common.numbers import counted, every, number, percent, upper
from kvinterp.common.vocabulary import PARTS, PREFIX_KV, RECOVERED, UNCHANGED
from kvinterp.findings import Chart, Finding, Panel, finding, label_of, median_of, only
from kvinterp.metrics.recovery import TO_SEE_A_DIFFERENCE

if TYPE_CHECKING:
    from kvinterp.patching import ActivationPatching, Decomposition, Sweep

NOTHING = "No step was decoded after the prefill: there is nothing to compare."

# A sweep ------------------------------------------------------------------------------------------

LAYERS = {
    "single": "one layer at a time",
    "cumulative": "layers from 0 on together",
    "cumulative-from": "layers to the last together",
}
HEADS = {"heads": "one head at a time", "kv-heads": "one KV head at a time"}
_CONTROLS = {
    "self": "own tensors (expected 0)",
    "other-prompt": "tensors of another prompt",
    "floor": "last residual (floor)",
    "together": "all layers together",
    "all-positions": "residual at all positions",
}


def headline_of_sweep(sweep: Sweep) -> list[str]:
    """Names the place that recovers most, or says why nothing can be recovered."""
    summary = sweep.summary()
    best, distance, prompts = (
        summary["best"],
        RECOVERED[summary["distance"]],
        counted(summary["examples"], "prompt"),
    )
    if best is None and summary["examples_without_difference"] == summary["examples"]:
        return [
            f"The paths' logits are bitwise equal at the steps patched of {prompts}: there is no difference to recover.",
            TO_SEE_A_DIFFERENCE,
        ]
    lines = [
        f"{count} of {prompts}: recovery is undefined, for {why}"
        for why, count in summary["examples_undefined"].items()
    ]
    if best is None:
        return lines
    where = {
        "single": "layer {layer:g} recovers",
        "cumulative": "layers 0 to {layer:g} together recover",
        "cumulative-from": "layers {layer:g} to the last together recover",
        "blocks": "positions {positions} recover",
    }.get(best["sweep"], "layer {layer:g}, head {head:g} recovers").format(**best)
    count = "" if best["defined"] == summary["examples"] else f"{int(best['defined'])} of "
    paths = {form: form for form in ("cached", "recompute")} | dict(summary.get("paths", {}))
    others = [path for form, path in paths.items() if path != form]
    between = f"{paths['cached']} against {paths['recompute']}, " if others else ""
    setting = f"{best['site']}, {summary['direction']}, {between}{count}{prompts}"
    low, high = best["interval_low"], best["interval_high"]
    setting += "" if pd.isna(low) else f"; 95% interval {percent(low)} to {percent(high)}"
    if best["median"] < 0.05:
        where = f"No place recovers more than 5%; {where}"
    elif low <= 0:
        where = f"No recovery is clearly above 0; {where}"
    lead = f"{upper(where)} most: {percent(best['median'])} of the {distance} ({setting})."
    idle = _unchanged_patches(sweep.recovery, ["sweep", "layer", "head", "positions"])
    return [lead, *_out_of_reach(best["site"], summary["direction"]), *idle, *lines]


def _out_of_reach(site: str, direction: str) -> list[str]:
    """What a patch of new or of stored keys or values alone cannot change on the cached path,
    whatever it recovers.
    """
    tensor = {"k": "keys", "v": "values"}.get(site.removeprefix("cache_"), "")
    if direction != "into-cached" or not tensor:
        return []
    if site.startswith("cache_"):
        other = "values" if tensor == "keys" else "keys"
        return [
            f"{site} moves the {tensor} that the cache holds and leaves its {other} as they are: kv moves both."
        ]
    return [
        f"{site} moves the {tensor} of the position that is fed, before the cache stores them: what it stored at earlier steps "
        f"(the prompt's {tensor} too) stays as it is, quantised or not. cache_{site} moves stored {tensor}, kv both."
    ]


def _unchanged_patches(table: pd.DataFrame, labels: list[str]) -> list[str]:
    """Names the patches that wrote only values that were there already, in every prompt: their
    recovery of 0 means nothing.
    """
    # Results of older versions lack the column.
    if "unchanged" not in table:
        return []
    idle = table.groupby(labels, sort=False)["unchanged"].all()
    layers = sorted(
        {int(layer) for layer in idle[idle].index.get_level_values("layer") if layer >= 0}
    )
    where = f" (layer {', '.join(map(str, layers))})" if layers else ""
    sentence = f"{int(idle.sum())} of {len(idle)} patches{where} {UNCHANGED}: the donor is equal to what it replaces there."
    return [sentence] if idle.any() else []


def rows_of_sweep(sweep: Sweep) -> Iterator[Finding]:
    """The median recovery of every patch, the largest first, then the controls and the difference
    that no patch reaches.
    """
    distance, prompts = sweep.provenance["distance"], sweep.recovery["example"].nunique()
    table = sweep.aggregate()
    for row in table.sort_values("median", ascending=False, kind="stable").to_dict("records"):
        labels = {name: row[name] for name in ("layer", "head") if row[name] >= 0}
        labels |= {"positions": row["positions"]} if row["sweep"] == "blocks" else {}
        notes = [f"{percent(row[name])} of the {RECOVERED[name.removeprefix('median_recovery_')]}" for name in row
                 if name.startswith("median_recovery_") and not pd.isna(row[name])]  # fmt: skip
        undefined = row["examples"] - row["defined"]
        notes += (
            [f"{counted(undefined, 'prompt')} without a difference left out"] if undefined else []
        )
        yield finding(f"median recovery of the {RECOVERED[distance]}", row["median"], (row["interval_low"], row["interval_high"]),
                      row["defined"], measure="%", note="; ".join(notes), sweep=row["sweep"], **labels)  # fmt: skip
    if "control" in sweep.controls:
        for name, rows in sweep.controls.groupby("control", sort=False):
            yield median_of(
                f"control, {_CONTROLS.get(str(name), name)}: recovery",
                rows["recovery"],
                measure="%",
                note="",
            )
    for name, left in sweep.left().items():
        yield finding(
            f"{RECOVERED[name]} left with all swept layers patched together",
            left["share"],
            n=prompts,
            measure="%",
        )
    for name, left in sweep.left("floor").items():
        yield finding(
            f"{RECOVERED[name]} left with the last residual patched, mean", left["mean"], n=prompts
        )


def charts_of_sweep(sweep: Sweep, suffix: str = "") -> dict[str, Chart]:
    """Charts ``recovery`` and, for layers over several steps, ``recovery_by_step``; the suffix goes
    into their titles.
    """
    about, frame = sweep.provenance, sweep.recovery
    distance = f"of the {RECOVERED[about['distance']]}"
    notes = [f"{about['site']} at {about['positions']} positions", f"steps: {about['steps']}"]
    panels = []
    if len(layers := frame[frame["sweep"].isin(LAYERS)]):
        panels.append(Panel(layers, "layer", "recovery", "medians", facet="sweep", titles=LAYERS, scale="signed", level=0,
                            label=f"recovery {distance}"))  # fmt: skip
    if len(heads := frame[frame["sweep"].isin(HEADS)]):
        medians = heads[heads["defined"]].groupby(["sweep", "layer", "head"])["recovery"].median()
        cells_drawn = pd.MultiIndex.from_frame(heads[["sweep", "layer", "head"]].drop_duplicates())
        head = "query head" if about["site"] in ("q", "z", "result", "pattern") else "KV head"
        cells = medians.reindex(cells_drawn).reset_index()
        panels.append(Panel(cells, "head", "layer", "map", "recovery", facet="sweep", titles=HEADS, scale="signed",
                            label=f"median recovery\n{distance}", xlabel=head))  # fmt: skip
    if len(blocks := only(sweep.aggregate(), sweep="blocks")):
        blocks = blocks.rename(columns={"interval_low": "low", "interval_high": "high"})
        panels.append(Panel(blocks, "median", "positions", "dots", scale="signed", level=0,
                            label=f"recovery {distance} by a block of positions, all layers"))  # fmt: skip
    if "control" in sweep.controls:
        rows = [median_of("", group["recovery"]) | {"control": _CONTROLS.get(str(name), name)}
                for name, group in sweep.controls.groupby("control", sort=False)]  # fmt: skip
        panels.append(
            Panel(
                pd.DataFrame(rows),
                "estimate",
                "control",
                "dots",
                scale="signed",
                level=0,
                label="controls",
            )
        )
    charts = {"recovery": Chart(f"What each patch recovers{suffix}", panels, notes)}
    steps = sweep.steps[sweep.steps["sweep"].isin(LAYERS)] if len(sweep.steps) else sweep.steps
    if len(steps) and steps["step"].nunique() > 1:
        medians = steps.groupby(["sweep", "layer", "step"])["recovery"].median().reset_index()
        panel = Panel(medians, "step", "layer", "map", "recovery", facet="sweep", titles=LAYERS, scale="signed", columns=1,
                      label=f"median recovery\n{distance}", xlabel="decode step")  # fmt: skip
        charts["recovery_by_step"] = Chart(
            f"What each patch recovers at each step{suffix}", [panel], notes
        )
    return charts


# A decomposition ----------------------------------------------------------------------------------

_PART_NAMES = {
    "total": "total: cached against recompute",
    "newest_row": "newest_row: this step's row, computed alone",
    "decoded_kv": "decoded_kv: K and V of decoded rows, computed alone",
    "prefix_kv": "prefix_kv: K and V of old rows, recomputed",
    "cache_format": "cache_format: K and V kept otherwise than written",
    "null": "null: recompute among more rows, no cache",
}


def headline_of_decomposition(split: Decomposition) -> list[str]:
    """Names the part that is most of the difference, and counts the steps at which a cache as such
    contributes nothing.
    """
    summary = split.summary()
    steps, differ, prompts = (
        summary["steps"],
        summary["differ"],
        counted(summary["examples"], "prompt"),
    )
    if not steps:
        return [NOTHING]
    if not differ:
        return [
            f"The paths' logits are bitwise equal at {every(steps, 'decode step')} of {prompts}.",
            TO_SEE_A_DIFFERENCE,
        ]
    leading = sorted(
        (part for part in PARTS if summary["most"].get(part)),
        key=lambda part: -summary["most"][part],
    )
    most = "; ".join(
        f"{_PART_NAMES[part].partition(': ')[2]} ({part}), at {summary['most'][part]}"
        for part in leading
    )
    lines = [
        f"The logits differ at {differ} of {counted(steps, 'decode step')} of {prompts}. "
        + (
            f"Most of the difference comes from {most}."
            if leading
            else "No part is more than half of it at any step."
        )
    ]
    none, within = summary["without_cache"], summary["within_null"]
    if none or within:
        lines.append(
            f"Computing rows alone, as a cache does, makes no difference at {none} of the {differ} steps, and no more than its "
            f"null control at {within} more."
        )
    return lines


def rows_of_decomposition(split: Decomposition) -> Iterator[Finding]:
    """The mean length of every part with its null, its KL, and at how many steps it is most of the
    difference.
    """
    summary = split.summary()
    if not summary["differ"]:
        return
    options: dict[str, Any] = {"n": summary["steps"], "unit": "steps"}
    names = {
        "total": "the whole",
        **PARTS,
        **PREFIX_KV,
        "cache": "rows computed alone (newest_row and decoded_kv): what a cache as such makes",
    }
    for part, name in names.items():
        if not summary[f"{part}_l2"]:
            continue
        null = summary.get(f"null_{part}_l2")
        note = (
            f"most of the difference at {counted(summary['most'].get(part, 0), 'step')}"
            if part in PARTS
            else ""
        )
        note += (
            "; no cache makes it: the recompute path's difference from itself"
            if part == "prefix_kv"
            else ""
        )
        yield finding("mean L2 of the logits", summary[f"{part}_l2"], null=np.nan if null is None else null, part=part,
                      note="; ".join(filter(None, (name, note))), **options)  # fmt: skip
        if part in summary:
            yield finding("mean KL", summary[part], measure="nats", part=part, **options)


def charts_of_decomposition(split: Decomposition, suffix: str = "") -> dict[str, Chart]:
    """Charts the parts by step and by layer, every example and the medians."""
    parts = [part for part in _PART_NAMES if part in split.steps]
    later = split.layers[split.layers["step"] > 0]
    axis: dict[str, Any] = {"y": "size", "kind": "medians", "color": "part", "names": _PART_NAMES}
    panels = [
        Panel(split.steps.melt(["example", "step"], parts, "part", "size"), "step", label="KL of the logits (nats)",
              xlabel="decode step (0 is the token the prefill decides)", **axis),
    ]  # fmt: skip
    if len(later):
        long = later.melt(["example", "step", "layer"], parts, "part", "size")
        panels.append(Panel(long, "layer", label="relative L2 difference\nof resid_post", **axis))
    return {"decomposition": Chart(f"What makes the difference{suffix} (points: every step and prompt; lines: medians)", panels,
                                   [f"null control: {split.provenance.get('suffix', '?')} more tokens"])}  # fmt: skip


# Clean into corrupted -----------------------------------------------------------------------------


def headline_of_activation_patching(result: ActivationPatching) -> list[str]:
    """Names the place that restores most of the clean prompt's answer."""
    ends = f"{_distance_name(result)} {number(result.corrupted)} with the corrupted prompt"
    ends += f", {number(result.clean)} with the clean one"
    best = result.overview().iloc[0]
    if pd.isna(best["recovery"]):
        return [
            f"Both prompts show the same ({ends}), so no place can restore it: give two whose answers differ."
        ]
    mean = f", mean of {counted(result.pairs, 'pair')}" if result.pairs > 1 else ""
    lead = f"{upper(label_of(_labels(best)))} restores most: {percent(best['recovery'])} by {result.site} ({ends}{mean})."
    labels = [name for name in ("layer", "head", "start") if name in result.frame]
    return [lead, *_unchanged_patches(result.frame, labels)]


def _distance_name(result: ActivationPatching) -> str:
    # A lambda has no name of its own.
    return "metric" if result.distance == "function" else RECOVERED[result.distance]


def _labels(row: Mapping[Any, Any]) -> Finding:
    return {name: row[name] for name in ("layer", "head", "start", "stop", "text") if name in row}


def rows_of_activation_patching(result: ActivationPatching) -> Iterator[Finding]:
    """The places that restore most."""
    if not result.recovery.isfinite().any():
        return
    for row in result.overview().to_dict("records"):
        note = f"{_distance_name(result)} {number(row['value'])}{' nats' if result.distance == 'kl' else ''}"
        yield finding(
            f"recovery by {result.site}",
            row["recovery"],
            n=result.pairs,
            unit="pairs",
            note=note,
            **_labels(row),
        )


def charts_of_activation_patching(result: ActivationPatching) -> dict[str, Chart]:
    """Charts the recovery of every place."""
    table = result.frame
    if not table["recovery"].notna().any():
        return {}
    facet, titles = "", {}
    if result.over == "heads,positions":
        facet, titles = "head", {head: f"head {head}" for head in table["head"].unique()}
    x, xlabel = (
        ("head", "head") if result.over == "heads" else ("start", "position (of a block the first)")
    )
    label = f"recovery of the {RECOVERED[result.distance]}"
    panel = Panel(table, x, "layer", "map", "recovery", facet=facet, titles=titles, label=label, xlabel=xlabel,
                  scale="signed", columns=4)  # fmt: skip
    title = f"What {result.site} of the clean prompt restores in the corrupted one, by patches{of_model(result.provenance)}"
    return {
        "activation_patching": Chart(
            title, [panel], [f"n = {counted(result.pairs, 'pair')} of prompts"]
        )
    }


def of_model(about: Mapping[str, Any]) -> str:
    """The model's name as the end of a title."""
    return f" in {str(about['model']).removeprefix('zoo:')}"
