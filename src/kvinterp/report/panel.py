"""Patching by hand in a notebook: a panel, and under it :class:`PatchBench`, which answers without a front end.

The bench keeps what does not depend on the patch (both paths' logits and the donor's tensors for the prompt in hand), so
that a question costs the patched run alone.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp import metrics
from kvinterp.data import Prompt
from kvinterp.errors import InputError, KvinterpError, UnsupportedError, located, unknown
from kvinterp.inputs import check_choice, encode
from kvinterp.models import Adapter, load_model, wrap
from kvinterp.models.threads import own_threads
from kvinterp.patching import DIRECTIONS, PATCH_SITES, Patch, PatchHook, PureRecompute
from kvinterp.patching.patch import PATCHED_CACHE, stored_sites
from kvinterp.paths import Runner, path_named, run
from kvinterp.paths.decode import fed_to_all, lockstep
from kvinterp.reading.patching import recovery_said
from kvinterp.recording import Trace
from kvinterp.report.page import Column, Table, Text, fragment

__all__ = ["PatchAnswer", "PatchBench", "PatchPanel", "patch_panel"]

EVERY = "every"


@dataclasses.dataclass(frozen=True)
class PatchAnswer:
    """What one patch did.

    Attributes:
        recovery: ``1 - d_after / d_before``; NaN where there is nothing to recover.
        l2_recovery: The same of the L2 distance of the logits, which no single step decides.
        why: Why ``recovery`` is NaN and what to do instead; else empty.
        d_before: Mean KL(donor || unpatched) over the steps patched, in nats.
        d_after: Mean KL(donor || patched) over them.
        steps: One row a step patched: step, token (fed at it), recovery, d_before, d_after, l2_recovery.
        tokens: The top tokens of the donor at ``shown_step``: token, text, donor, unpatched, patched (logits).
        shown_step: The step whose logits are shown: the one with the largest d_before.
        seconds: How long the answer took.
    """

    recovery: float
    d_before: float
    d_after: float
    steps: pd.DataFrame
    tokens: pd.DataFrame
    shown_step: int
    seconds: float
    l2_recovery: float
    why: str

    def html(self) -> str:
        """The answer as HTML; text that came with the tokens is escaped."""
        lead, rest = recovery_said(self)
        head = [Column("token", "code"), Column("donor"), Column("unpatched"), Column("patched")]
        rows = [
            [repr(row.text), *(f"{getattr(row, name):.6g}" for name in ("donor", "unpatched", "patched"))]
            for row in self.tokens.itertuples()
        ]
        caption = f"Logits of the donor's top tokens at step {self.shown_step}"
        return fragment(Text(rest, label=lead), Table(head, rows, caption=caption))


class PatchBench:
    """Answers one patch after another on one model, in the matched protocol.

    Both paths are fed the tokens the cached path chooses greedily. Patches move the newest position, of the cache all.

    Args:
        model: A model of any kind, or an adapter.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        kernels: The kernel mode of both paths, as in ``split_k(4,float16)``, under which they differ on any machine.

    Attributes:
        runs: Runs made so far that do not depend on a patch, the measure of what is remembered.
    """

    def __init__(self, model: Any, max_new_tokens: int = 12, kernels: str = "native") -> None:
        if not isinstance(max_new_tokens, int) or max_new_tokens < 2:
            raise InputError(f"max_new_tokens={max_new_tokens!r} was given: expected at least 2, so that one step decodes.")
        self.adapter = wrap(model)
        self.max_new_tokens = max_new_tokens
        self.runs = 0
        self._prompt: tuple[int, ...] = ()
        self._traces: dict[tuple[str, str, int | None], Trace] = {}
        self._paths = {form: path_named(f"{form}[kernels={kernels}]") for form in ("cached", "recompute")}
        self._pure = PureRecompute(self.adapter, self._paths["recompute"])

    def ask(
        self,
        prompt: str | Prompt | Sequence[int],
        site: str = "resid_post",
        layer: int = 0,
        head: int | None = None,
        step: int | str = EVERY,
        direction: str = "into-recompute",
        top: int = 5,
    ) -> PatchAnswer:
        """Patches and says what it recovers.

        Args:
            prompt: A text, a prompt or token ids.
            site: A site of PATCH_SITES.
            layer: The layer.
            head: Query head or KV head, as the site has them; all for None.
            step: A decode step from 1 on, or ``"every"``.
            direction: ``"into-recompute"`` or ``"into-cached"``.
            top: How many of the donor's top tokens to show.

        Raises:
            InputError: Something given does not exist.
            UnsupportedError: This model does not show the site.
        """
        started = time.perf_counter()
        check_choice("direction", direction, tuple(DIRECTIONS))
        if site not in PATCH_SITES:
            raise unknown("patch site", site, PATCH_SITES)
        if not (step == EVERY or (isinstance(step, int) and not isinstance(step, bool) and step >= 1)):
            raise InputError(f"step={step!r} was given: expected a decode step from 1 on, or 'every'.")
        wanted: Any = EVERY if step == EVERY else (step,)
        spot = "all" if site in PATCHED_CACHE else "newest"
        patch = Patch(site, (layer,), None if head is None else (head,), spot, wanted)
        PatchHook(self.adapter, [patch])
        with located(f"model {self.adapter.facts.name}"), own_threads(self.adapter), torch.no_grad():
            self._turn_to(prompt)
            giving, taking = ("cached", "recompute") if direction == "into-recompute" else ("recompute", "cached")
            patch = dataclasses.replace(patch, donor=self._trace(giving, site, layer))
            donor, base = self._logits(giving), self._logits(taking)
            steps = list(range(1, len(donor))) if step == EVERY else [int(step)]
            if not steps or steps[-1] >= len(donor):
                raise InputError(
                    f"step {steps[-1] if steps else 1} does not exist: the cached path decodes steps 1 to {len(donor) - 1} "
                    f"of this prompt with max_new_tokens={self.max_new_tokens}."
                )
            patched = self._patched(patch, taking, steps)
        return self._answer(steps, donor[steps], base[steps], patched, top, started)

    # What does not depend on the patch ---------------------------------------------------------------------------------

    def _turn_to(self, prompt: str | Prompt | Sequence[int]) -> None:
        tokens = tuple(encode(self.adapter, prompt, self.max_new_tokens))
        if tokens != self._prompt:
            self._prompt = tokens
            self._traces.clear()
            self._pure = PureRecompute(self.adapter, self._paths["recompute"])

    def _fed(self) -> tuple[int, ...]:
        return self._any("cached").fed

    def _logits(self, form: str) -> Float[Tensor, "step vocab"]:
        logits = self._any(form).logits
        assert logits is not None, "every run of the bench keeps its logits"
        return logits

    def _any(self, form: str) -> Trace:
        """The path's run on this prompt, with whatever it recorded."""
        found = next((trace for (of, *_), trace in self._traces.items() if of == form), None)
        return self._trace(form, "", None) if found is None else found

    def _trace(self, form: str, site: str, layer: int | None) -> Trace:
        # The cache is recorded whole and at one layer only, all others at the newest position of every layer.
        at = layer if site in PATCHED_CACHE else None
        if (form, site, at) not in self._traces:
            fed = None if form == "cached" and not any(of == "cached" for of, *_ in self._traces) else self._fed()
            self.runs += 1
            self._traces[form, site, at] = run(
                self.adapter,
                list(self._prompt),
                self._paths[form],
                max_new_tokens=self.max_new_tokens if fed is None else len(fed) + 1,
                continuation=fed,
                stop="end of sequence" if fed is None else "length",
                record=stored_sites(self.adapter, site) if site else (),
                layers=None if at is None else [at],
                positions="newest" if at is None else "all",
                logits="keep",
            )
        return self._traces[form, site, at]

    # What does ---------------------------------------------------------------------------------------------------------

    def _patched(self, patch: Patch, taking: str, steps: Sequence[int]) -> Float[Tensor, "step vocab"]:
        fed, prompt = self._fed(), list(self._prompt)
        hook = PatchHook(self.adapter, [patch], None, len(prompt))
        if taking == "recompute":
            return torch.stack([self._pure.patched([*prompt, *fed[:step]], step, hook) for step in steps])
        room, row = steps[-1] + 1, torch.tensor([prompt], device=self.adapter.device)
        with Runner(self.adapter, self._paths["cached"], row, room, [hook]) as runner:
            given = fed_to_all(fed, 1, 1, row.device)
            rows = [now.logits[0][0].clone() for now in lockstep([runner], room, given=given)]
        return torch.stack([rows[step] for step in steps])

    def _answer(
        self, steps: Sequence[int], donor: Tensor, base: Tensor, patched: Tensor, top: int, started: float
    ) -> PatchAnswer:
        before, after = (metrics.kl_divergence(donor, other) for other in (base, patched))
        fed = self._fed()
        by_step = metrics.recovery(before, after)
        l2 = [(donor.double() - other.double()).norm(dim=-1) for other in (base, patched)]
        frame = pd.DataFrame(
            {
                "step": list(steps),
                "token": self.adapter.pieces([fed[step - 1] for step in steps]),
                "recovery": by_step.tolist(),
                "d_before": before.tolist(),
                "d_after": after.tolist(),
                "l2_recovery": metrics.recovery(*l2).tolist(),
            }
        )
        shown = int(before.argmax())
        best = donor[shown].topk(min(top, donor.shape[-1])).indices
        columns = {"donor": donor, "unpatched": base, "patched": patched}
        tokens = pd.DataFrame(
            {
                "token": best.tolist(),
                "text": self.adapter.pieces(best.tolist()),
                **{name: logits[shown, best].tolist() for name, logits in columns.items()},
            }
        )
        means = before.mean(), after.mean()
        return PatchAnswer(
            float(metrics.recovery(*means)),
            float(means[0]),
            float(means[1]),
            frame,
            tokens,
            int(steps[shown]),
            time.perf_counter() - started,
            float(metrics.recovery(l2[0].mean(), l2[1].mean())),
            metrics.why_undefined(len(steps), float(l2[0].mean()), float(means[0])),
        )


class PatchPanel:
    """The panel: choices on the left, what the patch recovers on the right. It shows itself in a notebook.

    Attributes:
        controls: The ipywidgets by name: model, prompt, direction, site, layer, head, step.
        output: The widget that shows the answer, or what was wrong in one sentence.
        answer: The last answer, or None where there is none.
    """

    def __init__(self, models: Mapping[str, Callable[[], Any]], prompt: str, max_new_tokens: int) -> None:
        widgets = _ipywidgets()
        self._models, self._max_new_tokens = models, max_new_tokens
        self._benches: dict[str, PatchBench] = {}
        self._settling = False
        self.answer: PatchAnswer | None = None
        wide = widgets.Layout(width="26em")

        def choice(name: str, options: Sequence[Any]) -> Any:
            return widgets.Dropdown(options=options, description=name, layout=wide)

        self.controls: dict[str, Any] = {
            "model": choice("model", list(models)),
            "prompt": widgets.Textarea(value=prompt, description="prompt", continuous_update=False, layout=wide),
            "direction": choice("direction", list(DIRECTIONS)),
            "site": choice("site", list(PATCH_SITES)),
            "layer": choice("layer", [0]),
            "head": choice("head", [("all", None)]),
            "step": choice("step", [EVERY, *range(1, max_new_tokens)]),
        }
        self.controls["site"].value = "resid_post"
        self.output = widgets.HTML()
        self.box = widgets.HBox([widgets.VBox(list(self.controls.values())), self.output])
        for control in self.controls.values():
            control.observe(self._changed, names="value")
        self._update()

    def _changed(self, _: Any) -> None:
        if not self._settling:
            self._update()

    def _update(self) -> None:
        """Offers what the model has, asks, and shows the answer; whatever goes wrong becomes a sentence."""
        self.answer = None
        self.output.value = "<p>computing ...</p>"
        self._settling = True
        try:
            bench = self._bench(self.controls["model"].value)
            self._offer(bench.adapter)
            asked = {name: control.value for name, control in self.controls.items() if name != "model"}
            self.answer = bench.ask(**asked)
            self.output.value = self.answer.html()
        except Exception as error:  # A callback's traceback would be lost in the notebook's log.
            said = str(error) if isinstance(error, KvinterpError) else f"{type(error).__name__}: {error}"
            self.output.value = fragment(Text(" ".join(said.split()), look="alert"))
        finally:
            self._settling = False

    def _bench(self, name: str) -> PatchBench:
        if name not in self._benches:
            self._benches[name] = PatchBench(self._models[name](), self._max_new_tokens)
        return self._benches[name]

    def _offer(self, adapter: Adapter) -> None:
        facts, site = adapter.facts, self.controls["site"].value
        count, _ = facts.heads_of(site)
        _set_options(self.controls["layer"], [(str(layer), layer) for layer in range(facts.layers)])
        _set_options(self.controls["head"], [("all", None), *((str(head), head) for head in range(count))])

    def _repr_mimebundle_(self, **kwargs: Any) -> dict[str, Any]:
        # Where no front end runs, as on the web, the answer is read as a table.
        shown = self.box._repr_mimebundle_(**kwargs) or {}
        return {**shown, "text/html": self.output.value}


def patch_panel(
    models: Any = "zoo:mistral-mini",
    prompt: str
    | Prompt = "Question: Nora has 88 boxes and Jack has 53. How many more boxes does Nora have than Jack?\nAnswer:",
    *,
    max_new_tokens: int = 12,
    kind: str = "hooked",
    dtype: str | None = None,
) -> PatchPanel:
    """A panel to patch by hand: model, prompt, direction, site, layer, head and step; it answers as they are changed.

    Args:
        models: A name, a model of any kind or an adapter; or a list of these to choose from. Names are loaded when chosen.
        prompt: The text to begin with.
        max_new_tokens: Most steps.
        kind: How names are loaded; see :func:`kvinterp.load_model`.
        dtype: In which dtype names are loaded.

    Raises:
        InputError: No model was given.
        UnsupportedError: ipywidgets is not installed.
    """
    given = list(models) if isinstance(models, list | tuple) else [models]
    if not given:
        raise InputError("the list of models is empty: give at least one.")
    offered: dict[str, Callable[[], Any]] = {}
    for model in given:
        if isinstance(model, str):
            offered[model] = functools.partial(load_model, model, kind=kind, dtype=dtype)
        else:
            adapter = wrap(model)
            number = sum(name.startswith(adapter.facts.name) for name in offered)
            label = f"{adapter.facts.name} ({adapter.kind})" + (f" {number + 1}" if number else "")
            offered[label] = functools.partial(wrap, adapter)
    return PatchPanel(offered, prompt.text if isinstance(prompt, Prompt) else prompt, max_new_tokens)


def _set_options(control: Any, options: Sequence[tuple[str, Any]]) -> None:
    if tuple(options) == tuple(control.options):
        return
    before = control.value
    control.options = list(options)
    control.value = before if before in [value for _, value in options] else options[0][1]


def _ipywidgets() -> Any:
    try:
        import ipywidgets
    except ImportError as error:
        raise UnsupportedError(
            "the patching panel needs ipywidgets, which is not installed: pip install 'kvinterp[notebook]', or ask a "
            "PatchBench without a panel."
        ) from error
    return ipywidgets
