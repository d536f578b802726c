"""The panel in a notebook: what Python says to the browser, the browser itself, and the picture that a page keeps."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import kvinterp as kv
from browser import EVIL, IN_A_BROWSER, check_markup, faults_of
from kvinterp.report.page import script, styles
from kvinterp.report.panel import PatchPanel, patch_panel
from support import Case

pytest.importorskip("anywidget")

PROMPT = "Question: Nora has 8 boxes and Jack has 5. How many more?\nAnswer:"
OTHER = "Question: Nora has 7 boxes and Jack has 5. How many more?\nAnswer:"
STEPS = 4
NATIVE = Case("zoo:gqa2-mini", "native", "sdpa")
TRAITS = ("asked", "choices", "answer", "tried", "error", "answered")


@pytest.fixture
def panel(load: Any) -> PatchPanel:
    return patch_panel(load(NATIVE), PROMPT, other=OTHER, max_new_tokens=STEPS).choose(donor="prompt", distance="kl")


# What Python says ------------------------------------------------------------------------------------------------------


def test_the_panel_answers_as_it_is_changed(load: Any, panel: PatchPanel) -> None:
    bench = kv.PatchBench(load(NATIVE), STEPS)
    panel.choose(site="z", layer=1, head=3, step=2)
    asked = bench.ask(PROMPT, "z", 1, 3, 2, donor="prompt", other=OTHER)
    assert panel.answer is not None
    assert (panel.answer.d_before, panel.answer.d_after) == (asked.d_before, asked.d_after)
    panel.choose(distance="l2")
    assert panel.widget.answer["distances"][0][0] == "L2 of the logits"
    panel.choose(direction="into-cached", donor="path", site="resid_post", head=None)
    assert panel.answer.d_before == bench.ask(PROMPT, "resid_post", 1, step=2, direction="into-cached").d_before
    assert panel.widget.asked["head"] is None, "the stream has no heads"
    panel.choose(donor="zero", step="every")
    assert panel.widget.answer["lead"].startswith("L2 distance of the logits")
    json.dumps({name: getattr(panel.widget, name) for name in TRAITS}, allow_nan=False)


def test_several_layers_and_heads_and_free_positions_are_typed(load: Any, panel: PatchPanel) -> None:
    bench = kv.PatchBench(load(NATIVE), STEPS)
    panel.choose(site="z", layer="0, 2-3", head="1,3", positions="4-6", step=2)
    asked = bench.ask(PROMPT, "z", (0, 2, 3), (1, 3), 2, positions=(4, 7), donor="prompt", other=OTHER)
    assert panel.answer is not None
    assert (panel.answer.d_after, panel.answer.pair_after) == (asked.d_after, asked.pair_after)
    assert panel.answer.d_after != bench.ask(PROMPT, "z", 0, 1, 2, positions=(4, 7), donor="prompt", other=OTHER).d_after
    assert panel.widget.asked["layer"] == [0, 2, 3]
    assert [[0, 2, 3], "0, 2, 3", "at once"] in panel.widget.choices["layer"]
    assert "z, layer 0, 2, 3, head 1, 3, positions 4–6, step 2" in panel.widget.tried["entries"][-1]["said"]
    panel.choose(positions="5", layer="1")
    assert (panel.widget.asked["positions"], panel.widget.asked["layer"]) == ([5, 6], 1)
    for field, typed in (("layer", "x"), ("layer", "3-1"), ("positions", "1,5"), ("positions", "9" * 12), ("layer", "99")):
        panel.choose(**{field: typed})
        assert panel.widget.error, (field, typed)
        panel.choose(layer=0, positions="newest")
        assert not panel.widget.error
    json.dumps({name: getattr(panel.widget, name) for name in TRAITS}, allow_nan=False)


@pytest.mark.parametrize("more", [{}, {"donor": "zero", "layer": "0,1"}, {"donor": "path", "head": 1, "site": "kv"}])
def test_the_code_gives_the_same_answer(load: Any, panel: PatchPanel, more: dict[str, Any]) -> None:
    panel.choose(**more)
    assert panel.answer is not None
    again = eval(panel.widget.answer["code"], {"kv": kv, "model": load(NATIVE)})
    assert again.request == panel.answer.request
    assert (again.d_before, again.d_after, again.kl_after) == (
        panel.answer.d_before,
        panel.answer.d_after,
        panel.answer.kl_after,
    )


def test_what_is_wrong_is_a_sentence_and_the_panel_stays_usable(panel: PatchPanel) -> None:
    before = dict(panel.widget.asked)
    for asked, said in (
        ({"layer": 17}, "layer 17 does not exist"),
        ({"step": 9}, "step 9 does not exist: the cached path decodes steps 1 to 3"),
        ({"prompt": "<b>long</b> " * 400}, "shorten the prompt"),
        ({"prompt": ""}, "prompt"),
        ({"other": "Question: 1"}, "and positions are matched by number"),
        ({"other": " "}, "none was given"),
        ({"model": "zoo:nope"}, "model='zoo:nope' was given"),
        ({"distance": "cosine"}, "distance='cosine' was given"),
        ({"layer": {"a": 1}}, ""),
    ):
        panel.choose(**asked)
        assert said in panel.widget.error, asked
        assert panel.widget.error, asked
        assert "\n" not in panel.widget.error
        assert (panel.answer, panel.widget.answer) == (None, {})
        assert "<b>long" not in panel.picture()
        # Whatever was asked, what is right is answered again.
        panel.widget.asked = before
    assert panel.widget.error == ""
    assert panel.answer is not None


def test_nan_is_a_sentence_in_the_panel() -> None:
    model = kv.load_model("zoo:gqa2-mini", kind="native", dtype="float32", device="cpu")
    panel = patch_panel(model, PROMPT, max_new_tokens=STEPS)
    with torch.no_grad():
        model.blocks[0].mlp.down_proj.weight.fill_(torch.nan)
    panel.choose(layer=1).choose(layer=0)
    assert "NaN or Inf appeared" in panel.widget.error


def test_the_picture_is_the_last_state_as_text(panel: PatchPanel) -> None:
    panel.choose(site="kv", layer=1)
    shown = panel.picture()
    assert "A picture of the panel as it last stood." in shown
    assert panel.widget.answer["lead"] in shown
    panel.choose(other=EVIL)
    assert panel.widget.error
    assert "<script" not in panel.picture()
    assert "<img" not in panel.picture()
    assert "&lt;img src=x" in panel.picture()


# The browser -----------------------------------------------------------------------------------------------------------

BEGIN = """
globalThis.begin = (state, kernel) => {
  const heard = {}, sent = [];
  let changed = {};
  const model = {
    get: (name) => state[name],
    set: (name, value) => { state[name] = value; changed[name] = value; },
    on: (name, tell) => { (heard[name] ??= []).push(tell); },
    off: () => {},
    save_changes: async () => {
      const given = changed;
      changed = {};
      sent.push(given);
      Object.assign(state, await kernel(given));
      for (const tell of heard["change:answered"] ?? []) tell();
    },
  };
  globalThis.sent = sent;
  render({ model, el: document.getElementById("root") });
};
"""


CLIPPED = """() => {
  const pen = document.createElement("canvas").getContext("2d");
  return [...document.querySelectorAll("select")].filter((of) => {
    pen.font = getComputedStyle(of).font;
    return pen.measureText(of.selectedOptions[0].textContent).width > of.clientWidth - 30;
  }).map((of) => of.name);
}"""
"""The choices whose words are wider than their box, but for the arrow."""


@pytest.fixture
def shown(page_opened: Callable[..., Any], tmp_path: Path, panel: PatchPanel) -> Callable[..., Any]:
    """The panel in the browser, with Python behind it: what one clicks is answered."""

    def show() -> Any:
        path = tmp_path / "panel.html"
        style = "body { margin: 8px; background: light-dark(#fff, #111); color-scheme: light dark; }"
        # As anywidget loads it, but for the line that begins it here.
        code = f"{script('draw', 'panel')}\n{BEGIN}"
        head = f'<meta charset="utf-8"><title>panel</title><style>{style}{styles("draw", "panel")}</style>'
        body = '<div class="jp-OutputArea"><div id="root"></div><div class="kvinterp-picture">the picture</div></div>'
        path.write_text(
            f'<!DOCTYPE html><html lang="en"><head>{head}</head><body>{body}<script type="module">{code}</script></body></html>',
            encoding="utf-8",
        )
        opened = page_opened(path)

        def kernel(given: dict[str, Any]) -> dict[str, Any]:
            for name, value in given.items():
                setattr(panel.widget, name, value)
            return {name: getattr(panel.widget, name) for name in TRAITS}

        opened.page.expose_function("kernel", kernel)
        opened.page.evaluate("(state) => begin(state, kernel)", {name: getattr(panel.widget, name) for name in TRAITS})
        return opened

    return show


def settled(page: Any) -> None:
    page.wait_for_function("document.querySelector('[role=status]').textContent === ''")


class TestInABrowser:
    pytestmark = IN_A_BROWSER

    def test_a_click_sends_what_was_chosen_and_shows_what_it_did(self, shown: Any, panel: PatchPanel) -> None:
        opened = shown()
        page = opened.page
        settled(page)
        assert not page.locator(".kvinterp-picture").is_visible(), "the picture is for pages without the panel"
        page.locator("select[name=layer]").select_option("1")
        settled(page)
        page.locator("select[name=step]").select_option("2")
        settled(page)
        assert page.evaluate("sent.at(-1).asked.layer") == 1
        assert page.evaluate("sent.at(-1).asked.step") == 2
        assert panel.answer is not None
        row = page.locator("table.kv-plain").first.locator("tbody tr").first.inner_text().split("\t")
        numbers = [f"{value:.4g}" for value in (panel.answer.kl_before, panel.answer.kl_after)]
        assert row == ["KL, nats", *numbers, f"{panel.answer.kl_recovery:.2%}"]
        captions = page.locator(".kv-lists caption").all_inner_texts()
        assert captions == ["donor: other prompt", "unpatched recompute path", "patched recompute path"]
        page.locator("select[name=step]").select_option("1")
        settled(page)
        assert panel.widget.asked["step"] == 1
        page.locator("[name=undo]").click()
        settled(page)
        assert (panel.widget.asked["layer"], panel.widget.asked["step"]) == (1, 2)
        page.locator(".kv-tried summary").click()
        page.locator(".kv-tried button").first.click()
        settled(page)
        assert panel.widget.asked["donor"] == "path"
        opened.quiet()

    def test_nothing_is_cut_off_and_markup_stays_text(
        self, shown: Any, panel: PatchPanel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (bench,) = panel._benches.values()
        monkeypatch.setattr(bench.adapter, "pieces", lambda tokens: [EVIL] * len(tokens))
        panel.choose(prompt=f"{EVIL} 1", other=f"{EVIL} 2", step=0)
        assert panel.widget.error == ""
        assert "<img" not in panel.picture()
        opened = shown()
        page = opened.page
        settled(page)
        check_markup(opened, repr(EVIL))
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            for width in (1280, 420):
                page.set_viewport_size({"width": width, "height": 900})
                assert not faults_of(opened), (scheme, width)
                assert not page.evaluate(CLIPPED), (scheme, width)
        opened.quiet()


# The page that is made of a notebook -----------------------------------------------------------------------------------
