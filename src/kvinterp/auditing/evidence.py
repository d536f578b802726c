"""Gathering the evidence: every rung, with and without a fixed order of additions, and inside the blocks that differ."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from kvinterp.auditing.accounting import Account, account
from kvinterp.auditing.bench import first_line
from kvinterp.auditing.causes import Cause, other_attention
from kvinterp.auditing.exercises import Check, exercise
from kvinterp.auditing.first_difference import Finding
from kvinterp.auditing.judging import Judged, RungJudge
from kvinterp.auditing.ladder import Plan, Rung, band, dtype_name, unit_roundoff
from kvinterp.auditing.measure import climb
from kvinterp.auditing.onset import onset
from kvinterp.auditing.subject import Subject
from kvinterp.auditing.values import grid_module
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant

__all__ = ["Auditor", "Evidence"]

AFFORDED, A_KEY = 1.2e10, 4e4
"""Products of two numbers that one rung may make one by one for a fixed order, about a quarter of a minute on one core; and as
how many of them one key of one layer's attention counts, which is added up by itself."""


@dataclasses.dataclass
class Evidence:
    """What an audit saw, before anyone says what it means.

    Attributes:
        model: The model's name.
        own: Name of the rung in the model's own precision.
        terms: The longest sum in the model.
        rungs: What each rung showed, by name.
        judged: The blocks that differed, each with what takes the difference away, by rung.
        accounts: Whether the parts account for the whole, by rung.
        checks: What else was exercised.
        grid_module: The module from which on everything lies on a 16-bit grid, if the logits do.
        onset: The rung, layer and position at which a kernel changes its order, or None.
        refused: The rungs that torch cannot run this model in, and why.
        exercised: The lengths and positions that were run, in a sentence.
        random: The largest relative difference of the same forward run twice.
    """

    model: str
    own: str
    terms: int
    rungs: dict[str, Rung] = dataclasses.field(default_factory=dict)
    judged: dict[str, list[Judged]] = dataclasses.field(default_factory=dict)
    accounts: dict[str, Account] = dataclasses.field(default_factory=dict)
    checks: list[Check] = dataclasses.field(default_factory=list)
    grid_module: str = ""
    onset: tuple[str, int, int] | None = None
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    exercised: str = ""
    random: float = 0.0

    def band(self, name: str) -> float:
        """The relative error that rounding makes on a rung."""
        return band(self.rungs[name].dtype, self.terms)

    def first(self, name: str) -> tuple[Finding, Cause] | None:
        """The finding a rung is shown by: the first that nothing takes away, else the first."""
        judged = self.judged.get(name, [])
        found = next((j for j in judged if not j.cause.word), judged[0] if judged else None)
        return None if found is None else (found.finding, found.cause)


class Auditor:
    """Climbs the ladder and looks inside where a rung shows something.

    Args:
        adapter: The model.
        plan: What is run on each rung.
        dtypes: The rungs, by name.
        sweep: ``"yes"`` or ``"no"``: one long decode too.
        checks: ``"default"``, ``"thorough"`` or ``"none"``: what is exercised beside tokens fed one by one.
        progress: Told what runs next.
    """

    def __init__(
        self,
        adapter: Adapter,
        plan: Plan,
        dtypes: dict[str, Any],
        sweep: str,
        checks: str,
        progress: Callable[[str], None],
    ) -> None:
        self.adapter, self.plan, self.dtypes, self.sweep, self.progress = adapter, plan, dtypes, sweep, progress
        self.checks = checks
        own = dtype_name(adapter.dtype)
        matrices = [p.shape[-1] for p in adapter.model.parameters() if p.dim() == 2]
        self.seen = Evidence(adapter.facts.name, own, max([plan.length, adapter.facts.width, *matrices]))

    def run(self) -> Evidence:
        """Runs every rung."""
        judges: list[RungJudge] = []
        exercised = False
        for name, dtype in self.dtypes.items():
            self.progress(name)
            twin = self._in(dtype)
            rung = self._climb(twin, name)
            if rung is None:
                del twin
                continue
            self.seen.rungs[name] = rung
            if not rung.nonfinite:
                judge = RungJudge(twin, rung, self.plan, self.seen.terms)
                self.seen.judged[name] = judge.judge()
                self.seen.accounts[name] = account(twin, rung, self.plan, self.seen.terms)
                if name in (self.seen.own, "float32") and self.seen.onset is None:
                    self.seen.onset = onset(twin, rung, self.plan)
                judge.release()
                if judge.open:
                    judges.append(judge)
            if rung.grid and not self.seen.grid_module:
                tokens = torch.tensor([list(self.plan.prompts[0])], device=twin.device)
                self.seen.grid_module = grid_module(Subject(twin), tokens, getattr(torch, rung.grid))
            if name == self._finest and not rung.nonfinite:
                self._exercise(twin)
                exercised = True
            del twin  # Two copies at once would be one too many.
        if judges:
            self._settle(judges)
        if not exercised:
            self._exercise(self.adapter)
        self.seen.exercised = self._exercised()
        return self.seen

    @property
    def _finest(self) -> str:
        return min(self.dtypes, key=lambda name: unit_roundoff(self.dtypes[name]))

    def _settle(self, judges: list[RungJudge]) -> None:
        """What can only be told beside the same blocks in float64."""
        self.progress("float64 beside")
        try:
            twin: Adapter | None = self._in(torch.float64)
        except (RuntimeError, UnsupportedError):
            twin = None
        for judge in judges:
            finest = self.seen.judged.get("float64")
            wrong = {j.finding.layer for j in finest or () if not j.cause.word}
            clean = None if finest is None else set(range(-1, len(self.adapter.blocks) + 1)) - wrong
            # What differs from one run to the next does so in every precision.
            clean = set() if clean is None and self.seen.random else clean
            self.seen.judged[judge.name] = judge.settle(twin, clean)

    def _exercise(self, twin: Adapter) -> None:
        if self.checks == "none":
            return
        self.progress("exercises")
        thorough = self.checks == "thorough"
        prompts = [list(p[: self.plan.length]) for p in self.plan.prompts]
        self.seen.checks = exercise(
            Subject(twin), prompts, steps=self.plan.steps, thorough=thorough, progress=self.progress
        )

    def _climb(self, twin: Adapter, name: str) -> Rung | None:
        """One rung, or None where torch cannot run the model in its dtype."""
        sweep = "yes" if name in (self.seen.own, "float32") else "first" if name == self._finest else "no"
        sweep = sweep if self.sweep == "yes" else "no"
        try:
            rung = climb(twin, self.plan, sweep=sweep)
        except RuntimeError as error:
            if name == self.seen.own or isinstance(error, torch.OutOfMemoryError):
                raise
            self.seen.refused[name] = first_line(error, 120, "RuntimeError")
            if twin is self.adapter or not other_attention(twin):
                return None
            try:
                rung = climb(twin, self.plan, sweep=sweep)
            except RuntimeError:
                return None
            self.seen.refused[name] += "; it was run with eager attention"
        if not rung.nonfinite:
            self._fix(twin, rung, "first" if sweep != "no" else "no")
        return rung

    def _fix(self, twin: Adapter, rung: Rung, sweep: str) -> None:
        """The rung again with a fixed order, over as much of the plan as can be afforded."""
        self.progress(f"{rung.name}, {BatchInvariant()}")
        plan, sweep = self._affordable(sweep)
        if plan is None:
            rung.unfixed = "the model is too large to be run with a fixed order of additions here"
            return
        try:
            rung.fixed = climb(twin, plan, BatchInvariant(), sweep, against="whole")
            if (rung.fixed.local["null"] > 0).any():
                # A row depends on how many there are by the model's own design: only the same prefix compares.
                rung.fixed = climb(twin, plan, BatchInvariant(), sweep, against="prefix")
        except UnsupportedError as error:
            rung.unfixed = str(error)
        except RuntimeError as error:
            rung.unfixed = first_line(error, 160)

    def _affordable(self, sweep: str) -> tuple[Plan | None, str]:
        if self.adapter.device.type != "cpu":
            return self.plan, sweep
        weights = sum(p.numel() for p in self.adapter.model.parameters())
        layers = len(self.adapter.blocks)
        prompts, prefills = len(self.plan.prompts), list(self.plan.prefills)

        def cost(prompts: int, prefills: list[int], sweep: str) -> float:
            longest, steps = max(prefills) + self.plan.steps, self.plan.steps
            rows = prompts * (2 * longest + sum(2 * p + 3 * steps for p in prefills)) + longest * (sweep != "no")
            keys = prompts * sum((4 + 2 * steps) * p for p in prefills) + longest**2 / 2 * (sweep != "no")
            return weights * rows + A_KEY * layers * keys

        while cost(prompts, prefills, sweep) > AFFORDED:
            if sweep != "no":
                sweep = "no"
            elif prompts > 1:
                prompts = 1
            elif len(prefills) > 1:
                prefills.pop()
            else:
                return None, "no"
        plan = self.plan.only(prompts, prefills)
        return (plan if plan.length > (plan.chunk or 0) + 1 else dataclasses.replace(plan, chunk=None)), sweep

    def _in(self, dtype: torch.dtype) -> Adapter:
        """The model in a dtype; a copy that is dropped with its rung, never kept on the adapter."""
        return self.adapter if dtype == self.adapter.dtype and dtype != torch.float64 else self.adapter.cast(dtype)

    def _exercised(self) -> str:
        plan, rungs = self.plan, self.seen.rungs.values()
        said = f"Prompts of {', '.join(map(str, plan.prefills))} tokens, each with the next {plan.steps} one by one"
        if any(len(rung.sweep) for rung in rungs):
            said += f"; positions {plan.sweep} to {plan.length - 1} one by one"
        if any((rung.chunks["start"] > 0).any() for rung in rungs):
            said += f"; positions {plan.chunk} to {plan.length - 1} at once on a cache of {plan.chunk}"
        else:
            said += "; never several tokens at once on a cache that is not empty"
        return f"{said}."
