"""Answers one patch after another on one model. Runs that do not depend on the patch are made once and reused.

A question is data, and so is its answer. The notebook panel uses this bench, and it works without the panel.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp import metrics
from kvinterp.common.checks import check_choice, check_known, check_unread, check_whole, whole_number
from kvinterp.errors import InputError, located
from kvinterp.models import wrap
from kvinterp.models.answers import LOGIT_DIFFERENCE
from kvinterp.models.hook_names import one_site
from kvinterp.models.inputs import chosen_layers, encode
from kvinterp.models.threads import own_threads
from kvinterp.patching.ablations import ABLATIONS, ZERO, Ablation
from kvinterp.patching.clean_corrupted import check_aligned
from kvinterp.patching.distances import DISTANCES, check_finite, distances_of
from kvinterp.patching.donors import mean_donor, resample_donor
from kvinterp.patching.hook import PatchHook, read_changes
from kvinterp.patching.patch import PATCHED_CACHE, Patch, Positions, check_patch_site, stored_sites
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.sweeping import DIRECTIONS
from kvinterp.paths import Runner, path_named, run
from kvinterp.paths.decode import fed_to_all, lockstep
from kvinterp.recording import Trace

EVERY = "every"
MEASURED = ("kl", "l2", LOGIT_DIFFERENCE)
"""The distances of every patch: KL in nats, L2 of the logits, and the logit difference of two tokens."""
DONORS = {
    "path": "the other path, on the same prompt",
    "prompt": "the same path, on another prompt of as many tokens",
    **ABLATIONS,
}


@dataclasses.dataclass(frozen=True)
class Asked:
    """One patch of one prompt, as data.

    Attributes:
        site: A site of PATCH_SITES.
        layer: The layer, or several.
        head: Query head or KV head, as the site has them, or several; all for None.
        step: A step, or ``"every"``: every step from ``first`` on.
        positions: As in :class:`Patch`; None for the newest, or for all of the cache.
        direction: A direction of DIRECTIONS.
        donor: A name of DONORS.
        seed: Seeds the draws of ``"resample"``.
    """

    site: str = "resid_post"
    layer: int | tuple[int, ...] = 0
    head: int | tuple[int, ...] | None = None
    step: int | str = EVERY
    positions: Positions | None = None
    direction: str = "into-recompute"
    donor: str = "path"
    seed: int = 0

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
        """Whether the patch puts in rows that no run of the prompt computed, so that it restores nothing."""
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

    Distances are means over the patched steps, from the donor's logits, or for an ablation from the unpatched ones.

    Attributes:
        asked: The patch.
        recovery: ``1 - d_after / d_before``; NaN if there is nothing to recover, as with an ablation.
        l2_recovery: The recovery of the L2 distance of the logits, which no single step decides.
        why: Why ``recovery`` is NaN and what to do instead; else empty.
        d_before: KL(donor || unpatched), in nats; exactly 0 for an ablation.
        d_after: KL(donor || patched); for an ablation KL(unpatched || patched), which is its effect.
        l2_before: L2 distance of the logits, unpatched.
        l2_after: L2 distance of the logits, patched.
        pair: The two tokens of the logit difference, chosen by :func:`pair_of`.
        pair_before: ``|difference of the donor - difference of the unpatched run|``, in logits.
        pair_after: The same for the patched run.
        pair_recovery: The recovery of the logit difference.
        steps: One row a patched step: step, token (fed at it), recovery, d_before, d_after, l2_recovery.
        tokens: The top tokens of each run at ``shown_step``: run (donor, unpatched, patched), rank, token, text, probability,
            logit.
        shown_step: The step with the largest distance before the patch; for an ablation after it.
        unchanged: Whether every value that the patch wrote was there already.
        seconds: How long the answer took.
    """

    asked: Asked
    recovery: float
    l2_recovery: float
    why: str
    d_before: float
    d_after: float
    l2_before: float
    l2_after: float
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
        effect = f"KL {self.d_before:.3g} to {self.d_after:.3g} nats over {len(self.steps)} steps"
        share = f"recovery {self.recovery:.2%}, " if self.recovery == self.recovery else ""
        return f"<PatchAnswer to {self.asked}: {share}{effect}>"


def pair_of(donor: Float[Tensor, "step vocab"], base: Float[Tensor, "step vocab"]) -> tuple[int, int]:
    """The two tokens of the logit difference: at the step where the logits are farthest apart, the top tokens of both runs.

    If both have the same top token, the second is the donor's second.
    """
    at = int(DISTANCES["l2"](donor, base).argmax())
    first, second = donor[at].topk(2).indices.tolist()
    base_first = int(base[at].argmax())
    return first, second if base_first == first else base_first


class PatchBench:
    """Answers one patch after another on one model, in the matched protocol.

    Both paths are fed the tokens the cached path chooses greedily, and so is another prompt that is the donor.

    Args:
        model: A model of any kind, or an adapter.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        kernels: The kernel mode of both paths, such as ``split_k(4,float16)``, under which they differ on any machine.

    Attributes:
        runs: How many runs that do not depend on a patch were made so far.
        prompt: Token ids of the current prompt.
        other: Token ids of the other prompt; empty if there is none.
    """

    def __init__(self, model: Any, max_new_tokens: int = 12, kernels: str = "native") -> None:
        self.max_new_tokens = check_whole("max_new_tokens", max_new_tokens, 2, hint=", so that one step decodes")
        self.adapter = wrap(model)
        self.runs = 0
        self.prompt: tuple[int, ...] = ()
        self.other: tuple[int, ...] = ()
        self._traces: dict[Any, Trace] = {}
        self._pools: dict[Any, Ablation] = {}
        self._paths = {form: path_named(f"{form}[kernels={kernels}]") for form in ("cached", "recompute")}

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
        seed: int = 0,
    ) -> PatchAnswer:
        """Runs a patch and returns what it recovers, or what an ablation does.

        Args:
            prompt: A text, a prompt or token ids.
            site: As in :class:`Asked`, or a hook by TransformerLens's name, which names the layer too.
            layer: As in :class:`Asked`.
            head: As in :class:`Asked`.
            step: As in :class:`Asked`.
            direction: As in :class:`Asked`.
            top: How many top tokens of each run to return.
            positions: As in :class:`Asked`.
            donor: As in :class:`Asked`.
            other: Another prompt, for the donors ``"prompt"``, ``"mean"`` and ``"resample"``. Without one, ``"mean"`` is over
                the prompt's own positions.
            seed: As in :class:`Asked`.

        Raises:
            InputError: An argument names something that does not exist.
            NonFiniteError: NaN or Inf appeared in the logits.
            UnsupportedError: This model does not show the site.
        """
        site, hook_layers = one_site(self.adapter, site, None)
        layers = chosen_layers(self.adapter, hook_layers or layer)
        layer = layers[0] if len(layers) == 1 else tuple(layers)
        question = Asked(site, layer, head, step, positions, direction, donor, seed)
        if donor != "resample":
            check_unread("seed", seed, 0, f"donor {donor!r} draws nothing; leave it out, or give donor='resample'")
        if donor in ("path", "zero"):
            check_unread("other", other, None, f"donor {donor!r} gives without another prompt; give donor='prompt'")
        self.turn_to(prompt, other)
        return self.answer(question, top)

    def answer(self, question: Asked, top: int = 5) -> PatchAnswer:
        """Answers a question about the prompt that :meth:`turn_to` set, as :meth:`ask` does."""
        started, top = time.perf_counter(), check_whole("top", top)
        steps, pair, logits, changed, distances = self._measure(question)
        recovery = {name: metrics.recovery(*ends).tolist() for name, ends in distances.items()}
        (before, after), (l2_before, l2_after), (pair_before, pair_after) = (ends.tolist() for ends in distances.values())
        columns = {
            "step": steps,
            "token": [self.adapter.decode([self.fed[step - 1]]) if step else "" for step in steps],
            "recovery": recovery["kl"][1:],
            "d_before": before[1:],
            "d_after": after[1:],
            "l2_recovery": recovery["l2"][1:],
        }
        largest = int(distances["kl"][int(question.ablates), 1:].argmax())
        runs = ("unpatched", "patched") if question.ablates else ("donor", "unpatched", "patched")
        return PatchAnswer(
            asked=question,
            recovery=recovery["kl"][0],
            l2_recovery=recovery["l2"][0],
            why="" if question.ablates else metrics.why_undefined(len(steps), l2_before[0], before[0]),
            d_before=before[0],
            d_after=after[0],
            l2_before=l2_before[0],
            l2_after=l2_after[0],
            pair=tuple(self.adapter.pieces(list(pair))),  # type: ignore[arg-type]
            pair_before=pair_before[0],
            pair_after=pair_after[0],
            pair_recovery=recovery[LOGIT_DIFFERENCE][0],
            steps=pd.DataFrame(columns),
            tokens=self._top_tokens(dict(zip(runs, logits[-len(runs) :, largest], strict=True)), top),
            shown_step=steps[largest],
            unchanged=not changed,
            seconds=time.perf_counter() - started,
        )

    def _top_tokens(self, runs: Mapping[str, Float[Tensor, " vocab"]], top: int) -> pd.DataFrame:
        rows: list[dict[str, Any]] = []
        for name, logits in runs.items():
            probabilities = logits.double().softmax(-1)
            best = logits.topk(min(top, len(logits))).indices.tolist()
            for rank, (token, text) in enumerate(zip(best, self.adapter.pieces(best), strict=True), 1):
                scores = {"probability": float(probabilities[token]), "logit": float(logits[token])}
                rows.append({"run": name, "rank": rank, "token": token, "text": text, **scores})
        return pd.DataFrame(rows)

    # Runs that do not depend on the patch ------------------------------------------------------------------------------

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
            self._traces.clear()
            self._pools.clear()
            self._pure = PureRecompute(self.adapter, self._paths["recompute"])
        elif other_tokens != self.other:
            self._traces = {key: trace for key, trace in self._traces.items() if key[1] == "prompt"}
            self._pools.clear()
        self.prompt, self.other = tokens, other_tokens

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens that both paths are fed, one a step from step 1 on."""
        return self._prompt_trace("cached").fed

    def _prompt_trace(self, form: str) -> Trace:
        """A path's trace of the prompt, whichever sites it recorded."""
        trace = next((trace for key, trace in self._traces.items() if key[:2] == (form, "prompt")), None)
        return self._trace(form, "prompt") if trace is None else trace

    def _trace(self, form: str, name: str, question: Asked | None = None) -> Trace:
        """A path's trace of ``"prompt"`` or ``"other"``, with the site of a question."""
        # All positions are recorded at the question's layers only, the newest position at every layer.
        whole = question is not None and question.patch().positions != "newest"
        layers = question.layer if question is not None and whole else None
        site = "" if question is None else question.site
        key = (form, name, site, layers)
        if key not in self._traces:
            lead = form == "cached" and name == "prompt" and not any(k[:2] == (form, name) for k in self._traces)
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

    def _ablation(self, question: Asked) -> Ablation:
        if question.donor == "zero":
            return ZERO
        key, resample = (question.donor, question.site, question.layer, question.seed), question.donor == "resample"
        if resample and not self.other:
            raise InputError("donor 'resample' draws another prompt's rows and none was given: give other='a text'.")
        if key not in self._pools:
            self.runs += 1
            pool: Any = (self.adapter, [list(self.other or self.prompt)], question.site, question.layer)
            self._pools[key] = resample_donor(*pool, seed=question.seed) if resample else mean_donor(*pool)
        return self._pools[key]

    # The patched run ---------------------------------------------------------------------------------------------------

    def _measure(
        self, question: Asked
    ) -> tuple[list[int], tuple[int, int], Float[Tensor, "run step vocab"], bool, dict[str, Tensor]]:
        """Runs a patch and measures it.

        Returns:
            The steps; the two tokens of the logit difference; the logits of the donor, the unpatched and the patched run at each
            step; whether the patch changed anything; and for each of MEASURED the distance before and after, first its mean over
            the steps and then each step's.
        """
        # Raises InputError if the patch does not fit the model.
        PatchHook(self.adapter, [question.patch()])
        with located(f"model {self.adapter.facts.name}"), own_threads(self.adapter), torch.no_grad():
            source = self._donor(question)
            base: Any = self._prompt_trace(question.into).logits
            donor: Any = base if isinstance(source, Ablation) else source.logits
            steps = list(range(question.first, len(base))) if question.step == EVERY else [int(question.step)]
            if not steps or steps[-1] >= len(base):
                raise InputError(
                    f"step {steps[-1] if steps else 1} does not exist: the cached path decodes steps 1 to {len(base) - 1} of "
                    f"this prompt with max_new_tokens={self.max_new_tokens}."
                )
            patch = dataclasses.replace(question.patch(), steps=tuple(steps))
            if not any(patch.moves(step, len(self.prompt), question.into) for step in steps):
                raise InputError(
                    f"positions={patch.positions!r} of {question.site!r} patches nothing at "
                    f"{'any step' if question.step == EVERY else f'step {question.step}'}: the cached path computes the newest "
                    "position only at a decode step, and no path has positions yet to come; name others, patch kv, or patch "
                    "into-recompute."
                )
            patched, changed = self._run_patched(question, question.patch(source), steps)
        logits, pair, distances = torch.stack([donor[steps], base[steps], patched]), pair_of(donor, base), {}
        for name, distance in distances_of(",".join(MEASURED), pair).items():
            ends = [distance(logits[0], run).double() for run in logits[1:]]
            distances[name] = torch.stack([torch.cat([by_step.mean()[None], by_step]) for by_step in ends])
        check_finite(torch.stack([*distances.values()]), f"the patch of {question.site} at layer {question.layer}")
        return steps, pair, logits, changed, distances

    def _donor(self, question: Asked) -> Trace | Ablation:
        if question.ablates:
            return self._ablation(question)
        if question.donor == "path":
            return self._trace(question.other, "prompt", question)
        if not self.other:
            raise InputError("donor 'prompt' takes from another prompt and none was given: give other='a text'.")
        check_aligned(self.other, self.prompt)
        return self._trace(question.into, "other", question)

    def _run_patched(self, question: Asked, patch: Patch, steps: Sequence[int]) -> tuple[Float[Tensor, "step vocab"], bool]:
        """The logits of the patched path at each step, and whether the patch changed anything."""
        fed, prompt = self.fed, list(self.prompt)
        hook = PatchHook(self.adapter, [patch], None, len(prompt), question.first)
        if question.into == "recompute":
            if len(steps) == 1:
                # Questions about one prefix share it: the blocks before the patched one run once.
                self._pure.capture([*prompt, *fed[: steps[0]]])
            rows = [self._pure.patched([*prompt, *fed[:step]], step, hook) for step in steps]
        else:
            room, row = steps[-1] + 1, torch.tensor([prompt], device=self.adapter.device)
            with Runner(self.adapter, self._paths["cached"], row, room, [hook]) as runner:
                forced = fed_to_all(fed, 1, 1, row.device)
                every = [step.logits[0][0].clone() for step in lockstep([runner], room, given=forced)]
            rows = [every[step] for step in steps]
        return torch.stack(rows), read_changes([hook])[0][0]
