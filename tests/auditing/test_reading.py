"""Every sentence of a verdict, on made-up numbers: written where it is true of them, and not where it is false."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

import pandas as pd
import pytest
import torch

from kvinterp.auditing.accounting import Account
from kvinterp.auditing.causes import ErrorCause
from kvinterp.auditing.checks import NUMBERS, Check
from kvinterp.auditing.first_difference import DifferingTensor
from kvinterp.auditing.judging import Judged
from kvinterp.auditing.ladder import LOCAL, ONE_BY_ONE, STEPS, PrecisionRun
from kvinterp.auditing.page import page
from kvinterp.auditing.programs.outcome import PLAIN, RIGHT
from kvinterp.auditing.programs.reach import Reach
from kvinterp.auditing.reading import Evidence


def rung(
    dtype: torch.dtype = torch.float32,
    error: float = 0.0,
    logits: float = 0.0,
    null: float = 0.0,
    fixed: PrecisionRun | None = None,
    **more: Any,
) -> PrecisionRun:
    local = pd.DataFrame([(0, 9, 9, 10, 9, 0, "output", error, null)], columns=list(LOCAL))
    steps = pd.DataFrame([(0, 9, 9, logits, logits, logits / 10, 0.0, null)], columns=list(STEPS))
    name = str(dtype).removeprefix("torch.")
    empty = pd.DataFrame(columns=list(LOCAL))
    layers = pd.DataFrame({"layer": [0], "max_abs": [logits], "mean_abs": [logits], "relative": [logits]})
    made = PrecisionRun(name, dtype, steps, local, empty, layers, pd.DataFrame(), {}, "", 10.0, fixed=fixed)
    return dataclasses.replace(made, **more)


def finding(**more: Any) -> DifferingTensor:
    return DifferingTensor(
        **{"layer": 1, "tensor": "K", "module": "m.1.attn", "position": 9, "step": 9, "error": 1e-3, **more}
    )


def judged(word: str = "", kernels: str = "fixed order", **more: Any) -> Judged:
    cause = ErrorCause(word, **more.pop("cause", {}))
    return Judged(finding(**more), cause, kernels, ONE_BY_ONE)


def evidence(*rungs: PrecisionRun, **more: Any) -> Evidence:
    made = Evidence(
        f"a model (native, {rungs[0].name})", rungs[0].name, 64, {r.name: r for r in rungs}, exercised="what was run."
    )
    made.accounts = {r.name: Account(0.0, 0.0, "fixed order") for r in rungs}
    return dataclasses.replace(made, **more)


def told_positions(word: str) -> list[Check]:
    other = Check("mask and positions given", "right", "tried.")
    return [Check("decode step", "wrong", "off.", hint=NUMBERS if word == "right" else ""), other]


CLEAN = rung(error=1e-7, logits=1e-6, null=1e-6, fixed=rung())


@pytest.mark.parametrize(
    ("seen", "word", "code", "said", "unsaid"),
    [
        (evidence(rung(fixed=rung())), "equal", 0, "Every logit of all 1 steps is bitwise the same", "FAIL"),
        (evidence(CLEAN), "rounding", 0, "all 1 checks and 1 steps are bitwise equal", "Every logit"),
        # A fixed order that still differs in the logits is not said to be bitwise equal.
        (
            evidence(rung(error=1e-7, logits=1e-6, fixed=rung(logits=1e-6))), "rounding", 0,
            "with a fixed order 0 unit roundoffs are left", "bitwise equal.",
        ),
        (
            evidence(CLEAN, accounts={"float32": Account(1e-3, 0.0, "fixed order", 0, 9)}), "unexplained", 1,
            "no part differs by a bit", "of the parts' sizes",
        ),
        (
            evidence(CLEAN, accounts={"float32": Account(1e-1, 1e-3, "native", 0, 9)}), "unexplained", 1,
            "errors of the parts' sizes change them by at most 1.0e-03", "no part differs by a bit",
        ),
        (evidence(CLEAN, judged={"float32": [judged()]}), "bug", 1, "K of layer 1 (m.1.attn) is wrong", "PASS"),
        # Programs say whether positions that are told take it away.
        (
            evidence(CLEAN, judged={"float32": [judged()]}, checks=told_positions("right")), "bug", 1,
            "numbers cached tokens wrongly", "hint: new keys",
        ),
        (
            evidence(CLEAN, judged={"float32": [judged()]}, checks=told_positions("wrong")), "bug", 1,
            "hint: new keys", "numbers cached tokens wrongly",
        ),
        (evidence(CLEAN, judged={"float32": [judged("rounding")]}), "rounding", 0, "PASS", "is wrong"),
        (evidence(CLEAN, judged={"float32": [judged("unknown", cause={"detail": "no float64"})]}), "cannot-tell", 3,
         "could not be tried: no float64", "FAIL"),
        (evidence(CLEAN, random=0.5), "cannot-tell", 3, "something else each time", "PASS"),
        (evidence(CLEAN, judged={"float32": [judged("kernel", "native")]}), "kernel", 0, "a kernel is coarse there", "FAIL"),
        # A cast above the precision that serves is a note; one below it fails.
        (
            evidence(CLEAN, rung(torch.float64, fixed=rung(torch.float64)),
                     judged={"float64": [judged("cast", cause={"dtype": "float32", "module": "m.1.norm"})]}),
            "rounding", 0, "note: float32 inside (m.1.norm): no better than float32 in float64", "casts to",
        ),
        (
            evidence(CLEAN, judged={"float32": [judged("cast", cause={"dtype": "bfloat16", "module": "m.1.attn"})]}),
            "hidden-cast", 1, "m.1.attn casts to bfloat16, and without that cast nothing differs", "note: bfloat16",
        ),
        (
            evidence(CLEAN, judged={"float32": [judged("choice", "native", tensor="expert choice")]}), "rounding", 0,
            "tips the choice between nearly equal experts in float32 (layer 1)", "FAIL",
        ),
        (
            evidence(CLEAN, checks=[Check("left padding", "wrong", "off by 1.", step=9, layer=0, tensor="attention mask")]),
            "bug", 1, "left padding is wrong: off by 1. First apart: attention mask of layer 0.", "right, each",
        ),
        (
            evidence(CLEAN, checks=[Check("batch", "right", ""), Check("window", "not run", "")]), "rounding", 0,
            "right, each in so many programs: batch (0)\nnot reached: window", "cannot tell",
        ),
        (evidence(rung(nonfinite={"path": "recompute", "value": "NaN", "position": 0, "module": "m.0"})), "overflow", 1,
         "NaN first appears on the recompute path in m.0 in float32 at position 0", "wider range"),
        (evidence(rung(grid="bfloat16"), grid_module="lm_head"), "wrong-dtype", 1, "exactly a bfloat16 number", "PASS"),
    ],
)  # fmt: skip
def test_the_word_and_its_sentence(seen: Evidence, word: str, code: int, said: str, unsaid: str) -> None:
    verdict = seen.judge()
    assert (verdict.verdict, verdict.exit_code) == (word, code), verdict.reading
    assert said in verdict.reading
    assert unsaid not in verdict.reading
    first = {0: "PASS", 1: "FAIL", 3: "CANNOT TELL"}[code]
    assert verdict.reading.startswith(f"{first}  {word}  a model (native, float32), ")


def test_a_symptom_that_was_asked_for_leads() -> None:
    """It stood at the end of the first line, as one of "7 off without a cache too" behind the word PASS."""
    off = Check("left padding", PLAIN, "without a cache the same columns are off by 0.3.", program="rows(1)+feed(2)")
    asked = evidence(CLEAN, checks=[dataclasses.replace(off, asked="rows(5)+feed(22)")]).judge()
    first, second, *_ = asked.reading.splitlines()
    assert first.startswith("FAIL  not-the-cache")
    assert second.startswith(
        "not the cache: left padding changes the answer with and without one: without a cache the same"
    )
    assert asked.exit_code == 1, "whoever asked about the use has a wrong answer"
    allowed = evidence(CLEAN, checks=[dataclasses.replace(off, asked="rows(5)+feed(22)")]).judge(("not-the-cache",))
    assert allowed.exit_code == 0
    unasked = evidence(CLEAN, checks=[off]).judge()
    assert unasked.reading.startswith("PASS  rounding")
    assert unasked.exit_code == 0


def test_scripts_of_others_ask_a_verdict_by_its_earlier_name() -> None:
    verdict = evidence(CLEAN).judge()
    assert verdict.told() == verdict.as_dict()
    assert verdict.told()["verdict"] == "rounding"


def test_a_pass_says_how_far_it_went() -> None:
    """No default run passed position 130, and faults from 256 on were behind "35 of 35 uses tried"."""
    near = Check("prompt", RIGHT, "", reach=Reach(positions=12, context=2048, rows=17, turns=1))
    far = Check("decode step", RIGHT, "", reach=Reach(1103, 2048, 1, 12, 48, 3))
    verdict = evidence(CLEAN, checks=[near, far]).judge()
    said = "to position 1,103 of 2,048, 17 rows, 12 columns taken back, 48 at once, 3 turns"
    assert verdict.reading.splitlines()[0] == f"PASS  rounding  a model (native, float32), 2 of 2 uses tried, {said}"
    assert verdict.reach == Reach(1103, 2048, 17, 12, 48, 3)
    assert json.loads(verdict.to_json())["reach"]["positions"] == 1103
    assert str(Reach(positions=12, rows=1)) == "to position 12, 1 row", "what was not tried is left out"


@pytest.mark.parametrize(("beside", "said"), [({"Q"}, "Q alone is wrong"), ({"Q", "K"}, "Q and K are wrong")])
def test_a_hint_says_what_is_wrong_beside_the_first_difference(beside: set[str], said: str) -> None:
    """Positions that are wrong turn queries and keys: "Q alone is wrong" stood beside a first difference in K."""
    wrong = dataclasses.replace(judged(tensor="Q"), beside=frozenset(beside))
    assert f"hint: {said}" in evidence(CLEAN, judged={"float32": [wrong]}).judge().reading


def test_the_size_of_an_error_is_one_number_or_a_range_and_says_of_what() -> None:
    """It was "a relative error of 6.6e-01" for each of four precisions, beside "off by 0.0021 of its largest logit"."""
    wide = rung(torch.float64, fixed=rung(torch.float64))
    one, other = judged(tensor="Q"), judged(tensor="Q")
    one, other = (
        dataclasses.replace(each, finding=dataclasses.replace(each.finding, error=size))
        for each, size in ((one, 0.66), (other, 0.0123))
    )
    reading = evidence(CLEAN, wide, judged={"float32": [one], "float64": [other]}).judge().reading
    assert "off by 0.012 to 0.66 of its row's largest number in float32 and float64. " in reading
    assert (
        "off by 0.66 of its row's largest number in float32. " in evidence(CLEAN, judged={"float32": [one]}).judge().reading
    )


def test_the_page_leads_with_the_likely_cause() -> None:
    """It stood under a fold, behind a sentence of four precisions, and the ladder came before the uses that are wrong."""
    off = Check("decode step", "wrong", "row 0 is off by 0.0034 of its largest logit.", 0.0034, 1e-8, layer=0, tensor="K")
    wrong = dataclasses.replace(judged(tensor="Q"), beside=frozenset({"Q", "K"}))
    verdict = evidence(CLEAN, judged={"float32": [wrong]}, checks=[off]).judge()
    html = page(dataclasses.replace(verdict, provenance={"model": "a model"}))
    box = html[html.index('<div class="answer') : html.index("</div>", html.index('<div class="answer'))]
    sentences = [re.sub("<.*?>", "", each) for each in box.split("<p>")]
    assert sentences[0].startswith("FAIL")
    assert sentences[1] == "Q and K are wrong: the new token&#39;s position, or RoPE"
    assert sentences[2].startswith("Given equal inputs, Q of layer 1")
    assert "hint:" not in html
    assert html.index("row 0 is off by 0.0034") < html.index("Does the difference fall with precision?")


def test_what_is_allowed_passes_and_says_so() -> None:
    verdict = evidence(CLEAN, judged={"float32": [judged("cast", cause={"dtype": "bfloat16"})]}).judge(("hidden-cast",))
    assert verdict.exit_code == 0
    assert verdict.reading.startswith("PASS  hidden-cast (allowed)")
