"""The panel in a notebook: what Python says to the browser, the browser itself, and the picture that a page keeps."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from browser import EVIL, IN_A_BROWSER, check_markup, faults_of

import kvinterp as kv
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.study.report.page import script, styles
from kvinterp.study.report.panel import PatchPanel, patch_panel
from support import Case

pytest.importorskip("anywidget")

PROMPT = "Question: Nora has 8 boxes and Jack has 5. How many more?\nAnswer:"
OTHER = "Question: Nora has 7 boxes and Jack has 5. How many more?\nAnswer:"
STEPS = 4
NATIVE = Case("zoo:gqa2-mini", "native", "sdpa")
TRAITS = ("asked", "wanted", "choices", "answer", "map", "tried", "error", "answered")


@pytest.fixture
def panel(load: Any) -> PatchPanel:
    return patch_panel(load(NATIVE), PROMPT, other=OTHER, max_new_tokens=STEPS).choose(donor="prompt", distance="kl")


# What Python says ------------------------------------------------------------------------------------------------------


def test_the_panel_answers_as_it_is_changed(load: Any, panel: PatchPanel) -> None:
    bench = kv.PatchBench(load(NATIVE), STEPS)
    panel.choose(site="z", layer=1, head=3, step=2, view="layer by head").fill()
    asked = bench.ask(PROMPT, "z", 1, 3, 2, donor="prompt", other=OTHER)
    assert panel.answer is not None
    assert (panel.answer.d_before, panel.answer.d_after) == (asked.d_before, asked.d_after)
    made = panel.widget.map
    assert made["chosen"] == [1, 4], "column 0 is all heads"
    assert made["cells"][1][4] == asked.recovery
    panel.choose(distance="l2")
    assert panel.widget.map["cells"][1][4] == asked.l2_recovery, "the other distance was measured too"
    assert panel.widget.answer["distances"][0][0] == "L2 of the logits"
    panel.choose(direction="into-cached", donor="path", site="resid_post", head=None)
    assert panel.answer.d_before == bench.ask(PROMPT, "resid_post", 1, step=2, direction="into-cached").d_before
    assert panel.widget.asked["view"] == "layer by step", "the stream has no heads"
    assert panel.widget.map["filled"] == 0
    panel.choose(donor="zero", step="every")
    assert panel.widget.answer["lead"].startswith("KL(unpatched || patched)")
    assert panel.widget.map["scale"] == "sequential"
    json.dumps({name: getattr(panel.widget, name) for name in TRAITS}, allow_nan=False)


def test_what_all_means_is_said(load: Any, panel: PatchPanel) -> None:
    panel.choose(site="kv")
    assert f"all {load(NATIVE).facts.kv_heads} KV heads at once" in panel.widget.answer["said"]
    assert "at all positions that attention reads" in panel.widget.answer["said"]
    assert f"at every step from 0 to {STEPS - 1}, and the distances are means over them" in panel.widget.answer["said"]
    panel.choose(step=1, head=0)
    assert "at step 1 alone" in panel.widget.answer["said"]
    assert "KV heads at once" not in panel.widget.answer["said"]
    assert [None, "all", f"all {load(NATIVE).facts.kv_heads} KV heads at once"] in panel.widget.choices["head"]
    panel.choose(site="resid_post")
    assert "at the newest position" in panel.widget.answer["said"], "each site with positions of its own"


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


def test_the_logit_difference_is_of_the_two_tokens_that_it_names(load: Any, panel: PatchPanel) -> None:
    panel.choose(distance="logit_difference", site="resid_post", layer=3, positions="newest", step="every").fill()
    answer = panel.answer
    assert answer is not None
    one, two = answer.pair
    assert panel.widget.answer["distances"][0][0] == f"logit difference {one!r} − {two!r}"
    assert panel.widget.map["cells"][3][0] == answer.pair_recovery
    logits = answer.tokens.set_index(["run", "text"])["logit"]
    at = answer.steps["step"].tolist().index(answer.shown_step)
    adapter = load(NATIVE)
    runs = [kv.run(adapter, text, "recompute", max_new_tokens=STEPS, continuation=list(panel._benches[panel.widget.asked["model"]].fed),
                   stop="length", logits="keep").logits for text in (OTHER, PROMPT)]  # fmt: skip
    first, second = (adapter.tokenizer.encode(each, add_special_tokens=False)[0] for each in answer.pair)
    gaps = [(run[:, first] - run[:, second]).double() for run in runs]
    assert answer.pair_before == pytest.approx(float((gaps[0] - gaps[1]).abs().mean()), rel=1e-6)
    assert len(logits)
    assert at >= 0


def test_positions_at_which_the_prompts_differ_are_marked(load: Any, panel: PatchPanel) -> None:
    ids = [load(NATIVE).tokenizer.encode(text) for text in (PROMPT, OTHER)]
    tokens = panel.widget.choices["tokens"]
    differ = [at for at, (one, other) in enumerate(zip(*ids, strict=True)) if one != other]
    assert differ
    assert [at for at, (_, differs) in enumerate(tokens) if differs] == differ
    assert len(tokens) == len(ids[0]) + STEPS - 1


@pytest.mark.parametrize(
    "more", [{}, {"donor": "resample", "seed": 3, "layer": "0,1"}, {"donor": "path", "head": 1, "site": "kv"}]
)
def test_the_code_gives_the_same_answer(load: Any, panel: PatchPanel, more: dict[str, Any]) -> None:
    panel.choose(**more)
    assert panel.answer is not None
    again = eval(panel.widget.answer["code"], {"kv": kv, "model": load(NATIVE)})
    assert again.asked == panel.answer.asked
    assert (again.d_before, again.d_after, again.l2_after) == (
        panel.answer.d_before,
        panel.answer.d_after,
        panel.answer.l2_after,
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
        ({"view": "by hand"}, "view='by hand' was given"),
        ({"distance": "cosine"}, "distance='cosine' was given"),
        ({"layer": {"a": 1}}, ""),
    ):
        panel.choose(**asked)
        assert said in panel.widget.error, asked
        assert panel.widget.error, asked
        assert "\n" not in panel.widget.error
        assert (panel.answer, panel.widget.answer, panel.widget.map) == (None, {}, {})
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


def test_a_model_that_cannot_be_loaded_is_a_sentence_and_another_can_be_chosen(load: Any) -> None:
    panel = patch_panel(["zoo:no-such-model", load(NATIVE)], PROMPT, max_new_tokens=STEPS)
    assert "no-such-model" in panel.widget.error
    panel.choose(model=panel.widget.choices["model"][1][0])
    assert panel.widget.error == ""
    with pytest.raises(InputError, match="give at least one"):
        patch_panel([])
    with pytest.raises(InputError, match="choice='prmpt' was given"):
        panel.choose(prmpt="a")


def test_what_was_tried_can_be_undone(panel: PatchPanel) -> None:
    def back() -> None:
        tried = panel.widget.tried
        at = tried["entries"][tried["at"]]["before"]
        panel.widget.asked = {**tried["entries"][at]["asked"], "back": at}

    start = panel.widget.asked["layer"]
    panel.choose(layer=1).choose(step=2).choose(distance="l2", view="block by layer")
    assert len(panel.widget.tried["entries"]) == 4, "both donors, the layer and the step; how it is shown is no other patch"
    back()
    assert (panel.widget.asked["layer"], panel.widget.asked["step"]) == (1, "every")
    panel.choose(layer=3)
    back()
    assert panel.widget.asked["layer"] == 1, "back to where one came from, not to what was undone"
    back()
    assert panel.widget.asked["layer"] == start
    assert len(panel.widget.tried["entries"]) == 5, "the list keeps all of them"


def test_the_map_goes_on_row_by_row_and_answers_no_stale_request(panel: PatchPanel) -> None:
    name, answered = panel.widget.map["name"], panel.widget.answered
    assert panel.widget.map["cells"] == [[None] * len(panel.widget.map["columns"])] * len(panel.widget.map["rows"])
    panel.widget.wanted = {"map": name, "row": 0}
    assert panel.widget.map["filled"] == 1
    assert panel.widget.answered == answered + 1
    panel.widget.wanted = {"map": name, "row": 3}
    panel.widget.wanted = {"map": "another", "row": 1}
    assert panel.widget.map["filled"] == 1
    panel.choose(donor="zero").choose(donor="prompt")
    assert panel.widget.map["filled"] == 1, "what was filled is kept"


def test_the_picture_is_the_last_state_as_text(panel: PatchPanel) -> None:
    panel.choose(site="kv", layer=1).fill()
    shown = panel.picture()
    assert "A picture of the panel as it last stood." in shown
    assert shown.count("<td style=") == len(panel.widget.map["rows"]) * len(panel.widget.map["columns"])
    assert "outline:3px solid" in shown
    panel.choose(other=EVIL)
    assert panel.widget.error
    assert "<script" not in panel.picture()
    assert "<img" not in panel.picture()
    assert "&lt;img src=x" in panel.picture()


def test_without_anywidget_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvinterp.study.report import panel

    monkeypatch.setitem(sys.modules, "anywidget", None)
    panel._widget_class.cache_clear()
    with pytest.raises(UnsupportedError, match=r"needs anywidget.*pip install 'kvinterp\[notebook\]'"):
        patch_panel("zoo:mistral-mini", PROMPT)


def test_what_a_browser_sends_comes_as_one_message_and_is_answered_as_one(panel: PatchPanel) -> None:
    """As ipywidgets hears it: the answer is one update, with no trait that the browser has to wait for."""
    sent: list[set[str]] = []
    panel.widget.send_state = lambda key=None: sent.append({key} if isinstance(key, str) else set(key))
    asked = {**panel.widget.asked, "layer": 2, "positions": [3, 5]}
    panel.widget._handle_msg({"content": {"data": {"method": "update", "state": {"asked": asked}}}})
    whole = [names for names in sent if "answered" in names]
    assert len(whole) == 1
    assert {"answer", "map", "tried"} <= whole[0]
    assert panel.answer is not None
    assert (panel.answer.asked.layer, panel.answer.asked.positions) == (2, (3, 5))
    wanted = {"map": panel.widget.map["name"], "row": 0, "number": 1}
    panel.widget._handle_msg({"content": {"data": {"method": "update", "state": {"wanted": wanted}}}})
    assert panel.widget.map["filled"] == 1


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

    def show(held: str = "") -> Any:
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
                if name != held:
                    setattr(panel.widget, name, value)
            return {name: getattr(panel.widget, name) for name in TRAITS if name not in ("wanted",)}

        opened.page.expose_function("kernel", kernel)
        opened.page.evaluate("(state) => begin(state, kernel)", {name: getattr(panel.widget, name) for name in TRAITS})
        return opened

    return show


def settled(page: Any) -> None:
    page.wait_for_function("document.querySelector('[role=status]').textContent === ''")
    page.wait_for_function("document.querySelector('[name=filling]').hidden")


class TestInABrowser:
    pytestmark = IN_A_BROWSER

    def test_a_click_sends_what_was_chosen_and_shows_what_it_did(self, shown: Any, panel: PatchPanel) -> None:
        opened = shown()
        page = opened.page
        settled(page)
        assert panel.map is not None
        assert panel.map.filled == len(panel.map.rows), "it filled by itself"
        assert not page.locator(".kvinterp-picture").is_visible(), "the picture is for pages without the panel"
        page.locator("[data-at='1 3']").click()
        settled(page)
        assert page.evaluate("sent.at(-1).asked.layer") == 1
        assert page.evaluate("sent.at(-1).asked.step") == 2
        assert panel.answer is not None
        row = page.locator("table.kv-plain").first.locator("tbody tr").first.inner_text().split("\t")
        numbers = [f"{value:.4g}" for value in (panel.answer.d_before, panel.answer.d_after)]
        assert row == ["KL, nats", *numbers, f"{panel.answer.recovery:.2%}"]
        assert page.locator("[data-at='1 3']").get_attribute("aria-selected") == "true"
        captions = page.locator(".kv-lists caption").all_inner_texts()
        assert captions == ["donor: other prompt", "unpatched recompute path", "patched recompute path"]
        page.locator("[data-at='1 3']").focus()
        page.keyboard.press("ArrowLeft")
        page.keyboard.press("Enter")
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

    def test_all_is_chosen_and_stays_chosen(self, shown: Any, panel: PatchPanel) -> None:
        opened = shown()
        page = opened.page
        for name, value in (("site", '"z"'), ("head", "2"), ("step", "1"), ("head", "null"), ("step", '"every"')):
            page.locator(f"select[name={name}]").select_option(value)
            settled(page)
        page.locator("select[name=view]").select_option('"layer by head"')
        page.locator("select[name=layer]").select_option("1")
        settled(page)
        assert panel.map is not None
        heads = panel.map.bench.adapter.facts.query_heads
        for name, means in (("head", f"all {heads} query heads at once"), ("step", "steps 0 to 3, each patched")):
            select = page.locator(f"select[name={name}]")
            assert select.evaluate("(of) => of.selectedOptions[0].textContent") == "all"
            assert select.locator("xpath=following-sibling::small").inner_text() == means
        assert (panel.widget.asked["head"], panel.widget.asked["step"]) == (None, "every")
        assert page.locator("td[aria-selected=true]").get_attribute("data-at") == "1 0"
        page.locator("[data-at='0 0']").click()
        settled(page)
        assert panel.widget.asked["head"] is None
        opened.quiet()

    def test_tokens_are_picked_and_the_panel_is_reset(self, shown: Any, panel: PatchPanel, tmp_path: Path) -> None:
        opened = shown()
        page = opened.page
        settled(page)
        marked = page.locator(".kv-differs").evaluate_all("(all) => all.map((one) => Number(one.dataset.token))")
        assert marked == [at for at, (_, differs) in enumerate(panel.widget.choices["tokens"]) if differs]
        page.locator("[data-token='3']").click()
        settled(page)
        assert panel.widget.asked["positions"] == [3, 4]
        page.locator("[data-token='5']").click(modifiers=["Shift"])
        settled(page)
        assert panel.widget.asked["positions"] == [3, 6]
        assert page.locator("[data-token][aria-pressed=true]").count() == 3
        page.locator("[name=layer-typed]").fill("0,2")
        page.locator("[name=layer-typed]").blur()
        settled(page)
        assert panel.widget.asked["layer"] == [0, 2]
        assert page.locator("select[name=layer]").evaluate("(of) => of.selectedOptions[0].textContent") == "0, 2"
        for name in ("csv", "png"):
            with page.expect_download() as waiting:
                page.locator(f"[name={name}]").click()
            waiting.value.save_as(tmp_path / name)
        lines = (tmp_path / "csv").read_bytes().decode().split("\r\n")
        assert [line.split(",")[0].strip('"') for line in lines[1:]] == panel.widget.map["rows"]
        cell = panel.widget.map["cells"][1][2]
        assert float(lines[2].split(",")[3].strip('"')) == cell
        assert (tmp_path / "png").read_bytes().startswith(b"\x89PNG")
        page.locator("[name=reset]").click()
        settled(page)
        assert (panel.widget.asked["layer"], panel.widget.asked["positions"]) == (0, "newest")
        assert page.locator("[name=reset]").is_disabled()
        opened.quiet()

    def test_filling_is_stopped_and_goes_on(self, shown: Any, panel: PatchPanel) -> None:
        opened = shown(held="wanted")
        page = opened.page
        page.locator("[name=filling]").click()
        assert page.locator("[name=filling]").inner_text() == "Go on filling the map"
        asked = page.evaluate("sent.length")
        page.wait_for_timeout(50)
        assert page.evaluate("sent.length") == asked
        page.locator("[name=filling]").click()
        assert page.evaluate("sent.length") > asked
        assert panel.widget.map["filled"] == 0

    def test_an_error_is_one_sentence_and_the_panel_stays_usable(self, shown: Any, panel: PatchPanel) -> None:
        opened = shown()
        page = opened.page
        settled(page)
        page.locator("textarea[name=prompt]").fill(f"{EVIL} " * 90)
        page.locator("textarea[name=prompt]").blur()
        settled(page)
        assert "shorten the prompt" in page.locator("[role=alert]").inner_text()
        page.locator("textarea[name=prompt]").fill(PROMPT)
        page.locator("textarea[name=prompt]").blur()
        settled(page)
        assert page.locator("[role=alert]").count() == 0
        assert page.locator("[role=gridcell]").count() > 0
        opened.quiet()

    def test_nothing_is_cut_off_and_markup_stays_text(
        self, shown: Any, panel: PatchPanel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert panel.map is not None
        monkeypatch.setattr(panel.map.bench.adapter, "pieces", lambda tokens: [EVIL] * len(tokens))
        panel.choose(prompt=f"{EVIL} 1", other=f"{EVIL} 2", view="block by layer", step=0).fill()
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


def exported(panel: PatchPanel, folder: Path) -> Path:
    """A page as nbconvert makes it of a notebook that shows the panel, saved with its widgets' state."""
    nbconvert, nbformat = pytest.importorskip("nbconvert"), pytest.importorskip("nbformat")
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output
    from ipywidgets import Widget

    InteractiveShell.instance()
    with capture_output() as captured:
        panel._ipython_display_()
    cell = nbformat.v4.new_code_cell("kv.patch_panel(model)")
    cell.outputs = [nbformat.v4.new_output("display_data", data=dict(each.data)) for each in captured.outputs]
    state = Widget.get_manager_state(widgets=[panel.widget])
    mimetype = "application/vnd.jupyter.widget-state+json"
    notebook = nbformat.v4.new_notebook(cells=[cell], metadata={"widgets": {mimetype: state}})
    page, _ = nbconvert.HTMLExporter().from_notebook_node(notebook)
    path = folder / "exported.html"
    path.write_text(page, encoding="utf-8")
    return path


@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_a_page_made_of_the_notebook_keeps_the_picture(panel: PatchPanel, tmp_path: Path, page_opened: Any) -> None:
    """Without a kernel and without a network, though the page names the widget and would load its manager from elsewhere."""
    panel.choose(site="kv", layer=2).fill()
    opened = page_opened(exported(panel, tmp_path))
    kept = opened.page.locator(".kvinterp-picture")
    assert kept.is_visible()
    assert "as it last stood" in kept.inner_text()
    cells = kept.locator("td[style]")
    assert cells.count() == len(panel.widget.map["rows"]) * len(panel.widget.map["columns"])
    assert len({cells.nth(at).evaluate("(cell) => getComputedStyle(cell).backgroundColor") for at in range(8)}) > 1
    assert [said for said in opened.console if "ERR_INTERNET_DISCONNECTED" not in said and "require" not in said] == []


@pytest.mark.long
@pytest.mark.hooked
@pytest.mark.browser
@pytest.mark.xdist_group("browser")
def test_a_page_made_of_the_third_notebook_shows_the_picture(tmp_path: Path, page_opened: Any) -> None:
    """Run by nbclient, exported by nbconvert, opened without a kernel and without a network."""
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    nbconvert = pytest.importorskip("nbconvert")
    source = Path(__file__).parents[2] / "notebooks" / "03_interactive_patching.ipynb"
    notebook = nbformat.read(source, as_version=4)
    nbclient.NotebookClient(notebook, timeout=280, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert notebook.metadata["widgets"], "the state of widgets is saved, as JupyterLab saves it"
    path = tmp_path / "03.html"
    path.write_text(nbconvert.HTMLExporter().from_notebook_node(notebook)[0], encoding="utf-8")
    opened = page_opened(path)
    kept = opened.page.locator(".kvinterp-picture")
    assert kept.is_visible()
    assert "as it last stood" in kept.inner_text()
    assert kept.locator("td[style]").count() > 20
    assert [said for said in opened.console if "ERR_INTERNET_DISCONNECTED" not in said and "require" not in said] == []


def test_the_picture_follows_the_panel(panel: PatchPanel) -> None:
    from IPython.core.interactiveshell import InteractiveShell
    from IPython.utils.capture import capture_output

    InteractiveShell.instance()
    with capture_output() as captured:
        panel._ipython_display_()
        panel.choose(layer=1)
    widget, *pictures = captured.outputs
    assert "application/vnd.jupyter.widget-view+json" in widget.data
    assert "by hand" in widget.data["text/plain"]
    assert len(pictures) == 2, "it is shown, and shown anew where it was"
    assert pictures[1].update
    assert "resid_post of layer 0" in pictures[0].data["text/html"]
    assert "resid_post of layer 1" in pictures[1].data["text/html"]
