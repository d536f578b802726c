"""What is said of what changed is true of its numbers: each sentence where it holds, and not where it does not."""

from __future__ import annotations

import numpy as np
import pytest

from kvinterp.comparison import Comparison
from kvinterp.study.report.page import Packed, Table
from kvinterp.study.report.tokens import boundary_of, changes, flips_of, kept_said, no_boundary, square_said
from synthetic import comparison


def made(strategy: str = "greedy", flip: int | None = None, examples: int = 3, **more: str) -> Comparison:
    """Ten times as far from another token on path b as on path a, and closest at step 2 of example 1."""
    found = comparison(tuple(range(examples)), steps=5, flip=flip, strategy=strategy, **more)
    near = (found.steps["example"] == 1) & (found.steps["step"] == 2)
    found.steps["boundary_a"] = np.where(near, 0.125, 0.5)
    found.steps["boundary_b"] = 10 * found.steps["boundary_a"]
    return found


@pytest.mark.parametrize(
    ("strategy", "unit", "word"),
    [
        ("greedy", "logits", "ahead of its next best"),
        ("top_p(0.9,1.0)", "cumulative probability", "the number drawn"),
        ("top_k(5,1.0)", "cumulative probability", "the number drawn"),
        ("unknown", "", "not known"),
    ],
)
def test_the_distance_is_that_of_the_strategy_in_use(strategy: str, unit: str, word: str) -> None:
    said, found = boundary_of(made(strategy))
    assert found == unit
    assert word in said


def test_steps_after_a_flip_are_of_other_texts_only_when_each_path_reads_its_own() -> None:
    free, matched = made(flip=2, protocol="free"), made(flip=2)
    free.steps.loc[free.steps["after_flip"], "flipped"] = True
    assert len(flips_of(free)) == len(flips_of(matched)) == 3


def test_a_distance_that_is_not_there_is_none() -> None:
    found = made("top_p(0.9,1.0)")
    assert no_boundary(found) == "no other token could be drawn"
    found.steps = found.steps.drop(columns=["boundary_a", "boundary_b"])
    assert no_boundary(found) == "not recorded"


def test_what_the_page_holds_is_said() -> None:
    found = made()
    assert kept_said(found, 15, 15) == []
    assert kept_said(found, 3, 1) == [
        "Of 15 steps 3 have their map here and 1 their attention (dotted): flips and the largest KL first."
    ]
    found.provenance["derived"] = ("pattern",)
    assert "derived from queries and keys" in kept_said(found, 15, 15)[0]
    found.heads = found.heads.iloc[:0]
    assert kept_said(found, 15, 0) == ["No attention pattern was recorded."]
    found.layers = found.layers.iloc[:0]
    assert kept_said(found, 0, 0) == ["No activation was recorded."]
    assert "protocol='matched'" in square_said(made(protocol="free"))
    assert "protocol" not in square_said(made())


def test_flips_come_first_and_without_one_the_largest_kl() -> None:
    table, *_, packed = (
        part for part in changes({"one": made(), "third": made(flip=1)}) if isinstance(part, Table | Packed)
    )
    assert list(packed.blobs) == ["third", "one"]
    assert [row[-1] for row in table.rows] == ["third"] * 3 + ["one"] * 3
    kl = made().steps.groupby("example")["kl"].max()
    (alone, _) = (part for part in changes({"": made()}) if isinstance(part, Table | Packed))
    assert [next(iter(row[0].to)).partition(",")[0] for row in alone.rows] == [
        f"p{n}" for n in kl.sort_values().index[::-1]
    ]
    assert not any(isinstance(part, Table) for part in changes({"": same()})), "two paths without any difference"
    nothing = made()
    nothing.steps = nothing.steps.iloc[:0]
    assert changes({"": nothing}) == []


def same() -> Comparison:
    """Two paths without any difference."""
    found = made()
    found.steps[["kl", "max_abs_logit"]] = 0.0
    return found
