"""Every sentence that can be written about a result: numbers of which it is true and it is written, and others where it is not.

No model runs: the tables are made up, each to be what one processor or another could give.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from kvinterp.common.numbers import share
from kvinterp.comparison import Comparison
from kvinterp.data import Prompt
from kvinterp.study.findings import findings_of, lines_of
from kvinterp.study.findings.of_comparison import headline_of, rows_of_comparison
from kvinterp.study.reading.answer import notes_of, question_of
from kvinterp.study.reading.precision import ladder_said
from kvinterp.study.report import compare
from kvinterp.study.report.compare import flip_section, ladder_of
from kvinterp.study.report.page import Picture
from synthetic import comparison, failures, result


@pytest.fixture(autouse=True)
def _no_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are of words."""
    monkeypatch.setattr(compare, "pictured", lambda folder, name, figure, caption: Picture(caption, b""))
    for name in ("figure_named", "precision_ladder"):
        monkeypatch.setattr(compare, name, lambda *given: None)


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
    assert "nan" not in text.lower().replace("finance", ""), text


ALIKE = "bitwise equal at all"
ONE = (0,)
SIX = tuple(range(6))

# where() ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("one", "wanted", "unwanted"),
    [
        (made(), ["logits differ at 8 of 10 steps, the earliest step 1", "0 of 2 prompts flip a token",
                  "of 2 prompts, too few for an interval", "Measured on a processor, 1 thread;"], [ALIKE, "up to the flip", "left out"]),
        (made(size=0.0), [f"{ALIKE} 10 steps of 2 prompts, on a processor, 1 thread", "To see a difference try another dtype"],
         ["logits differ", "interval"]),
        (made(examples=ONE), ["of 1 prompt, too few for an interval", "0 of 1 prompt flips"], ["95%"]),
        (made(steps_equal("step != 3")), ["differ at 2 of 10 steps, the earliest step 3"], ["earliest step 1", ALIKE]),
        (made(flip=4, protocol="free"), ["2 of 2 prompts flip a token"], ["up to the flip", "after it"]),
        (made(flip=2, protocol="free"), ["at 4 of 6 steps up to the flip", "nats after it, where the two texts differ"],
         ["at 8 of 10"]),
        (made(flip=2), ["at 8 of 10 steps", "2 of 2 prompts flip"], ["after it", "up to the flip"]),
        (made(both(steps_equal("step < 4"), setting("steps", "max_abs_logit", 20.0, "step == 4")), flip=3, protocol="free"),
         ["bitwise equal at all 8 steps up to the flip", "largest logit difference 0 up to the flip"], ["differ at"]),
        (made(setting("heads", "kl", 0.0)), ["the attention pattern differs nowhere that was compared"],
         ["attention pattern differs most"]),
        (made(setting("kv_positions", "relative_error", np.nan)), ["the cache differs nowhere"], ["cache differs most"]),
        (made(both(setting("heads", "kl", 1e-6))), ["at layer 0, head 0 (and as much at 5 other places)"], []),
        (made(setting("layers", "site", "attn_out")), ["recorded tensors differ most", "site attn_out"],
         ["residual stream"]),
        (made(setting("layers", "relative_l2", 1.0, "layer == 0")), ["site resid_post, layer 0"], ["layer 2."]),
        (made(layers=1), ["residual stream differs nowhere"], ["residual stream differs most"]),
        (made(setting("steps", "kl", np.inf, "step == 1"), examples=ONE), ["no prompt gives a number"], ["95%"]),
    ],
)  # fmt: skip
def test_where(one: Comparison, wanted: list[str], unwanted: list[str]) -> None:
    checked(one.where(), wanted, unwanted)


@pytest.mark.parametrize(
    ("gone", "lets_go", "wanted", "unwanted"),
    [
        # Two prompts of four tokens, four steps more, three layers, one KV head: 48 rows at the last step.
        (0, [], [], ["let go of"]),
        (2, ["a"], ["cached had let go of 25% of its rows by the last step (12 of 48, counted over the layers and KV heads of "
                    "2 prompts)", "K and V are compared on the rows that both paths hold"], ["no row", "recompute had"]),
        (0, ["b"], ["recompute let go of no row by the last step: it had room for all 48"], ["had let go", "cached let go"]),
        (2, ["a", "b"], ["cached had let go of 25%", "recompute let go of no row"], []),
    ],
)  # fmt: skip
@pytest.mark.parametrize("size", [1e-3, 0.0])
def test_where_says_how_many_rows_were_let_go_of(
    gone: int, lets_go: list[str], wanted: list[str], unwanted: list[str], size: float
) -> None:
    one = made(setting("kv_steps", "let_go_a", float(gone), "step == 4"), size=size, lets_go=lets_go)
    checked(one.where(), wanted, unwanted)
    gone_by = [row for row in rows_of_comparison(one) if row["finding"] == "cache rows let go of by the last step"]
    assert [row["path"] for row in gone_by] == [one.provenance["paths"][side] for side in lets_go]
    assert all(row["n"] == 48 for row in gone_by)
    assert [row["estimate"] for row in gone_by][: len(lets_go)] == [
        12 / 48 if side == "a" and gone else 0 for side in lets_go
    ]


def test_where_says_what_was_left_out() -> None:
    left = dataclasses.replace(made(), failures=failures(7))
    checked(left.where(), ["1 prompt is left out; see failures."], [])
    empty = dataclasses.replace(left, steps=left.steps.iloc[:0])
    checked(empty.where(), ["no prompt could be compared", "1 prompt is left out"], ["differ", ALIKE])


# Headline and findings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "wanted", "unwanted"),
    [
        ([made()], ["different logits at 8 of 10 steps, by 9.8 × 10⁻⁴ at most.", "No token changes in 2 decodes."], ["bit for bit"]),
        ([made(size=0.0)], ["the same logits, bit for bit, at all 10 steps.", "No token changes"], ["different logits"]),
        ([made(examples=ONE)], ["No token changes in 1 decode."], []),
        ([made(flip=4, protocol="free")], ["In 2 of 2 decodes another token is chosen, the earliest at step 4."], ["No token"]),
        # What is behind the flip is of two texts.
        ([made(both(steps_equal("step <= 2"), setting("steps", "max_abs_logit", 9.0, "step > 2")), flip=2, protocol="free")],
         ["bit for bit, at all 6 steps.", "another token is chosen"], ["different logits"]),
        ([made(), made(kind="hooked", size=0.0)], ["different logits at 8 of 20 steps"], []),
    ],
)  # fmt: skip
def test_the_headline(given: list[Comparison], wanted: list[str], unwanted: list[str]) -> None:
    checked(" ".join(headline_of(given)), wanted, unwanted)


def found(one: Comparison) -> str:
    return "\n".join(lines_of(findings_of(rows_of_comparison(one))))


CORRELATED = "median rank correlation of KL and"


def by_margin(made: Comparison) -> None:
    made.steps["kl"] = np.where(made.steps["step"] > 0, np.exp(-made.steps["margin_a"]), 0.0)


@pytest.mark.parametrize(
    ("one", "wanted", "unwanted"),
    [
        (made(), ["steps whose logits differ 80% (n = 10 steps): first at step 1.",
                  "prompts in which a token flips 0%", "layer 1: median relative L2 of resid_post", "the first layer above 0",
                  "layer 2, head 0: largest mean KL of an attention head", "K and V vectors of the prompt that differ 0% (n = 192 vectors)",
                  "K and V vectors of the decoded tokens that differ"], [CORRELATED, "behind a flip", "let go"]),
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
        (made(steps=30), [CORRELATED], []),
        (made(by_margin, steps=30, examples=SIX), [f"{CORRELATED} path a's margin, over the steps of a prompt -1 (95% interval -1 to -1"], []),
        (made(both(by_margin, setting("steps", "margin_a", 1.0)), steps=30), [f"{CORRELATED} the step"], ["path a's margin"]),
    ],
)  # fmt: skip
def test_the_findings(one: Comparison, wanted: list[str], unwanted: list[str]) -> None:
    checked(found(one), wanted, unwanted)


def test_what_is_to_be_known_of_the_numbers() -> None:
    def noted(*given: Comparison, **settings: Any) -> str:
        return " ".join(notes_of([result(one, **settings) for one in given]))

    checked(noted(made()), ["In the matched protocol", "of 2 prompts on a processor, 1 thread.", "can be equal where they differ"],
            ["left out", SAME, "numbers can be others"])  # fmt: skip
    # What a policy does is done on every processor.
    for path in ("cached+h2o(0.1,0.1)", "cached[cache=quantized(8,fp8)]"):
        checked(noted(made(paths={"a": path, "b": "cached"})), ["there the numbers can be others"], ["can be equal"])
    checked(noted(dataclasses.replace(made(), failures=failures(7, 8))), ["2 prompts were left out"], [])
    checked(noted(made(), made(protocol="free")), [SAME, "In the free protocol"], [])
    checked(noted(made(), made(protocol="free", seed=1)), [], [SAME])
    checked(noted(made(size=0.0)), ["To see a difference"], [])
    checked(noted(made(), left_out={"pattern": "It has none."}), ["pattern is not recorded, because it has none."], [])


SAME = "Matched and free give the same numbers"


def test_the_question_is_that_of_the_paths() -> None:
    other = {"a": "cached@float64", "b": "cached"}
    checked(question_of([result(made())]), ["decoding from the KV cache"], ["the path"])
    checked(question_of([result(made(paths=other))]), ["the path cached@float64"], ["KV cache"])
    checked(question_of([result(made()), result(made(paths=other))]), ["these 2 pairs of paths"], ["KV cache"])


# The ladder ------------------------------------------------------------------------------------------------------------


def rungs(**models: dict[str, float]) -> dict[str, list[Comparison]]:
    return {name: [made(size=size, dtype=dtype) for dtype, size in sizes.items()] for name, sizes in models.items()}


FALLS = "falls at every step up in precision, as rounding does"
STUCK = "which this table does not explain"
BEGINS = "speaks neither for nor against rounding"
ROUNDS = {"float16": 1e-3, "float32": 1e-7, "float64": 1e-16}


@pytest.mark.parametrize(
    ("given", "wanted", "unwanted"),
    [
        (rungs(m=ROUNDS), ["On the same 2 prompts (matched, native)", "It " + FALLS], [STUCK, BEGINS, "of any model"]),
        (rungs(m=ROUNDS, n=ROUNDS), ["In each model it " + FALLS, "of any model was"], [STUCK, BEGINS]),
        (rungs(m={**ROUNDS, "float64": 0.0}), ["It " + FALLS], [STUCK, BEGINS]),
        # A processor on which one model is exactly equal in float16: no sign against rounding.
        (rungs(m={**ROUNDS, "float16": 0.0}, n=ROUNDS),
         ["In n it " + FALLS, "m: bitwise equal in float16 and", "apart in float32", BEGINS],
         ["In each model", STUCK, "does not fall"]),
        (rungs(m={**ROUNDS, "float16": 0.0}), [BEGINS], ["It falls", "it falls", STUCK]),
        (rungs(m={"float16": 1e-3, "float32": 1e-7, "float64": 1e-6}),
         ["m: it does not fall from float32", STUCK], ["falls at every", BEGINS]),
        (rungs(m={"float16": 1e-3, "float32": 1e-3}), ["m: it does not fall from float16", STUCK], ["falls at"]),
        (rungs(m={"float16": 0.0, "float32": 0.0}), ["In m the paths are bitwise equal in every one of them"],
         ["falls", STUCK, BEGINS]),
        (rungs(m={"float16": 0.0, "float32": 0.0}, n=ROUNDS), ["In n it " + FALLS, "In m the paths are bitwise equal"],
         ["In each model", STUCK, BEGINS]),
        # Given in another order, it is judged from the coarsest to the finest.
        (rungs(m={"float64": 1e-16, "bfloat16": 1e-2, "float32": 1e-7}), ["It " + FALLS], [STUCK]),
        (rungs(m={"float16": 1e-3}), [], ["largest"]),
    ],
)  # fmt: skip
def test_the_ladder(given: dict[str, list[Comparison]], wanted: list[str], unwanted: list[str]) -> None:
    checked(" ".join(ladder_said(given)), wanted, unwanted)


def test_a_ladder_is_of_one_kind_and_protocol() -> None:
    """Two kinds in float32 were one model's two rungs of equal precision, so that nothing could fall."""
    every = [made(), made(kind="hooked"), made(size=1e-7, dtype="float32"), made(size=1e-7, dtype="float32", kind="hooked")]
    found = ladder_of([result(one) for one in every], "float16")
    assert list(found) == ["mistral-mini, native, matched", "mistral-mini, hooked, matched"]
    checked(" ".join(ladder_said(found)), ["In each model it " + FALLS], [STUCK])


# Titles and shares -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "whole", "text"),
    [(0, 5, "0%"), (5, 5, "100%"), (1, 1000, "less than 1%"), (999, 1000, "more than 99%"), (1, 2, "50%")],
)
def test_a_share_is_all_or_nothing_only_where_it_is(part: int, whole: int, text: str) -> None:
    assert share(part, whole) == text


# A token that flips ----------------------------------------------------------------------------------------------------

FLIP = {"flip": 2, "protocol": "free", "paths": {"a": "cached[cache=quantized(8,fp8)]", "b": "recompute"}}
EIGHT = "What the flips changed"


def said_of_flips(one: Comparison, **more: Any) -> str:
    section = flip_section(result(one, **more))
    cells = [cell for row in section.rows for cell in row]
    return " ".join([*section.done, *section.seen, *cells])


def sums(*texts: str) -> list[Prompt]:
    """Prompts that can be judged: their right answer is 7."""
    return [Prompt(id=f"p{n}", text=text, task="arithmetic", answer="7") for n, text in enumerate(texts)]


def decoded(example: int, a: str, b: str) -> Change:
    where = f"example == {example}"
    return both(setting("examples", "text_a", a, where), setting("examples", "text_b", b, where))


RIGHT, WRONG = " 3 + 4 = 7. #### 7", " 3 + 4 = 8. #### 8"


@pytest.mark.parametrize(
    ("one", "wanted", "unwanted"),
    [
        (made(), ["No token flipped in 2 decodes of at most 5 steps"], ["A token flipped", EIGHT, "Shown is"]),
        (made(both(decoded(0, WRONG, RIGHT), decoded(1, RIGHT, WRONG)), **FLIP),
         ["A token flipped in 2 of 2 decodes (95% interval of the share 16% to 100%)",
          "of these 2, path a alone answered right in 1, path b alone in 1, and in 0", "Shown is p0.", "before step 2.",
          "Mean KL over the 2 steps after it"], ["No token flipped"]),
        (made(both(decoded(0, WRONG, WRONG), decoded(1, WRONG, RIGHT)), **FLIP),
         ["path a alone answered right in 0, path b alone in 1, and in 1", "Shown is p1."], ["Shown is p0"]),
        (made(both(decoded(0, RIGHT, RIGHT), decoded(1, RIGHT, RIGHT)), **FLIP),
         ["path a alone answered right in 0, path b alone in 0, and in 2", "Shown is p0."], []),
        (made(both(decoded(0, WRONG, RIGHT), setting("examples", "flip_index", np.nan, "example == 1")), **FLIP),
         ["A token flipped in 1 of 2 decodes", "of it, path a alone answered right in 0, path b alone in 1"], ["p1"]),
        (made(decoded(0, WRONG, RIGHT), examples=ONE, **{**FLIP, "flip": 4}), ["before step 4."], ["steps after it"]),
    ],
)  # fmt: skip
def test_what_is_said_of_a_flip(one: Comparison, wanted: list[str], unwanted: list[str]) -> None:
    checked(said_of_flips(one, prompts=sums("a", "b")), wanted, unwanted)


def test_a_flip_that_cannot_be_judged_says_so() -> None:
    checked(said_of_flips(made(**FLIP)), ["A token flipped in 2 of 2", "not judged"], [EIGHT, " right ", "wrong"])
