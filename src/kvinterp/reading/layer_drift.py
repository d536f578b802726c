"""What drift by layer shows, a sentence each, with how many it is of and its interval."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pandas as pd

from kvinterp.metrics.massive import SUFFIX
from kvinterp.reading.numbers import between, counted, ends_said, listed, models_on, number, upper
from kvinterp.reading.results import only

__all__ = [
    "EVERY_STEP",
    "ONE_STEP",
    "amplification_title",
    "drift_title",
    "heads_title",
    "paper_title",
    "said_of_layer_drift",
]

EVERY_STEP, ONE_STEP = "every decode step", "decode step 1"
"""Which rows a mean is of: all that a path decodes after the prefill, or those of the paper."""
LEVEL = 0.05
"""Below which a corrected p-value is said to tell two things apart."""
_AGAINST = {
    "previous layer": "the layer before",
    "layer 0": "layer 0",
    "same-path null": "the recompute path's own, among more rows",
}


def said_of_layer_drift(tables: Mapping[str, pd.DataFrame], provenance: Mapping[str, Any]) -> list[str]:
    """What :class:`kvinterp.experiments.layer_drift.LayerDrift` found, from its tables and the provenance of each model."""
    free = only(tables["layer_drift_rows"], protocol="free", selection=EVERY_STEP)
    lines = [
        f"{drift_title(tables['drift_by_layer'])}. Each path fed its own text, {int(free['removed'].sum())} of "
        f"{int(free['rows'].sum())} rows are of other tokens, and left out.",
        f"{models_on(provenance)}. Medians are over examples, with 95% intervals; other machines "
        "choose other orders of addition, and every number here is this one's.",
    ]
    for model, examples in tables["drift_examples"].groupby("model", sort=False):
        mine = {name: only(table, model=model) for name, table in tables.items()}
        lines += _said_of_rows(str(model), examples, mine)
        if mine["drift_by_layer"].empty:
            continue
        lines += _said_of_growth(mine)
        lines += _said_of_paper(mine)
        lines += [*_said_of_tests(mine["layer_tests"]), *_said_of_heads(mine)]
    if len(tables["layer_tests"]):
        lines.append(
            "Mann-Whitney takes the two sides as independent samples; they are of the same examples, as Wilcoxon has it."
        )
    return lines


def _said_of_rows(model: str, examples: pd.DataFrame, mine: Mapping[str, pd.DataFrame]) -> list[str]:
    failed = examples[examples["message"] != ""]
    known = examples.drop(failed.index)
    left = [f"{counted(len(failed), 'example')} left out: {failed['message'].iloc[0]}"] if len(failed) else []
    if known.empty:
        return [f"{model}: no example could be compared.", *left]
    steps, flips = int(known["steps"].sum()), int(known["flip_index"].notna().sum())
    said = f"{model}: {counted(len(known), 'example')}, {steps} steps; in {flips} of the examples a token flips."
    free = only(mine["layer_drift_rows"], protocol="free", selection=EVERY_STEP)
    if free.empty:
        return [f"{said} No step was decoded after the prefill.", *left]
    gone, of = int(free["removed"].iloc[0]), int(free["rows"].iloc[0])
    said += (
        f" Fed its own text, each path had read other tokens than the other at {gone} of {of} rows (a row is a step of an "
        "example in one layer): these are removed."
        if gone
        else f" Each path fed its own text, both had read the same tokens at all {of} rows (a row is a step of an example in one "
        "layer): none is removed."
    )
    return [said, *left]


# Growth ----------------------------------------------------------------------------------------------------------------


def _said_of_growth(mine: Mapping[str, pd.DataFrame]) -> list[str]:
    every, table = only(mine["drift_by_layer"], selection=EVERY_STEP, protocol="matched"), mine["amplification"]
    if every.empty:
        return []
    if not only(every, measure="l2")["mean"].max() > 0:
        return ["  On the same tokens resid_post is bitwise equal in every layer: nothing grows."]
    ends = []
    for measure, name in (("l2", "L2"), ("relative_l2", "relative L2"), (f"l2{SUFFIX}", "L2 without the three largest")):
        rows = only(every, measure=measure).sort_values("layer").to_dict("records")
        ends.append(f"{name} {_with_interval(rows[0], 'median')} and {_with_interval(rows[-1], 'median')}")
    first, last = int(every["layer"].min()), int(every["layer"].max())
    said = [f"  On the same tokens, at layers {first} and {last}, medians: {'; '.join(ends)}."]
    growth = only(table, measure="l2")
    known = growth.dropna(subset=["ratio"])
    if len(known):
        layer = int(known.loc[known["ratio"].idxmax(), "layer"])
        here = only(table, layer=layer).set_index("measure")
        beside = (
            f"{_with_interval(here.loc[name], 'ratio', ' times')} {text}"
            for name, text in (
                (f"l2{SUFFIX}", "without the three largest dimensions"),
                ("relative_l2", "relative to the stream"),
                (f"relative_l2{SUFFIX}", "both"),
            )
        )
        grown = f"L2 grows most from layer {layer - 1} to {layer}: {_with_interval(here.loc['l2'], 'ratio', ' times')}"
        of = counted(int(here.loc["l2", "n"]), "example")
        said.append(f"  {grown}; {', '.join(beside)}; the median of the {of} that drift in layer {layer - 1}.")
    zero = growth[growth["ratio"].isna() & (growth["layer"] > first)]["layer"]
    if len(zero):
        said.append(f"  No growth is given at layer {listed(list(map(str, zero)))}: the layer before has no drift.")
    return said


def _with_interval(row: Any, column: str, unit: str = "") -> str:
    return number(row[column]) + unit + ends_said(row["low"], row["high"])


def drift_title(means: pd.DataFrame) -> str:
    """Of drift by layer: how the absolute and the relative one change from the first layer that drifts to the last."""
    every = only(means, selection=EVERY_STEP, protocol="matched")
    said = []
    for measure, name in (("l2", "absolute"), ("relative_l2", "relative")):
        grown = []
        for _, line in only(every, measure=measure).groupby("model", sort=False):
            drift = line.sort_values("layer")["median"]
            if drift.max() > 0:
                grown.append(drift.iloc[-1] / drift[drift > 0].iloc[0])
        if grown:
            said.append(f"{name} {between(grown)}-fold")
    if not said:
        in_the_median = " of the median example" * bool((every["mean"] > 0).any())
        return f"On the same tokens resid_post is bitwise equal in every layer{in_the_median}"
    return f"On the same tokens the median L2 changes from the first layer that drifts to the last: {', '.join(said)}"


def amplification_title(table: pd.DataFrame) -> str:
    """Of growth from layer to layer: where L2 grows most."""
    known = only(table, measure="l2").dropna(subset=["ratio"])
    if known.empty:
        return "No layer drifts more than another: all are equal, or there is one alone"
    most = known.loc[known.groupby("model", sort=False)["ratio"].idxmax()]
    places = [f"layer {int(row['layer'])} of {row['model'].removeprefix('zoo:')}" for row in most.to_dict("records")]
    return f"L2 grows most at {listed(places)}"


# The paper's selection -------------------------------------------------------------------------------------------------


def _said_of_paper(mine: Mapping[str, pd.DataFrame]) -> list[str]:
    chosen = only(mine["layer_drift_rows"], protocol="free", selection=ONE_STEP)
    if chosen.empty:
        return ["  No example reaches the paper's decode step 1."]
    gone, of = int(chosen["removed"].iloc[0]), int(chosen["rows"].iloc[0])
    cosine = only(mine["drift_by_layer"], selection=ONE_STEP, protocol="free", measure="cosine")
    cosine = cosine[cosine["layer"] == cosine["layer"].min()].set_index("rule")
    examples = int(mine["drift_examples"]["divergent"].sum())
    said = (
        f"  The paper's selection (decode step 1, the {counted(examples, 'example')} of highest mean KL), each path fed its "
        f"own text: {gone} of {of} rows are of other tokens"
    )
    of_all = f"the cosine at layer {int(cosine['layer'].iloc[0])} is {_with_interval(cosine.loc['none'], 'mean')}"
    if not gone:
        return [f"{said}; {of_all}."]
    same = f"; {_with_interval(cosine.loc['same tokens'], 'mean')} over the others" if "same tokens" in cosine.index else ""
    return [f"{said}; {of_all} over all{same}."]


def paper_title(counts: pd.DataFrame) -> str:
    """Of the paper's selection: how many rows are of other tokens."""
    chosen = only(counts, protocol="free", selection=ONE_STEP)
    gone, of = int(chosen["removed"].sum()), int(chosen["rows"].sum())
    if not gone:
        return f"Decode step 1, each path fed its own text: both had read the same tokens at all {of} rows"
    return f"Decode step 1, each path fed its own text: other tokens at {gone} of {of} rows"


# Tests -----------------------------------------------------------------------------------------------------------------


def _said_of_tests(tests: pd.DataFrame) -> list[str]:
    lines = []
    for contrast, group in only(tests, measure="l2").groupby("contrast", sort=False):
        found = []
        for test, table in group.groupby("test", sort=False):
            known, middle = table.dropna(subset=["p_bh"]), 0.5 if test == "Mann-Whitney" else 0.0
            told = known[known["p_bh"] < LEVEL]
            up, down = int((told["effect"] > middle).sum()), int((told["effect"] < middle).sum())
            shown = f"larger at {up} and smaller at {down} of {counted(len(table), 'layer')}"
            equal = f" ({len(table) - len(known)} where nothing differs)" * (len(known) < len(table))
            found.append(f"{test} {shown}{equal}")
        n = between(sorted(set(group["n"])))
        lines.append(f"  L2 against {_AGAINST[str(contrast)]} (n {n} examples, BH at {LEVEL:g}): {'; '.join(found)}.")
    return lines


# Heads -----------------------------------------------------------------------------------------------------------------


def _said_of_heads(mine: Mapping[str, pd.DataFrame]) -> list[str]:
    heads, correlations = mine["head_kl"], mine["head_correlation"]
    if heads.empty:
        return ["  The model shows no attention pattern: nothing is said of heads."]
    derived = " (patterns derived beside the kernel, which shows none)" * bool((heads["pattern"] == "derived").any())
    if not heads["kl"].max() > 0:
        return [f"  Every attention pattern is exactly equal{derived}."]
    most = heads.loc[heads["kl"].idxmax()]
    said = (
        f"  Attention differs most in layer {int(most['layer'])}, head {int(most['head'])}: mean KL {number(most['kl'])} nats "
        f"over {counted(int(most['n']), 'example')}{derived}."
    )
    return [said, f"  {upper(_said_of_sharing(correlations))}."]


def _said_of_sharing(correlations: pd.DataFrame) -> str:
    by = {str(kind): table.dropna(subset=["r"]) for kind, table in correlations.groupby("kind")}
    known = by.get("within - across", pd.DataFrame())
    if len(known):
        above, below = int((known["low"] > 0).sum()), int((known["high"] < 0).sum())
        ends = " and ".join(f"{between(by[kind]['r'].tolist())} {text}" for kind, text in _PAIRS.items())
        n, few = between(known["n"].tolist()), int(known["low"].isna().sum())
        without = f" ({few} with too few examples for one)" * bool(few)
        return (
            f"head errors correlate {ends} (Spearman over an example's steps, n {n} examples, by layer); the difference is above "
            f"0 at {above} and below 0 at {below} of {counted(len(known), 'layer')}, by its 95% interval{without}"
        )
    for kind, text in _PAIRS.items():
        if len(by.get(kind, ())):
            other = "no two heads share a KV head" if kind == "across" else "all heads share one KV head"
            return f"head errors correlate {between(by[kind]['r'].tolist())} {text}; {other}, so there is nothing to compare with"
    return "no two heads' errors vary over enough steps to be correlated"


_PAIRS = {"within": "within a KV group", "across": "across KV groups"}


def heads_title(heads: pd.DataFrame, correlations: pd.DataFrame) -> str:
    """Of the heads: whether those that share a KV head err more alike than others."""
    known = only(correlations, kind="within - across").dropna(subset=["low"])
    if not heads["kl"].max() > 0:
        return "Every attention pattern is exactly equal"
    if known.empty:
        return "Attention KL by head; there is no correlation within KV groups to set against one across them"
    above, below = int((known["low"] > 0).sum()), int((known["high"] < 0).sum())
    rest = len(known) - above - below
    return (
        f"Heads that share a KV head err more alike at {above}, less at {below}, and not told apart at {rest} of "
        f"{counted(len(known), 'layer')}"
    )
