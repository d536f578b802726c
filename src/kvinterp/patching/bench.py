"""One patch after another on one model: what does not depend on the patch is run once, so that a question costs its own run.

A question is data, and so is its answer. This is what stands behind the panel in a notebook, and its face without a front end.
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
from kvinterp.common.checks import check_choice, check_known, check_unread, check_whole
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
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import PATCHED_CACHE, Patch, Positions, check_patch_site, stored_sites
from kvinterp.patching.recompute import PureRecompute
from kvinterp.patching.sweeping import DIRECTIONS
from kvinterp.paths import Runner, path_named, run
from kvinterp.paths.decode import fed_to_all, lockstep
from kvinterp.recording import Trace

EVERY = "every"
MEASURED = ("kl", "l2", LOGIT_DIFFERENCE)
"""What is measured of every patch: KL in nats, the L2 distance of the logits, and how far apart two tokens' logits are moved."""
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
        positions: As of a :class:`Patch`; None for the newest, of the cache all.
        direction: A direction of DIRECTIONS: into which path.
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
        if self.step != EVERY and not (
            isinstance(self.step, int) and not isinstance(self.step, bool) and self.step >= self.first
        ):
            kind = "a decode step from 1 on" if self.first else "a step from 0 on"
            raise InputError(f"step={self.step!r} was given: expected {kind}, or 'every'.")

    @property
    def first(self) -> int:
        """The first step that differs: both paths of one prompt begin with the same forward."""
        return 1 if self.donor == "path" else 0

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers."""
        return self.layer if isinstance(self.layer, tuple) else (self.layer,)

    @property
    def into(self) -> str:
        """The form of the path that is patched."""
        return self.direction.removeprefix("into-")

    @property
    def ablates(self) -> bool:
        """Whether nothing is restored: rows that no run computed go in."""
        return self.donor in ABLATIONS

    def patch(self, donor: Trace | Ablation | None = None) -> Patch:
        """The same as a :class:`Patch`."""
        positions = self.positions
        if positions is None:
            positions = "all" if self.site in PATCHED_CACHE else "newest"
        steps: Any = EVERY if self.step == EVERY else (self.step,)
        return Patch(
            self.site, self.layers, (self.head,) if isinstance(self.head, int) else self.head, positions, steps, donor
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PatchAnswer:
    """What one patch did.

    Distances are means over the steps patched, from what gives (the donor's logits; of an ablation the unpatched ones).

    Attributes:
        asked: The patch.
        recovery: ``1 - d_after / d_before``; NaN where there is nothing to recover, as with an ablation.
        l2_recovery: The same of the L2 distance of the logits, which no single step decides.
        why: Why ``recovery`` is NaN and what to do instead; else empty.
        d_before: KL(donor || unpatched), in nats; exactly 0 of an ablation.
        d_after: KL(donor || patched); of an ablation KL(unpatched || patched), which is what it does.
        l2_before: L2 distance of the logits, unpatched.
        l2_after: The same, patched.
        pair: The two tokens of the logit difference, whose ids are :func:`pair_of`'s.
        pair_before: ``|difference of the donor - that of the unpatched|``, in logits.
        pair_after: The same, patched.
        pair_recovery: The recovery of it.
        steps: One row a step patched: step, token (fed at it), recovery, d_before, d_after, l2_recovery.
        tokens: The top tokens at ``shown_step`` of each run: run (donor, unpatched, patched), rank, token, text, probability,
            logit.
        shown_step: The step with the largest distance before; of an ablation after.
        unchanged: Whether all that the patch wrote was there already.
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
    unchanged: bool = False
    seconds: float = float("nan")

    def __repr__(self) -> str:
        """The patch and what it did, in one line."""
        did = f"KL {self.d_before:.3g} to {self.d_after:.3g} nats over {len(self.steps)} steps"
        share = f"recovery {self.recovery:.2%}, " if self.recovery == self.recovery else ""
        return f"<PatchAnswer to {self.asked}: {share}{did}>"


def pair_of(donor: Float[Tensor, "step vocab"], base: Float[Tensor, "step vocab"]) -> tuple[int, int]:
    """The two tokens of the logit difference: the donor's first where the logits are farthest apart, and the other run's.

    Where that is the same token, the donor's second.
    """
    at = int(DISTANCES["l2"](donor, base).argmax())
    first, second = donor[at].topk(2).indices.tolist()
    other = int(base[at].argmax())
    return first, second if other == first else other


class PatchBench:
    """Answers one patch after another on one model, in the matched protocol.

    Both paths are fed the tokens the cached path chooses greedily, and so is another prompt that gives.

    Args:
        model: A model of any kind, or an adapter.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        kernels: The kernel mode of both paths, as in ``split_k(4,float16)``, under which they differ on any machine.

    Attributes:
        runs: Runs made so far that do not depend on a patch, the measure of what is remembered.
        prompt: Token ids of the prompt in hand.
        other: Token ids of the other prompt; none where there is none.
    """

    def __init__(self, model: Any, max_new_tokens: int = 12, kernels: str = "native") -> None:
        if not isinstance(max_new_tokens, int) or max_new_tokens < 2:
            raise InputError(f"max_new_tokens={max_new_tokens!r} was given: expected at least 2, so that one step decodes.")
        self.adapter = wrap(model)
        self.max_new_tokens = max_new_tokens
        self.runs = 0
        self.prompt: tuple[int, ...] = ()
        self.other: tuple[int, ...] = ()
        self._traces: dict[Any, Trace] = {}
        self._pools: dict[Any, Ablation] = {}
        self._paths = {form: path_named(f"{form}[kernels={kernels}]") for form in ("cached", "recompute")}
        self._pure = PureRecompute(self.adapter, self._paths["recompute"])

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
        """Patches and says what it recovers, or what an ablation does.

        Args:
            prompt: A text, a prompt or token ids.
            site: As of :class:`Asked`; a hook's name of TransformerLens says the layer too.
            layer: As of :class:`Asked`.
            head: As of :class:`Asked`.
            step: As of :class:`Asked`.
            direction: As of :class:`Asked`.
            top: How many of each run's top tokens to show.
            positions: As of :class:`Asked`.
            donor: As of :class:`Asked`.
            other: Another prompt, for the donors ``"prompt"``, ``"mean"`` and ``"resample"``; ``"mean"`` without one is
                that over the prompt's own positions.
            seed: As of :class:`Asked`.

        Raises:
            InputError: Something given does not exist.
            NonFiniteError: NaN or Inf appeared in the logits.
            UnsupportedError: This model does not show the site.
        """
        site, own = one_site(self.adapter, site, None)
        layers = chosen_layers(self.adapter, own or (layer if isinstance(layer, tuple) else [layer]))
        layer = layers[0] if len(layers) == 1 else tuple(layers)
        asked = Asked(site, layer, head, step, positions, direction, donor, seed)
        if donor != "resample":
            check_unread("seed", seed, 0, f"donor {donor!r} draws nothing; leave it out, or give donor='resample'")
        if donor in ("path", "zero"):
            check_unread("other", other, None, f"donor {donor!r} gives without another prompt; give donor='prompt'")
        self.turn_to(prompt, other)
        return self.answer(asked, top)

    def answer(self, asked: Asked, top: int = 5) -> PatchAnswer:
        """The answer to a patch of the prompt that :meth:`turn_to` turned to, as :meth:`ask` gives it."""
        started, top = time.perf_counter(), check_whole("top", top)
        steps, pair, logits, changed, found = self._answered(asked)
        recovered = {name: metrics.recovery(*both).tolist() for name, both in found.items()}
        (before, after), (l2_before, l2_after), (pair_before, pair_after) = (both.tolist() for both in found.values())
        columns = {
            "step": steps,
            "token": [self.adapter.decode([self.fed[step - 1]]) if step else "" for step in steps],
            "recovery": recovered["kl"][1:],
            "d_before": before[1:],
            "d_after": after[1:],
            "l2_recovery": recovered["l2"][1:],
        }
        shown = int(found["kl"][int(asked.ablates), 1:].argmax())
        runs = ("unpatched", "patched") if asked.ablates else ("donor", "unpatched", "patched")
        return PatchAnswer(
            asked=asked,
            recovery=recovered["kl"][0],
            l2_recovery=recovered["l2"][0],
            why="" if asked.ablates else metrics.why_undefined(len(steps), l2_before[0], before[0]),
            d_before=before[0],
            d_after=after[0],
            l2_before=l2_before[0],
            l2_after=l2_after[0],
            pair=tuple(self.adapter.pieces(list(pair))),  # type: ignore[arg-type]
            pair_before=pair_before[0],
            pair_after=pair_after[0],
            pair_recovery=recovered[LOGIT_DIFFERENCE][0],
            steps=pd.DataFrame(columns),
            tokens=self._top_tokens(dict(zip(runs, logits[-len(runs) :, shown], strict=True)), top),
            shown_step=steps[shown],
            unchanged=not changed,
            seconds=time.perf_counter() - started,
        )

    def _top_tokens(self, runs: Mapping[str, Float[Tensor, " vocab"]], top: int) -> pd.DataFrame:
        found: list[dict[str, Any]] = []
        for name, logits in runs.items():
            chances = logits.double().softmax(-1)
            best = logits.topk(min(top, len(logits))).indices.tolist()
            for rank, (token, text) in enumerate(zip(best, self.adapter.pieces(best), strict=True), 1):
                scores = {"probability": float(chances[token]), "logit": float(logits[token])}
                found.append({"run": name, "rank": rank, "token": token, "text": text, **scores})
        return pd.DataFrame(found)

    # What does not depend on the patch ---------------------------------------------------------------------------------

    def turn_to(self, prompt: Any, other: Any = None) -> None:
        """Makes a prompt, and another one that gives, those that are asked about.

        Raises:
            InputError: One of them is empty, too long or no text of this model.
        """
        given = tuple(encode(self.adapter, prompt, self.max_new_tokens))
        # A blank one in the panel is none.
        blank = other is None or (isinstance(other, str) and not other.strip())
        others = () if blank else tuple(encode(self.adapter, other, self.max_new_tokens))
        if given != self.prompt:
            self._traces.clear()
            self._pools.clear()
            self._pure = PureRecompute(self.adapter, self._paths["recompute"])
        elif others != self.other:
            self._traces = {key: trace for key, trace in self._traces.items() if key[1] == "prompt"}
            self._pools.clear()
        self.prompt, self.other = given, others

    @property
    def fed(self) -> tuple[int, ...]:
        """The tokens that both paths are fed, one a step from step 1 on."""
        return self._any("cached").fed

    def _any(self, form: str) -> Trace:
        """A path's run of the prompt, with whatever it recorded."""
        found = next((trace for key, trace in self._traces.items() if key[:2] == (form, "prompt")), None)
        return self._trace(form, "prompt") if found is None else found

    def _trace(self, form: str, of: str, asked: Asked | None = None) -> Trace:
        # All positions are recorded at one layer only, the newest of every layer.
        whole = asked is not None and asked.patch().positions != "newest"
        layers = asked.layers if asked is not None and whole else None
        site = "" if asked is None else asked.site
        key = (form, of, site, layers)
        if key not in self._traces:
            lead = form == "cached" and of == "prompt" and not any(k[:2] == (form, of) for k in self._traces)
            fed = None if lead else self.fed
            self.runs += 1
            self._traces[key] = run(
                self.adapter,
                list(getattr(self, of)),
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

    def _ablation(self, asked: Asked) -> Ablation:
        key = (asked.donor, asked.site, asked.layer, asked.seed)
        if asked.donor == "zero":
            return ZERO
        if asked.donor == "resample" and not self.other:
            raise InputError("donor 'resample' draws another prompt's rows and none was given: give other='a text'.")
        if key not in self._pools:
            self.runs += 1
            of: Any = (self.adapter, [list(self.other or self.prompt)], asked.site, list(asked.layers))
            drawn = asked.donor == "resample"
            self._pools[key] = resample_donor(*of, seed=asked.seed) if drawn else mean_donor(*of)
        return self._pools[key]

    # What does ---------------------------------------------------------------------------------------------------------

    def _answered(
        self, asked: Asked
    ) -> tuple[list[int], tuple[int, int], Float[Tensor, "run step vocab"], Tensor, dict[str, Tensor]]:
        """The steps; the two tokens of the logit difference; at each step the logits of what gives, of the unpatched run and of
        the patched one; whether the patch changed anything; and by each of MEASURED the distance before and after, the mean over
        the steps and then at each.
        """
        PatchHook(self.adapter, [asked.patch()])
        with located(f"model {self.adapter.facts.name}"), own_threads(self.adapter), torch.no_grad():
            source = self._source(asked)
            base: Any = self._any(asked.into).logits
            donor: Any = base if isinstance(source, Ablation) else source.logits
            steps = list(range(asked.first, len(base))) if asked.step == EVERY else [int(asked.step)]
            if not steps or steps[-1] >= len(base):
                raise InputError(
                    f"step {steps[-1] if steps else 1} does not exist: the cached path decodes steps 1 to {len(base) - 1} of "
                    f"this prompt with max_new_tokens={self.max_new_tokens}."
                )
            if not self._moves(asked):
                raise InputError(
                    f"positions={asked.patch().positions!r} of {asked.site!r} patches nothing at "
                    f"{'any step' if asked.step == EVERY else f'step {asked.step}'}: the cached path computes the newest "
                    "position only at a decode step, and no path has positions yet to come; name others, patch kv, or patch "
                    "into-recompute."
                )
            patched, changed = self._patched(asked, asked.patch(source), steps)
        logits, pair, found = torch.stack([donor[steps], base[steps], patched]), pair_of(donor, base), {}
        for name, distance in distances_of(",".join(MEASURED), pair).items():
            both = [distance(logits[0], other).double() for other in logits[1:]]
            found[name] = torch.stack([torch.cat([each.mean()[None], each]) for each in both])
        check_finite(torch.stack([*found.values()]), f"the patch of {asked.site} at layer {asked.layer}")
        return steps, pair, logits, changed, found

    def _source(self, asked: Asked) -> Trace | Ablation:
        if asked.ablates:
            return self._ablation(asked)
        if asked.donor == "path":
            return self._trace("recompute" if asked.into == "cached" else "cached", "prompt", asked)
        if not self.other:
            raise InputError("donor 'prompt' takes from another prompt and none was given: give other='a text'.")
        check_aligned(self.other, self.prompt)
        return self._trace(asked.into, "other", asked)

    def _moves(self, asked: Asked) -> bool:
        steps = range(asked.first, len(self.fed) + 1) if asked.step == EVERY else [int(asked.step)]
        patch = dataclasses.replace(asked.patch(), steps=tuple(steps) or (1,))
        return any(patch.moves(step, len(self.prompt), asked.into) for step in steps)

    def _patched(self, asked: Asked, patch: Patch, steps: Sequence[int]) -> tuple[Float[Tensor, "step vocab"], Tensor]:
        fed, prompt = self.fed, list(self.prompt)
        hook = PatchHook(self.adapter, [patch], None, len(prompt), asked.first)
        if asked.into == "recompute":
            if len(steps) == 1:
                # One prefix for several questions: what comes before the patched block runs once.
                self._pure.capture([*prompt, *fed[: steps[0]]])
            rows = [self._pure.patched([*prompt, *fed[:step]], step, hook) for step in steps]
            return torch.stack(rows), hook.changed[0]
        room, row = steps[-1] + 1, torch.tensor([prompt], device=self.adapter.device)
        with Runner(self.adapter, self._paths["cached"], row, room, [hook]) as runner:
            given = fed_to_all(fed, 1, 1, row.device)
            rows = [now.logits[0][0].clone() for now in lockstep([runner], room, given=given)]
        return torch.stack([rows[step] for step in steps]), hook.changed[0]
