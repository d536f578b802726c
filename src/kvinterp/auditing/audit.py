"""An audit: a model, a cache of one's own, anybody's functions, or what another engine gave, and one verdict.

``arguments.py`` checks what is given, ``auditor.py`` runs every precision, ``uses.py`` the programs of the cache; what was
found is an ``Evidence``, of which ``reading.py`` makes the verdict that is returned here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvinterp.auditing.arguments import (
    CHECKS,
    LENGTHS,
    RUNGS,
    THOROUGH,
    budget_of,
    checked_lengths,
    own_lengths,
    precisions,
    programs_asked_for,
    prompt_tokens,
)
from kvinterp.auditing.auditor import Auditor
from kvinterp.auditing.blocks import evaluating
from kvinterp.auditing.causality import check_causal
from kvinterp.auditing.checks import Check
from kvinterp.auditing.ladder import dtype_name, prefix_plan
from kvinterp.auditing.own_code import behind, decoded, decoded_far, subject_of, texts_of
from kvinterp.auditing.own_dtype import distance_of, distances_of
from kvinterp.auditing.programs.function_subject import FunctionSubject
from kvinterp.auditing.programs.names import programs_named
from kvinterp.auditing.programs.outcome import RIGHT, WRONG
from kvinterp.auditing.programs.subject import Subject
from kvinterp.auditing.reading import Evidence, of_functions
from kvinterp.auditing.subjects import GivenCache, counted_in, dropped_by
from kvinterp.auditing.uses import PROGRAMS, SECONDS, check_functions, uses_of
from kvinterp.auditing.verdict import Audit, Verdict, allowed
from kvinterp.common.checks import (
    check_callable,
    check_choice,
    check_instance,
    check_known,
    check_seed,
    check_text,
    check_unread,
)
from kvinterp.common.wings import taken
from kvinterp.errors import InputError, KvinterpError, UnsupportedError, located, reason
from kvinterp.models import Adapter, wrap
from kvinterp.models.cache_kinds import Dynamic, Preallocated, cache_named
from kvinterp.models.provenance import machine, provenance
from kvinterp.models.threads import own_threads
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

ALWAYS_READ = ("seed", "allow", "out", "progress")
"""What is read whatever is audited."""


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
        lengths: Lengths of the prompts, each followed by single tokens. Default:
            5,63,64,65,96,97,128 and the lengths around the model's sliding window.

            Those the context has room for are used, and of the ones around a window or chunk those
            up to 512. The first prompt takes all of them, in the model's own precision and in the
            finest; the shortest and the longest stand for them in the others, with a fixed order of
            additions, and for further prompts.
        steps: How many tokens follow each prompt, one at a time.
        seed: Seed for random prompts and random weights.
        sweep: ``"yes"`` also decodes the whole first prompt from its beginning, in the same two
            precisions, to find the first position at which something is wrong.
        checks: Which programs of the cache to run: default (--programs), thorough (five times as
            many), quick (each use once, first, until one is wrong), each (each use once) or none.

            They are run beside tokens fed one by one. ``"quick"`` and ``"each"`` compile and draw
            none; ``"quick"`` runs them before the precisions, and the first that is wrong ends the
            audit unless ``allow`` names a word.
        reach: ``"yes"`` also decodes over every edge that the config names (window, RoPE switch,
            context end), however far; ``"no"`` lists those that cost too much as not run.
        calls: Programs to run as well, such as 'rows(0+4)+feed(9)+crop(2)+feed(1)', or their names,
            such as padded(left,5),batched(8); or all. Also prints how far each moves logits in
            --dtype.

            Beside each distance stand those of two recomputations in that dtype (``distances``).
        programs: How many programs of the cache to run: each use once, then drawn ones (--seed).
        seconds: Processor seconds that the programs take at most.
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
        cache: Ask about another cache than the model's own, on this model: quantized(4),
            quantized(8,fp8), static, offloaded, or your own class, package.module:Class.

            Or the class itself, or a function that makes one; see :func:`kvinterp.Cached`. Programs
            run on it, and its own methods move its rows and take its positions back.
        lossy: ``"yes"``: that cache is meant to lose something, as a quantised one of your own:
            what is right is then the same cache without the use, one row alone. Transformers'
            quantised layers need not be said.
        allow: A verdict that should not fail, such as hidden-cast; may be given several times.

            In Python a list of words of :data:`VERDICTS`.
        out: A folder for verdict.json and the page, or None.
        detail: ``"verdict"`` returns the :class:`Verdict`, ``"everything"`` the :class:`Audit`.
        progress: Told what runs next.
        against: Judge the log-probs of another engine instead, read from this file
            (docs/engines.md).

            Or from what :meth:`kvinterp.Trace.from_arrays` made of arrays. They are judged on their
            own tokens.
        format: Format of the --against file. Default: recognised from its content.
        declared: The dtype that the engine was said to compute in; what the file says unless given.
        older: The model with weights of an earlier time, or without an adapter, which the engine of
            --against or its cache may have.

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
            return _audit_cache(adapter, GivenCache(kind, lossy == "yes"), arguments)
        if inputs is not None:
            return _audit_functions(behind(adapter, prompts, inputs), arguments, "prompts")
    check_unread("requests", requests, "any", "the model's own caches are tried; leave it out")
    check_choice("detail", detail, ("verdict", "everything"))
    check_choice("sweep", sweep, ("yes", "no"))
    check_choice("reach", reach, ("yes", "no"))
    check_known("checks", checks, CHECKS)
    extra = programs_asked_for(calls, checks)
    count, most = budget_of(programs, seconds)
    check_seed(seed)
    check_callable("progress", progress)
    allow = allowed(allow)
    lengths, steps = checked_lengths(own_lengths(adapter) if lengths is None else lengths, steps)
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
        positions = min(adapter.facts.context, max(lengths) + steps)
        plan = prefix_plan(
            prompt_tokens(adapter, prompts, positions, seed), lengths, steps, positions, sweep
        )
        tell, more = progress or (lambda _: None), THOROUGH if checks == "thorough" else 1

        spent: dict[str, float] = {}

        def exercised() -> list[Check]:
            return (
                []
                if checks == "none"
                else uses_of(
                    adapter,
                    count * more,
                    most * more,
                    seed,
                    extra,
                    reach,
                    tell,
                    breadth=checks,
                    spent=spent,
                )
            )

        # A word that is allowed may be read from the precisions alone.
        order = "programs" if checks == "quick" and not allow else "precisions"
        evidence = Auditor(adapter, plan, dtypes, exercised, tell, order).run()
        evidence.distances = distances_of(adapter, extra)
        evidence.seconds += [
            {"rung": evidence.own, "part": f"programs: {stage}", "processor_seconds": took}
            for stage, took in spent.items()
        ]
        evidence.about = provenance(adapter, lengths=list(plan.prefills), steps=plan.steps)
        if evidence.prompt is not None:
            evidence.about["prompt_differs"] = dataclasses.asdict(evidence.prompt)
    result = Audit(evidence.judge(allow), list(evidence.rungs.values()), plan, evidence.about)
    if out is not None:
        result.save(out)
    return result if detail == "everything" else result.verdict


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
        budget_of(arguments["programs"], arguments["seconds"]),
        arguments["progress"] or (lambda _: None),
    )
    check_known("checks", arguments["checks"], CHECKS)
    check_choice("reach", arguments["reach"], ("yes", "no"))
    asked, own = (
        programs_asked_for(arguments["calls"], arguments["checks"]),
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
        arguments["checks"],
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


def _audit_cache(adapter: Adapter, asked: GivenCache, arguments: Mapping[str, Any]) -> Verdict:
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
    count, most = budget_of(arguments["programs"], arguments["seconds"])
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
            adapter, count * more, most * more, seed, given, arguments["reach"], tell, asked, checks
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


# What is given ------------------------------------------------------------------------------------


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
