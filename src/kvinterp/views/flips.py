"""The report's section on a token that flips: in how many decodes, what it changed, and one of them to look at."""

from __future__ import annotations

from typing import Any

import pandas as pd
from scipy import stats

from kvinterp.comparison.where import prompts_said
from kvinterp.data import TASKS, score
from kvinterp.results import Result
from kvinterp.views.section import Column, Section
from kvinterp.views.words import kind_of, model_of, number

__all__ = ["flip_section"]


def flip_section(result: Result) -> Section:
    """What happens where a token flips, on a comparison that is made to show it and counts nowhere else on the page.

    Args:
        result: A comparison in the free protocol, with tokens chosen greedily.
    """
    about, examples = result.comparison.about, result.comparison.examples
    a, b = about["paths"]["a"], about["paths"]["b"]
    done = [
        f"A pair of paths of its own, which counts in nothing else on this page: path a, {a}, and path b, {b}, of "
        f"{model_of(result)}, {kind_of(result)}, in {about['dtype']}, on {prompts_said(len(examples))}. Each path is fed its own "
        "tokens, the most likely ones, so that after a flip the two texts differ."
    ]
    flipped = examples[examples["flip_index"].notna()]
    if flipped.empty:
        longest = int(examples["steps"].max()) if len(examples) else 0
        said = f"No token flipped in {len(examples)} decodes of at most {longest} steps: there is no case to show."
        return Section("A token that flips", done, [said])
    rows = [_judged(result, row) for row in flipped.to_dict("records")]
    shown = min(rows, key=lambda row: (row["right_a"] == row["right_b"], row["flip_index"], row["example"]))
    seen = [_count(len(flipped), len(examples)), *_changed(rows), *_shown(result, shown)]
    head = [Column("prompt, path"), Column("decoded", text_block=True), Column("answer")]
    table = [
        [f"{shown['id']}, {side}: {path}", str(shown[f"text_{side}"]), _ANSWER[shown[f"right_{side}"]]]
        for side, path in (("a", a), ("b", b))
    ]
    return Section("A token that flips", done, seen, head=head, rows=table)


_ANSWER = {True: "right", False: "wrong", None: "not judged"}


def _judged(result: Result, row: dict[str, Any]) -> dict[str, Any]:
    """A row of the examples with whether each path answered right; None where the prompt has nothing to judge it by."""
    prompt = {prompt.id: prompt for prompt in result.prompts}.get(row["id"])
    known = prompt is not None and prompt.task in TASKS
    right = {f"right_{s}": score(prompt, str(row[f"text_{s}"])) if known and prompt else None for s in ("a", "b")}
    return {**row, **right}


def _count(flips: int, decodes: int) -> str:
    interval = stats.binomtest(flips, decodes).proportion_ci(method="wilson")
    return (
        f"A token flipped in {flips} of {decodes} decode{'s' * (decodes != 1)} (95% interval of the share "
        f"{interval.low:.0%} to {interval.high:.0%})."
    )


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
