"""Runs an audit's precisions from the coarsest to the finest, and looks inside where one shows something.

``audit.py`` checks what was given and plans the lengths; here each precision is measured
(``measure.py``), again with a fixed order of additions, judged (``judging.py``) and accounted for
(``accounting.py``); the programs of the cache run in between. What comes out is an ``Evidence``,
which ``reading.py`` turns into a word.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from kvinterp.auditing.accounting import account
from kvinterp.auditing.blocks import BlockModel
from kvinterp.auditing.causes import other_attention
from kvinterp.auditing.checks import Check
from kvinterp.auditing.judging import PrecisionJudge
from kvinterp.auditing.ladder import SLACK, Plan, PrecisionRun, band, dtype_name, unit_roundoff
from kvinterp.auditing.measure import measure_precision
from kvinterp.auditing.programs.outcome import WRONG
from kvinterp.auditing.reading import Evidence
from kvinterp.auditing.uses import right_in_float64
from kvinterp.auditing.values import difference, grid_module, on_grid
from kvinterp.errors import KvinterpError, UnsupportedError, named, out_of_memory, reason
from kvinterp.models import Adapter
from kvinterp.models.passes import unread_by
from kvinterp.paths.kernels import BatchInvariant
from kvinterp.paths.prompt import prompt_difference

AFFORDED, A_KEY = 1.2e10, 4e4
"""Products of two numbers that one precision may make one by one for a fixed order, about a quarter of a
minute on one core; and as how many of them one key of one layer's attention counts, which is added
up by itself."""


@dataclasses.dataclass
class Auditor:
    """Measures and judges a model in each precision.

    Args:
        adapter: The model.
        plan: The prompts, and which of their positions are decoded.
        dtypes: The precisions by name.
        exercise: Runs the programs of the cache.
        progress: Called with what runs next.
        first: ``"programs"``: they run before the precisions, and one that is wrong ends the audit.
    """

    adapter: Adapter
    plan: Plan
    dtypes: dict[str, torch.dtype]
    exercise: Callable[[], list[Check]]
    progress: Callable[[str], None]
    first: str = "precisions"

    def __post_init__(self) -> None:
        self.finest = min(self.dtypes, key=lambda name: unit_roundoff(self.dtypes[name]))
        facts, matrices = (
            self.adapter.facts,
            [p.shape[-1] for p in self.adapter.model.parameters() if p.dim() == 2],
        )
        self.weights = sum(p.numel() for p in self.adapter.model.parameters())
        terms = max([self.plan.length, facts.width, *matrices])
        own = dtype_name(self.adapter.dtype)
        self.evidence = Evidence(f"{facts.name} ({self.adapter.kind}, {own})", own, terms)

    def run(self) -> Evidence:
        """Runs every precision; of a model that crashes there the programs of its cache alone, if one of
        these crashes too.
        """
        evidence = self.evidence
        evidence.random, evidence.unread = self._random(), unread_by(self.adapter)
        if self.first == "programs":
            self._programs()
            if any(check.status == WRONG for check in evidence.checks):
                evidence.exercised = (
                    "no precisions: a program of the cache is wrong, which ended the audit."
                )
                return evidence
        try:
            self._ladder()
            evidence.exercised = self._exercised()
        except KvinterpError:
            raise
        # Whatever a model's own code meets first.
        except Exception as error:
            evidence.checks = evidence.checks or self._exercise()
            if not any(check.status == WRONG for check in evidence.checks):
                raise
            evidence.rungs, evidence.judged, evidence.accounts, evidence.prompt = {}, {}, {}, None
            evidence.refused = {}
            evidence.exercised = f"no precisions: decoding token by token raised {named(error)}."
        return evidence

    def _ladder(self) -> None:
        """Every precision, and the programs of the cache."""
        evidence, judges = self.evidence, []
        self.progress("the prompt itself")
        evidence.prompt = prompt_difference(self.adapter, self.plan.tokens(0, self.adapter.device))
        for name, dtype in self.dtypes.items():
            self.progress(name)
            with self._timed("copy", name):
                adapter = self._in(dtype)
            run = self._measured(adapter, name)
            if run is not None:
                evidence.rungs[name] = run
                if run.grid:
                    self._ask_grid(adapter, run)
                if not run.nonfinite:
                    with self._timed("causes", name):
                        judges += self._judge(adapter, run)
            del adapter  # Two copies at once would be one too many.
        if self.first != "programs":
            self._programs()
        if judges:
            with self._timed("causes", "float64 beside"):
                self._settle(judges)

    def _programs(self) -> None:
        """The programs of the cache."""
        self.progress("programs of the cache")
        with self._timed("programs", self.evidence.own):
            self.evidence.checks = self._exercise()

    def _exercise(self) -> list[Check]:
        """The uses of the cache; where its rows are not read, that is what is wrong in each that is
        off.
        """
        checks, unread = self.exercise(), self.evidence.unread
        if unread is None:
            return checks
        where: dict[str, Any] = {"layer": unread.layer, "tensor": "K", "module": unread.module}
        return [
            dataclasses.replace(check, **where) if check.status == WRONG else check
            for check in checks
        ]

    def _ask_grid(self, adapter: Adapter, run: PrecisionRun) -> None:
        """Whether logits that lie on a grid were put there: those of whole numbers leave it once
        the blocks' outputs move.
        """
        runner, tokens, grid = (
            BlockModel(adapter),
            self.plan.tokens(0, adapter.device),
            getattr(torch, run.grid),
        )
        size = band(run.dtype, max(tokens.shape[1], adapter.facts.width)) / SLACK
        if not on_grid(runner.moved(tokens, lambda _: size), grid):
            run.grid = ""
        elif not self.evidence.grid_module:
            self.evidence.grid_module = grid_module(runner, tokens, grid)

    def _judge(self, adapter: Adapter, run: PrecisionRun) -> list[PrecisionJudge]:
        """Judges a precision; its judge, where that has to see the model in float64."""
        evidence, one = self.evidence, PrecisionJudge(adapter, run, self.evidence.terms)
        evidence.judged[run.name] = one.judge()
        evidence.accounts[run.name] = account(adapter, run, evidence.terms)
        return [one] if one.open else []

    def _settle(self, judges: list[PrecisionJudge]) -> None:
        """What can only be told beside the same blocks in float64."""
        self.progress("float64 beside")
        adapter: Adapter | None = None
        with contextlib.suppress(RuntimeError, UnsupportedError):
            adapter = self._in(torch.float64)
        evidence, every = self.evidence, set(range(-1, len(self.adapter.blocks) + 1))
        clean: set[int] | None = None
        if "float64" in evidence.judged:
            clean = every - {
                j.finding.layer for name, j in evidence.caused("") if name == "float64"
            }
        elif right_in_float64(evidence.checks):
            clean = every
        elif evidence.random:
            clean = set()  # What differs from one run to the next does so in every precision.
        for one in judges:
            evidence.judged[one.name] = one.settle(adapter, clean)

    @contextlib.contextmanager
    def _timed(self, part: str, rung: str) -> Iterator[None]:
        clock, processor = time.perf_counter(), time.process_time()
        yield
        took = {
            "seconds": time.perf_counter() - clock,
            "processor_seconds": time.process_time() - processor,
        }
        self.evidence.seconds.append({"rung": rung, "part": part, **took})

    def _measured(self, adapter: Adapter, name: str) -> PrecisionRun | None:
        """One precision, or None where torch cannot run the model in its dtype."""
        # What serves and what sees the smallest errors decide; the others show how the difference
        # scales.
        decides = name in (self.evidence.own, self.finest)
        plan = self.plan if decides else dataclasses.replace(self.plan.ends, sweep=None)

        def own() -> PrecisionRun:
            with self._timed("own kernels", name):
                return measure_precision(adapter, plan)

        try:
            run = own()
        except KvinterpError:
            raise
        # What users put on a model may not go along to another dtype, and says so by any error.
        except Exception as error:
            if name == self.evidence.own or out_of_memory(error):
                raise
            self.evidence.refused[name] = reason(error)
            if adapter is self.adapter or not other_attention(adapter):
                return None
            try:
                run = own()
            except Exception:
                return None
            self.evidence.refused[name] += "; it was run with eager attention"
        if not run.nonfinite:
            with self._timed("fixed order", name):
                self._fix(adapter, run)
        return run

    def _fix(self, adapter: Adapter, run: PrecisionRun) -> None:
        """The precision again with a fixed order, which knows no length from another: over the shortest
        and the longest prompt.
        """
        self.progress(f"{run.name}, {BatchInvariant()}")
        if (plan := self._affordable()) is None:
            run.unfixed = "the model is too large to be run with a fixed order of additions here"
            return
        try:
            run.fixed = measure_precision(adapter, plan, BatchInvariant(), "whole")
            # Where a row depends on how many there are by the model's own design only the same
            # prefix compares.
            against = "prefix" if (run.fixed.local["null"] > 0).any() else "whole"
            # Where a part differs, the long decode shows from which position on.
            sweep = run.plan.sweep if run.fixed.largest_error else None
            if against == "prefix" or sweep is not None:
                run.fixed = measure_precision(
                    adapter, dataclasses.replace(plan, sweep=sweep), BatchInvariant(), against
                )
        except UnsupportedError as error:
            run.unfixed = str(error)
        except RuntimeError as error:
            run.unfixed = reason(error)

    def _affordable(self) -> Plan | None:
        """The shortest and the longest prompt, or the shortest alone, as far as a processor can run
        them with a fixed order.
        """
        both = dataclasses.replace(self.plan.ends, sweep=None, chunk=None)
        for plan in (both, dataclasses.replace(both, prefills=both.prefills[:1])):
            rows = 2 * (plan.length + sum(plan.prefills))
            keys = (4 + plan.steps) * sum(plan.prefills)
            products = self.weights * rows + A_KEY * len(self.adapter.blocks) * keys
            if self.adapter.device.type != "cpu" or products <= AFFORDED:
                return plan
        return None

    def _in(self, dtype: torch.dtype) -> Adapter:
        """The model in a dtype; a copy that is dropped with its precision, never kept on the adapter."""
        return (
            self.adapter
            if dtype == self.adapter.dtype and dtype != torch.float64
            else self.adapter.cast(dtype)
        )

    def _exercised(self) -> str:
        plan, runs = self.plan, self.evidence.rungs.values()
        sentence = f"Prompts of {', '.join(map(str, plan.prefills))} tokens, each with the next {plan.steps} one by one; "
        if any(len(run.sweep) for run in runs):
            sentence += f"positions {plan.sweep} to {plan.length - 1} one by one; "
        if any((run.chunks["start"] > 0).any() for run in runs):
            return f"{sentence}positions {plan.chunk} to {plan.length - 1} at once on a cache of {plan.chunk}."
        return f"{sentence}never several tokens at once on a cache that is not empty."

    def _random(self) -> float:
        """The relative difference of one forward run twice, where it is beyond what rounding in
        another order makes.
        """
        model, tokens = BlockModel(self.adapter), self.plan.tokens(0, self.adapter.device)
        first, again = model.recompute(tokens), model.recompute(tokens)
        finite = first.isfinite() & again.isfinite()
        size = difference(first[finite], again[finite]) if bool(finite.any()) else 0.0
        return size if size > band(model.dtype, self.adapter.facts.width) else 0.0
