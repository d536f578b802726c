"""The sections of the report: what was done, the figures, what to see in them. A section without data is None."""

from __future__ import annotations

import base64
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.figure import Figure

from kvinterp.comparison import PROTOCOLS, Comparison
from kvinterp.results import Result
from kvinterp.views.plots import FIGURES, draw_attention, draw_drift, draw_kl, draw_kv, figure_of, precision_ladder, save
from kvinterp.views.words import (
    drift_medians,
    file_name,
    grouped,
    kind_of,
    largest_difference,
    leading,
    model_of,
    number,
    place_of,
    right_answers,
    unit_roundoff,
    with_protocol,
)

__all__ = [
    "Column",
    "Gallery",
    "Picture",
    "Section",
    "attention_section",
    "drift_section",
    "failures_section",
    "kl_section",
    "kv_section",
    "precision_section",
    "table_section",
]


@dataclasses.dataclass(frozen=True)
class Picture:
    """A figure on the page: its caption, and its PNG in base64."""

    caption: str
    data: str


@dataclasses.dataclass(frozen=True)
class Column:
    """The head of a column: its text, and whether it holds numbers or whole texts."""

    text: str
    number: bool = False
    text_block: bool = False


@dataclasses.dataclass
class Section:
    """One section of the page."""

    title: str
    done: list[str]
    seen: list[str]
    pictures: list[Picture] = dataclasses.field(default_factory=list)
    head: list[Column] = dataclasses.field(default_factory=list)
    rows: list[list[str]] = dataclasses.field(default_factory=list)


class Gallery:
    """Saves figures and keeps them for the page.

    Args:
        folder: Where the files go.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def add(self, name: str, figure: Figure, caption: str) -> Picture:
        """Saves one figure as ``name.png``."""
        path = save(figure, self.folder / f"{name}.png")
        return Picture(caption, base64.b64encode(path.read_bytes()).decode("ascii"))


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
    "mean KL before the flip",
    "mean KL after the flip",
    "answered right, a / b",
)


def table_section(results: Sequence[Result]) -> Section:
    """One line a comparison."""
    rows = [_row(result) for result in results]
    head = [Column(name) for name in _NAMES] + [Column(name, number=True) for name in _NUMBERS]
    if not any(row[-1] for row in rows):
        head, rows = head[:-1], [row[:-1] for row in rows]
    about = results[0].comparison.about
    prompts = max(len(r.prompts) for r in results)
    steps = sum(len(r.comparison.steps) for r in results)
    done = [
        f"{len(results)} comparison{'s' * (len(results) != 1)} of path a, {about['paths']['a']}, with path b, "
        f"{about['paths']['b']}, on {'up to ' * (len(results) > 1)}{prompts} prompt{'s' * (prompts != 1)}"
        f"{' each' * (len(results) > 1)}: {steps} decode steps in all. Tokens are chosen by the strategy "
        f"{about['strategy']}. KL is KL(a || b) of the next-token distributions, in nats, computed in float64."
    ]
    seen = []
    if len(results) > 1:
        seen.append(
            "Each line is one comparison. Read across protocols for the effect of flipped tokens, across kinds for that of "
            "other kernels on the same weights, across dtypes for that of precision."
        )
    seen += _protocol_sentence(results)
    interrupted = [r.folder.name for r in results if r.summary.get("interrupted")]
    if interrupted:
        seen.append(f"Interrupted, so with fewer prompts than planned: {', '.join(interrupted)}.")
    return Section("All comparisons" if len(results) > 1 else "The comparison", done, seen, head=head, rows=rows)


def _row(result: Result) -> list[str]:
    about, steps, examples = result.comparison.about, result.comparison.steps, result.comparison.examples
    cells = [model_of(result), f"{about['kind']} ({about['attention']})", about["dtype"], about["protocol"]]
    if steps.empty:
        return [*cells, "0", "0", *["–"] * 8, ""]
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
        number(steps.loc[~steps["after_flip"], "kl"].mean()),
        "no flip" if after.empty else number(after.mean()),
        "" if right is None else f"{right[0]} / {right[1]} of {len(examples)}",
    ]


def _protocol_sentence(results: Sequence[Result]) -> list[str]:
    same = [
        bool((free.comparison.steps["kl"].to_numpy() == matched.comparison.steps["kl"].to_numpy()).all())
        for free in with_protocol(results, "free")
        for matched in with_protocol(results, "matched")
        if place_of(free) == place_of(matched) and len(free.comparison.steps) == len(matched.comparison.steps)
    ]
    if same and all(same):
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
    steps = pd.concat([r.comparison.steps for r in main])
    first, later = steps[steps["step"] == 0], steps[steps["step"] > 0]
    equal = int((first["max_abs_logit"] == 0).sum())
    seen = [
        f"At step 0, the token that the prefill decides, the logits are bitwise equal in {equal} of {len(first)} decodes."
    ]
    if not later.empty:
        same = int((later["max_abs_logit"] == 0).sum())
        seen.append(f"From step 1 on, {same} of {len(later)} steps are still bitwise equal.")
        seen += _kl_sentence(later[later["kl"] > 0])
    return Section("KL by step", done, seen, made)


def _kl_sentence(steps: pd.DataFrame) -> list[str]:
    if steps.empty:
        return []
    text = f"Where KL is not 0 it ranges from {number(steps['kl'].min())} to {number(steps['kl'].max())} nats."
    if len(steps) < 20 or steps["margin_a"].nunique() < 2:
        return [text]
    by_step, by_margin = (steps[name].corr(steps["kl"], method="spearman") for name in ("step", "margin_a"))
    text += f" Its rank correlation is {by_step:+.2f} with the step and {by_margin:+.2f} with the margin of path a's token"
    sure = ": a distribution that is sure of its token hardly moves when its logits do" if by_margin < -0.5 else ""
    return [f"{text}{sure}."]


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
        f"The residual stream ({', '.join(sites)}) of the newest position was recorded on both paths at every step. "
        "Relative L2 is the length of the difference over the length of path b's vector. Points are medians over prompts "
        "and steps from 1 on, bars the quartiles."
    ]
    seen = ["The median over prompts and steps:"]
    for result in one:
        medians = drift_medians(result.comparison)
        nonzero = medians[medians > 0]
        if nonzero.empty:
            said = "exactly 0 at every layer"
        else:
            said = f"first above 0 at layer {nonzero.index[0]}, where it is {number(nonzero.iloc[0])}; "
            said += f"{number(medians.iloc[-1])} at layer {medians.index[-1]}"
        seen.append(f"{model_of(result)}, {kind_of(result)}: {said}.")
    return Section("Drift of the residual stream by layer", done, seen, made)


# Attention -------------------------------------------------------------------------------------------------------------


def attention_section(main: Sequence[Result], gallery: Gallery) -> Section | None:
    """How far apart the attention patterns are, head by head; and which kinds cannot say."""
    made, seen = [], ["Mean KL over prompts and steps:"]
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
        means = heads[heads["step"] > 0].groupby(["layer", "head"])["kl"].mean()
        if means.empty:
            continue
        said = f"exactly 0 in {int((means == 0).sum())} of {len(means)} heads"
        if means.max() > 0:
            layer, head = means.idxmax()  # type: ignore[misc]  # a pair, because the index has two levels
            said += f"; most in layer {layer}, head {head}: {number(means.max())} nats"
        seen.append(f"{model}, {kind}: {said}.")
    if len(seen) == 1:
        return None
    if not made:
        return Section("Attention by layer and head", ["No attention pattern was recorded."], seen[1:], made)
    done = [
        "The attention pattern of the newest position was recorded on both paths; the number is the mean over prompts and "
        "steps from 1 on of the KL divergence between the two patterns of a head."
    ]
    return Section("Attention by layer and head", done, seen, made)


# K and V ---------------------------------------------------------------------------------------------------------------


def kv_section(main: Sequence[Result], gallery: Gallery) -> Section | None:
    """How far apart K and V are, position by position."""
    one = [r for r in leading(main) if not r.comparison.kv.empty]
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
    kv = comparison.kv[comparison.kv["step"] > 0]
    prompt = kv["example"].map(comparison.examples.set_index("example")["prompt_tokens"])
    said = []
    for name, part in (("prompt", kv[kv["position"] < prompt]), ("decoded", kv[kv["position"] >= prompt])):
        differing = part[part["relative_error"] > 0]
        if part.empty:
            continue
        if differing.empty:
            said.append(f"all {name} vectors are exactly equal")
            continue
        said.append(
            f"{len(differing) / len(part):.1%} of the {name} vectors differ, their elements on average by "
            f"{number(differing['ulp_mean'].mean())} units in the last place"
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
            ratios.append(largest_difference(c) / units[-1])
            numbers = (largest_difference(c), units[-1], ratios[-1], c.steps["kl"].mean())
            rows.append([model, c.about["dtype"], str(len(c.steps)), *map(number, numbers)])
    kinds = sorted({c.about["kind"] for group in rungs.values() for c in group})
    done = [
        f"The same weights and the same problems ({', '.join(kinds)}, matched) in more than one precision. Every dtype "
        "rounds to its own unit roundoff, and a difference that comes from rounding shrinks with it."
    ]
    seen = [
        f"The unit roundoff shrinks {number(max(units) / min(units))}-fold over the ladder, while the difference counted "
        f"in unit roundoffs stays between {number(min(ratios))} and {number(max(ratios))}. KL goes with the square of the "
        "logit difference, so it falls by about twice as many orders of magnitude."
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
