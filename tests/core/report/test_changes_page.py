"""What changed, as a reader finds it: a token is clicked and its heads appear, a head is clicked and its attention appears.

Every number that is read from the page is held against the tables.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from browser import EVIL, IN_A_BROWSER, Opened, check_markup, check_page
from kvinterp.comparison import Comparison
from kvinterp.report.page import render
from kvinterp.report.tokens import changes
from synthetic import comparison, comparison_page

pytestmark = IN_A_BROWSER


def written(folder: Path, **found: Comparison) -> Path:
    path = folder / "page.html"
    one = {"": next(iter(found.values()))} if len(found) == 1 else found
    path.write_text(render("x", changes(one)), encoding="utf-8")
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


# What the page holds ---------------------------------------------------------------------------------------------------
