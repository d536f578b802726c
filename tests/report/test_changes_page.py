"""What changed, as a reader finds it: a token is clicked and its heads appear, a head is clicked and its attention appears.

Every number that is read from the page is held against the tables.
"""

from __future__ import annotations

import base64
import gzip
import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from browser import EVIL, IN_A_BROWSER, Opened, check_markup, check_page

from kvinterp.comparison import Comparison
from kvinterp.study.experiments.behaviour import flipped_decodes
from kvinterp.study.report.experiment import write_experiment
from kvinterp.study.report.page import render
from kvinterp.study.report.tokens import SCRIPTS, SHEETS, changes, packed_comparison, three_digits, tokens_fragment
from synthetic import comparison, comparison_page

pytestmark = IN_A_BROWSER


def written(folder: Path, **found: Comparison) -> Path:
    path = folder / "page.html"
    one = {"": next(iter(found.values()))} if len(found) == 1 else found
    path.write_text(render("report", "x", changes(one), scripts=SCRIPTS, sheets=SHEETS), encoding="utf-8")
    return path


def drawn(opened: Opened) -> Any:
    opened.page.wait_for_selector("#kv-changes[data-drawn]")
    return opened.page


def read(text: str) -> float:
    """A number as the page writes it."""
    return float(text.replace("−", "-"))


def told(text: str, name: str) -> float:
    """The number after a name in what a cell says of itself."""
    found = re.search(rf"{re.escape(name)} (−?[0-9.]+(?:e[-+]?[0-9]+)?)", text)
    assert found, text
    return read(found.group(1))


def alike(shown: float, wanted: float) -> bool:
    """Whether a number was shown to three digits."""
    return float(f"{shown:.2e}") == float(f"{wanted:.2e}")


def tokens_of(page: Any) -> Any:
    return page.locator("#kv-changes .kv-strips").first.locator("[data-at]")


def test_a_token_shows_its_heads_and_a_head_its_attention(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    made = comparison((0, 1), steps=5, flip=3, heads=2)
    opened = page_opened(written(tmp_path, one=made))
    page = drawn(opened)
    assert page.locator(".kv-detail h3").inner_text() == "p0, step 3"
    for step in (1, 4):
        tokens_of(page).nth(step).click()
        assert page.locator(".kv-detail h3").inner_text() == f"p0, step {step}"
        table = made.heads[(made.heads["example"] == 0) & (made.heads["step"] == step)].set_index(["layer", "head"])["kl"]
        for (layer, head), kl in table.items():
            said = page.locator(f".kv-heat [data-at='{layer} {head}']").get_attribute("aria-label")
            assert alike(told(said, f"layer {layer}, head {head}:"), kl), said
        drift = made.layers[(made.layers["example"] == 0) & (made.layers["step"] == step)]["relative_l2"]
        shown = page.locator(".kv-bars .kv-number").all_inner_texts()
        assert all(alike(read(text), wanted) for text, wanted in zip(shown, drift, strict=True))
    page.locator(".kv-heat [data-at='1 1']").click()
    kept = made.attention_rows
    kept = kept[(kept["example"] == 0) & (kept["step"] == 4) & (kept["layer"] == 1) & (kept["head"] == 1)]
    strip = page.locator(".kv-attention .kv-strip").first.locator("[data-at]")
    assert strip.count() == len(kept)
    for at, row in enumerate(kept.to_dict("records")):
        said = strip.nth(at).get_attribute("aria-label")
        wanted = {": a": row["a"], ", b": row["b"], ", a − b": float(row["a"]) - float(row["b"])}
        assert all(alike(told(said, name), value) for name, value in wanted.items()), (said, wanted)
    # Layer 0's rows were not kept, and the page says so and how to see them.
    page.locator(".kv-heat [data-at='0 0']").click()
    assert (
        "kv.attention_comparison(both, prompts[0], model=model, example=0, step=4, layers=[0])"
        in page.locator(".kv-attention").inner_text()
    )
    opened.quiet()


def test_the_keyboard_does_what_the_mouse_does(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    page = drawn(page_opened(written(tmp_path, one=comparison((0, 1), flip=2))))
    tokens_of(page).nth(0).focus()
    for key in ("ArrowRight", "Enter"):
        page.keyboard.press(key)
    assert page.locator(".kv-detail h3").inner_text() == "p0, step 1"
    page.keyboard.press("End")
    page.keyboard.press(" ")
    assert page.locator(".kv-detail h3").inner_text() == "p0, step 4"
    page.locator("#flips a").nth(1).click()
    assert page.locator(".kv-detail h3").inner_text() == "p1, step 2"


def test_after_a_flip_the_texts_are_others_and_have_no_colour(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    made = comparison((0,), steps=5, flip=2, protocol="free")
    page = drawn(page_opened(written(tmp_path, one=made)))
    lines = page.locator("#kv-changes .kv-strips").first.locator(".kv-strip")
    assert lines.count() == 2
    for line in (0, 1):
        looks = [cell.get_attribute("class") or "" for cell in lines.nth(line).locator("[data-at]").all()]
        assert ["kv-other" in look for look in looks] == [False] * 3 + [True] * 2
        assert ["kv-shade" in look or "kv-zero" in look for look in looks] == [True] * 3 + [False] * 2
        assert ["kv-flip" in look for look in looks] == [False, False, True, False, False]
    colour = made.steps.loc[~made.steps["after_flip"] & (made.steps["kl"] > 0), "kl"]
    key = page.locator("#kv-changes > div > .kv-legend, #kv-changes .kv-legend").first.inner_text()
    ends = [read(text) for text in re.findall(r"[0-9.]+e-[0-9]+|0\.[0-9]+", key)]
    assert alike(ends[0], colour.min())
    assert alike(ends[1], colour.max())


def test_several_comparisons_are_chosen_among(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    page = drawn(page_opened(written(tmp_path, plain=comparison((0,)), flipping=comparison((0, 1), flip=1))))
    select = page.locator("#kv-changes select").first
    assert select.locator("option").all_inner_texts() == ["flipping", "plain"]
    prompts = page.locator("#kv-changes select")
    assert prompts.nth(1).locator("option").first.inner_text() == "p0: flips at step 1"
    assert page.locator(".kv-flip").count() == 2, "the token, and the legend's own"
    select.select_option("1")
    # A function to wait for is evaluated as a text, which the page's policy forbids.
    page.locator(".kv-flip").nth(1).wait_for(state="detached")
    assert page.locator(".kv-flip").count() == 1
    assert "largest KL" in page.locator("#kv-changes select").nth(1).locator("option").first.inner_text()


def test_what_was_not_recorded_is_said(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    made = comparison((0,))
    for name in ("heads", "layers", "attention_rows", "tokens"):
        setattr(made, name, getattr(made, name).iloc[:0])
    made.steps = made.steps.drop(columns=["probability_a", "probability_b"], errors="ignore")
    opened = page_opened(written(tmp_path, one=made))
    page = drawn(opened)
    text = page.locator("#kv-changes").inner_text()
    assert "No activation was recorded." in text
    assert "not recorded" in page.locator(".kv-facts").inner_text()
    opened.quiet()


@pytest.mark.parametrize("protocol", ["matched", "free"])
def test_the_page_in_every_width_and_scheme(page_opened: Callable[..., Opened], tmp_path: Path, protocol: str) -> None:
    made = comparison((0, 1), flip=2, protocol=protocol)
    made.examples["id"] = made.examples["id"] + EVIL
    made.tokens["text"] = EVIL

    def prepared(page: Any) -> None:
        page.wait_for_selector("#kv-changes[data-drawn]")
        page.locator(".kv-heat [data-at='1 1']").click()

    path = written(tmp_path, one=made)
    check_page(page_opened, path, prepared=prepared)
    opened = page_opened(path)
    drawn(opened)
    check_markup(opened)


def test_the_page_of_compare_has_it(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    opened = page_opened(comparison_page(tmp_path, comparison((0, 1), flip=2)))
    assert drawn(opened).locator("#flips tbody tr").count() == 2
    opened.quiet()


def test_a_notebook_shows_it_in_a_frame(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    path = tmp_path / "frame.html"
    path.write_text(f"<!DOCTYPE html><body>{tokens_fragment(comparison((0,), flip=1))}", encoding="utf-8")
    opened = page_opened(path)
    frame = opened.page.frame_locator("iframe")
    frame.locator("#kv-changes[data-drawn]").wait_for()
    frame.locator("#kv-changes .kv-strips [data-at]").nth(2).click()
    assert frame.locator(".kv-detail h3").inner_text() == "p0, step 2"
    opened.quiet()


# What the page holds ---------------------------------------------------------------------------------------------------


def test_a_number_is_kept_to_three_digits(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    sizes = 10.0 ** rng.uniform(-23, 11, 300) * (1 + rng.uniform(size=300))
    edges = [0.0, 1.0, 9.996, 0.09994999, 999.6, 1e-23, 5e-324, 1e300, math.inf, math.nan, -1.0, -9.996e-5, -math.inf]
    numbers = np.array([*edges, *sizes, *-sizes, *10.0 ** np.arange(-20, 10)])
    assert three_digits(np.array([[1.0, math.nan], [2.0, 3.0004]])) == [[1, None], [2, 3]]
    assert three_digits(np.full((0, 2, 3), 1.0)) == []
    assert three_digits(np.full((2, 1), 1.0)) == [[1], [1]]
    text = json.dumps({"said": "</script> NaN", "numbers": three_digits(numbers)}, allow_nan=False)
    path = tmp_path / "numbers.html"
    more = render("report", "x", [], scripts=("draw",))
    path.write_text(more.replace("</script>", "\nObject.assign(globalThis, { unpacked, number, known });</script>"))
    path.write_text(re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", path.read_text()))
    page = page_opened(path).page
    said, shown, there = page.evaluate(
        "async (text) => { const { said, numbers } = await unpacked(text);"
        " return [said, numbers.map(number), numbers.map(known)]; }",
        base64.b64encode(gzip.compress(text.encode())).decode(),
    )
    assert said == "</script> NaN"
    assert shown[:6] == ["0", "1", "10", "0.0999", "1000", "1.00e-23"]
    assert shown[8:13] == ["∞", "no value", "−1", "−1.00e-4", "−∞"]
    assert there == np.isfinite(numbers).tolist()
    assert all(alike(read(text), number) for text, number in zip(shown[13:], numbers[13:], strict=True))


def test_where_there_is_no_room_flips_and_the_largest_kl_come_first(
    page_opened: Callable[..., Opened], tmp_path: Path
) -> None:
    made = comparison((0, 1), steps=5, flip=3)
    size = made.heads.groupby(["example", "step"]).size().iloc[0] + made.layers.groupby(["example", "step"]).size().iloc[0]
    from kvinterp.study.report import tokens

    few = packed_comparison(made, maps=int(3 * size), rows=0)
    assert few == packed_comparison(made, maps=int(3 * size), rows=0)
    parts = [
        part if not isinstance(part, tokens.Packed) else tokens.Packed(part.name, {"": few}) for part in changes({"": made})
    ]
    path = tmp_path / "few.html"
    path.write_text(render("report", "x", parts, scripts=SCRIPTS, sheets=SHEETS), encoding="utf-8")
    page = drawn(page_opened(path))
    assert "Of 10 steps 3 have their map here" in page.locator("#kv-changes").inner_text()
    largest = made.steps[~made.steps["flipped"]].sort_values("kl").iloc[-1]
    for example, step, there in [
        (0, 3, True),
        (1, 3, True),
        (int(largest["example"]), int(largest["step"]), True),
        (0, 0, False),
    ]:
        page.evaluate(f"location.hash = '#at-0-{example}-{step}'")
        page.locator(".kv-detail h3", has_text=f"p{example}, step {step}").wait_for()
        assert (page.locator(".kv-heat").count() == 1) is there
        assert ("not in the page" in page.locator(".kv-beside").inner_text()) is not there


def test_the_page_of_behaviour_shows_the_decodes_that_flip(page_opened: Callable[..., Opened], tmp_path: Path) -> None:
    made = comparison((0, 1), steps=5, flip=2, protocol="free")
    of = {"model": "zoo:m", "strategy": "greedy", "seed": 0}
    stays = made.examples.assign(diverged=False, protocol="matched", **of)
    tables = {
        "decodes": pd.concat([stays, made.examples.assign(diverged=True, protocol="free", **of)]),
        "flip_steps": made.steps.assign(**of),
        "flip_tokens": made.tokens.assign(**of),
    }
    lead = changes(flipped_decodes(tables, ("cached", "recompute")))
    path = write_experiment(tmp_path, "What?", ["This."], {}, [], {}, {}, lead)
    opened = page_opened(path)
    page = drawn(opened)
    assert page.locator("#flips tbody tr").count() == 2
    assert page.locator("#kv-changes .kv-strips").first.locator(".kv-strip").count() == 2
    page.locator("#flips a").nth(1).click()
    assert page.locator(".kv-detail h3").inner_text() == "p1, step 2"
    opened.quiet()
    none = {**tables, "flip_steps": made.steps.iloc[:0].assign(**of)}
    assert changes(flipped_decodes(none, ("cached", "recompute"))) == []
