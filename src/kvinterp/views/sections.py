"""The sections of the report: what was done, the figures, what to see in them. A section without data is None."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.comparison import PROTOCOLS, Comparison
from kvinterp.comparison.where import most, prompts_said
from kvinterp.results import Result
from kvinterp.views.plots import FIGURES, draw_attention, draw_drift, draw_kl, draw_kv, figure_of, precision_ladder
from kvinterp.views.precision import fall_of, kl_falls_as_a_square
from kvinterp.views.section import Column, Gallery, Section
from kvinterp.views.words import (
    drift_medians,
    file_name,
    grouped,
    kind_of,
    leading,
    model_of,
    number,
    place_of,
    right_answers,
    share,
    site_of,
    unit_roundoff,
    with_protocol,
)

__all__ = [
    "attention_section",
    "drift_section",
    "failures_section",
    "kl_section",
    "kv_section",
    "precision_section",
    "table_section",
]


# All comparisons -------------------------------------------------------------------------------------------------------

_NAMES = ("model", "kind", "dtype", "protocol")
_NUMBERS = (
    "prompts",
    "steps",
    "steps that differ",
    "prompts that flip",
    "largest logit difference",
    "mean KL",
    "median KL",
    "largest KL",
    "mean KL up to the flip",
    "95% of a prompt's mean KL up to the flip",
    "mean KL after the flip",
    "answered right, a / b",
)


def table_section(results: Sequence[Result]) -> Section:
    """One line a comparison."""
    rows = [_row(result) for result in results]
    head = [Column(name) for name in _NAMES] + [Column(name, number=True) for name in _NUMBERS]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    counts = {len(r.prompts) for r in results}
    steps = sum(len(r.comparison.steps) for r in results)
    pairs, strategies = (
        list(dict.fromkeys(get(r.comparison.about) for r in results))
        for get in (lambda a: f"path a, {a['paths']['a']}, with path b, {a['paths']['b']}", lambda a: str(a["strategy"]))
    )
    of = pairs[0] if len(pairs) == 1 else f"path a with path b ({len(pairs)} pairs of paths, named in the last table)"
    each = prompts_said(max(counts)) if len(counts) == 1 else f"{min(counts)} to {prompts_said(max(counts))}"
    done = [
        f"{len(results)} comparison{'s' * (len(results) != 1)} of {of}, on {each}{' each' * (len(results) > 1)}: {steps} "
        f"decode steps in all. Tokens are chosen by the strategy {' or '.join(strategies)}. KL is KL(a || b) of the "
        "next-token distributions, in nats, computed in float64. The step at which a token flips counts as up to the flip; "
        "the interval is a bootstrap over prompts."
    ]
    seen = []
    varying = [
        said
        for said, names in _ACROSS.items()
        if len({tuple(str(r.comparison.about[name]) for name in names) for r in results}) > 1
    ]
    if varying:
        seen.append(f"Each line is one comparison. Read {', '.join(varying)}.")
    seen += _protocol_sentence(results)
    interrupted = [r.folder.name for r in results if r.summary.get("interrupted")]
    if interrupted:
        seen.append(f"Interrupted, so with fewer prompts than planned: {', '.join(interrupted)}.")
    return Section("All comparisons" if len(results) > 1 else "The comparison", done, seen, head=head, rows=rows)


_ACROSS = {
    "across protocols for the effect of flipped tokens": ("protocol",),
    "across kinds for that of other kernels on the same weights": ("kind",),
    "across dtypes for that of precision": ("dtype",),
}


def _row(result: Result) -> list[str]:
    about, steps, examples = result.comparison.about, result.comparison.steps, result.comparison.examples
    cells = [model_of(result), f"{about['kind']} ({about['attention']})", about["dtype"], about["protocol"]]
    if steps.empty:
        return [*cells, "0", "0", *["–"] * (len(_NUMBERS) - 3), ""]
    before = steps[~steps["after_flip"].astype(bool)]
    after, right = steps.loc[steps["after_flip"], "kl"], right_answers(result)
    return [
        *cells,
        str(len(examples)),
        str(len(steps)),
        str(int((steps["max_abs_logit"] > 0).sum())),
        str(int(examples["flip_index"].notna().sum())),
        number(steps["max_abs_logit"].max()),
        number(steps["kl"].mean()),
        number(steps["kl"].median()),
        number(steps["kl"].max()),
        number(before["kl"].mean()),
        _interval(before.groupby("example")["kl"].mean()),
        number(after.mean()) if len(after) else "–" if examples["flip_index"].notna().any() else "no flip",
        "" if right is None else f"{right[0]} / {right[1]} of {len(examples)}",
    ]


def _interval(values: pd.Series) -> str:
    known = values[values.abs() < float("inf")]
    if len(known) < 2:
        return "one prompt" if len(known) else "–"
    return " to ".join(map(number, metrics.bootstrap_interval(known.to_numpy())))


def _protocol_sentence(results: Sequence[Result]) -> list[str]:
    pairs = [
        (free.comparison.steps, matched.comparison.steps)
        for free in with_protocol(results, "free")
        for matched in with_protocol(results, "matched")
        if place_of(free) == place_of(matched)
        and all(free.comparison.about[key] == matched.comparison.about[key] for key in ("dtype", "paths", "strategy"))
    ]
    columns = ["example", "step", "kl", "max_abs_logit"]
    if pairs and all(a[columns].reset_index(drop=True).equals(b[columns].reset_index(drop=True)) for a, b in pairs):
        return ["Matched and free give the same numbers here: as long as no token flips, both paths see the same text."]
    return []


# KL by step ------------------------------------------------------------------------------------------------------------


def kl_section(main: Sequence[Result], gallery: Gallery) -> Section:
    """How far apart the next-token distributions are, step by step."""
    protocols = list(dict.fromkeys(r.comparison.about["protocol"] for r in main))
    made = []
    for (model, kind), group in grouped(main).items():
        lines = {r.comparison.about["protocol"]: r.comparison for r in group if not r.comparison.steps.empty}
        if lines:
            figure = figure_of(draw_kl, lines, (5.6, 3.9))
            name = file_name(model, kind, "kl_by_step", main)
            made.append(gallery.add(name, figure, f"{model}, {kind}: {FIGURES['kl_by_step']}"))
    done = [
        "At every step both paths give logits for the next token; the KL divergence says how far apart the two "
        "distributions are. " + " ".join(f"In the {name} protocol, {PROTOCOLS[name]}." for name in protocols)
    ]
    steps = pd.concat([_named(r) for r in main])
    first, later = steps[steps["step"] == 0], steps[steps["step"] > 0]
    equal = int((first["max_abs_logit"] == 0).sum())
    seen = [
        f"At step 0, the token that the prefill decides, the logits are bitwise equal in {equal} of {len(first)} decodes."
    ]
    if not later.empty:
        same = int((later["max_abs_logit"] == 0).sum())
        left = ", leaving out those after a flip in the free protocol, whose texts differ" if _left_out(main) else ""
        seen.append(f"From step 1 on, {same} of {len(later)} steps are bitwise equal{left}.")
        seen += _kl_sentence(later[later["kl"] > 0])
    return Section("KL by step", done, seen, made)


def _named(result: Result) -> pd.DataFrame:
    """The steps at which both paths hold the same text, each with the prompt it is of."""
    steps = result.comparison.same_text(result.comparison.steps)
    ids = result.comparison.examples.set_index("example")["id"]
    return steps.assign(prompt=steps["example"].map(ids))


def _left_out(main: Sequence[Result]) -> bool:
    return any(len(r.comparison.same_text(r.comparison.steps)) < len(r.comparison.steps) for r in main)


def _kl_sentence(steps: pd.DataFrame) -> list[str]:
    if steps.empty:
        return []
    low, high = number(steps["kl"].min()), number(steps["kl"].max())
    said = [f"Where KL is above 0 it is {low} nats." if low == high else f"Where KL is above 0 it is {low} to {high} nats."]
    if len(steps) < 20 or steps["kl"].nunique() < 2:
        return said
    found = {}
    for name, of in (("step", "the step"), ("margin_a", "path a's margin")):
        if steps[name].nunique() > 1:
            columns = [steps[key].to_numpy(float) for key in (name, "kl")]
            low_end, high_end = metrics.clustered_interval(_rank_correlation, steps["prompt"].to_numpy(str), *columns)
            interval = f" (95% {low_end:+.2f} to {high_end:+.2f})" if low_end == low_end else ""
            found[name] = high_end
            said.append(f"{_rank_correlation(*columns):+.2f} with {of}{interval}")
    if len(said) > 1:
        prompts = prompts_said(steps["prompt"].nunique())
        text = f"Its rank correlation over these {len(steps)} steps of {prompts} is {' and '.join(said[1:])}"
        sure = found.get("margin_a", 0.0) < -0.5
        text += ": a distribution that is sure of its token hardly moves when its logits do" if sure else ""
        said = [said[0], f"{text}."]
    return said


def _rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    return float(pd.Series(a).corr(pd.Series(b), method="spearman")) if min(len(set(a)), len(set(b))) > 1 else np.nan


# Drift -----------------------------------------------------------------------------------------------------------------


def drift_section(main: Sequence[Result], gallery: Gallery) -> Section | None:
    """How far apart the residual streams are, layer by layer."""
    one = [r for r in leading(main) if not r.comparison.layers.empty]
    if not one:
        return None
    made = []
    for model in dict.fromkeys(model_of(r) for r in one):
        lines = {kind_of(r): r.comparison for r in one if model_of(r) == model}
        figure = figure_of(draw_drift, lines, (5.6, 3.7))
        name = file_name(model, "", "drift_by_layer", main)
        made.append(gallery.add(name, figure, f"{model}, {' and '.join(lines)}: {FIGURES['drift_by_layer']}"))
    sites = sorted({str(site) for r in one for site in r.comparison.layers["site"].unique()})
    done = [
        f"Of the newest position {', '.join(sites)} {'was' if len(sites) == 1 else 'were'} recorded on both paths at every "
        "step. Relative L2 is the length of the difference over the length of path b's vector. Points are medians over "
        "prompts and steps from 1 on, bars the quartiles."
    ]
    seen = ["The median over prompts and steps from 1 on:"]
    for result in one:
        medians = drift_medians(result.comparison)
        if medians.empty:
            continue
        nonzero = medians[medians > 0]
        if nonzero.empty:
            frame = result.comparison.same_text(result.comparison.layers)
            frame = frame[(frame["step"] > 0) & (frame["site"] == site_of(result.comparison))]
            said = (
                f"exactly 0 at every layer recorded; {int((frame['relative_l2'] > 0).sum())} of {len(frame)} vectors differ"
            )
        else:
            said = f"first above 0 at layer {nonzero.index[0]}, where it is {number(nonzero.iloc[0])}"
            if nonzero.index[0] != medians.index[-1]:
                said += f"; {number(medians.iloc[-1])} at layer {medians.index[-1]}"
        seen.append(f"{model_of(result)}, {kind_of(result)}: {site_of(result.comparison)} {said}.")
    return Section("Drift by layer", done, seen if len(seen) > 1 else [], made)


# Attention -------------------------------------------------------------------------------------------------------------


def attention_section(main: Sequence[Result], gallery: Gallery) -> Section | None:
    """How far apart the attention patterns are, head by head; and which kinds cannot say."""
    made, seen = [], ["Mean KL over prompts and steps from 1 on:"]
    derived: list[bool] = []
    for result in leading(main):
        model, kind, heads = model_of(result), kind_of(result), result.comparison.heads
        reason = result.summary["settings"].get("left_out", {}).get("pattern")
        if reason:
            seen.append(f"{model}, {kind}: not recorded, because {reason[:1].lower()}{reason[1:]}")
        if heads.empty:
            continue
        figure = figure_of(draw_attention, {"": result.comparison}, (5.6, 3.5))
        name = file_name(model, kind, "attention_by_head", main)
        made.append(gallery.add(name, figure, f"{model}, {kind}: {FIGURES['attention_by_head']}"))
        heads = result.comparison.same_text(heads)
        means = heads[heads["step"] > 0].groupby(["layer", "head"])["kl"].mean().dropna()
        if means.empty:
            continue
        derived = ["pattern" in result.comparison.derived, *derived]
        said = f"exactly 0 in {int((means == 0).sum())} of {len(means)} heads"
        if means.max() > 0:
            largest, place = most(means, ("layer", "head"))
            said += f"; most in {place}: {number(largest)} nats"
        said += " (derived)" * derived[0]
        seen.append(f"{model}, {kind}: {said}.")
    if len(seen) == 1:
        return None
    if not made:
        return Section("Attention by layer and head", ["No attention pattern was recorded."], seen[1:], made)
    done = [
        "The attention pattern of the newest position was recorded on both paths; the number is the mean over prompts and "
        "steps from 1 on of the KL divergence between the two patterns of a head."
    ]
    if any(derived):
        done.append(
            "Where it says derived, attention ran in a fused kernel (SDPA) that shows no pattern: it was derived beside the "
            "kernel, from the queries, keys and mask that the kernel was given, so what the kernel rounds is not in it."
        )
    return Section("Attention by layer and head", done, seen, made)


# K and V ---------------------------------------------------------------------------------------------------------------


def kv_section(main: Sequence[Result], gallery: Gallery) -> Section | None:
    """How far apart K and V are, position by position."""
    one = [r for r in leading(main) if not r.comparison.kv_positions.empty]
    if not one:
        return None
    made, seen = [], ["Counted over all prompts, steps from 1 on, layers and KV heads:"]
    for result in one:
        model, kind = place_of(result)
        figure = figure_of(draw_kv, {"": result.comparison}, (5.6, 3.9))
        name = file_name(model, kind, "kv_by_position", main)
        made.append(gallery.add(name, figure, f"{model}, {kind}: {FIGURES['kv_by_position']}"))
        said = _kv_sentence(result.comparison)
        if said:
            seen.append(f"{model}, {kind}: {said}.")
    done = [
        "K and V of every position, as attention reads them, were compared at every step, layer and KV head. The figure "
        "shows the prompt that decoded the most tokens, averaged over steps and KV heads; white is no difference at all."
    ]
    return Section("K and V by cache position", done, seen if len(seen) > 1 else [], made)


def _kv_sentence(comparison: Comparison) -> str:
    kv = comparison.same_text(comparison.kv_positions)
    prompt = kv["example"].map(comparison.examples.set_index("example")["prompt_tokens"])
    said = []
    for name, part in (("prompt", kv[kv["position"] < prompt]), ("decoded", kv[kv["position"] >= prompt])):
        if part.empty:
            continue
        vectors, differing = int(part["vectors"].sum()), int(part["differing"].sum())
        if not differing:
            said.append(f"all {vectors} {name} vectors are exactly equal")
            continue
        # Vectors that are equal are 0 units apart, so that they add nothing to the sum.
        units = (part["ulp_mean"] * part["vectors"]).sum() / differing
        said.append(
            f"{share(differing, vectors)} of the {vectors} {name} vectors differ, and in those that do the mean "
            f"element by {number(units)} units in the last place"
        )
    return "; ".join(said)


# Precision and failures ------------------------------------------------------------------------------------------------


def precision_section(rungs: Mapping[str, Sequence[Comparison]], gallery: Gallery) -> Section:
    """The same weights and prompts in more than one dtype."""
    picture = gallery.add("precision_ladder", precision_ladder(rungs), "Largest logit difference by dtype")
    names = ("steps", "largest logit difference", "unit roundoff", "difference in unit roundoffs", "mean KL")
    head = [Column("model"), Column("dtype"), *[Column(name, number=True) for name in names]]
    rows, ratios, units = [], [], []
    for model, group in rungs.items():
        for c in group:
            units.append(unit_roundoff(c.about["dtype"]))
            largest = float(c.steps["max_abs_logit"].max())
            ratios.append(largest / units[-1])
            numbers = (largest, units[-1], ratios[-1], c.steps["kl"].mean())
            rows.append([model, c.about["dtype"], str(len(c.steps)), *map(number, numbers)])
    kinds, protocols = (sorted({c.about[key] for group in rungs.values() for c in group}) for key in ("kind", "protocol"))
    done = [
        f"The same weights and the same problems ({', '.join(kinds + protocols)}) in more than one precision. Every dtype "
        "rounds to its own unit roundoff, and a difference that comes from rounding shrinks with it; how many roundoffs it "
        "comes to is the kernels' and the model's doing."
    ]
    seen = [
        f"Over the ladder the unit roundoff shrinks {number(max(units) / min(units))}-fold; counted in unit roundoffs the "
        + (
            "difference is 0 everywhere."
            if not max(ratios)
            else f"differences are {number(min(ratios))} to {number(max(ratios))}."
        )
    ]
    if kl_falls_as_a_square(rungs):
        seen[0] += (
            " KL goes about with the square of a small logit difference: it falls by about twice as many orders of magnitude."
        )
    seen += [
        f"{fall.model} is bitwise equal in {coarse} on this processor: a 0 there is no measure of the others."
        for fall in (fall_of(model, group) for model, group in rungs.items())
        for (coarse, _), _ in fall.begins
    ]
    return Section("The same in higher precision", done, seen, [picture], head, rows)


def failures_section(results: Sequence[Result]) -> Section | None:
    """The prompts in which NaN or Inf appeared."""
    rows = [
        [r.folder.name, str(row["id"]), str(row["message"])]
        for r in results
        for row in r.comparison.failures.to_dict("records")
    ]
    if not rows:
        return None
    done = ["NaN or Inf appeared in these; they are left out of every number and figure above."]
    return Section("Left out", done, [], head=[Column("comparison"), Column("prompt"), Column("what happened")], rows=rows)
