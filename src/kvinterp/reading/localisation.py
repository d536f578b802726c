"""What patches and the split found on the examples whose paths differ most, a sentence each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from kvinterp.reading.numbers import between, counted, ends_said, models_on, percent, upper
from kvinterp.reading.patching import said_of_decomposition
from kvinterp.reading.results import only
from kvinterp.reading.vocabulary import RECOVERED

_SAID = {
    "paper": "as the paper has it, resid_post of the cached path into the recompute path at the first cached step, free",
    "residual": "resid_post into the recompute path, the newest position of every step",
    "residual-all": "resid_post into the recompute path, all positions of every step",
    "kv-into-recompute": "K and V of the cached path into the recompute path",
    "kv-into-cached": "K and V of the recompute path into the cached path",
    "k-into-recompute": "K alone into the recompute path",
    "v-into-recompute": "V alone into the recompute path",
    "k-into-cached": "K alone into the cached path",
    "v-into-cached": "V alone into the cached path",
}
_COLUMNS = ("model", "part", "sweep", "layer", "defined", "median")


def said_of_localisation(summary: Mapping[str, Any]) -> list[str]:
    """What was found of each model; ``summary`` is that of :class:`kvinterp.experiments.localisation.Localisation`."""
    provenance, chosen = summary["provenance"], pd.DataFrame(summary["chosen"])
    lines = [
        f"{localisation_title(pd.DataFrame(summary['by_layer'], columns=_COLUMNS))}.",
        f"{models_on(provenance)}. Recovery is a share of the difference, medians over examples with 95% intervals.",
    ]
    for model in provenance:
        mine = only(chosen, model=model) if len(chosen) else chosen
        if mine.empty:
            lines.append(f"{model}: no example could be compared.")
            continue
        lines.append(_said_of_choice(model, mine))
        rows = [row for row in summary["by_layer"] if row["model"] == model]
        sweeps = [each for each in summary["sweeps"] if each["model"] == model]
        if sweeps and not any(row["defined"] for row in rows):
            lines.append("  No patch has anything to recover: what its recovery is of is 0 in each of these examples.")
            sweeps = []
        for found in sweeps:
            lines.append(f"  {upper(_said_of_part(found, [row for row in rows if row['part'] == found['part']]))}")
            if found["part"] == "paper":
                lines.append(
                    "  The recompute path keeps nothing between steps: such a patch reaches a later one through the chosen token "
                    "alone, so that recovering nothing does not say where the difference is."
                )
        for split in (each for each in summary["decompositions"] if each["model"] == model):
            # Without the machine, which is said once.
            lines += [f"  {line}" for line in said_of_decomposition(split)[:-1]]
    return lines


def _said_of_choice(model: str, mine: pd.DataFrame) -> str:
    flips, of = int(mine["flip_index"].notna().sum()), int(mine["of"].iloc[0])
    kl = between(mine["mean_kl"].tolist())
    which = f"all {of} examples" if of == len(mine) else f"the {len(mine)} of {of} examples of the highest mean KL"
    return f"{model}: {which} (free protocol, {kl} nats); {flips} of them flip a token."


def _said_of_part(found: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    said, distance = _SAID[found["part"]], RECOVERED[found["distance"]]
    known = [row for row in rows if row["defined"]]
    if not known:
        return f"{said}: the {distance} is 0 in every example, so that nothing can be recovered."
    parts = []
    single = [row for row in known if row["sweep"] == "single"]
    if single:
        best = max(single, key=lambda row: row["median"])
        medians = [row["median"] for row in single]
        shown = f"one layer at a time {percent(min(medians))} to {percent(max(medians))}"
        parts.append(shown + f", most at layer {best['layer']}" * (max(medians) > min(medians)))
    together = all_layers(known)
    if together is not None:
        interval = ends_said(together["interval_low"], together["interval_high"], "95% interval {}, ", percent)
        parts.append(f"all layers together {percent(together['median'])} ({interval}mean {percent(together['mean'])})")
    n, of = known[0]["defined"], known[0]["examples"]
    over = counted(n, "example") + (f", {of - n} without a difference left out" if n < of else "")
    return f"{said}: of the {distance}, {'; '.join(parts)} ({over})."


def all_layers(rows: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The row of a sweep in which every layer is patched together, or None where there is none."""
    last = max((row["layer"] for row in rows), default=-1)
    whole = [row for row in rows if (row["sweep"], row["layer"]) in (("cumulative", last), ("cumulative-from", 0))]
    return whole[0] if whole else None


def localisation_title(by_layer: pd.DataFrame) -> str:
    """Of the map: what the paper's patch and K and V recover with all layers together."""
    said = []
    for part, name in (("paper", "the paper's patch"), ("kv-into-cached", "K and V put into the cached path")):
        found = []
        for _, rows in only(by_layer[by_layer["defined"] > 0], part=part).groupby("model", sort=False):
            together = all_layers(rows.to_dict("records"))
            found += [together["median"]] if together is not None else []
        if found:
            low, high = percent(min(found)), percent(max(found))
            said.append(f"{name} {low if low == high else f'{low} to {high}'}")
    if not said:
        return "Recovery by layer: there is no difference to recover, or neither patch was asked for"
    return f"All layers together, median recovery: {'; '.join(said)}"
