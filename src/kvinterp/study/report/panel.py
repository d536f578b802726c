"""Patching by hand in a notebook: choices that one changes, and what the patch that they say did.

The browser's side is ``static/panel.js``; it sends what is asked (``asked``), and everything that it shows is made here.
:class:`kvinterp.PatchBench` answers the same without a front end.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

from kvinterp.common.checks import check_choice, check_text, check_unread, check_whole
from kvinterp.data import Prompt
from kvinterp.errors import InputError, KvinterpError, UnsupportedError, unexpected
from kvinterp.models import load_model, wrap
from kvinterp.models.load import check_loadable
from kvinterp.patching import Asked, PatchAnswer, PatchBench
from kvinterp.patching.bench import MEASURED
from kvinterp.paths import kernels_named
from kvinterp.study.report.page import script, styles
from kvinterp.study.report.panel_shown import (
    answer_shown,
    choices,
    code_of,
    picture,
    plain,
    recovery_said,
    said_of,
)

PROMPT = "Question: Nora has 88 boxes and Jack has 53. How many more boxes does Nora have than Jack?\nAnswer:"
OTHER = PROMPT.replace("88", "78")
"""Of as many tokens."""
MOST_TRIED = 100


class PatchPanel:
    """The panel: the choices, and what the chosen patch did. It shows itself in a notebook.

    Attributes:
        widget: The widget, whose traits are all that the browser sees and sends.
        answer: The last answer, or None where something was wrong.
    """

    def __init__(
        self, models: Mapping[str, Callable[[], Any]], prompt: str, other: str, max_new_tokens: int, kernels: str
    ) -> None:
        self._models, self._max_new_tokens, self._kernels = models, max_new_tokens, kernels
        self._benches: dict[str, PatchBench] = {}
        self._tried: list[dict[str, Any]] = []
        self._at = -1
        self._pictures: list[Any] = []
        self._busy = False
        self.answer: PatchAnswer | None = None
        # L2 first, as in a sweep: where paths differ by rounding, KL is that of one uncertain step.
        start = {"model": next(iter(models)), "prompt": prompt, "other": other, "distance": "l2"}
        asked = {field.name: field.default for field in dataclasses.fields(Asked)}
        self.widget = _widget_class()(choices=choices(self._models, None, None), asked={**start, **asked})
        self.widget.observe(lambda _: self._hear(self._update), "asked")
        self._hear(self._update)

    def choose(self, **changes: Any) -> PatchPanel:
        """Changes what is asked, as a click would: model, prompt, other, distance, or a field of a patch.

        Raises:
            InputError: There is no such choice. What cannot be answered is said in the panel instead.
        """
        for name in changes:
            check_choice("choice", name, self.widget.asked)
        self.widget.asked = {**self.widget.asked, **changes}
        return self

    def picture(self) -> str:
        """What the panel shows, as HTML that needs no kernel, no script and no network."""
        return picture(self.widget.asked, self.widget.answer, self.widget.error)

    def _ipython_display_(self) -> None:
        from IPython.display import HTML, display

        display(self.widget)
        # Beside the panel, which hides it: a page made of the notebook shows it, for it has no kernel to ask.
        self._pictures.append(display(HTML(self._kept_picture()), display_id=True))

    def _kept_picture(self) -> str:
        return f'<div class="kvinterp-picture">{self.picture()}</div>'

    # What the browser sends --------------------------------------------------------------------------------------------

    def _hear(self, work: Callable[[], dict[str, Any]]) -> None:
        """Does what was asked for; whatever goes wrong becomes a sentence, since a traceback would be lost in a log."""
        if self._busy:
            return
        self._busy = True
        try:
            shown = {"error": "", **work()}
        except Exception as error:
            said = str(error) if isinstance(error, KvinterpError) else f"{type(error).__name__}: {error}"
            self.answer = None
            shown = {"error": " ".join(said.split()), "answer": {}}
        finally:
            self._busy = False
        self._show(shown)

    def _show(self, shown: dict[str, Any]) -> None:
        self._busy = True
        try:
            with self.widget.hold_sync():
                for name, value in shown.items():
                    setattr(self.widget, name, value)
                # The browser draws when this changes: by then all the others have.
                self.widget.answered += 1
        finally:
            self._busy = False
        for handle in self._pictures:
            from IPython.display import HTML

            handle.update(HTML(self._kept_picture()))

    def _update(self) -> dict[str, Any]:
        given = dict(self.widget.asked)
        back = given.pop("back", None)
        bench = self._bench(given["model"])
        given, asked = self._settled(given, bench)
        measure = given["distance"]
        check_choice("distance", measure, MEASURED)
        self.answer = None
        bench.turn_to(given["prompt"], given["other"])
        self.answer = bench.answer(asked, top=5)
        self._note(given, back)
        return {
            "asked": given,
            "choices": choices(self._models, bench, asked),
            "answer": {
                **answer_shown(self.answer, bench, measure),
                "code": code_of(asked, given["prompt"], given["other"], self._max_new_tokens, self._kernels),
            },
            "tried": {"entries": self._tried, "at": self._at},
        }

    def _bench(self, name: str) -> PatchBench:
        check_choice("model", name, self._models)
        if name not in self._benches:
            self._benches[name] = PatchBench(self._models[name](), self._max_new_tokens, self._kernels)
        return self._benches[name]

    def _settled(self, given: dict[str, Any], bench: PatchBench) -> tuple[dict[str, Any], Asked]:
        """What is asked, where heads and positions are such as the site has."""
        given.update({name: _typed(name, given[name]) for name in ("layer", "head", "positions")})
        heads, _ = bench.adapter.facts.heads_of(_asked(given).site)
        if not heads:
            given["head"] = None
        before = self._tried[self._at]["asked"] if self._tried else given
        if before["site"] != given["site"] and given["positions"] == before["positions"] in ("newest", "all"):
            given["positions"] = None
        asked = _asked(given)
        # The site's own where none is named: the newest, of the cache all.
        asked = dataclasses.replace(asked, positions=asked.patch().positions)
        return {
            **given,
            **{field.name: getattr(asked, field.name) for field in dataclasses.fields(asked)},
            **{name: plain(getattr(asked, name)) for name in ("layer", "head", "positions")},
        }, asked

    def _note(self, given: dict[str, Any], back: Any) -> None:
        """Keeps what was tried, and from where: undoing goes back there."""
        if isinstance(back, int) and 0 <= back < len(self._tried):
            self._at = back
            return
        now = {name: value for name, value in given.items() if name != "distance"}
        if self._at >= 0 and now == {name: self._tried[self._at]["asked"][name] for name in now}:
            return
        assert self.answer is not None
        lead, _ = recovery_said(self.answer)
        asked = self.answer.asked
        head = "" if asked.head is None else f", head {said_of(asked.head)}"
        at = asked.positions
        where = f"positions {at[0]}–{(at[1] or 0) - 1}" if isinstance(at, tuple) else f"{at} positions"
        place = f"{asked.site}, layer {said_of(asked.layer)}{head}, {where}, step {asked.step}"
        said = f"{place}, {asked.direction}, {asked.donor}"
        if len(self._tried) == MOST_TRIED:
            self._tried, self._at = self._tried[1:], self._at - 1
            self._tried = [{**entry, "before": max(entry["before"] - 1, 0)} for entry in self._tried]
        self._tried = [*self._tried, {"asked": given, "said": said, "found": lead, "before": max(self._at, 0)}]
        self._at = len(self._tried) - 1


def patch_panel(
    models: Any = "zoo:mistral-mini",
    prompt: str | Prompt = PROMPT,
    *,
    other: str | Prompt = "",
    max_new_tokens: int = 12,
    kind: str = "native",
    dtype: str | None = None,
    kernels: str = "native",
) -> PatchPanel:
    """A panel to patch by hand: what gives, the place and the step are chosen, and what that patch did is shown.

    What gives (the donor) is the other path, another prompt, or an ablation. Undo goes back, and what was tried is listed.
    Beside it stands a picture of its last state, which a page made of the notebook shows.

    Args:
        models: A name, a model of any kind or an adapter; or a list of these to choose from. Names are loaded when chosen.
        prompt: The text to begin with.
        other: Another prompt, of as many tokens, that gives where it is chosen as the donor.
        max_new_tokens: Most steps.
        kind: How names are loaded; see :func:`kvinterp.load_model`.
        dtype: In which dtype names are loaded.
        kernels: The kernel mode of both paths, as in ``split_k(4,float16)``, under which they differ on any machine.

    Raises:
        InputError: No model was given.
        UnsupportedError: anywidget is not installed.

    Example:
        >>> kv.patch_panel(model, prompts[0], other=prompts[1])  # doctest: +SKIP
    """
    given = list(models) if isinstance(models, list | tuple) else [models]
    if not given:
        raise InputError("the list of models is empty: give at least one.")
    check_loadable(kind, dtype=dtype)
    if not any(isinstance(model, str) for model in given):
        for name, choice, default in (("kind", kind, "native"), ("dtype", dtype, None)):
            check_unread(name, choice, default, "no model is loaded by name; leave it out")
    check_whole("max_new_tokens", max_new_tokens, 2)
    kernels_named(kernels)
    offered: dict[str, Callable[[], Any]] = {}
    for model in given:
        if isinstance(model, str):
            offered[model] = functools.partial(load_model, model, kind=kind, dtype=dtype)
        else:
            adapter = wrap(model)
            number = sum(name.startswith(adapter.facts.name) for name in offered)
            label = f"{adapter.facts.name} ({adapter.kind})" + (f" {number + 1}" if number else "")
            offered[label] = functools.partial(wrap, adapter)
    first, second = (
        text.text if isinstance(text, Prompt) else check_text(name, text, "'2 + 2 ='")
        for name, text in (("prompt", prompt), ("other", other))
    )
    return PatchPanel(offered, first, OTHER if first == PROMPT and not second else second, max_new_tokens, kernels)


@functools.cache
def _widget_class() -> Any:
    try:
        import anywidget
        import traitlets
    except ImportError as error:
        raise UnsupportedError(
            "the patching panel needs anywidget, which is not installed: pip install 'kvinterp[notebook]', or ask a "
            "PatchBench without a panel."
        ) from error

    class PatchPanelWidget(anywidget.AnyWidget):
        """What the browser sees and sends: see ``static/panel.js``."""

        _esm = str(script("draw", "panel"))
        _css = str(styles("draw", "panel"))
        asked = traitlets.Dict().tag(sync=True)
        choices = traitlets.Dict().tag(sync=True)
        answer = traitlets.Dict().tag(sync=True)
        tried = traitlets.Dict({"entries": [], "at": -1}).tag(sync=True)
        error = traitlets.Unicode().tag(sync=True)
        answered = traitlets.Int().tag(sync=True)

        def __repr__(self) -> str:
            # Where no front end runs this is all there is of the widget itself, and it is the same in every run.
            return "kvinterp: a panel to patch by hand; under it a picture of it as it last stood"

    return PatchPanelWidget


def _asked(given: Mapping[str, Any]) -> Asked:
    found = {field.name: given[field.name] for field in dataclasses.fields(Asked)}
    settled: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in found.items()}
    return Asked(**settled)


def _typed(name: str, value: Any) -> Any:
    """Layers, heads or positions that were typed: one number, several as ``0,2``, or a range as ``1-3``."""
    if not isinstance(value, str) or (name == "positions" and value in ("newest", "all", "earlier")):
        return value
    numbers: list[int] = []
    for part in value.replace("–", "-").split(","):
        low, dash, high = (each.strip() for each in part.partition("-"))
        if not all(each.isdecimal() and len(each) < _DIGITS for each in (low, high if dash else low)):
            raise unexpected(name, value, "numbers such as 3, 0,2 or 1-3")
        numbers += range(int(low), int(high if dash else low) + 1)
    if not numbers or (name == "positions" and numbers != list(range(numbers[0], numbers[-1] + 1))):
        raise unexpected(name, value, "one range such as 5 or 3-7" if numbers else "the smaller number first, as in 1-3")
    if name == "positions":
        return [numbers[0], numbers[-1] + 1]
    return numbers[0] if len(numbers) == 1 else numbers


_DIGITS = 6
"""Of a number that is typed, more than any position has."""
