"""A panel for patching by hand in a notebook: the user changes the choices and sees the effect of
the patch.

The browser's side is ``static/panel.js``; it sends the choices (``asked``), and everything that it
shows is made here. :class:`kvinterp.PatchBench` gives the same answers without a front end.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any

from kvinterp.common.checks import check_choice, check_text, check_unread, check_whole
from kvinterp.data import Prompt
from kvinterp.errors import InputError, KvinterpError, UnsupportedError, unexpected
from kvinterp.models import load_model, wrap
from kvinterp.models.load import check_loadable
from kvinterp.patching import PatchAnswer, PatchBench, PatchRequest
from kvinterp.patching.bench import MEASURED, paths_of
from kvinterp.paths import ExecutionPath
from kvinterp.paths.path import FORMS
from kvinterp.report.page import from_template, script, styles
from kvinterp.report.panel_shown import Data, answer_data, choices, choices_of, code_of, label_of

PROMPT = "Question: Nora has 88 boxes and Jack has 53. How many more boxes does Nora have than Jack?\nAnswer:"
OTHER = PROMPT.replace("88", "78")
"""A second prompt with as many tokens."""


class PatchPanel:
    """The panel, with the choices and the effect of the chosen patch; a notebook shows it.

    Attributes:
        widget: The widget; its traits are all that the browser receives and sends.
        answer: The last answer, or None after an error.
    """

    def __init__(
        self, models: Mapping[str, Callable[[], Any]], prompt: str, other: str, **bench: Any
    ) -> None:
        self._models, self._options = models, bench
        self._benches: dict[str, PatchBench] = {}
        self._pictures: list[Any] = []
        self._asked: Data = {}
        self.answer: PatchAnswer | None = None
        # L2 first, as in a sweep: where paths differ by rounding, one uncertain step dominates KL.
        start = {"model": next(iter(models)), "prompt": prompt, "other": other, "distance": "l2"}
        self.widget = _widget_class()(
            choices=choices(models), asked={**start, **vars(PatchRequest())}
        )
        self.widget.observe(lambda _: self._answer_asked(), "asked")
        self._answer_asked()

    def choose(self, **changes: Any) -> PatchPanel:
        """Changes choices, as a click would: model, prompt, other, distance, or a field of a patch.

        Raises:
            InputError: There is no such choice. Other errors appear in the panel instead.
        """
        for name in changes:
            check_choice("choice", name, self.widget.asked)
        self.widget.asked = {**self.widget.asked, **changes}
        return self

    def picture(self) -> str:
        """The state of the panel as HTML that needs no kernel, no script and no network."""
        widget = self.widget
        return from_template("panel", asked=widget.asked, answer=widget.answer, error=widget.error)

    def _ipython_display_(self) -> None:
        from IPython.display import display

        display(self.widget)
        # The panel hides this picture. A page made of the notebook shows it, since it has no kernel
        # to ask.
        self._pictures.append(display(self._picture(), display_id=True))

    def _picture(self) -> Any:
        from IPython.display import HTML

        return HTML(f'<div class="kvinterp-picture">{self.picture()}</div>')

    # What the browser sends -----------------------------------------------------------------------

    def _answer_asked(self) -> None:
        """Answers what is asked and shows it; an error becomes a sentence, since a traceback would
        be lost in a log.
        """
        if self.widget.asked == self._asked:
            return
        try:
            state = {"error": "", **self._update()}
            self._asked = state["asked"]
        except Exception as error:
            sentence = (
                str(error)
                if isinstance(error, KvinterpError)
                else f"{type(error).__name__}: {error}"
            )
            self.answer, self._asked = None, {}
            state = {"error": " ".join(sentence.split()), "answer": {}}
        # The browser draws when this last one changes: by then all the others have.
        state["answered"] = self.widget.answered + 1
        with self.widget.hold_sync():
            for name, value in state.items():
                setattr(self.widget, name, value)
        for handle in self._pictures:
            handle.update(self._picture())

    def _update(self) -> Data:
        """The new state of the widget for what is asked."""
        fields = dict(self.widget.asked)
        back = fields.pop("back", None)
        bench = self._bench(fields["model"])
        fields, question = self._complete(fields, bench)
        check_choice("distance", fields["distance"], MEASURED)
        bench.turn_to(fields["prompt"], fields["other"])
        answer = self.answer = bench.answer(question, top=5)
        code = code_of(question, fields["prompt"], fields["other"], self._call())
        return {
            "asked": fields,
            "choices": {**choices(self._models), **choices_of(bench, question)},
            "answer": {**answer_data(answer, bench, fields["distance"]), "code": code},
            "tried": _tried(self.widget.tried, fields, answer, back),
        }

    def _bench(self, name: str) -> PatchBench:
        check_choice("model", name, self._models)
        if name not in self._benches:
            self._benches[name] = PatchBench(self._models[name](), **self._options)
        return self._benches[name]

    def _call(self) -> str:
        """The arguments of the bench that are not its defaults, as code."""
        defaults = inspect.signature(PatchBench).parameters
        options = {
            name: str(value) if name in FORMS else value for name, value in self._options.items()
        }
        return ", ".join(
            f"{name}={value!r}"
            for name, value in options.items()
            if name == "max_new_tokens" or value != defaults[name].default
        )

    def _complete(self, fields: Data, bench: PatchBench) -> tuple[Data, PatchRequest]:
        """Completes the choices so that heads and positions are ones that the site has."""
        fields |= {
            name: _parse_numbers(name, fields[name]) for name in ("layer", "head", "positions")
        }
        heads, _ = bench.adapter.facts.heads_of(_question(fields).site)
        if not heads:
            fields["head"] = None
        tried = self.widget.tried
        before = tried["entries"][tried["at"]]["asked"] if tried["entries"] else fields
        if before["site"] != fields["site"] and fields["positions"] == before["positions"] in (
            "newest",
            "all",
        ):
            fields["positions"] = None
        question = _question(fields)
        # Where none are chosen, the site's default: the newest position, or all positions of the
        # cache.
        question = dataclasses.replace(question, positions=question.patch().positions)
        # JSON has lists only.
        chosen = {
            name: list(value) if isinstance(value, tuple) else value
            for name, value in vars(question).items()
        }
        return fields | chosen, question


def _tried(tried: Data, fields: Data, answer: PatchAnswer, back: Any) -> Data:
    """The list of what was tried with the answered question, and with the entry that undo goes back
    to.
    """
    entries, at = tried["entries"], tried["at"]
    if isinstance(back, int) and 0 <= back < len(entries):
        return {"entries": entries, "at": back}
    if entries and {**fields, "distance": ""} == {**entries[at]["asked"], "distance": ""}:
        return tried
    entry = {
        "asked": fields,
        "said": label_of(answer.request),
        "found": answer.sentences()[0],
        "before": max(at, 0),
    }
    return {"entries": [*entries, entry], "at": len(entries)}


def patch_panel(
    models: Any = "zoo:mistral-mini",
    prompt: str | Prompt = PROMPT,
    *,
    other: str | Prompt = "",
    max_new_tokens: int = 12,
    kind: str = "native",
    dtype: str | None = None,
    kernels: str = "native",
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
) -> PatchPanel:
    """Makes a panel to patch by hand: the user chooses the donor, the place and the step, and sees
    the effect of the patch.

    The donor is the other path, another prompt, or an ablation. The panel lists what was tried, and
    undo goes back. A page made of the notebook shows a picture of the panel's last state.

    Args:
        models: A name, a model of any kind or an adapter; or a list of these to choose from. Names
            are loaded when chosen.
        prompt: The text to begin with.
        other: Another prompt with as many tokens, for where it is chosen as the donor.
        max_new_tokens: The largest number of steps.
        kind: The kind in which names are loaded; see :func:`kvinterp.load_model`.
        dtype: The dtype in which names are loaded.
        kernels: The kernel mode of both paths, such as ``split_k(4,float16)``, under which they
            differ on any machine.
        cached: The cached path, such as ``cached+int8``.
        recompute: The recompute path.

    Raises:
        InputError: No model was given.
        UnsupportedError: anywidget is not installed.

    Example:
        >>> kv.patch_panel(model, prompts[0], other=prompts[1])  # doctest: +SKIP
    """
    items = list(models) if isinstance(models, list | tuple) else [models]
    if not items:
        raise InputError("the list of models is empty: give at least one.")
    check_loadable(kind, dtype=dtype)
    if not any(isinstance(model, str) for model in items):
        for name, choice, default in (("kind", kind, "native"), ("dtype", dtype, None)):
            check_unread(name, choice, default, "no model is loaded by name; leave it out")
    check_whole("max_new_tokens", max_new_tokens, 2)
    paths_of(cached, recompute, kernels)
    offered: dict[str, Callable[[], Any]] = {}
    for model in items:
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
    options = {
        "max_new_tokens": max_new_tokens,
        "kernels": kernels,
        "cached": cached,
        "recompute": recompute,
    }
    return PatchPanel(
        offered, first, OTHER if first == PROMPT and not second else second, **options
    )


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
        """The data that the browser receives and sends: see ``static/panel.js``."""

        _esm = str(script("draw", "panel"))
        _css = str(styles("draw", "panel"))
        asked = traitlets.Dict().tag(sync=True)
        choices = traitlets.Dict().tag(sync=True)
        answer = traitlets.Dict().tag(sync=True)
        tried = traitlets.Dict({"entries": [], "at": -1}).tag(sync=True)
        error = traitlets.Unicode().tag(sync=True)
        answered = traitlets.Int().tag(sync=True)

        def __repr__(self) -> str:
            # Without a front end this text is all that shows of the widget, and it is the same in
            # every run.
            return "kvinterp: a panel to patch by hand; under it a picture of it as it last stood"

    return PatchPanelWidget


def _question(fields: Mapping[str, Any]) -> PatchRequest:
    names = [field.name for field in dataclasses.fields(PatchRequest)]
    values: Data = {
        name: tuple(fields[name]) if isinstance(fields[name], list) else fields[name]
        for name in names
    }
    return PatchRequest(**values)


def _parse_numbers(name: str, value: Any) -> Any:
    """Parses layers, heads or positions that the user typed: one number, several as ``0,2``, or a
    range as ``1-3``.
    """
    if not isinstance(value, str) or (
        name == "positions" and value in ("newest", "all", "earlier")
    ):
        return value
    parts = [
        re.fullmatch(r"\s*(\d{1,5})\s*(?:[-–]\s*(\d{1,5})\s*)?", part) for part in value.split(",")
    ]
    numbers = [
        number
        for part in parts
        if part
        for number in range(int(part[1]), int(part[2] or part[1]) + 1)
    ]
    if None in parts or not numbers:
        raise unexpected(name, value, "numbers such as 3, 0,2 or 1-3")
    if name != "positions":
        return numbers if len(numbers) > 1 else numbers[0]
    if numbers != list(range(numbers[0], numbers[-1] + 1)):
        raise unexpected(name, value, "one range such as 5 or 3-7")
    return [numbers[0], numbers[-1] + 1]
