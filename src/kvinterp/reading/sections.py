"""What each section of the report says, what was done and what there is to see in it; and the titles of its figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.reading.numbers import counted, ends_said, most, number, share, short
from kvinterp.reading.results import decoded, drift_medians, kind_of, leading, model_of, place_of, site_of, with_protocol
from kvinterp.reading.vocabulary import PROTOCOLS
from kvinterp.reading.where import let_go

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison
    from kvinterp.results import Result

__all__ = [
    "Said",
    "attention_said",
    "attention_title",
    "drift_said",
    "drift_title",
    "kl_said",
    "kl_title",
    "kv_said",
    "kv_title",
    "table_said",
]

Said = tuple[list[str], list[str]]
"""What was done, and what there is to see."""

# All comparisons -------------------------------------------------------------------------------------------------------


def table_said(results: Sequence[Result]) -> Said:
    """Of the table that has a line for each comparison."""
    counts = {len(r.prompts) for r in results}
    steps = sum(len(r.comparison.steps) for r in results)
    pairs, strategies = (
        list(dict.fromkeys(get(r.comparison.provenance) for r in results))
        for get in (lambda a: f"path a, {a['paths']['a']}, with path b, {a['paths']['b']}", lambda a: str(a["strategy"]))
    )
    of = pairs[0] if len(pairs) == 1 else f"path a with path b ({len(pairs)} pairs of paths, named in the last table)"
    each = counted(max(counts), "prompt") if len(counts) == 1 else f"{min(counts)} to {counted(max(counts), 'prompt')}"
    done = [
        f"{counted(len(results), 'comparison')} of {of}, on {each}{' each' * (len(results) > 1)}: {steps} "
        f"decode steps in all. Tokens are chosen by the strategy {' or '.join(strategies)}. KL is KL(a || b) of the "
        "next-token distributions, in nats, computed in float64. The step at which a token flips counts as up to the flip; "
        "the interval is that of the median over prompts."
    ]
    varying = [
        said
        for said, names in _ACROSS.items()
        if len({tuple(str(r.comparison.provenance[name]) for name in names) for r in results}) > 1
    ]
    seen = [f"Each line is one comparison. Read {', '.join(varying)}."] if varying else []
    seen += _protocols_alike(results)
    interrupted = [r.folder.name for r in results if r.summary.get("interrupted")]
    if interrupted:
        seen.append(f"Interrupted, so with fewer prompts than planned: {', '.join(interrupted)}.")
    return done, seen


_ACROSS = {
    "across protocols for the effect of flipped tokens": ("protocol",),
    "across kinds for that of other kernels on the same weights": ("kind",),
    "across dtypes for that of precision": ("dtype",),
}


def _protocols_alike(results: Sequence[Result]) -> list[str]:
    pairs = [
        (free.comparison.steps, matched.comparison.steps)
        for free in with_protocol(results, "free")
        for matched in with_protocol(results, "matched")
        if place_of(free) == place_of(matched)
        and all(
            free.comparison.provenance[key] == matched.comparison.provenance[key] for key in ("dtype", "paths", "strategy")
        )
    ]
    columns = ["example", "step", "kl", "max_abs_logit"]
    if pairs and all(a[columns].reset_index(drop=True).equals(b[columns].reset_index(drop=True)) for a, b in pairs):
        return ["Matched and free give the same numbers here: as long as no token flips, both paths see the same text."]
    return []


# KL by step ------------------------------------------------------------------------------------------------------------


def kl_said(main: Sequence[Result]) -> Said:
    """Of how far apart the next-token distributions are, step by step."""
    protocols = dict.fromkeys(r.comparison.provenance["protocol"] for r in main)
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
        cut = len(steps) < sum(len(r.comparison.steps) for r in main)
        left = ", leaving out those after a flip in the free protocol, whose texts differ" if cut else ""
        seen.append(f"From step 1 on, {same} of {len(later)} steps are bitwise equal{left}.")
        seen += _kl_size(later[later["kl"] > 0])
    return done, seen


def _named(result: Result) -> pd.DataFrame:
    """The steps at which both paths hold the same text, each with the prompt it is of."""
    steps = result.comparison.same_text(result.comparison.steps)
    ids = result.comparison.examples.set_index("example")["id"]
    return steps.assign(prompt=steps["example"].map(ids))


def _kl_size(steps: pd.DataFrame) -> list[str]:
    """Of the steps at which KL is above 0: how large it is, and what it goes with."""
    if steps.empty:
        return []
    low, high = number(steps["kl"].min()), number(steps["kl"].max())
    size = f"Where KL is above 0 it is {low} nats." if low == high else f"Where KL is above 0 it is {low} to {high} nats."
    if len(steps) < 20 or steps["kl"].nunique() < 2:
        return [size]
    said, margin_high = [], 0.0
    for name, of in (("step", "the step"), ("margin_a", "path a's margin")):
        found = metrics.typical([_rank_correlation(own[name], own["kl"]) for _, own in steps.groupby("prompt")])
        if found.n:
            interval = ends_said(*found.interval, " (95% interval {})", "{:+.2f}".format)
            margin_high = found.high if name == "margin_a" else margin_high
            said.append(f"{found.median:+.2f} with {of}{interval}")
    if not said:
        return [size]
    prompts = counted(steps["prompt"].nunique(), "prompt")
    text = f"Its rank correlation over the steps of a prompt, in the median of {prompts}, is {' and '.join(said)}"
    sure = ": a distribution that is sure of its token hardly moves when its logits do" if margin_high < -0.5 else ""
    return [size, f"{text}{sure}."]


def _rank_correlation(a: pd.Series, b: pd.Series) -> float:
    return float(a.corr(b, method="spearman")) if min(a.nunique(), b.nunique()) > 2 else np.nan


# Drift, attention, K and V ---------------------------------------------------------------------------------------------


def drift_said(main: Sequence[Result]) -> Said:
    """Of how far apart the residual streams are, layer by layer."""
    one = [r for r in leading(main) if not r.comparison.layers.empty]
    sites = sorted({str(site) for r in one for site in r.comparison.layers["site"].unique()})
    done = [
        f"Of the newest position {', '.join(sites)} {'was' if len(sites) == 1 else 'were'} recorded on both paths at every "
        "step. Relative L2 is the length of the difference over the length of path b's vector. Points are medians over "
        "prompts and steps from 1 on, bars the quartiles."
    ]
    seen = [
        f"{model_of(r)}, {kind_of(r)}: {site_of(r.comparison)} {_drift(r.comparison, medians)}."
        for r in one
        if len(medians := drift_medians(r.comparison))
    ]
    return done, ["The median over prompts and steps from 1 on:", *seen] if seen else []


def _drift(comparison: Comparison, medians: pd.Series) -> str:
    nonzero = medians[medians > 0]
    if nonzero.empty:
        frame = decoded(comparison, comparison.layers)
        frame = frame[frame["site"] == site_of(comparison)]
        differ = int((frame["relative_l2"] > 0).sum())
        return f"exactly 0 at every layer recorded; {differ} of {len(frame)} vectors differ"
    said = f"first above 0 at layer {nonzero.index[0]}, where it is {number(nonzero.iloc[0])}"
    last = medians.index[-1]
    return said if nonzero.index[0] == last else f"{said}; {number(medians.iloc[-1])} at layer {last}"


def attention_said(main: Sequence[Result]) -> Said | None:
    """Of how far apart the attention patterns are, head by head, and which kinds cannot say; None where nothing is said."""
    seen, derived = [], []
    for result in leading(main):
        who, heads = ", ".join(place_of(result)), result.comparison.heads
        reason = result.summary["settings"].get("left_out", {}).get("pattern")
        if reason:
            seen.append(f"{who}: not recorded, because {reason[:1].lower()}{reason[1:]}")
        means = decoded(result.comparison, heads).groupby(["layer", "head"])["kl"].mean().dropna()
        if means.empty:
            continue
        derived.append("pattern" in result.comparison.derived)
        said = f"exactly 0 in {int((means == 0).sum())} of {len(means)} heads"
        if means.max() > 0:
            largest, place = most(means, ("layer", "head"))
            said += f"; most in {place}: {number(largest)} nats"
        seen.append(f"{who}: {said}{' (derived)' * derived[-1]}.")
    if not seen:
        return None
    if all(r.comparison.heads.empty for r in leading(main)):
        return ["No attention pattern was recorded."], seen
    done = [
        "The attention pattern of the newest position was recorded on both paths; the number is the mean over prompts and "
        "steps from 1 on of the KL divergence between the two patterns of a head."
    ]
    if any(derived):
        done.append(
            "Where it says derived, attention ran in a fused kernel (SDPA) that shows no pattern: it was derived beside the "
            "kernel, from the queries, keys and mask that the kernel was given, so what the kernel rounds is not in it."
        )
    return done, ["Mean KL over prompts and steps from 1 on:", *seen]


def kv_said(main: Sequence[Result]) -> Said:
    """Of how far apart K and V are, position by position."""
    gone = {", ".join(place_of(r)): let_go(r.comparison) for r in leading(main)}
    done = [
        "K and V of every position that both paths hold, as attention reads them, were compared at every step, layer and KV "
        "head. The figure shows the prompt that decoded the most tokens, averaged over steps and KV heads; blank is no "
        "difference at all" + (", and hatched what they both held at no step from 1 on" if any(gone.values()) else "") + "."
    ]
    found = {", ".join(place_of(r)): _kv(r.comparison) for r in leading(main) if not r.comparison.kv_positions.empty}
    seen = [f"{who}: {said}." for who, said in found.items() if said]
    if seen:
        seen.insert(0, "Counted over all prompts, steps from 1 on, layers and KV heads:")
    return done, [*seen, *(f"{who}: {line}" for who, lines in gone.items() for line in lines)]


def _kv(comparison: Comparison) -> str:
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


# Titles, each of which says what is to be seen in its picture ------------------------------------------------------------


def kl_title(frames: Mapping[str, pd.DataFrame]) -> str:
    """Of KL by step; ``frames`` are tables of steps by label, of which the first is told."""
    label, steps = next(iter(frames.items()))
    which = f" ({label})" if len(frames) > 1 else ""
    differing = steps[steps["max_abs_logit"] > 0]
    if differing.empty:
        return f"The paths are bitwise equal at all {len(steps)} steps{which}"
    first = int(differing["step"].min())
    return f"The paths differ at {len(differing)} of {len(steps)} steps, first at step {first}{which}"


def drift_title(lines: Mapping[str, pd.DataFrame], what: str) -> str:
    """Of drift by layer; ``lines`` are the quartiles by layer of each line drawn."""
    medians = pd.concat([line[0.5] for line in lines.values()], axis=1).sort_index()
    above = (medians > 0).any(axis=1)
    if not above.any():
        return f"The median difference of {what} is 0 at every layer"
    begin, last, first = medians.index[0], medians.index[-1], medians.index[above.to_numpy()][0]
    ends = sorted(medians.loc[last].dropna())
    size = short(ends[0]) if ends[0] == ends[-1] else f"{short(ends[0])} to {short(ends[-1])}"
    if first != begin:
        return f"The median difference of {what} is first above 0 at layer {first}; at layer {last} it is {size}"
    if begin == last or not (medians.loc[first] > 0).all():
        return f"At layer {last} the median difference of {what} is {size}"
    grown = sorted((medians.loc[last] / medians.loc[first]).dropna())
    times = list(dict.fromkeys(f"{value:.2g}" for value in (grown[0], grown[-1])))
    return f"From layer {first} to layer {last} the median difference changes {' to '.join(times)}-fold"


def attention_title(table: pd.DataFrame, derived: str = "") -> str:
    """Of attention KL; ``table`` holds the mean KL, layer by head."""
    flat = table.stack()
    if not (flat > 0).any():
        return f"every attention pattern is exactly equal{derived}"
    largest, place = most(flat, ("layer", "head"))
    return f"attention differs most in {place} ({short(largest)} nats){derived}"


def kv_title(means: pd.Series, prompt: int, of: str = "") -> str:
    """Of K and V by position.

    Args:
        means: Mean errors by tensor, layer and position.
        prompt: The prompt's length.
        of: Of which K and V, where not of all.
    """
    positions = means.index.get_level_values("position")
    inside, decoded = means[positions < prompt], means[positions >= prompt]
    where = f", {of}," if of else ""
    if not (means > 0).any():
        return f"K and V{where} are exactly equal everywhere in this prompt and what it decoded"
    said: list[str] = []
    for name, part in (("this prompt's", inside), ("decoded", decoded)):
        if len(part):
            differ = (
                f"differ by {short(part.mean())} on average over positions" if (part > 0).any() else "are exactly equal"
            )
            said.append(f"{name} {f'K and V{where}' if not said else 'ones'} {differ}")
    return ", ".join(said)
