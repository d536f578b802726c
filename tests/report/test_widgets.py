"""Patching by hand: the bench gives the sweep's numbers, remembers what it may, and the panel shows no traceback."""

from __future__ import annotations

import sys
from typing import Any

import pandas as pd
import pytest

import kvinterp as kv
from kvinterp import metrics
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.patching.planted import Planted
from kvinterp.report.panel import PatchAnswer, PatchBench, patch_panel
from support import Case

PROMPT = "Question: Nora has 8 boxes and Jack has 5. How many more?\nAnswer:"
STEPS = 6


@pytest.fixture(scope="module")
def model(load: Any) -> Any:
    return load(Case("zoo:mistral-mini", "hooked"), "float16")


@pytest.mark.hooked
@pytest.mark.parametrize("direction", ["into-recompute", "into-cached"])
@pytest.mark.parametrize(
    ("site", "layer", "head", "step"),
    [
        ("resid_post", 2, None, "every"),
        ("kv", 3, 1, "every"),
        ("z", 2, 1, 3),
        ("cache_v", 1, None, 2),
        ("pattern", 3, 5, 4),
    ],
)
def test_the_bench_gives_the_numbers_of_a_sweep(
    model: Any, site: str, layer: int, head: int | None, step: int | str, direction: str
) -> None:
    answer = PatchBench(model, STEPS).ask(PROMPT, site, layer, head, step, direction)
    swept = kv.sweep(
        model,
        PROMPT,
        site,
        "single" if head is None else "heads",
        layers=[layer],
        direction=direction,
        steps="every" if step == "every" else (step,),
        max_new_tokens=STEPS,
        controls="none",
        progress="none",
    )
    row = swept.recovery[swept.recovery["head"] == (-1 if head is None else head)].iloc[0]
    assert (answer.d_before, answer.d_after) == (row["d_before"], row["d_after"])
    assert answer.recovery == row["recovery"] or not row["defined"]
    assert len(answer.steps) == row["steps"]


@pytest.mark.hooked
def test_what_does_not_depend_on_the_patch_is_run_once(model: Any) -> None:
    bench = PatchBench(model, STEPS)
    first = bench.ask(PROMPT, "resid_post", 1)
    assert bench.runs == 2, "one run a path"
    for layer in range(model.facts.layers):
        bench.ask(PROMPT, "resid_post", layer, step=2)
    assert bench.runs == 2, "other layers and steps of the same site cost the patched run alone"
    bench.ask(PROMPT, "z", 1, 0)
    assert bench.runs == 3, "another site is recorded once"
    bench.ask("Question: another?\nAnswer:", "resid_post", 1)
    assert bench.runs == 5
    again = bench.ask(PROMPT, "resid_post", 1)
    assert again.steps.equals(first.steps)
    assert again.tokens.equals(first.tokens)


@pytest.mark.hooked
def test_the_last_residual_gives_the_donors_logits(model: Any) -> None:
    """At the last layer nothing follows but the unembedding, which is what the control calls the floor."""
    bench = PatchBench(model, STEPS)
    # So that the paths differ on every machine, and before the unembedding.
    bench._paths["cached"] = kv.Cached(Planted(1, 256.0))
    answer = bench.ask(PROMPT, "resid_post", model.facts.layers - 1)
    assert answer.d_before > 0, "the paths do not differ here: the test shows nothing"
    assert answer.recovery > 0.99
    assert answer.steps["d_before"].idxmax() == answer.steps.index[answer.steps["step"] == answer.shown_step][0]
    assert answer.tokens["donor"].is_monotonic_decreasing


def test_equal_paths_have_no_recovery() -> None:
    empty = pd.DataFrame({name: [] for name in ("token", "text", "donor", "unpatched", "patched")})
    nan, frame = float("nan"), pd.DataFrame({"step": [1]})
    why = metrics.why_undefined(1, 0.0, 0.0)
    shown = PatchAnswer(nan, 0.0, 0.0, frame, empty, 1, 0.1, nan, why).html()
    assert "bitwise equal at the steps patched" in shown
    assert "try another dtype" in shown
    assert "%" not in shown
    assert (
        "Recovery 50.00% of the KL, 40.00% of the L2 distance"
        in PatchAnswer(0.5, 2.0, 1.0, frame, empty, 1, 0.1, 0.4, "").html()
    )
    assert "exactly 0 before, exactly 0 after" in shown


@pytest.mark.hooked
@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"site": "resid_pots"}, "did you mean 'resid_post'"),
        ({"layer": 9}, "layer 9 does not exist"),
        ({"site": "z", "head": 8}, "query head 8 does not exist"),
        ({"site": "kv", "head": 2}, "KV head 2 does not exist"),
        ({"head": 0}, "has no heads"),
        ({"step": 0}, "expected a decode step from 1 on"),
        ({"step": STEPS}, rf"step {STEPS} does not exist: the cached path decodes steps 1 to {STEPS - 1}"),
        ({"direction": "sideways"}, "direction='sideways' was given"),
    ],
)
def test_what_does_not_exist_is_one_sentence(model: Any, asked: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        PatchBench(model, STEPS).ask(PROMPT, **asked)


def test_a_bench_needs_a_decode_step(load: Any) -> None:
    with pytest.raises(InputError, match="at least 2"):
        PatchBench(load(Case("zoo:mistral-mini", "native", "sdpa"), "float16"), 1)


# The panel -------------------------------------------------------------------------------------------------------------


@pytest.mark.hooked
def test_the_panel_answers_as_it_is_changed(model: Any) -> None:
    pytest.importorskip("ipywidgets")
    panel = patch_panel(model, PROMPT, max_new_tokens=STEPS)
    assert panel.answer is not None
    assert "Recovery" in panel.output.value
    panel.controls["site"].value = "z"
    assert [value for _, value in panel.controls["head"].options] == [None, *range(model.facts.query_heads)]
    panel.controls["layer"].value = 2
    panel.controls["head"].value = 3
    panel.controls["step"].value = 4
    asked = PatchBench(model, STEPS).ask(PROMPT, "z", 2, 3, 4)
    assert (panel.answer.d_before, panel.answer.d_after) == (asked.d_before, asked.d_after)
    panel.controls["site"].value = "resid_post"
    assert panel.controls["head"].value is None, "a head is not kept where the site has none"
    panel.controls["direction"].value = "into-cached"
    assert (
        panel.answer.d_before
        == PatchBench(model, STEPS).ask(PROMPT, "resid_post", 2, step=4, direction="into-cached").d_before
    )
    assert "text/html" in panel._repr_mimebundle_()


@pytest.mark.hooked
def test_the_panel_says_what_is_wrong_in_a_sentence(model: Any, load: Any) -> None:
    pytest.importorskip("ipywidgets")
    panel = patch_panel([model, load(Case("zoo:mistral-mini", "native", "sdpa"), "float16")], PROMPT, max_new_tokens=STEPS)
    panel.controls["prompt"].value = "<b>long</b> " * 400
    assert panel.answer is None
    assert panel.output.value.startswith('<p role="alert"><b>')
    assert "shorten the prompt" in panel.output.value
    assert "<b>long" not in panel.output.value
    panel.controls["prompt"].value = PROMPT
    assert panel.answer is not None, "it recovers"
    panel.controls["site"].value = "pattern"
    panel.controls["model"].value = panel.controls["model"].options[1]
    assert panel.answer is None
    assert "attention=" in panel.output.value, "SDPA shows no pattern, and the sentence says what to do"


def test_a_model_that_cannot_be_loaded_is_a_sentence_in_the_panel() -> None:
    pytest.importorskip("ipywidgets")
    panel = patch_panel("zoo:no-such-model", PROMPT)
    assert "no-such-model" in panel.output.value
    assert panel.answer is None
    with pytest.raises(InputError, match="give at least one"):
        patch_panel([])


def test_without_ipywidgets_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ipywidgets", None)
    with pytest.raises(UnsupportedError, match=r"pip install 'kvinterp\[notebook\]'"):
        patch_panel("zoo:mistral-mini", PROMPT)


@pytest.mark.hooked
def test_tokens_stay_text(model: Any) -> None:
    answer = PatchBench(model, STEPS).ask("<i>Question</i>: <script>1</script> 4 + 4\nAnswer:", "resid_post", 0)
    hostile = answer.tokens.assign(text="<script>alert(1)</script>")
    shown = type(answer)(**{**vars(answer), "tokens": hostile}).html()
    assert "<script>" not in shown
    assert "&lt;script&gt;" in shown
