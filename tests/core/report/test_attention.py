"""The attention page: true patterns, honest labels, one copy of circuitsvis, nothing loaded, text that stays text."""

from __future__ import annotations

import base64
import hashlib
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import kvinterp as kv
from browser import IN_A_BROWSER, Opened
from kvinterp.common.numbers import number
from kvinterp.common.vocabulary import PROTOCOLS
from kvinterp.errors import InputError
from kvinterp.recording import Trace
from kvinterp.report.attention import assembled_pattern, attention_comparison
from kvinterp.report.page import Table, from_template
from pages import Page
from support import Case, assert_bitwise, assert_close

PROMPT = "Question: Nora has 8 boxes and Jack has 5. How many more?\nAnswer:"
HOSTILE = (
    "<script>document.title='owned'</script> <!-- </script> <img src=x onerror=\"document.title='owned'\"> & \u2028 $a$"
)
MINI = Case("zoo:mistral-mini", "hooked")
EAGER = Case("zoo:gemma2-mini", "native", "eager")
STEP = 3
_FLOAT32_SOFTMAX = 2.0**-23
"""transformers' eager attention takes its softmax in float32 whatever the model's dtype: one rounding on each side."""


def in_a_browser(test: Any) -> Any:
    """A test that opens pages."""
    for mark in IN_A_BROWSER:
        test = mark(test)
    return test


@pytest.fixture(scope="module")
def model(load: Any) -> Any:
    return load(EAGER, "float16")


def _trace(pattern: torch.Tensor, path: str = "recompute", step: int = 0, prompt: int = 3) -> Trace:
    """A trace that shows this pattern at this step."""
    ids = tuple(range(prompt))
    fed = tuple(range(step))
    return Trace(path, ids, tuple(range(step + 1)), fed, {("pattern", 0): [pattern]}, (step,))


def _both(model: Any, prompt: Any, **more: Any) -> tuple[Trace, Trace]:
    """The traces of both paths up to the step, fed the same tokens."""
    how: dict[str, Any] = {"max_new_tokens": STEP + 1, "record": "pattern", "positions": "all", **more}
    cached = kv.run(model, prompt, "cached", **how)
    return cached, kv.run(model, prompt, "recompute", continuation=cached.fed, **how)


def _causal(*rows: list[float]) -> torch.Tensor:
    return torch.tensor([[row + [0.0] * (len(rows) - len(row)) for row in rows]])


# The patterns ----------------------------------------------------------------------------------------------------------


def test_a_cached_pattern_is_put_together_from_the_row_of_each_step(load: Any) -> None:
    model = load(EAGER, "float64")
    cached, again = _both(model, PROMPT)
    for layer in range(model.facts.layers):
        a, b = (assembled_pattern(trace, layer, STEP) for trace in (cached, again))
        length = len(cached.prompt) + STEP
        assert a.shape == (model.facts.query_heads, length, length)
        assert_bitwise(a[:, : len(cached.prompt), : len(cached.prompt)], cached.records["pattern", layer][0])
        assert_bitwise(
            a[:, -1, -cached.records["pattern", layer][STEP].shape[-1] :], cached.records["pattern", layer][STEP][:, 0]
        )
        # In float64 the two paths agree to rounding, so a row put in the wrong place would be seen.
        assert_close(a, b, f"pattern of layer {layer}", ("head", "query", "key"), absolute=_FLOAT32_SOFTMAX)


def test_rows_of_a_sliding_cache_stand_under_their_own_keys(load: Any) -> None:
    model = load(Case("mistral-window", "native", "eager"), "float64")
    window = min(w for w in model.facts.windows if w is not None)
    prompt = [(7 * i) % 50 + 3 for i in range(window + 5)]
    cached, again = _both(model, prompt, stop="length")
    a, b = (assembled_pattern(trace, 0, STEP) for trace in (cached, again))
    assert cached.records["pattern", 0][STEP].shape[-1] < a.shape[-1], "the cache did not slide: the test shows nothing"
    assert_close(a, b, "pattern", ("head", "query", "key"), absolute=_FLOAT32_SOFTMAX)
    assert not a[:, -1, :-window].any()


def test_kl_is_what_a_comparison_reports_for_that_step(model: Any) -> None:
    # Products split by their number of rows, so that the paths differ on every machine.
    paths = {side: f"{form}[kernels=split_k(4,float16)]" for side, form in (("a", "cached"), ("b", "recompute"))}
    compared = kv.compare(model, PROMPT, **paths, record="pattern", max_new_tokens=STEP + 1, progress="none")
    shown = attention_comparison(model, PROMPT, step=STEP, **paths).heads.sort_values(["layer", "head"])
    reported = compared.heads[compared.heads["step"] == STEP].sort_values(["layer", "head"])
    assert shown["kl"].tolist() == reported["kl"].tolist()
    assert reported["kl"].max() > 0, "no head differs here: the test shows nothing"
    again = attention_comparison(compared, PROMPT, model=model, step=STEP)
    assert again.heads["kl"].tolist() == shown.sort_index()["kl"].tolist()


def test_a_path_against_itself_is_exactly_zero(model: Any) -> None:
    same = attention_comparison(model, PROMPT, step=STEP, a="recompute", b="recompute")
    assert not same.heads[["kl", "largest_row_kl", "largest_difference"]].to_numpy().any()
    page = same.page.html()
    assert page.count("KL exactly 0 nats") == len(same.heads)
    assert page.count("difference: 0 in all") == len(same.heads)


def test_a_whole_generation_is_shown(model: Any) -> None:
    """Each row is the one that the run which wrote the text computed; beside it the rows of one forward."""
    (text,) = kv.generated(model, PROMPT, "pattern", max_new_tokens=5)
    shown = attention_comparison(text)
    assert "<h1>Attention at step 4: the run that wrote the text against" in shown.page.html()
    step = len(text.positions) - len(text.prompt)
    assert (shown.page.step, shown.page.view.stop, shown.page.view.start) == (step, len(text.positions), 0)
    head = shown.page.heads[0]
    place, number = ("pattern", head.row["layer"]), head.row["head"]
    assert np.array_equal(head.a, text[place][number].double().numpy())
    with kv.record(model, "pattern", positions="all") as seen, torch.no_grad():
        model.forward(torch.tensor([text.text[: len(text.positions)]]))
    assert np.array_equal(head.b, seen[place][0, number].double().numpy())
    with pytest.raises(InputError, match="shown whole"):
        attention_comparison(text, step=1)
    (bare,) = kv.generated(model, PROMPT, "resid_post", layers=[0], max_new_tokens=2)
    with pytest.raises(InputError, match="has no pattern"):
        attention_comparison(bare)


def test_the_page_begins_with_its_finding_and_the_report_links_to_it(model: Any, tmp_path: Path) -> None:
    paths = {side: f"{form}[kernels=split_k(4,float16)]" for side, form in (("a", "cached"), ("b", "recompute"))}
    shown = attention_comparison(model, PROMPT, step=STEP, **paths)
    most = shown.heads.iloc[0]
    differ = int((shown.heads["largest_row_kl"] > 0).sum())
    finding = shown.page.finding
    assert finding == (
        f"{differ} of {len(shown.heads)} heads attend differently by step {STEP}; most in layer {most['layer']}, head "
        f"{most['head']}: KL {number(most['kl'])} nats in the newest row."
    )
    html = shown.page.html()
    assert f'<div class="answer"><p>{finding}</p></div>' in html
    assert html.index(finding) < html.index("KL is of the newest row")
    same = attention_comparison(model, PROMPT, step=STEP, a="recompute", b="recompute").page.finding
    assert same == f"All {len(shown.heads)} heads attend the same to the bit at step {STEP}: recompute against recompute."
    box = from_template("experiment", **_page_of(["a <b>; attention.html shows them."]))
    assert '<p>a &lt;b&gt;; <a href="./attention.html">attention.html</a> shows them.</p>' in box


def _page_of(lines: list[str]) -> dict[str, Any]:
    empty = Table([], [])
    about = {"title": "x", "heading": "x", "kicker": "", "style": "", "script": "", "explanation": "", "choices": {}}
    parts = dict.fromkeys(("parts", "found", "pictures", "tables"), ())
    return {
        **about,
        **parts,
        "lines": lines,
        "protocols": PROTOCOLS,
        "shared": empty,
        "differing": empty,
        "files": ["attention.html"],
    }


# What is shown ---------------------------------------------------------------------------------------------------------


def test_the_difference_is_first_minus_second_on_a_stated_scale() -> None:
    a, b = _causal([1.0], [0.25, 0.75], [0.5, 0.25, 0.25]), _causal([1.0], [0.25, 0.75], [0.25, 0.25, 0.5])
    page = attention_comparison(_trace(a), _trace(b), step=0, tokens=["x", "y", "z"]).page
    data = _data(page.html())
    figure = next(f for f in data["figures"] if f["id"] == "head-0-difference")
    assert figure["rows"] == [[0.0], [0.0, 0.0], [0.25, 0.0, -0.25]]
    assert figure["limit"] == 0.25
    assert "difference: ±0.25, in 2 of 6 cells" in page.html()
    assert [f["limit"] for f in data["figures"]] == [1.0, 1.0, 0.25]


def test_heads_are_chosen_by_kl_and_said(model: Any) -> None:
    few = attention_comparison(model, PROMPT, step=STEP, most=2)
    whole = few.heads
    assert whole["shown"].sum() == 2
    assert whole.loc[whole["shown"], "kl"].min() >= whole.loc[~whole["shown"], "kl"].max()
    assert f"2 of {len(whole)} heads are shown, those with the largest KL." in few.page.html()
    one = attention_comparison(model, PROMPT, step=STEP, layers=1, heads=[2])
    assert one.heads[["layer", "head"]].to_numpy().tolist() == [[1, 2]]


def test_long_contexts_are_cropped_to_the_newest_or_pooled(model: Any) -> None:
    whole = attention_comparison(model, PROMPT, step=STEP, layers=0, heads=[0])
    length = len(whole.page.rows)
    cropped = attention_comparison(model, PROMPT, step=STEP, layers=0, heads=[0], cells=10)
    assert np.array_equal(cropped.page.heads[0].a, whole.page.heads[0].a[-10:, -10:])
    assert cropped.page.rows[0][1] == length - 10
    assert cropped.page.rows[0][0].startswith(f"{length - 10}: ")
    inside = np.mean([head.sum(1).mean() for head in (cropped.page.heads[0].a, cropped.page.heads[0].b)])
    assert f"{inside:.1%} of their attention" in cropped.page.html()

    cells = next(cells for cells in range(4, length) if length % -(-length // cells))
    pooled = attention_comparison(model, PROMPT, step=STEP, layers=0, heads=[0], cells=cells, fit="pool")
    block = -(-length // cells)  # the last block is a shorter one
    square = whole.page.heads[0].a
    by_hand = [
        [square[q : q + block, k : k + block].sum(1).mean() for k in range(0, length, block)]
        for q in range(0, length, block)
    ]
    np.testing.assert_allclose(pooled.page.heads[0].a, by_hand, rtol=1e-12)
    np.testing.assert_allclose(pooled.page.heads[0].a.sum(1), 1, atol=2e-3)  # float16 rows sum to one to three digits
    assert pooled.heads["kl"].tolist() == whole.heads["kl"].tolist()
    part = attention_comparison(model, PROMPT, step=STEP, layers=0, heads=[0], positions=(2, 5))
    assert np.array_equal(part.page.heads[0].a, square[2:5, 2:5])


# The page --------------------------------------------------------------------------------------------------------------


def _data(page: str) -> dict[str, Any]:
    return json.loads(Page(page).scripts[0])


def test_the_page_holds_circuitsvis_once_and_loads_nothing(model: Any) -> None:
    page = attention_comparison(model, PROMPT, step=STEP).page.html()
    reader = Page(page)
    assert page.count("var CircuitsVis=") == 1
    assert len(reader.scripts) == 3
    assert "sourceMappingURL" not in page
    assert not reader.wanted
    policy = next(attributes["content"] for tag, attributes in reader.elements if "http-equiv" in attributes)
    assert policy is not None
    assert "default-src 'none'" in policy
    for script in reader.scripts[1:]:
        assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy


def test_markup_in_prompts_stays_text(model: Any) -> None:
    plain = Page(attention_comparison(model, PROMPT, step=1, layers=0).page.html())
    shown = attention_comparison(model, HOSTILE, step=1, layers=0, cells=200)
    reader = Page(shown.page.html())
    assert {*reader.tags} == {*plain.tags}
    assert reader.tags.count("script") == 3
    assert reader.comments == 0
    pieces = model.pieces(model.encode(HOSTILE))
    tokens = [text for text, *_ in shown.page.rows]
    assert _data(shown.page.html())["tokens"] == tokens
    assert "".join(tokens[1 : len(pieces)]).replace("·", " ").startswith("<script>document.title='owned'</script>")


def test_in_a_notebook_it_shows_itself_in_a_frame_without_rights(model: Any) -> None:
    shown = attention_comparison(model, PROMPT, step=1, layers=0)
    reader = Page(shown._repr_html_())
    assert reader.tags == ["iframe"]
    assert reader.elements[0][1]["srcdoc"] == shown.page.html()
    assert reader.elements[0][1]["sandbox"] == "allow-scripts"


# Wrong input -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"step": -1}, "step=-1 was given"),
        ({"step": 1, "layers": 9}, "layer 9 does not exist"),
        ({"step": 1, "heads": [9]}, "query head 9 does not exist: this model has query heads 0 to 3"),
        ({"step": 1, "layers": []}, "an empty list of layers was given: name at least one"),
        ({"step": 1, "positions": (5, 400)}, r"0 <= start < stop <= \d+"),
        ({"step": 1, "fit": "squeeze"}, "fit='squeeze' was given"),
    ],
)
def test_what_does_not_exist_is_one_sentence(model: Any, arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        attention_comparison(model, PROMPT, **arguments)


def test_a_comparison_wants_its_own_model_and_prompt(model: Any, load: Any) -> None:
    compared = kv.compare(model, PROMPT, record="", max_new_tokens=3, progress="none")
    remembered = attention_comparison(compared, step=1).heads
    pd.testing.assert_frame_equal(remembered, attention_comparison(compared, PROMPT, model=model, step=1).heads)
    with pytest.raises(InputError, match="example 4 does not exist"):
        attention_comparison(compared, step=1, example=4)
    with pytest.raises(InputError, match="no longer has its model and prompts"):
        attention_comparison(pickle.loads(pickle.dumps(compared)), step=1)
    with pytest.raises(InputError, match="other weights"):
        attention_comparison(compared, PROMPT, model=load(MINI, "float16"), step=1)
    with pytest.raises(InputError, match="give the prompt it was made on"):
        attention_comparison(compared, "Question:", model=model, step=1)
    with pytest.raises(InputError, match="the comparison has steps 0 to 2"):
        attention_comparison(compared, PROMPT, model=model, step=9)
    free = kv.compare(model, PROMPT, record="", protocol="free", max_new_tokens=3, progress="none")
    with pytest.raises(InputError, match="protocol='matched'"):
        attention_comparison(free, PROMPT, model=model, step=1)


# A real browser --------------------------------------------------------------------------------------------------------


def browsed(page_opened: Callable[..., Opened], page: Path, figures: int) -> Opened:
    """A page that drew all of its figures, said nothing in the console and asked for nothing."""
    opened = page_opened(page)
    opened.page.wait_for_selector(f"body[data-drawn='{figures}']")
    opened.quiet()
    return opened


@in_a_browser
def test_a_browser_shows_markup_as_text(page_opened: Callable[..., Opened], load: Any, tmp_path: Path) -> None:
    shown = attention_comparison(load(MINI, "float16"), HOSTILE, step=1, most=1)
    opened = browsed(page_opened, shown.save(tmp_path / "page.html"), 3)
    assert opened.page.title().startswith("Attention at step 1")
    assert opened.page.locator("img").count() == 0
