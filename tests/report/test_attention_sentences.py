"""What the attention page and the patching panel say: written where it is true of the numbers, and not where it is false."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kvinterp.recording import Trace
from kvinterp.study.report.attention import AttentionComparison, attention_comparison
from kvinterp.study.report.attention_page import View


def pattern(length: int, heads: int = 2) -> torch.Tensor:
    """Even attention to all keys before."""
    rows = torch.tril(torch.ones(heads, length, length))
    return rows / rows.sum(-1, keepdim=True)


def recompute(length: int, step: int = 0, heads: int = 2, derived: tuple[str, ...] = ()) -> Trace:
    ids, fed = tuple(range(length - step)), tuple(range(step))
    made = Trace("recompute", ids, tuple(range(step + 1)), fed, {("pattern", 0): [pattern(length, heads)]}, (step,))
    return dataclasses.replace(made, derived=derived)


def cached(length: int, step: int) -> Trace:
    """A prefill, then one row a step."""
    prompt, whole = length - step, pattern(length)
    kept = [whole[:, :prompt, :prompt], *(whole[:, row : row + 1, : row + 1] for row in range(prompt, length))]
    steps = tuple(range(step + 1))
    return Trace("cached", tuple(range(prompt)), steps, tuple(range(step)), {("pattern", 0): kept}, steps)


def said(made: AttentionComparison) -> str:
    return " ".join(made.page.sentences)


def test_which_rows_were_computed_when() -> None:
    made = attention_comparison(cached(6, 2), recompute(6, 2), step=2)
    assert "Step 2: 6 positions, of which 4 are the prompt's." in said(made)
    assert "The first path, cached: rows 0 to 3 from the prefill, rows 4 to 5 from steps 1 to 2, one a step." in said(made)
    assert "The second path, recompute: all 6 rows computed at this step." in said(made)
    first = attention_comparison(cached(4, 0), recompute(4), step=0)
    assert "The first path, cached: all 4 rows computed at this step." in said(first)
    assert "prefill" not in said(first)


def test_how_many_heads_are_shown() -> None:
    assert "All 2 heads are shown, the largest KL first." in said(attention_comparison(recompute(3), recompute(3), step=0))
    few = said(attention_comparison(recompute(3), recompute(3), step=0, most=1))
    assert "1 of 2 heads are shown, those with the largest KL." in few
    assert "All 2" not in few
    one = said(attention_comparison(recompute(3, heads=1), recompute(3, heads=1), step=0))
    assert "The one head that was compared is shown." in one
    assert "heads are shown" not in one


def test_derived_is_said_of_what_is_derived_only() -> None:
    plain = said(attention_comparison(recompute(3), recompute(3), step=0))
    derived = said(attention_comparison(recompute(3), recompute(3, derived=("pattern",)), step=0))
    assert "derived" not in plain
    assert "derived beside it" in derived


def test_what_is_left_out_is_said_of_what_is_left_out_only() -> None:
    whole = said(attention_comparison(recompute(6), recompute(6), step=0))
    assert "brackets" not in whole
    cut = said(attention_comparison(recompute(6), recompute(6), step=0, cells=3))
    # Rows 3, 4 and 5 see 4, 5 and 6 keys evenly, of which 1, 2 and 3 are shown.
    assert f"Positions 3 to 5 are shown; their rows give {(1 / 4 + 2 / 5 + 3 / 6) / 3:.1%} of their attention" in cut
    assert "pooled" not in cut
    pooled = said(attention_comparison(recompute(6), recompute(6), step=0, cells=3, fit="pool"))
    assert "Positions are pooled in blocks of 2" in pooled
    assert "are shown; their rows" not in pooled


@pytest.mark.parametrize(
    ("view", "number", "place"),
    [
        (View(0, 8, 1), 3, ("position 3", "prompt")),
        (View(2, 8, 1), 3, ("position 5", "decoded")),
        (View(0, 8, 3), 0, ("positions 0 to 2", "prompt")),
        (View(0, 8, 3), 1, ("positions 3 to 5", "prompt and decoded")),
        (View(0, 8, 3), 2, ("positions 6 to 7", "decoded")),
    ],
)
def test_whose_positions_a_row_stands_for(view: View, number: int, place: tuple[str, str]) -> None:
    assert view.place(number, prompt=5) == place


def test_a_pooled_block_is_not_called_the_newest_position() -> None:
    pooled = attention_comparison(recompute(6), recompute(6), step=0, cells=3, fit="pool").page.places
    assert [kind for _, kind in pooled] == ["prompt"] * 3
    assert attention_comparison(recompute(6), recompute(6), step=0).page.places[-1] == ("position 5", "newest")
