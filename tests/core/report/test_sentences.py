"""Every sentence that can be written about a result: numbers of which it is true and it is written, and others where it is not.

No model runs: the tables are made up, each to be what one processor or another could give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvinterp.comparison import Comparison
from kvinterp.comparison.findings import headline_of, rows_of_comparison
from kvinterp.findings import findings_of, lines_of
from synthetic import comparison, failures

Change = Callable[[Comparison], None]


def made(change: Change | None = None, **settings: Any) -> Comparison:
    made = comparison(**settings)
    if change is not None:
        change(made)
    return made


def setting(table: str, column: str, value: Any, where: str | None = None) -> Change:
    """Sets a column, at the rows of a query or at all."""

    def change(made: Comparison) -> None:
        frame = getattr(made, table)
        rows = frame.index if where is None else frame.query(where).index
        frame.loc[rows, column] = value

    return change


def both(*changes: Change) -> Change:
    def change(made: Comparison) -> None:
        for one in changes:
            one(made)

    return change


def steps_equal(where: str) -> Change:
    return both(*(setting("steps", name, 0.0, where) for name in ("kl", "js", "max_abs_logit", "rms_logit")))


def checked(text: str, wanted: list[str], unwanted: list[str]) -> None:
    text = text.replace("\u00a0", " ").replace("\u202f", " ")
    for sentence in wanted:
        assert sentence in text, f"{sentence!r} is not in:\n{text}"
    for sentence in unwanted:
        assert sentence not in text, f"{sentence!r} is in:\n{text}"
    assert "nan" not in text.lower().replace("nan first appeared", ""), text


ALIKE = "give the same logits, bit for bit, at all"
ONE = (0,)

# where() ---------------------------------------------------------------------------------------------------------------


def test_where_says_what_was_left_out() -> None:
    left = dataclasses.replace(made(), failures=failures(7))
    checked(left.where(), ["p7: prompt left out has no number: path cached: NaN first appeared in layer 1."], [])
    empty = dataclasses.replace(left, steps=left.steps.iloc[:0])
    checked(empty.where(), ["no prompt could be compared", "p7: prompt left out"], ["differ", ALIKE])


# Headline and findings -------------------------------------------------------------------------------------------------


def found(one: Comparison) -> str:
    return "\n".join(lines_of(findings_of(rows_of_comparison(one))))


@pytest.mark.parametrize(
    ("one", "wanted", "unwanted"),
    [
        (made(), ["steps whose logits differ 80% (n = 10 steps): first at step 1.",
                  "prompts in which a token flips 0%", "layer 1: median relative L2 of resid_post", "the first layer above 0",
                  "layer 2, head 0: largest mean KL of an attention head", "K and V vectors of the prompt that differ 0% (n = 192 vectors)",
                  "K and V vectors of the decoded tokens that differ"], ["behind a flip", "let go"]),
        (made(size=0.0), ["steps whose logits differ 0%", "largest difference of a logit 0 (n = 10 steps)",
                          "layer 2: median relative L2 of resid_post 0", "largest mean KL of an attention head 0 nats"], ["first"]),
        (made(examples=ONE), ["median of a prompt's mean KL", "n = 1 prompt)"], ["layer 1: median relative L2 of resid_post (95%"]),
        (made(steps_equal("step != 4 or example == 1")), ["differ 10%", "first at step 4"], []),
        (made(strategy="top_p(1.0,2.0)"), [], ["smallest margin"]),
        (made(setting("steps", "margin_a", np.nan)), [], ["smallest margin"]),
        (made(setting("steps", "margin_b", 0.0123, "example == 1 and step == 2")), ["smallest margin of a decision 0.0123 logits"], []),
        (made(flip=2, protocol="free"), ["mean KL behind a flip, where the two texts differ", "(n = 4 steps)",
                                         "token flips 100%", "the earliest at step 2"], []),
        (made(setting("layers", "relative_l2", 0.0)), ["layer 2: median relative L2 of resid_post 0"], ["first layer above"]),
        (made(setting("layers", "site", "mlp_out")), ["relative L2 of mlp_out"], ["resid_post"]),
        (made(setting("layers", "relative_l2", np.nan)), [], ["relative L2 of"]),
        (made(setting("heads", "kl", 1.0, "layer == 0 and head == 1")), ["layer 0, head 1: largest mean KL"], []),
        (made(setting("kv_positions", "differing", 1, "position == 0 and layer == 0 and tensor == 'K'")),
         ["K and V vectors of the prompt that differ"], ["prompt that differ 0%"]),
    ],
)  # fmt: skip
def test_the_findings(one: Comparison, wanted: list[str], unwanted: list[str]) -> None:
    checked(found(one), wanted, unwanted)


@pytest.mark.parametrize(
    ("between", "positions", "wanted"),
    [
        (0.001, 10, "About the size of rounding: two recomputations of the same positions differ by 0.001."),
        # The largest of ten steps may be twice that of five positions.
        (0.0006, 5, "About the size of rounding: two recomputations of the same positions differ by 6.0 × 10⁻⁴."),
        (0.0006, 10, "That is 1.6 times what two recomputations of the same positions differ by (6.0 × 10⁻⁴)."),
        (1e-6, 5, "That is 960 times what two recomputations of the same positions differ by (1.0 × 10⁻⁶)."),
        (0.0, 5, "Two recomputations of the same positions give the same bits."),
    ],
)
def test_a_difference_is_said_beside_that_of_two_recomputations(between: float, positions: int, wanted: str) -> None:
    one = made(both(steps_equal("step != 1"), setting("steps", "max_abs_logit", 9.6e-4, "step == 1")))
    assert len(one.steps) == 10
    null = {"max_abs_logit": between, "unit": 1e-3, "positions": positions, "dtype": "float16", "prompts": 2}
    one.provenance["null"] = null
    sentences = headline_of(one)
    assert [each.replace("\u00a0", " ") for each in sentences[1:2]] == [wanted]
    assert sentences[-1].endswith("kvinterp audit says whether that is rounding or a bug.")


# Titles and shares -----------------------------------------------------------------------------------------------------
