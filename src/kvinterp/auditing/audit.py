"""An audit: what is given is checked, every precision is run and judged, and what was found is kept
together.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from kvinterp.auditing.blocks import BlockModel, evaluating, prompts_for
from kvinterp.auditing.causality import check_causal
from kvinterp.auditing.causes import other_attention
from kvinterp.auditing.checks import Check
from kvinterp.auditing.judging import RungJudge, account
from kvinterp.auditing.ladder import (
    SLACK,
    Plan,
    PrecisionRun,
    band,
    dtype_name,
    prefix_plan,
    unit_roundoff,
)
from kvinterp.auditing.measure import climb
from kvinterp.auditing.own_code import behind, decoded, decoded_far, subject_of, texts_of
from kvinterp.auditing.own_dtype import distance_of, distances_of
from kvinterp.auditing.programs.function_subject import FunctionSubject
from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.running import RIGHT, WRONG
from kvinterp.auditing.programs.subject import Subject
from kvinterp.auditing.reading import Evidence, of_functions
from kvinterp.auditing.uses import (
    PROGRAMS,
    SECONDS,
    CacheAsked,
    check_functions,
    counted_in,
    dropped_by,
    edges_of,
    programs_named,
    right_in_float64,
    uses_of,
)
from kvinterp.auditing.values import difference, grid_module, on_grid
from kvinterp.auditing.verdict import Audit, Verdict, allowed
from kvinterp.common.checks import (
    check_callable,
    check_choice,
    check_instance,
    check_known,
    check_seed,
    check_text,
    check_unread,
    given_list,
    whole_number,
)
from kvinterp.common.wings import taken
from kvinterp.data import Prompt
from kvinterp.data.chat import prompt_ids
from kvinterp.errors import (
    InputError,
    KvinterpError,
    UnsupportedError,
    located,
    named,
    out_of_memory,
    reason,
    shown,
)
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.caches import Dynamic, Preallocated, cache_named
from kvinterp.models.inputs import token_ids
from kvinterp.models.passes import unread_by
from kvinterp.models.provenance import machine, provenance
from kvinterp.models.threads import own_threads
from kvinterp.paths.kernels import BatchInvariant
from kvinterp.paths.prompt import prompt_difference
from kvinterp.recording import Trace

READ_OF_FUNCTIONS = (
    "calls",
    "programs",
    "seconds",
    "checks",
    "lengths",
    "steps",
    "prompts",
    "reach",
)
"""What is read where programs of a cache are all that runs."""
TWO_CACHES = {"fork", "another request in between"}
"""Uses of two caches at once."""
RUNGS = ("bfloat16", "float16", "float32", "float64")
LENGTHS = (5, 63, 64, 65, 96, 97, 128)
"""Prompt lengths on and beside the usual tile, window and chunk sizes."""

CHECKS = ("default", "thorough", "none")
"""How many programs of the cache are tried: as many as ``programs`` says, five times as many, or
none.
"""
THOROUGH = 5

LONGEST, MOST_STEPS = 32_768, 4_096
"""The longest prompt of an audit, and the most tokens that are fed singly in all."""
ALWAYS_READ = ("seed", "allow", "out", "progress")
"""What is read whatever is audited."""

LONGEST_EDGE = 512
"""The longest window or chunk that default lengths reach over."""

AFFORDED, A_KEY = 1.2e10, 4e4
"""Products of two numbers that one rung may make one by one for a fixed order, about a quarter of a
minute on one core; and as how many of them one key of one layer's attention counts, which is added
up by itself."""


def against_named() -> Any:
    """What judges a model beside what another engine gave, as the wing hands it in that reads such
    files.
    """
    return taken("judges", "against", "a judgement against another engine")


def audit(
    model: Any = None,
    prompts: Sequence[Any] | None = None,
    *,
    rungs: Sequence[str] = RUNGS,
    lengths: Sequence[int] | None = None,
    steps: int = 3,
    seed: int = 0,
    sweep: str = "yes",
    checks: str = "default",
    reach: str = "no",
    calls: str = "",
    programs: int = PROGRAMS,
    seconds: float = SECONDS,
    full: Callable[[Any], Any] | None = None,
    step: Callable[[Any, Any], tuple[Any, Any]] | None = None,
    requests: str = "any",
    inputs: Mapping[str, Any] | Sequence[Mapping[str, Any]] | None = None,
    cache: Any = None,
    lossy: str = "no",
    allow: Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    detail: str = "verdict",
    progress: Callable[[str], None] | None = None,
    against: str | Path | Trace | None = None,
    format: str | None = None,
    declared: str | None = None,
    older: Any = None,
) -> Any:
    """Says whether a model's cached decoding is right, and if not what is wrong and where.

    Args:
        model: A model of any kind or an adapter. A transformers model runs with its own cache.
        prompts: Texts or token ids, each at least as long as the longest length and its steps;
            default: two random ones.
        rungs: The precisions to climb.
        lengths: Prompt lengths after which tokens are fed one by one; those the context has room
            for are used. Default: :data:`LENGTHS` and those on both sides of the model's own window
            and chunk, as far as these are at most 512. The first prompt takes all of them, in the
            model's own precision and in the finest; the shortest and the longest stand for them in
            the others, with a fixed order of additions, and for further prompts.
        steps: How many tokens are fed one by one after each.
        seed: Seeds the random prompts.
        sweep: ``"yes"`` also decodes the whole first prompt from its beginning, in the same two
            precisions, to find the first position at which something is wrong.
        checks: Which programs of the cache are run beside tokens fed one by one: ``"default"`` (as
            many as ``programs``), ``"thorough"`` (five times as many) or ``"none"``.
        reach: ``"yes"`` also decodes over every edge that the config names (window, RoPE switch,
            context end), however far; ``"no"`` lists those that cost too much as not run.
        calls: Programs to run besides, with commas between, such as
            ``"rows(0+4)+feed(9)+feed(3,1)"``, or names for one, such as
            ``"padded(left,5),batched(8)"``; or ``"all"`` names. Each line also says how far it
            moves logits in the model's own dtype, beside two recomputations in it (``distances``).
        programs: How many programs of the cache are run: some that try each use once, then drawn
            ones (``seed``).
        seconds: Processor seconds that they take at most.
        full: In the place of a model anybody's own code: token ids ``[row, position]`` to logits
            ``[row, position, vocabulary]``, without a cache. A module whose ``forward(ids, cache)``
            returns both may be given as the model.
        step: With it: token ids of new positions and a cache, None for a new one, to their logits
            (or those of the newest alone) and the cache behind them. ``calls``, ``programs``,
            ``seconds``, ``seed``, ``checks``, ``lengths``, ``steps``, ``prompts`` (token ids) and
            ``reach`` are read as for a model.
        requests: ``"one"`` of code that holds its cache itself and promises one request at a time:
            ``step(ids, None)`` begins anew, and what needs two caches at once is listed as refused.
            ``"any"``: caches live beside one another.
        inputs: What the first forward gets besides, by name, such as ``pixel_values``, for a prompt
            that holds more than text: then ``prompts`` is that one prompt as token ids, and every
            row begins with it and an image of its own; or a list of both. An encoder-decoder takes
            what its encoder reads, a row a source.
        cache: Another cache than the model's own, which alone is asked about: a class of
            transformers caches of your own, a function that makes one, or a kind by name, such as
            ``"quantized(4)"``; see :func:`kvinterp.Cached`. Programs run on it, and its own methods
            move its rows and take its positions back.
        lossy: ``"yes"``: that cache is meant to lose something, as a quantised one of your own:
            what is right is then the same cache without the use, one row alone. Transformers'
            quantised layers need not be said.
        allow: Words of :data:`VERDICTS` that shall not fail, such as ``"hidden-cast"``.
        out: A folder for verdict.json and the page, or None.
        detail: ``"verdict"`` returns the :class:`Verdict`, ``"everything"`` the :class:`Audit`.
        progress: Told what runs next.
        against: What another engine gave: a file of its log-probs (docs/engines.md), or what
            :meth:`kvinterp.Trace.from_arrays` made of arrays. Then these are judged, on their own
            tokens.
        format: The format of that file; known by its content unless given.
        declared: The dtype that the engine was said to compute in; what the file says unless given.
        older: The model with weights of an earlier time, or without an adapter, which that engine
            or its cache may still have.

    Raises:
        InputError: Something given does not fit.
    """
    arguments = {
        name: value
        for name, value in locals().items()
        if name not in ("full", "step", "inputs", "model")
    }
    if full is not None or step is not None:
        if model is not None or not callable(full) or not callable(step):
            raise InputError(
                "full and step go together and take the place of a model: kv.audit(full=f, step=g), with f(ids) -> logits and "
                "g(ids, cache) -> logits, cache."
            )
        check_choice("requests", requests, ("any", "one"))
        return _audit_functions(
            FunctionSubject(full, step, requests=requests), arguments, "requests"
        )
    if model is None:
        raise InputError(
            "no model was given: give one, or two functions of your own, full=f and step=g."
        )
    if against is not None:
        for name, (value, default) in _given(
            arguments, "against", "format", "declared", "older"
        ).items():
            check_unread(
                name,
                value,
                default,
                "against feeds the tokens of its file and runs no checks; leave it out",
            )
        judged = against_named()(
            model, against, declared, format, allow, seed, progress or (lambda _: None), older
        )
        if out is not None:
            judged.save(out)
        return judged
    for name, value in {"format": format, "declared": declared, "older": older}.items():
        check_unread(name, value, None, "nothing is given to judge the model against; leave it out")
    check_choice("lossy", lossy, ("yes", "no"))
    if lossy == "yes" and cache is None:
        raise InputError(
            "lossy='yes' was given, and no cache that is lossy: give one with cache=, or leave it out."
        )
    with evaluating(model):
        try:
            adapter = wrap(model)
        except KvinterpError:
            if (own := subject_of(model, inputs)) is None:
                raise
            return _audit_functions(own, arguments)
        kind = cache_named("dynamic" if cache is None else cache)
        if isinstance(kind, Preallocated):
            raise InputError(
                f"cache={kind} was given, which is kvinterp's own: give a cache of transformers' or of yours."
            )
        if not isinstance(kind, Dynamic):
            return _audit_cache(adapter, CacheAsked(kind, lossy == "yes"), arguments)
        if inputs is not None:
            return _audit_functions(behind(adapter, prompts, inputs), arguments, "prompts")
    check_unread("requests", requests, "any", "the model's own caches are tried; leave it out")
    check_choice("detail", detail, ("verdict", "everything"))
    check_choice("sweep", sweep, ("yes", "no"))
    check_choice("reach", reach, ("yes", "no"))
    check_known("checks", checks, CHECKS)
    extra = _asked_programs(calls, checks)
    count, most = _budget(programs, seconds)
    check_seed(seed)
    check_callable("progress", progress)
    allow = allowed(allow)
    lengths, steps = checked_lengths(_own_lengths(adapter) if lengths is None else lengths, steps)
    dtypes = precisions(rungs, adapter)
    if out is not None:
        check_instance("out", out, (str, os.PathLike), "the name of a folder, or None")
        from kvinterp.auditing.folder import check_own

        check_own(Path(out))
    with (
        located(f"audit of {adapter.facts.name}"),
        own_threads(adapter),
        _torchs_own_words(),
        evaluating(adapter),
    ):
        check_causal(adapter)
        room = min(adapter.facts.context, max(lengths) + steps)
        plan = prefix_plan(_tokens(adapter, prompts, room, seed), lengths, steps, room, sweep)
        tell, more = progress or (lambda _: None), THOROUGH if checks == "thorough" else 1

        def exercised() -> list[Check]:
            return (
                []
                if checks == "none"
                else uses_of(adapter, count * more, most * more, seed, extra, reach, tell)
            )

        evidence = _Auditor(adapter, plan, dtypes, exercised, tell).run()
        evidence.distances = distances_of(adapter, extra)
        evidence.about = provenance(adapter, lengths=list(plan.prefills), steps=plan.steps)
        if evidence.prompt is not None:
            evidence.about["prompt_differs"] = dataclasses.asdict(evidence.prompt)
    result = Audit(evidence.judge(allow), list(evidence.rungs.values()), plan, evidence.about)
    if out is not None:
        result.save(out)
    return result if detail == "everything" else result.verdict


def _asked_programs(calls: Any, checks: str) -> list[Program]:
    """The programs that were asked for."""
    extra = programs_named(
        check_text("calls", calls, "programs such as 'rows(0+4)+feed(9)+feed(3,1)', or 'all'")
    )
    if extra and checks == "none":
        raise InputError(f"calls={calls!r} was given with checks='none': leave one of the two out.")
    return extra


def _budget(programs: Any, seconds: Any) -> tuple[int, float]:
    """How many programs, and how long they take at most."""
    if (whole_number(programs) or 0) < 1 or not isinstance(seconds, int | float) or not seconds > 0:
        raise InputError(
            f"programs={shown(programs)}, seconds={shown(seconds)} was given: expected a whole number of at least 1, and "
            "seconds above 0."
        )
    return int(programs), float(seconds)


def _given(arguments: Mapping[str, Any], *read: str) -> dict[str, tuple[Any, Any]]:
    """What was given of :func:`audit`'s arguments, beside its default, and is not read."""
    defaults = {
        name: parameter.default for name, parameter in inspect.signature(audit).parameters.items()
    }
    unread = [name for name in arguments if name not in (*ALWAYS_READ, *read)]
    return {
        name: (arguments[name], defaults[name])
        for name in unread
        if arguments[name] is not defaults[name]
    }


def _audit_functions(subject: Subject, arguments: Mapping[str, Any], *read: str) -> Verdict:
    """Anybody's own code: the word of the programs, without layers; what else was given is named in
    a note.

    Args:
        subject: What programs run on.
        arguments: Those of :func:`audit`, by name.
        read: The names of those that were read already.
    """
    unread = ", ".join(_given(arguments, *READ_OF_FUNCTIONS, *read))
    notes = [f"{unread}: not read, since only programs of a cache run on this"] if unread else []
    budget, tell = (
        _budget(arguments["programs"], arguments["seconds"]),
        arguments["progress"] or (lambda _: None),
    )
    check_known("checks", arguments["checks"], CHECKS)
    check_choice("reach", arguments["reach"], ("yes", "no"))
    asked, own = (
        _asked_programs(arguments["calls"], arguments["checks"]),
        arguments["lengths"] is None,
    )
    lengths, steps = checked_lengths(LENGTHS if own else arguments["lengths"], arguments["steps"])
    if arguments["prompts"] is not None and "prompts" not in read:
        subject.begins = texts_of(subject, arguments["prompts"])
    every = [decoded(length, steps) for length in lengths]
    every += decoded_far(subject, steps, budget[1], arguments["reach"]) if own else []
    more = {"none": 0, "thorough": THOROUGH}.get(arguments["checks"], 1)
    searched, checks = check_functions(
        subject,
        budget[0] * more,
        budget[1] * max(more, 1),
        check_seed(arguments["seed"]),
        [*asked, *([] if own else every)],
        every if own else [],
        tell,
    )
    notes += subject.notes
    if (
        any(check.status == WRONG for check in checks)
        and (found := counted_in(subject)) is not None
    ):
        notes.append(f"its cache drops rows, and {found.said}")
    if {
        check.name for check in checks if check.status == WRONG
    } & TWO_CACHES and subject.requests == "any":
        notes.append(
            "code that holds its cache itself may promise one request at a time: then say requests='one'"
        )
    about = {**machine(subject.device), "model": subject.name, "kind": "functions"}
    about["dtype"] = dtype_name(subject.alone(subject.tokens[:1]).dtype)
    allow = allowed(arguments["allow"])
    verdict = of_functions(
        Evidence(
            subject.name,
            "",
            0,
            checks=checks,
            distances=[distance_of(subject, program) for program in asked],
            allow=allow,
            notes=notes,
            about=about,
        ),
        searched.worst,
        subject.against,
    )
    if arguments["out"] is not None:
        verdict.save(arguments["out"])
    return verdict


def _audit_cache(adapter: Adapter, asked: CacheAsked, arguments: Mapping[str, Any]) -> Verdict:
    """A cache that is not the model's own: the word of the programs on it.

    Args:
        adapter: The model.
        asked: The cache.
        arguments: Those of :func:`audit`, by name.
    """
    read = ("programs", "seconds", "calls", "reach", "checks", "cache", "lossy")
    unread = ", ".join(_given(arguments, *read))
    notes = (
        [f"{unread}: not read, since only programs of a cache run on a cache that is given"]
        if unread
        else []
    )
    check_choice("reach", arguments["reach"], ("yes", "no"))
    if (checks := arguments["checks"]) == "none":
        raise InputError(
            f"cache={asked.kind} was given with checks='none', and only programs run on it: leave one out."
        )
    check_known("checks", checks, CHECKS)
    given = programs_named(
        check_text("calls", arguments["calls"], "programs such as 'rows(0+4)+feed(9)', or 'all'")
    )
    count, most = _budget(arguments["programs"], arguments["seconds"])
    more, tell = THOROUGH if checks == "thorough" else 1, arguments["progress"] or (lambda _: None)
    with (
        located(f"audit of {adapter.facts.name} on {asked.kind}"),
        own_threads(adapter),
        evaluating(adapter),
    ):
        seed = check_seed(arguments["seed"])
        # What cannot be made on this model or machine is said before anything runs.
        adapter.own_cache(asked.kind, 1, 1, adapter.dtype)
        found = uses_of(
            adapter, count * more, most * more, seed, given, arguments["reach"], tell, asked
        )
        figures = distances_of(adapter, given, asked.kind, asked.declared)
        dropped = dropped_by(adapter, asked)
    if dropped is not None and dropped.position != dropped.fed:
        # Whatever a cache may drop, a token stands where it stands.
        found = [
            Check(
                "positions", WRONG, f"{asked.kind} drops rows, and {dropped.said}.", dropped.moved
            ),
            *found,
        ]
    elif dropped is not None:
        notes.append(f"{asked.kind} drops rows, and {dropped.said}")
    facts, own = adapter.facts, dtype_name(adapter.dtype)
    evidence = Evidence(
        f"{asked.kind} on {facts.name} ({adapter.kind}, {own})", own, 0, checks=found, distances=figures,
        allow=allowed(arguments["allow"]),
        notes=[*notes, *asked.notes], about=provenance(adapter, cache=str(asked.kind)),
    )  # fmt: skip
    worst = max((check.error or 0.0 for check in found if check.status == RIGHT), default=0.0)
    right = (
        "the same cache without the use"
        if asked.lossy
        else "the forward without a cache of a row's own tokens"
    )
    verdict = of_functions(evidence, worst, right)
    if arguments["out"] is not None:
        verdict.save(arguments["out"])
    return verdict


@dataclasses.dataclass
class _Auditor:
    """Climbs the ladder and looks inside where a rung shows something; what it is given,
    :func:`audit` was given.
    """

    adapter: Adapter
    plan: Plan
    dtypes: dict[str, torch.dtype]
    exercise: Callable[[], list[Check]]
    progress: Callable[[str], None]

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
        """Runs every rung; of a model that crashes there the programs of its cache alone, if one of
        these crashes too.
        """
        evidence = self.evidence
        evidence.random, evidence.unread = self._random(), unread_by(self.adapter)
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
        """Every rung, and the programs of the cache."""
        evidence, judges = self.evidence, []
        self.progress("the prompt itself")
        evidence.prompt = prompt_difference(self.adapter, self.plan.tokens(0, self.adapter.device))
        for name, dtype in self.dtypes.items():
            self.progress(name)
            with self._timed("copy", name):
                twin = self._in(dtype)
            run = self._climb(twin, name)
            if run is not None:
                evidence.rungs[name] = run
                if run.grid:
                    self._ask_grid(twin, run)
                if not run.nonfinite:
                    with self._timed("causes", name):
                        judges += self._judge(twin, run)
            del twin  # Two copies at once would be one too many.
        self.progress("programs of the cache")
        with self._timed("programs", evidence.own):
            evidence.checks = self._exercise()
        if judges:
            with self._timed("causes", "float64 beside"):
                self._settle(judges)

    def _exercise(self) -> list[Check]:
        """The uses of the cache; where its rows are not read, that is what is wrong in each that is
        off.
        """
        checks, unread = self.exercise(), self.evidence.unread
        if unread is None:
            return checks
        place: dict[str, Any] = {"layer": unread.layer, "tensor": "K", "module": unread.module}
        return [
            dataclasses.replace(check, **place) if check.status == WRONG else check
            for check in checks
        ]

    def _ask_grid(self, twin: Adapter, run: PrecisionRun) -> None:
        """Whether logits that lie on a grid were put there: those of whole numbers leave it once
        the blocks' outputs move.
        """
        runner, tokens, grid = (
            BlockModel(twin),
            self.plan.tokens(0, twin.device),
            getattr(torch, run.grid),
        )
        size = band(run.dtype, max(tokens.shape[1], twin.facts.width)) / SLACK
        if not on_grid(runner.moved(tokens, lambda _: size), grid):
            run.grid = ""
        elif not self.evidence.grid_module:
            self.evidence.grid_module = grid_module(runner, tokens, grid)

    def _judge(self, twin: Adapter, run: PrecisionRun) -> list[RungJudge]:
        """Judges a rung; its judge, where that has to see the model in float64."""
        evidence, one = self.evidence, RungJudge(twin, run, self.evidence.terms)
        evidence.judged[run.name] = one.judge()
        evidence.accounts[run.name] = account(twin, run, evidence.terms)
        return [one] if one.open else []

    def _settle(self, judges: list[RungJudge]) -> None:
        """What can only be told beside the same blocks in float64."""
        self.progress("float64 beside")
        twin: Adapter | None = None
        with contextlib.suppress(RuntimeError, UnsupportedError):
            twin = self._in(torch.float64)
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
            evidence.judged[one.name] = one.settle(twin, clean)

    @contextlib.contextmanager
    def _timed(self, part: str, rung: str) -> Iterator[None]:
        clock, processor = time.perf_counter(), time.process_time()
        yield
        took = {
            "seconds": time.perf_counter() - clock,
            "processor_seconds": time.process_time() - processor,
        }
        self.evidence.seconds.append({"rung": rung, "part": part, **took})

    def _climb(self, twin: Adapter, name: str) -> PrecisionRun | None:
        """One rung, or None where torch cannot run the model in its dtype."""
        # What serves and what sees the smallest errors decide; the others show how the difference
        # scales.
        decides = name in (self.evidence.own, self.finest)
        plan = self.plan if decides else dataclasses.replace(self.plan.ends, sweep=None)

        def own() -> PrecisionRun:
            with self._timed("own kernels", name):
                return climb(twin, plan)

        try:
            run = own()
        except KvinterpError:
            raise
        # What users put on a model may not go along to another dtype, and says so by any error.
        except Exception as error:
            if name == self.evidence.own or out_of_memory(error):
                raise
            self.evidence.refused[name] = reason(error)
            if twin is self.adapter or not other_attention(twin):
                return None
            try:
                run = own()
            except Exception:
                return None
            self.evidence.refused[name] += "; it was run with eager attention"
        if not run.nonfinite:
            with self._timed("fixed order", name):
                self._fix(twin, run)
        return run

    def _fix(self, twin: Adapter, run: PrecisionRun) -> None:
        """The rung again with a fixed order, which knows no length from another: over the shortest
        and the longest prompt.
        """
        self.progress(f"{run.name}, {BatchInvariant()}")
        if (plan := self._affordable()) is None:
            run.unfixed = "the model is too large to be run with a fixed order of additions here"
            return
        try:
            run.fixed = climb(twin, plan, BatchInvariant(), "whole")
            # Where a row depends on how many there are by the model's own design only the same
            # prefix compares.
            against = "prefix" if (run.fixed.local["null"] > 0).any() else "whole"
            # Where a part differs, the long decode shows from which position on.
            sweep = run.plan.sweep if run.fixed.largest_error else None
            if against == "prefix" or sweep is not None:
                run.fixed = climb(
                    twin, dataclasses.replace(plan, sweep=sweep), BatchInvariant(), against
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
        """The model in a dtype; a copy that is dropped with its rung, never kept on the adapter."""
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


# What is given ------------------------------------------------------------------------------------


def precisions(rungs: Any, adapter: Adapter) -> dict[str, torch.dtype]:
    """The precisions to climb by name, the model's own among them."""
    expected = f"a list of at least one precision of {', '.join(RUNGS)}"
    rungs = given_list("rungs", rungs, expected)
    if not rungs:
        raise InputError(f"rungs={shown(rungs)} was given: expected {expected}.")
    dtypes = {dtype_name(dtype): dtype for dtype in map(dtype_named, rungs) if dtype is not None}
    dtypes.setdefault(dtype_name(adapter.dtype), adapter.dtype)
    return dtypes


@contextlib.contextmanager
def _torchs_own_words() -> Iterator[None]:
    """What torch says of a forward that it cannot run, in one sentence."""
    try:
        yield
    except KvinterpError:
        raise
    # Models raise whatever their code meets first.
    except Exception as error:
        raise UnsupportedError(
            "this model cannot be run as the audit runs it, tokens one by one on its own cache and each block given the "
            f"recomputation's rows: {reason(error)}"
        ) from error


def checked_lengths(lengths: Any, steps: Any) -> tuple[tuple[int, ...], int]:
    """The lengths and steps as whole numbers, where an audit of them ends."""
    expected = "whole numbers of at least 1, as in lengths=(5, 63, 64), steps=3"
    counts = [
        whole_number(value) or 0 for value in (*given_list("lengths", lengths, expected), steps)
    ]
    if len(counts) < 2 or min(counts) < 1:
        raise InputError(
            f"lengths={shown(lengths)}, steps={shown(steps)} was given: expected {expected}."
        )
    *lengths, steps = counts
    if max(lengths) > LONGEST or len(set(lengths)) * steps > MOST_STEPS:
        raise InputError(
            f"lengths={shown(lengths)} with {shown(steps)} steps each were asked for, and each step "
            f"recomputes its whole prefix at every precision: expected lengths up to {LONGEST:,} and at most {MOST_STEPS:,} "
            "steps in all; give fewer."
        )
    return tuple(lengths), steps


def _own_lengths(adapter: Adapter) -> tuple[int, ...]:
    edges = [edge for edge in edges_of(adapter) if edge <= LONGEST_EDGE]
    return tuple(sorted({*LENGTHS, *(edge + side for edge in edges for side in (-1, 1))}))


def _tokens(
    adapter: Adapter, prompts: Sequence[Any] | None, length: int, seed: int
) -> list[Sequence[int]]:
    if prompts is None:
        return prompts_for(adapter, 2, length, seed)
    every: list[Sequence[int]] = []
    for prompt in given_list("prompts", prompts, "a list of prompts, each text or token ids"):
        if isinstance(prompt, str | Prompt):
            ids = prompt_ids(adapter, prompt)
        else:
            ids = (token_ids(prompt) or list(prompt)) if isinstance(prompt, Iterable) else [prompt]
        vocabulary = adapter.facts.vocabulary
        wrong = next((t for t in ids if not isinstance(t, int) or not 0 <= t < vocabulary), None)
        if wrong is not None or len(ids) < 3:
            what = "it has fewer than 3 tokens" if wrong is None else f"it holds token {wrong!r}"
            raise InputError(
                f"prompt {str(prompt)[:40]!r} cannot be audited: {what}; vocabulary {vocabulary}."
            )
        every.append(ids)
    if not every:
        raise InputError(
            "the list of prompts is empty: give at least one, or leave it out for random ones."
        )
    return every
