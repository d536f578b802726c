"""What is said of what changed is true of its numbers: each sentence where it holds, and not where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from kvinterp.comparison import Comparison
from kvinterp.study.reading.changed import (
    boundary_of,
    changed_said,
    closest,
    flips_of,
    kept_said,
    no_boundary,
    none_changed_said,
    square_said,
)
from kvinterp.study.report.page import Table, Text
from kvinterp.study.report.tokens import changes
from synthetic import comparison


def made(strategy: str = "greedy", flip: int | None = None, examples: int = 3, **more: str) -> Comparison:
    """Ten times as far from another token on path b as on path a, and closest at step 2 of example 1."""
    found = comparison(tuple(range(examples)), steps=5, flip=flip, strategy=strategy, **more)
    near = (found.steps["example"] == 1) & (found.steps["step"] == 2)
    found.steps["boundary_a"] = np.where(near, 0.125, 0.5)
    found.steps["boundary_b"] = 10 * found.steps["boundary_a"]
    return found


def test_no_flip_is_said_with_the_closest_call() -> None:
    said = " ".join(changed_said(made()))
    assert said.startswith("No token flips: both paths choose the same token at all 15 steps of 3 prompts.")
    assert "step 2 of p1: path a's token is 0.125 logits ahead" in said
    drawn = " ".join(changed_said(made("top_p(0.9,1.0)")))
    assert "the number drawn lies 0.125 in cumulative probability from where another token begins" in drawn
    assert "logits ahead" not in drawn


def test_flips_are_counted_with_their_prompts() -> None:
    found = made(flip=2)
    found.steps.loc[found.steps["example"] == 2, ["flipped", "after_flip"]] = False
    (said,) = changed_said(found)
    assert said.startswith("2 of 3 prompts flip a token (95% interval of the share ")
    assert said.endswith("; the other 1 flips none.")
    assert f"at {len(flips_of(found))} of 15 steps on the same text" in said
    assert "No token flips" not in said
    assert "closest" not in said


def test_one_prompt_has_no_interval() -> None:
    (said,) = changed_said(made(flip=2, examples=1))
    assert said == "1 of 1 prompt flips a token, at 1 of 5 steps on the same text."


def test_steps_after_a_flip_are_of_other_texts_only_when_each_path_reads_its_own() -> None:
    free, matched = made(flip=2, protocol="free"), made(flip=2)
    assert (
        "at 3 of 9 steps on the same text. The 6 steps after a flip, of two different texts, are not counted."
        in " ".join(changed_said(free))
    )
    assert "after a flip" not in " ".join(changed_said(matched))
    free.steps.loc[free.steps["after_flip"], "flipped"] = True
    assert len(flips_of(free)) == 3


def test_a_distance_that_is_not_there_is_none() -> None:
    found = made("top_p(0.9,1.0)")
    found.steps[["boundary_a", "boundary_b"]] = np.nan
    assert closest(found) is None
    assert no_boundary(found) == "no other token could be drawn"
    assert "There was no close call: at all 15 steps no other token could be drawn." in changed_said(found)
    found.steps = found.steps.drop(columns=["boundary_a", "boundary_b"])
    assert no_boundary(found) == "not recorded"
    assert len(changed_said(found)) == 1


@pytest.mark.parametrize(
    ("strategy", "unit", "word"),
    [
        ("greedy", "logits", "the logit margin, which decides"),
        ("top_p(0.9,1.0)", "cumulative probability", "the logit margin does not decide"),
        ("top_k(5,1.0)", "cumulative probability", "the logit margin does not decide"),
        ("unknown", "", "not known"),
    ],
)
def test_the_distance_is_that_of_the_strategy_in_use(strategy: str, unit: str, word: str) -> None:
    said, found = boundary_of(made(strategy))
    assert found == unit
    assert word in said


def test_what_the_page_holds_is_said() -> None:
    found = made()
    assert not any("map and the drift of" in text for text in kept_said(found, 15, 1))
    assert "3 of 15 steps" in kept_said(found, 3, 0)[0]
    assert "No attention row was kept" in kept_said(found, 15, 0)[-1]
    assert "1 of 15 steps are here" in kept_said(found, 15, 1)[-1]
    assert "attention_rows.parquet has those of 3 steps." in kept_said(found, 15, 1)[-1]
    assert "attention_rows.parquet" not in kept_said(found, 15, 3)[-1]
    assert none_changed_said({"x": made(), "y": made("top_p(0.9,1.0)")})[1:] == ["They are: x; y."]
    found.heads = found.heads.iloc[:0]
    assert kept_said(found, 15, 0) == [
        "No attention pattern was recorded, so there is no map of heads and no attention to show."
    ]
    assert "protocol='matched'" in square_said(made(protocol="free"))
    assert "protocol" not in square_said(made())


def test_equal_comparisons_are_one_sentence_and_flips_come_first() -> None:
    parts = changes({"one": made(), "other": made(), "third": made(flip=1)})
    said = [part for part in parts if getattr(part, "label", "")]
    assert [part.label for part in said] == ["third"]
    text = " ".join(part.text for part in parts if isinstance(part, Text))
    assert "No token flips in 2 comparisons: both paths choose the same token at all 30 steps of 6 decodes." in text
    assert "The closest call of all, in one, is step 2 of p1: path a's token is 0.125 logits ahead" in text
    assert "They are: one; other." in text
    tables = [part for part in parts if isinstance(part, Table)]
    assert [row[-1] for row in tables[0].rows] == ["third"] * 3
    assert not any(isinstance(part, Table) for part in changes({"": same()}))


def same() -> Comparison:
    """Two paths without any difference."""
    found = made()
    found.steps[["kl", "max_abs_logit"]] = 0.0
    return found
