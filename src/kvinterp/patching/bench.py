"""Answers one patch after another on one model. Runs that do not depend on the patch are made once
and reused.

A question is data, and so is its answer. The notebook panel uses this bench, and it works without
the panel.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp import metrics
from kvinterp.common.checks import (
    check_choice,
    check_known,
    check_unread,
    check_whole,
    whole_number,
)
from kvinterp.common.numbers import counted
from kvinterp.common.vocabulary import UNCHANGED
from kvinterp.errors import InputError, located
from kvinterp.models import dtype_named, wrap
from kvinterp.models.answers import LOGIT_DIFFERENCE
from kvinterp.models.hook_names import one_site
from kvinterp.models.inputs import chosen_layers, encode
from kvinterp.models.threads import own_threads
from kvinterp.patching.ablations import ABLATIONS, ZERO, Ablation
from kvinterp.patching.clean_corrupted import check_aligned
from kvinterp.patching.distances import DISTANCES, check_finite, distances_of
from kvinterp.patching.hook import PatchHook, read_changes
from kvinterp.patching.patch import PATCHED_CACHE, Patch, Positions, check_patch_site, stored_sites
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.side_by_side import two_paths
from kvinterp.patching.sweeping import DIRECTIONS
from kvinterp.paths import ExecutionPath, Runner, kernels_named, run
from kvinterp.paths.decode import fed_to_all, lockstep
from kvinterp.paths.kernels import Native
from kvinterp.paths.path import FORMS
from kvinterp.recording import Trace

EVERY = "every"
MEASURED = ("l2", "kl", LOGIT_DIFFERENCE)
"""The distances of every patch: L2 of the logits, KL in nats, and the logit difference of two
tokens.
"""
DONORS = {
    "path": "the other path, on the same prompt",
    "prompt": "the same path, on another prompt of as many tokens",
    **ABLATIONS,
}


@dataclasses.dataclass(frozen=True)
class PatchRequest:
    """One patch of one prompt, as data.

    Attributes:
        site: A site of PATCH_SITES.
        layer: The layer, or several.
        head: Query head or KV head, as the site has them, or several; all for None.
        step: A step, or ``"every"``: every step from ``first`` on.
        positions: As in :class:`Patch`; None for the newest, or for all of the cache.
        direction: A direction of DIRECTIONS.
        donor: A name of DONORS.
    """

    site: str = "resid_post"
    layer: int | tuple[int, ...] = 0
    head: int | tuple[int, ...] | None = None
    step: int | str = EVERY
    positions: Positions | None = None
    direction: str = "into-recompute"
    donor: str = "path"

    def __post_init__(self) -> None:
        check_choice("direction", self.direction, DIRECTIONS)
        check_known("donor", self.donor, DONORS)
        check_patch_site(self.site)
        number = whole_number(self.step)
        if self.step != EVERY and (number is None or number < self.first):
            kind = "a decode step from 1 on" if self.first else "a step from 0 on"
            raise InputError(f"step={self.step!r} was given: expected {kind}, or 'every'.")

    @property
    def first(self) -> int:
        """The first step that can differ: both paths of one prompt begin with the same forward."""
        return int(self.donor == "path")

    @property
    def into(self) -> str:
        """The form of the path that is patched."""
        return self.direction.removeprefix("into-")

    @property
    def other(self) -> str:
        """The form of the other path."""
        return "recompute" if self.into == "cached" else "cached"

    @property
    def ablates(self) -> bool:
        """Whether the patch puts in rows that no run of the prompt computed, so that it restores
        nothing.
        """
        return self.donor in ABLATIONS

    def patch(self, donor: Trace | Ablation | None = None) -> Patch:
        """Makes the :class:`Patch`."""
        positions = self.positions
        if positions is None:
            positions = "all" if self.site in PATCHED_CACHE else "newest"
        # A patch makes tuples of single numbers.
        fields: Any = (self.site, self.layer, self.head, positions, self.step, donor)
        return Patch(*fields)


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchAnswer:
    """The effect of one patch.

    Distances are means over the patched steps, from the donor's logits, or for an ablation from the
    unpatched ones. L2 leads, as in :func:`kvinterp.sweep`: where paths differ by rounding, one
    uncertain step is most of the KL.

    Attributes:
        request: The patch.
        recovery: ``1 - d_after / d_before`` of the L2 distance; NaN if there is nothing to recover,
            as with an ablation.
        why: Why ``recovery`` is NaN and what to do instead; else empty.
        d_before: L2 distance of the logits from the donor's, unpatched; exactly 0 for an ablation.
        d_after: The same, patched; for an ablation from the unpatched logits, which is its effect.
        null: The largest L2 distance of two recomputations of the same positions, one of a longer
            text; NaN where the text is too short for two.
        kl_recovery: The recovery of the KL; NaN where that is 0.
        kl_before: KL(donor || unpatched), in nats; exactly 0 for an ablation.
        kl_after: KL(donor || patched); for an ablation KL(unpatched || patched).
        pair: The two tokens of the logit difference, chosen by :func:`pair_of`.
        pair_before: ``|difference of the donor - difference of the unpatched run|``, in logits.
        pair_after: The same for the patched run.
        pair_recovery: The recovery of the logit difference.
        steps: One row a patched step: step, token (fed at it), recovery, d_before, d_after,
            kl_recovery, kl_before, kl_after.
        tokens: The top tokens of each run at ``shown_step``: run (donor, unpatched, patched), rank,
            token, text, probability, logit.
        shown_step: The step with the largest KL before the patch; for an ablation after it.
        unchanged: Whether every value that the patch wrote was there already.
        seconds: How long the answer took.
    """

    request: PatchRequest
    recovery: float
    why: str
    d_before: float
    d_after: float
    null: float
    kl_recovery: float
    kl_before: float
    kl_after: float
    pair: tuple[str, str]
    pair_before: float
    pair_after: float
    pair_recovery: float
    steps: pd.DataFrame
    tokens: pd.DataFrame
    shown_step: int
    unchanged: bool
    seconds: float

    def __repr__(self) -> str:
        """Names the patch and its effect in one line."""
        lead, *rest = self.sentences()
        return f"<PatchAnswer to {self.request}: {lead} {'. '.join(rest)}.>"

    @property
    def within_null(self) -> bool:
        """Whether the whole difference is no larger than that of two recomputations: what is
        recovered of it is rounding.
        """
        whole = self.d_after if self.request.ablates else self.d_before
        return 0 < whole <= self.null

    def sentences(self) -> list[str]:
        """What the patch did: first the one thing to read, then the numbers behind it."""
        over = f"over {counted(len(self.steps), 'step')}"
        before, after = exactly(self.d_before), exactly(self.d_after)
        kl_before, kl_after = (exactly(value, "nats") for value in (self.kl_before, self.kl_after))
        null = f"two recomputations of the same positions differ by an L2 of up to {exactly(self.null)}"
        if self.request.ablates:
            lines = [
                f"L2 distance of the logits {after}, KL(unpatched || patched) {kl_after}",
                f"mean {over}. An ablation restores nothing, so there is no recovery: this is what it changes",
            ]
            lines += [f"It is within its null: {null}"] * self.within_null
        elif math.isnan(self.recovery):
            lines = ["Recovery undefined", f"{over}: {self.why.rstrip('.')}"]
        elif self.within_null:
            lines = [
                f"Recovery {self.recovery:.2%} of a difference that is within its null:",
                f"the L2 distance of the logits is {before} before and {after} after the patch, {over}, and {null}, so that what "
                "was moved has the size of rounding",
            ]
        else:
            share = "" if math.isnan(self.kl_recovery) else f" ({self.kl_recovery:.2%})"
            lines = [
                f"Recovery {self.recovery:.2%} of the L2 distance of the logits",
                f"{over}. L2 to the donor: {before} before, {after} after the patch; KL: {kl_before} before, {kl_after} "
                f"after{share}",
            ]
        return lines + [f"The patch {UNCHANGED}"] * self.unchanged


def paths_of(
    cached: str | ExecutionPath, recompute: str | ExecutionPath, kernels: str = "native"
) -> dict[str, ExecutionPath]:
    """The two paths of a bench by their form, each with the kernel mode if one is given.

    Raises:
        InputError: A path has another form, or kernels of its own beside the mode.
    """
    mode, paths = (
        kernels_named(kernels),
        dict(zip(FORMS, two_paths(cached, recompute, "patching by hand"), strict=True)),
    )
    if isinstance(mode, Native):
        return paths
    for path in paths.values():
        if not isinstance(path.kernels, Native):
            raise InputError(
                f"kernels={kernels!r} was given with path {path}, which has its own: leave one out."
            )
    return {form: dataclasses.replace(path, kernels=mode) for form, path in paths.items()}


def pair_of(
    donor: Float[Tensor, "step vocab"], base: Float[Tensor, "step vocab"]
) -> tuple[int, int]:
    """The two tokens of the logit difference: at the step where the logits are farthest apart, the
    top tokens of both runs.

    If both have the same top token, the second is the donor's second.
    """
    at = int(DISTANCES["l2"](donor, base).argmax())
    first, second = donor[at].topk(2).indices.tolist()
    base_first = int(base[at].argmax())
    return first, second if base_first == first else base_first


def exactly(value: float, unit: str = "") -> str:
    """A distance in words: ``exactly 0``, or three digits and the unit."""
    return "exactly 0" if value == 0 else f"{value:.3g} {unit}".strip()


class PatchBench:
    """Answers one patch after another on one model, in the matched protocol.

    Both paths are fed the tokens the cached path chooses greedily, and so is another prompt that is
    the donor.

    Args:
        model: A model of any kind, or an adapter.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        kernels: The kernel mode of both paths, such as ``split_k(4,float16)``, under which they
            differ on any machine.
        cached: The cached path, such as ``cached+int8``.
        recompute: The recompute path.

    Attributes:
        runs: How many runs that do not depend on a patch were made so far.
        prompt: Token ids of the current prompt.
        other: Token ids of the other prompt; empty if there is none.
    """

    def __init__(
        self,
        model: Any,
        max_new_tokens: int = 12,
        kernels: str = "native",
        cached: str | ExecutionPath = "cached",
        recompute: str | ExecutionPath = "recompute",
    ) -> None:
        self.max_new_tokens = check_whole(
            "max_new_tokens", max_new_tokens, 2, hint=", so that one step decodes"
        )
        self.adapter = wrap(model)
        self.runs = 0
        self.prompt: tuple[int, ...] = ()
        self.other: tuple[int, ...] = ()
        self._traces: dict[Any, Trace] = {}
        self._null: float | None = None
        self._paths = paths_of(cached, recompute, kernels)

    def ask(
        self,
        prompt: Any,
        site: str = "resid_post",
        layer: int | tuple[int, ...] = 0,
        head: int | tuple[int, ...] | None = None,
        step: int | str = EVERY,
        direction: str = "into-recompute",
        top: int = 5,
        *,
        positions: Positions | None = None,
        donor: str = "path",
        other: Any = None,
    ) -> PatchAnswer:
        """Runs a patch and returns what it recovers, or what an ablation does.

        Args:
            prompt: A text, a prompt or token ids.
            site: As in :class:`PatchRequest`, or a hook by TransformerLens's name, which names the layer
                too.
            layer: As in :class:`PatchRequest`.
            head: As in :class:`PatchRequest`.
            step: As in :class:`PatchRequest`.
            direction: As in :class:`PatchRequest`.
            top: How many top tokens of each run to return.
            positions: As in :class:`PatchRequest`.
            donor: As in :class:`PatchRequest`.
            other: Another prompt, for the donor ``"prompt"``.

        Raises:
            InputError: An argument names something that does not exist.
            NonFiniteError: NaN or Inf appeared in the logits.
            UnsupportedError: This model does not show the site.
        """
        site, hook_layers = one_site(self.adapter, site, None)
        layers = chosen_layers(self.adapter, hook_layers or layer)
        layer = layers[0] if len(layers) == 1 else tuple(layers)
        question = PatchRequest(site, layer, head, step, positions, direction, donor)
        if donor != "prompt":
            check_unread(
                "other",
                other,
                None,
                f"donor {donor!r} gives without another prompt; give donor='prompt'",
            )
        self.turn_to(prompt, other)
        return self.answer(question, top)

    def answer(self, question: PatchRequest, top: int = 5) -> PatchAnswer:
        """Answers a question about the prompt that :meth:`turn_to` set, as :meth:`ask` does."""
        started, top = time.perf_counter(), check_whole("top", top)
        steps, pair, logits, changed, distances = self._measure(question)
        recovery = {name: metrics.recovery(*ends).tolist() for name, ends in distances.items()}
        (before, after), (kl_before, kl_after), (pair_before, pair_after) = (
            distances[name].tolist() for name in ("l2", "kl", LOGIT_DIFFERENCE)
        )
        columns = {
            "step": steps,
            "token": [self.adapter.decode([self.fed[step - 1]]) if step else "" for step in steps],
            "recovery": recovery["l2"][1:],
            "d_before": before[1:],
            "d_after": after[1:],
            "kl_recovery": recovery["kl"][1:],
            "kl_before": kl_before[1:],
            "kl_after": kl_after[1:],
        }
        largest = int(distances["kl"][int(question.ablates), 1:].argmax())
        runs = ("unpatched", "patched") if question.ablates else ("donor", "unpatched", "patched")
        return PatchAnswer(
            request=question,
            recovery=recovery["l2"][0],
            why="" if question.ablates else metrics.why_undefined(len(steps), before[0], before[0]),
            d_before=before[0],
            d_after=after[0],
            null=self._null_of(),
            kl_recovery=recovery["kl"][0],
            kl_before=kl_before[0],
            kl_after=kl_after[0],
            pair=tuple(self.adapter.pieces(list(pair))),  # type: ignore[arg-type]
            pair_before=pair_before[0],
            pair_after=pair_after[0],
            pair_recovery=recovery[LOGIT_DIFFERENCE][0],
            steps=pd.DataFrame(columns),
            tokens=self._top_tokens(
                dict(zip(runs, logits[-len(runs) :, largest], strict=True)), top
            ),
            shown_step=steps[largest],
            unchanged=not changed,
            seconds=time.perf_counter() - started,
        )

    def _top_tokens(self, runs: Mapping[str, Float[Tensor, " vocab"]], top: int) -> pd.DataFrame:
        rows: list[dict[str, Any]] = []
        for name, logits in runs.items():
            probabilities = logits.double().softmax(-1)
            best = logits.topk(min(top, len(logits))).indices.tolist()
            for rank, (token, text) in enumerate(
                zip(best, self.adapter.pieces(best), strict=True), 1
            ):
                scores = {"probability": float(probabilities[token]), "logit": float(logits[token])}
                rows.append({"run": name, "rank": rank, "token": token, "text": text, **scores})
        return pd.DataFrame(rows)

    # Runs that do not depend on the patch ---------------------------------------------------------

    def turn_to(self, prompt: Any, other: Any = None) -> None:
        """Sets the prompt, and the other prompt, of the questions that follow.

        Raises:
            InputError: One of them is empty, too long or no text of this model.
        """
        tokens = tuple(encode(self.adapter, prompt, self.max_new_tokens))
        # A blank field of the panel means no other prompt.
        blank = other is None or (isinstance(other, str) and not other.strip())
        other_tokens = () if blank else tuple(encode(self.adapter, other, self.max_new_tokens))
        if tokens != self.prompt:
            self._null = None
            self._traces.clear()
            self._pure = PureRecompute(self.adapter, self._paths["recompute"])
        elif other_tokens != self.other:
            self._traces = {key: trace for key, trace in self._traces.items() if key[1] == "prompt"}
        self.prompt, self.other = tokens, other_tokens

    def _null_of(self) -> float:
        """The largest L2 distance of two recomputations, of the text and of half of what was
        decoded; NaN without a half.
        """
        if self._null is None:
            text, start = (
                torch.tensor([[*self.prompt, *self.fed]], device=self.adapter.device),
                len(self.prompt) - 1,
            )
            stop, self._null = start + (text.shape[1] - start + 1) // 2, math.nan
            if stop < text.shape[1]:
                with (
                    located(f"model {self.adapter.facts.name}"),
                    own_threads(self.adapter),
                    torch.no_grad(),
                ):
                    whole, half = (
                        self._pure.whole(part)[0, start:stop] for part in (text, text[:, :stop])
                    )
                self._null = float(DISTANCES["l2"](whole, half).max())
        return self._null

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens that both paths are fed, one a step from step 1 on."""
        return self._prompt_trace("cached").fed

    def _prompt_trace(self, form: str) -> Trace:
        """A path's trace of the prompt, whichever sites it recorded."""
        trace = next(
            (trace for key, trace in self._traces.items() if key[:2] == (form, "prompt")), None
        )
        return self._trace(form, "prompt") if trace is None else trace

    def _trace(self, form: str, name: str, question: PatchRequest | None = None) -> Trace:
        """A path's trace of ``"prompt"`` or ``"other"``, with the site of a question."""
        # All positions are recorded at the question's layers only, the newest position at every
        # layer.
        whole = question is not None and question.patch().positions != "newest"
        layers = question.layer if question is not None and whole else None
        site = "" if question is None else question.site
        key = (form, name, site, layers)
        if key not in self._traces:
            lead = (
                form == "cached"
                and name == "prompt"
                and not any(k[:2] == (form, name) for k in self._traces)
            )
            fed = None if lead else self.fed
            self.runs += 1
            self._traces[key] = run(
                self.adapter,
                list(getattr(self, name)),
                self._paths[form],
                max_new_tokens=self.max_new_tokens if fed is None else len(fed) + 1,
                continuation=fed,
                stop="end of sequence" if fed is None else "length",
                record=stored_sites(self.adapter, site) if site else (),
                layers=layers,
                positions="all" if whole else "newest",
                logits="keep",
            )
        return self._traces[key]

    # The patched run ------------------------------------------------------------------------------

    def _measure(
        self, question: PatchRequest
    ) -> tuple[
        list[int], tuple[int, int], Float[Tensor, "run step vocab"], bool, dict[str, Tensor]
    ]:
        """Runs a patch and measures it.

        Returns:
            The steps; the two tokens of the logit difference; the logits of the donor, the
            unpatched and the patched run at each step; whether the patch changed anything; and for
            each of MEASURED the distance before and after, first its mean over the steps and then
            each step's.
        """
        # Raises InputError if the patch does not fit the model.
        PatchHook(self.adapter, [question.patch()])
        path = self._paths[question.into]
        form = "recompute" if path.refresh else path.form
        with (
            located(f"model {self.adapter.facts.name}"),
            own_threads(self.adapter),
            torch.no_grad(),
        ):
            source = self._donor(question)
            base: Any = self._prompt_trace(question.into).logits
            donor: Any = base if isinstance(source, Ablation) else source.logits
            steps = (
                list(range(question.first, len(base)))
                if question.step == EVERY
                else [int(question.step)]
            )
            if not steps or steps[-1] >= len(base):
                raise InputError(
                    f"step {steps[-1] if steps else 1} does not exist: the cached path decodes steps 1 to {len(base) - 1} of "
                    f"this prompt with max_new_tokens={self.max_new_tokens}."
                )
            patch = dataclasses.replace(question.patch(), steps=tuple(steps))
            if not any(patch.moves(step, len(self.prompt), form) for step in steps):
                raise InputError(
                    f"positions={patch.positions!r} of {question.site!r} patches nothing at "
                    f"{'any step' if question.step == EVERY else f'step {question.step}'}: the cached path computes the newest "
                    "position only at a decode step, and no path has positions yet to come; name others, patch kv, or patch "
                    "into-recompute."
                )
            patched, changed = self._run_patched(question, question.patch(source), steps)
        # Two paths may compute in two dtypes.
        logits = torch.stack([run.to(donor) for run in (donor[steps], base[steps], patched)])
        pair, distances = pair_of(donor, base.to(donor)), {}
        for name, distance in distances_of(",".join(MEASURED), pair).items():
            ends = [distance(logits[0], run).double() for run in logits[1:]]
            distances[name] = torch.stack(
                [torch.cat([by_step.mean()[None], by_step]) for by_step in ends]
            )
        check_finite(
            torch.stack([*distances.values()]),
            f"the patch of {question.site} at layer {question.layer}",
        )
        return steps, pair, logits, changed, distances

    def _donor(self, question: PatchRequest) -> Trace | Ablation:
        if question.ablates:
            return ZERO
        if question.donor == "path":
            return self._trace(question.other, "prompt", question)
        if not self.other:
            raise InputError(
                "donor 'prompt' takes from another prompt and none was given: give other='a text'."
            )
        check_aligned(self.other, self.prompt)
        return self._trace(question.into, "other", question)

    def _run_patched(
        self, question: PatchRequest, patch: Patch, steps: Sequence[int]
    ) -> tuple[Float[Tensor, "step vocab"], bool]:
        """The logits of the patched path at each step, and whether the patch changed anything."""
        fed, prompt = self.fed, list(self.prompt)
        model = self.adapter.at(dtype_named(self._paths[question.into].dtype))
        hook = PatchHook(model, [patch], None, len(prompt), question.first)
        if question.into == "recompute":
            if len(steps) == 1:
                # Questions about one prefix share it: the blocks before the patched one run once.
                self._pure.capture([*prompt, *fed[: steps[0]]])
            rows = [self._pure.patched([*prompt, *fed[:step]], step, hook) for step in steps]
        else:
            max_new_tokens, row = steps[-1] + 1, torch.tensor([prompt], device=self.adapter.device)
            with Runner(self.adapter, self._paths["cached"], row, max_new_tokens, [hook]) as runner:
                forced = fed_to_all(fed, 1, 1, row.device)
                every = [
                    step.logits[0][0].clone()
                    for step in lockstep([runner], max_new_tokens, given=forced)
                ]
            rows = [every[step] for step in steps]
        return torch.stack(rows), read_changes([hook])[0][0]
