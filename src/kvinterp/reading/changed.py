"""What is said of what changed: which prompts flip, which call was closest, and what of it the page can show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.reading.flips import share_said
from kvinterp.reading.numbers import counted, number, prompts_said

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison

__all__ = [
    "boundary_of",
    "changed_said",
    "closest",
    "flips_of",
    "kept_said",
    "no_boundary",
    "none_changed_said",
    "square_said",
]


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
    """Which prompts flip a token, of how many; where none does, which call was closest.

    Args:
        comparison: A comparison with at least one step.
    """
    prompts, steps = len(comparison.examples), len(comparison.same_text(comparison.steps))
    flips = flips_of(comparison)
    flipping = int(flips["example"].nunique())
    if not flipping:
        same = f"No token flips: both paths choose the same token at {_every(steps)} of {prompts_said(prompts)}."
        return [same, *_closest(comparison)]
    interval = share_said(flipping, prompts)
    told = f"{flipping} of {prompts_said(prompts)} {'flips' if flipping == 1 else 'flip'} a token"
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
    """What of a comparison the page holds, and why not more.

    Args:
        comparison: The comparison.
        maps: Of how many steps the page holds the map and the drift.
        rows: Of how many steps it holds attention rows.
    """
    steps, said = len(comparison.steps), []
    if comparison.heads.empty and comparison.layers.empty:
        said.append(
            "No activation was recorded: there is neither a map of heads nor a drift by layer, and no attention to show."
        )
    elif comparison.heads.empty:
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
    elif not comparison.heads.empty:
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
