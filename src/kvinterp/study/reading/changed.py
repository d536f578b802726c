"""What is said of what changed: which prompts flip, what a flip changed, which call was closest, and what the page can show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.common.numbers import counted, number
from kvinterp.study.reading.results import judged, kind_of, model_of

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison
    from kvinterp.study.results import Result


def flips_of(comparison: Comparison) -> pd.DataFrame:
    """The steps at which the paths chose different tokens on the same text, with ``id``; by example and step."""
    steps = comparison.same_text(comparison.steps)
    return _named(comparison, steps[steps["flipped"].astype(bool)])


def _named(comparison: Comparison, steps: pd.DataFrame) -> pd.DataFrame:
    ids = comparison.examples.set_index("example")["id"]
    return steps.assign(id=steps["example"].map(ids)).sort_values(["example", "step"], ignore_index=True)


def boundary_of(comparison: Comparison) -> tuple[str, str]:
    """What the distance to the decision boundary is under the strategy in use, and its unit."""
    strategy = str(comparison.provenance["strategy"])
    if strategy == "greedy":
        said = "how far the path's own token was ahead of its next best (the logit margin, which decides a greedy choice)"
        return said, "logits"
    if strategy.startswith(("top_k", "top_p")):
        return (
            f"how far the number that both paths drew lay from where another token begins, in the cumulative probability that "
            f"{strategy} looks it up in (the logit margin does not decide a draw)"
        ), "cumulative probability"
    return "not known under this strategy", ""


def no_boundary(comparison: Comparison) -> str:
    """What it means that a step has no distance."""
    drawn = str(comparison.provenance["strategy"]).startswith(("top_k", "top_p"))
    return "no other token could be drawn" if drawn and "boundary_a" in comparison.steps else "not recorded"


def closest(comparison: Comparison) -> dict[str, Any] | None:
    """The step, on the same text, at which a path's choice was closest to another one; None where no distance is known."""
    steps = comparison.same_text(comparison.steps)
    if not {"boundary_a", "boundary_b"} <= {*steps.columns}:
        return None
    distance = steps[["boundary_a", "boundary_b"]].min(axis=1).dropna()
    if distance.empty:
        return None
    row = _named(comparison, steps.loc[[distance.idxmin()]]).iloc[0].to_dict()
    return {**row, "distance": float(distance.min()), "side": "a" if row["boundary_a"] == distance.min() else "b"}


def changed_said(comparison: Comparison) -> list[str]:
    """Which prompts of a comparison flip a token, of how many; where none does, which call was closest."""
    prompts, steps = len(comparison.examples), len(comparison.same_text(comparison.steps))
    flips = flips_of(comparison)
    flipping = int(flips["example"].nunique())
    if not flipping:
        same = f"No token flips: both paths choose the same token at {_every(steps)} of {counted(prompts, 'prompt')}."
        return [same, *_closest(comparison)]
    interval = _share_said(flipping, prompts)
    told = f"{flipping} of {counted(prompts, 'prompt')} {'flips' if flipping == 1 else 'flip'} a token"
    told += f" ({interval})" if interval else ""
    told += f", at {len(flips)} of {counted(steps, 'step')} on the same text"
    rest = prompts - flipping
    none = f"; the other {rest} {'flips' if rest == 1 else 'flip'} none" if rest else ""
    other = len(comparison.steps) - steps
    after = (
        f" The {counted(other, 'step')} after a flip, of two different texts, {'is' if other == 1 else 'are'} not counted."
    )
    return [f"{told}{none}.{after if other else ''}"]


def none_changed_said(found: Mapping[str, Comparison]) -> list[str]:
    """What is said of several comparisons in none of which a token flips: all at once, with the closest call of all."""
    steps = sum(len(comparison.same_text(comparison.steps)) for comparison in found.values())
    decodes = sum(len(comparison.examples) for comparison in found.values())
    calls = {label: row for label, comparison in found.items() if (row := closest(comparison)) is not None}
    said = [
        f"No token flips in {len(found)} comparisons: both paths choose the same token at {_every(steps)} of {decodes} decodes."
    ]
    # A greedy margin and a distance along a cumulative probability are not compared with each other.
    if len({boundary_of(found[label])[1] for label in calls}) == 1:
        label = min(calls, key=lambda name: calls[name]["distance"])
        said += _closest(found[label], f"The closest call of all, in {label},")
    return [*said, f"They are: {'; '.join(found)}."]


def _every(steps: int) -> str:
    return "the one step" if steps == 1 else f"all {steps} steps"


def _closest(comparison: Comparison, lead: str = "The closest call") -> list[str]:
    row = closest(comparison)
    if row is None:
        none = no_boundary(comparison)
        return [] if none == "not recorded" else [f"There was no close call: at {_every(len(comparison.steps))} {none}."]
    side, distance = row["side"], number(row["distance"])
    at = f"{lead} is step {int(row['step'])} of {row['id']}:"
    difference = f"the largest difference of any logit there is {number(row['max_abs_logit'])}"
    if comparison.provenance["strategy"] == "greedy":
        return [f"{at} path {side}'s token is {distance} logits ahead of its next best, and {difference}."]
    return [
        f"{at} on path {side} the number drawn lies {distance} in cumulative probability from where another token begins, "
        f"and {difference}."
    ]


def kept_said(comparison: Comparison, maps: int, rows: int) -> list[str]:
    """What of a comparison the page holds, maps and attention rows of so many steps, and why not more."""
    steps, said = len(comparison.steps), []
    if not comparison.count("heads") and not comparison.count("layers"):
        said.append(
            "No activation was recorded: there is neither a map of heads nor a drift by layer, and no attention to show."
        )
    elif not comparison.count("heads"):
        said.append("No attention pattern was recorded, so there is no map of heads and no attention to show.")
    elif "pattern" in comparison.derived:
        said.append("Attention patterns were derived, from queries and keys, beside a kernel that shows none.")
    if maps and maps < steps:
        said.append(
            f"The page holds the map and the drift of {maps} of {steps} steps: first flips, then the largest KL on the same "
            "text. Those of all steps are in heads.parquet and layers.parquet."
        )
    kept = len(comparison.attention_rows[["example", "step"]].drop_duplicates())
    if rows:
        said.append(
            f"The attention rows of {rows} of {steps} steps are here (dotted under the token): of each prompt its first flip "
            "and its steps of largest KL on the same text, as far as there is room."
            + (f" attention_rows.parquet has those of {kept} steps." if kept > rows else "")
        )
    elif comparison.count("heads"):
        said.append("No attention row was kept with this comparison.")
    return said


def square_said(comparison: Comparison) -> str:
    """How to see the attention of every query, and not of the newest alone."""
    call = (
        "kv.attention_comparison(both, prompts[{example}], model=model, example={example}, step={step}, layers=[{layer}])"
    )
    if comparison.provenance["protocol"] == "matched":
        return f"Every query's attention, for any step, where both is this comparison (kv.load(FOLDER)): {call}."
    return f"Every query's attention is compared on one text: kv.compare(..., protocol='matched'), then {call}."


# A decode to look at ---------------------------------------------------------------------------------------------------


def flips_said(result: Result) -> tuple[list[str], list[str], list[list[str]]]:
    """What happens where a token flips, on a comparison that is made to show it.

    Args:
        result: A comparison in the free protocol, with tokens chosen greedily.

    Returns:
        What was done; what there is to see; and of the decode that is shown each path with its text and whether it is right.
    """
    provenance, examples = result.comparison.provenance, result.comparison.examples
    a, b = provenance["paths"]["a"], provenance["paths"]["b"]
    done = [
        f"A pair of paths of its own, which counts in nothing else on this page: path a, {a}, and path b, {b}, of "
        f"{model_of(result)}, {kind_of(result)}, in {provenance['dtype']}, on {counted(len(examples), 'prompt')}. Each path is "
        "fed its own tokens, the most likely ones, so that after a flip the two texts differ."
    ]
    flipped = examples[examples["flip_index"].notna()]
    if flipped.empty:
        longest = int(examples["steps"].max()) if len(examples) else 0
        return (
            done,
            [f"No token flipped in {len(examples)} decodes of at most {longest} steps: there is no case to show."],
            [],
        )
    prompts = {prompt.id: prompt for prompt in result.prompts}
    rows = [
        {**row, **{f"right_{s}": judged(prompts.get(row["id"]), row[f"text_{s}"]) for s in ("a", "b")}}
        for row in flipped.to_dict("records")
    ]
    shown = min(rows, key=lambda row: (row["right_a"] == row["right_b"], row["flip_index"], row["example"]))
    seen = [_count(len(flipped), len(examples)), *_changed(rows), *_shown(result, shown)]
    cells = [
        [f"{shown['id']}, {side}: {path}", str(shown[f"text_{side}"]), _ANSWER[shown[f"right_{side}"]]]
        for side, path in (("a", a), ("b", b))
    ]
    return done, seen, cells


_ANSWER = {True: "right", False: "wrong", None: "not judged"}


def _share_said(part: int, whole: int) -> str:
    """The interval of a share; empty of one, which has none worth the name."""
    if whole < 2:
        return ""
    # What it needs takes a moment to load, and only this sentence needs it.
    from kvinterp.metrics import share_of

    interval = share_of([True] * part + [False] * (whole - part))
    return f"95% interval of the share {interval.low:.0%} to {interval.high:.0%}"


def _count(flips: int, decodes: int) -> str:
    interval = _share_said(flips, decodes)
    return f"A token flipped in {flips} of {counted(decodes, 'decode')}{f' ({interval})' if interval else ''}."


def _changed(rows: list[dict[str, Any]]) -> list[str]:
    judged = [(row["right_a"], row["right_b"]) for row in rows if row["right_a"] is not None]
    if not judged:
        return []
    only_a, only_b = judged.count((True, False)), judged.count((False, True))
    same = len(judged) - only_a - only_b
    of = "it" if len(judged) == 1 else f"these {len(judged)}"
    return [
        f"What the flips changed: of {of}, path a alone answered right in {only_a}, path b alone in {only_b}, and in {same} the "
        "answer is as right or as wrong on both."
    ]


def _shown(result: Result, row: dict[str, Any]) -> list[str]:
    steps = result.comparison.steps
    steps = steps[steps["example"] == row["example"]]
    at = steps[steps["step"] == row["flip_index"]].iloc[0]
    after = steps.loc[steps["after_flip"].astype(bool), "kl"]
    later = (
        f" Mean KL over the {len(after)} steps after it, where the texts differ, is {number(after.mean())} nats."
        if len(after) and pd.notna(after.mean())
        else ""
    )
    return [
        f"Shown is {row['id']}. Both paths chose the same tokens before step {int(at['step'])}. There path a's token was "
        f"{number(at['margin_a'])} logits ahead of its next best, path b's {number(at['margin_b'])}, and the largest difference "
        f"of any logit was {number(at['max_abs_logit'])}: KL {number(at['kl'])} nats.{later}"
    ]
