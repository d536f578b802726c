"""What is said of tokens that flip: in how many decodes, what it changed, and one of them to look at."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd

from kvinterp.reading.numbers import counted, number, prompts_said
from kvinterp.reading.results import judged, kind_of, model_of

if TYPE_CHECKING:
    from kvinterp.results import Result

__all__ = ["flips_said", "share_said"]


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
        f"{model_of(result)}, {kind_of(result)}, in {provenance['dtype']}, on {prompts_said(len(examples))}. Each path is fed "
        "its own tokens, the most likely ones, so that after a flip the two texts differ."
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


def share_said(part: int, whole: int) -> str:
    """The interval of a share; empty of one, which has none worth the name."""
    if whole < 2:
        return ""
    # scipy.stats takes a moment to load, and only this sentence needs it.
    from scipy import stats

    interval = stats.binomtest(part, whole).proportion_ci(method="wilson")
    return f"95% interval of the share {interval.low:.0%} to {interval.high:.0%}"


def _count(flips: int, decodes: int) -> str:
    interval = share_said(flips, decodes)
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
