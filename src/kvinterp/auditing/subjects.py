"""What the programs of a model's cache run on: the model in float64 or as it is, on its own cache or on one that was given.

``uses.py`` runs the programs on what is made here; ``programs/model_subject.py`` is the model as a program sees it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Sequence

import torch

from kvinterp.auditing.blocks import prompts_for
from kvinterp.auditing.checks import NOT_RUN, Check
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.operations.crop import croppable
from kvinterp.auditing.programs.outcome import WRONG
from kvinterp.auditing.programs.search import Searched, run_program
from kvinterp.auditing.programs.subject import NARROW, Subject
from kvinterp.errors import UnsupportedError, out_of_memory, reason
from kvinterp.models import Adapter
from kvinterp.models.cache_kinds import CacheKind, MadeBy, Named
from kvinterp.models.caches import MOVES, offers
from kvinterp.models.positions import Counted, counted, counted_by

FAR = 98
"""Tokens behind which a step is asked where it puts the next one: more than a compressed cache as a rule keeps."""


def widest_subject(adapter: Adapter, make: Callable[..., ModelSubject]) -> tuple[ModelSubject, str]:
    """In float64 with casts lifted, or where the model does not run so, as it is; and why not in
    float64.

    A function that replaces a module's ``forward``, or an SAE in a hook, keeps the tensors that it
    was made with.
    """
    try:
        return make(adapter), ""
    except Exception as error:
        if out_of_memory(error):
            raise
        try:
            return make(adapter, ()), reason(error)
        except UnsupportedError:
            raise
        except Exception:
            # What it raises in either says more of the model than of a cast.
            raise error from None


def subject_instead(
    adapter: Adapter, found: Searched, make: Callable[..., ModelSubject]
) -> tuple[ModelSubject, str] | None:
    """The model as it is, and what a program raises in float64 that runs on it; None where none
    does. What a library refuses it may refuse on it too, where the program was not wrong before.
    """
    for one in [run for run in (*found.wrong, *found.others.values()) if run.raised]:
        with contextlib.suppress(Exception):
            own = make(adapter, ())
            again = run_program(own, one.program)
            if not again.raised and (again.word != WRONG or one.word == WRONG):
                return own, one.raised
    return None


@dataclasses.dataclass
class GivenCache:
    """A cache that is not the model's own, of which an audit is asked.

    Attributes:
        kind: What makes it.
        declared: Whether it is said to lose something.
        notes: What is to be said beside the checks.
        lossy: Whether it was seen to.
    """

    kind: CacheKind
    declared: bool = False
    notes: list[str] = dataclasses.field(default_factory=list)
    lossy: bool = False

    def subject(self, adapter: Adapter, lifted: Sequence[torch.dtype] = NARROW) -> ModelSubject:
        """The model on that cache; what the cache loses is noted once."""
        made = ModelSubject(adapter, lifted, self.kind, self.declared)
        singly = "a prompt in one forward and then single tokens"
        if made.lossy:
            note = (
                f"{self.kind} loses something, as it is said to: in {singly} it is off from the forward without a cache by "
                f"{made.loss:.2g} of the largest logit; each use was held against the same cache without it, one row alone in "
                "the same pieces"
            )
            nulls = [
                f"{kind} by {null:.2g}" for kind, null in made.nulls.items() if null > made.limit
            ]
            note += (
                f" ({' and '.join(nulls)} it is off from itself, and what is off by less than the root of that passes)"
                * bool(nulls)
            )
        elif made.loss > made.limit:
            note = (
                f"in {singly} {self.kind} is off from the forward without a cache by {made.loss:.2g} of the largest logit: "
                "where it is meant to lose that, say so (--lossy, in Python lossy='yes'), and each use is held against the "
                "same cache without it"
            )
        else:
            note = (
                f"{self.kind} was said to lose something, and loses nothing here"
                if self.declared
                else ""
            )
        # What is lost in any precision is said; that nothing is, where it is so in all.
        self.notes = (
            [note] if note and (made.lossy or not (self.lossy or self.notes)) else self.notes
        )
        self.lossy = self.lossy or made.lossy
        return made

    def completed(self, subject: ModelSubject, checks: list[Check]) -> list[Check]:
        """The checks, and those of uses that the cache does not offer."""
        cache = subject.fresh()
        named = {
            "crop and go on": (
                croppable(cache),
                "it does not offer to take positions back, so that none was",
            ),
            **{
                name: (offers(cache, name), f"it offers no {name}, so that no row was moved by it")
                for name in MOVES
            },
        }
        known = {check.name for check in checks}
        missing = [
            (name, why)
            for name, (offered, why) in named.items()
            if not offered and name not in known
        ]
        return [*checks, *(Check(name, NOT_RUN, f"{why}.") for name, why in missing)]

    def blamed(self, adapter: Adapter, checks: list[Check]) -> list[Check]:
        """The checks, of which those that are wrong say whether the model's own cache is wrong in
        the same program too.
        """
        if not any(check.status == WRONG for check in checks):
            return checks
        own, _ = widest_subject(adapter, ModelSubject)
        found = []
        for check in checks:
            if (
                check.status == WRONG
                and run_program(own, program_named(check.program)).word == WRONG
            ):
                said = f"{check.detail.rstrip('.')}; so is the model's own cache in this program, which kvinterp audit places."
                check = dataclasses.replace(check, detail=said)
            found.append(check)
        return found


def dropped_by(adapter: Adapter, asked: GivenCache) -> Counted | None:
    """Where the model puts a token behind rows that its user's cache dropped; None where that keeps
    all.
    """
    length = min(FAR, adapter.facts.context)
    if not isinstance(asked.kind, MadeBy | Named) or not adapter.plain or length < 3:
        return None
    tokens = torch.tensor(prompts_for(adapter, 1, length, 0), device=adapter.device)
    return counted(adapter, lambda: asked.kind.make(adapter.config, length), tokens)


def counted_in(subject: Subject) -> Counted | None:
    """Where anybody's own step puts a token behind rows that its cache dropped; None where it keeps
    all, or cannot be asked.
    """
    text = [
        subject.tokens[n % len(subject.tokens)] for n in range(min(FAR, subject.max_columns - 1))
    ]
    with contextlib.suppress(Exception), subject.running():
        # Its id is none of the numbers that a position may be.
        text[-1] = next((token for token in subject.tokens if token >= len(text)), text[-1])
        return counted_by(lambda ids, cache: subject.feed(ids, cache), subject.tensor([text]))
    return None
