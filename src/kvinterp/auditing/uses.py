"""The uses of a model's cache: programs in float64 with casts lifted, and some in the model's own
dtype.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import types
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch

from kvinterp.auditing.blocks import evaluating
from kvinterp.auditing.checks import BEYOND, NOT_RUN, NUMBERS, UNCLEAR, Check
from kvinterp.auditing.edges import edge_programs, far_programs, past
from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.programs.crashes import CRASHES, OURS, whose
from kvinterp.auditing.programs.first_difference import placed
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.names import program_named
from kvinterp.auditing.programs.outcome import PLAIN, REFUSED, RIGHT, WRONG, OwnError
from kvinterp.auditing.programs.pasted import pasted
from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.running import Run
from kvinterp.auditing.programs.search import (
    EDGES,
    FIRST,
    FURTHEST,
    ONCE,
    Searched,
    base_of,
    far,
    run_program,
    search,
    shrink,
)
from kvinterp.auditing.programs.subject import MAX_COLUMNS, SIXTEEN, Subject, apart
from kvinterp.auditing.subjects import GivenCache, subject_instead, widest_subject
from kvinterp.errors import UnsupportedError, named, out_of_memory
from kvinterp.models import Adapter
from kvinterp.models.door import quiet_transformers

PROGRAMS, SECONDS = 100, 80.0
"""Programs that are run unless told, and processor seconds that they take at most."""
FEWER_BITS = "a tensor is cast to 16 bits in this use that the plain forward keeps wider"


def uses_of(
    adapter: Adapter,
    programs: int = PROGRAMS,
    seconds: float = SECONDS,
    seed: int = 0,
    given: Sequence[Program] = (),
    reach: str = "no",
    progress: Callable[[str], None] = lambda _: None,
    asked: GivenCache | None = None,
    breadth: str = "default",
    spent: dict[str, float] | None = None,
) -> list[Check]:
    """Tries a model's cache in every use that it offers.

    The model is left as it was: its hooks, configs, training mode and the random state.

    Args:
        adapter: The model.
        programs: How many programs are run.
        seconds: How many processor seconds they take at most.
        seed: Draws them.
        given: Programs that are run besides.
        reach: ``"yes"`` also goes over every edge that the config names, however far.
        progress: Told what runs.
        asked: The cache that is asked about, where it is not the model's own.
        breadth: ``"quick"``: each use once, until one is wrong, and nothing that no contract of a
            cache promises; ``"each"``: the same, whatever is wrong.
        spent: Gets the processor seconds of each stage, by its name.

    Returns:
        A check a use, those that are wrong first.
    """
    make = ModelSubject if asked is None else asked.subject
    with as_it_was(adapter), torch.no_grad():
        try:
            subject, why = widest_subject(adapter, make)
        except OwnError:
            raise
        except Exception as error:
            return [_met(adapter, error)]
        edges, not_reached = edge_programs(adapter, reach)
        names = {
            str(program_named(text)): (f"over the {name}", size)
            for (name, size), texts in edges.items()
            for text in texts
        }
        first = [
            *given,
            *(program for program in map(program_named, names) if subject.offers(program.rows)),
        ]
        further, dear = far_programs(adapter, reach)
        ahead = [*map(program_named, further)]
        faults = ONCE.get(breadth, 4)

        def searched() -> Searched:
            return search(
                subject, programs, seconds, seed, first, faults, progress=progress, further=ahead,
                breadth=breadth,
            )  # fmt: skip

        found = searched()
        if subject.lifted and (own := subject_instead(adapter, found, make)) is not None:
            subject, why = own
            found = searched()
        names = {
            str(program_named(text)): (past(size), size) for text, size in further.items()
        } | names
        not_reached += [*dear, *_cut(found, names, programs, seconds)]
        spent = {} if spent is None else spent
        spent |= found.spent
        with _spending(spent, "places and lines of what is wrong"):
            checks = _checks(subject, found, names, {*map(str, given)})
        # In 16 bits a cache that loses is off from itself wherever rounding tips what it quantises.
        sixteen = adapter.dtype in SIXTEEN
        if why:
            said = f"what runs on this model does not follow a cast ({why}), so programs were judged in its own"
            not_reached.insert(0, Check("float64", NOT_RUN, f"{said} {dtype_name(adapter.dtype)}."))
        elif (
            not subject.lossy
            if sixteen
            else not any(one.status == WRONG for one in checks) and _may_cast(subject, found)
        ):
            with _spending(spent, "again in 16 bits" if sixteen else "again with casts to 16 bits"):
                checks += _narrow(
                    adapter, subject, given, _wrong_uses(checks), programs // 5, seconds / 3, make
                )
        if asked is not None:
            checks = asked.blamed(adapter, asked.completed(subject, checks))
        if subject.mixes:
            said = f"in a batch the forward without a cache is off by {subject.mixes:.2g} from each row alone"
            checks.append(
                Check(
                    "batch", PLAIN, f"{said}: rows were tried alone.", subject.mixes, subject.limit
                )
            )
        # What no contract of a cache promises: said, and no failure.
        if breadth not in ONCE:
            found = search(subject, programs // 6, seconds / 4, seed, faults=1, beyond="yes")
            spent |= found.spent
            known = _wrong_uses(checks)
            checks += [
                _wrong(subject, one, BEYOND, found.ran)
                for one in found.wrong
                if base_of(one.use) not in known
            ]
        return [*sorted(checks, key=lambda one: one.status != WRONG), *not_reached]


@contextlib.contextmanager
def _spending(spent: dict[str, float], stage: str) -> Iterator[None]:
    """Notes the processor seconds of what runs inside."""
    began = time.process_time()
    yield
    spent[stage] = time.process_time() - began


def check_functions(
    subject: Subject,
    programs: int,
    seconds: float,
    seed: int,
    asked: Sequence[Program],
    lengths: Sequence[Program],
    progress: Callable[[str], None],
    breadth: str = "default",
) -> tuple[Searched, list[Check]]:
    """The same of anybody's own forward and step: as far as the functions go, and without a place.

    Args:
        subject: They.
        programs, seconds, seed, progress, breadth: As of :func:`uses_of`.
        asked: Programs that are run besides.
        lengths: Those that go on singly behind prompts of some lengths.
    """
    names, further = {*map(str, asked)}, far(subject.context)
    given, most = [*asked, *lengths], programs + (len(asked) + len(lengths)) * (programs > 0)
    ahead = [*map(program_named, further)] if programs else []
    faults = ONCE.get(breadth, 4)
    found = search(
        subject,
        most,
        seconds,
        seed,
        given,
        faults,
        progress=progress,
        further=ahead,
        breadth=breadth,
    )
    edges = {
        str(program): (past(size), size)
        for program, size in zip(ahead, further.values(), strict=False)
    }
    # A cache that nobody was asked to fill may say in this way that it is full.
    ends = [
        one
        for one in found.wrong
        if one.raised
        and one.origin not in names
        and sum(step.columns for step in one.program.steps) > MAX_COLUMNS
    ]
    found.wrong = [one for one in found.wrong if one not in ends]
    full = [
        Check(
            "end of the cache", REFUSED, f"{one.why}, in {one.program}.", program=str(one.program)
        )
        for one in ends
    ]
    refused = [
        Check(f"{use} in {one.program}", REFUSED, f"{one.why}.", program=str(one.program))
        for (word, use), one in found.others.items()
        if word == REFUSED and use in found.right
    ]
    return found, [
        *_checks(subject, found, edges, names),
        *full,
        *refused,
        *_cut(found, edges, most, seconds),
    ]


def _met(adapter: Adapter, error: Exception) -> Check:
    """What an error makes of the programs before any could run."""
    cause = (
        error.__cause__
        if isinstance(error, UnsupportedError) and error.__cause__ is not None
        else error
    )
    who, line_of_code = whose(cause, adapter.model)
    said = named(cause)
    if out_of_memory(cause):
        return Check("programs of the cache", UNCLEAR, f"it raised {said}.")
    if isinstance(error, UnsupportedError):
        return Check("programs of the cache", NOT_RUN, f"{str(error).rstrip('.')}.")
    if who == OURS:
        return Check(
            "programs of the cache",
            UNCLEAR,
            f"kvinterp itself raised {said} ({line_of_code}): please report it.",
        )
    return Check(
        "prompt",
        WRONG if who == CRASHES else REFUSED,
        f"a prompt with a cache raises {said} ({line_of_code}).",
    )


def _checks(
    subject: Subject,
    found: Searched,
    names: Mapping[str, tuple[str, int]] = types.MappingProxyType({}),
    asked: Collection[str] = (),
) -> list[Check]:
    """A check a use; programs that go over an edge, and do so still when they are shrunk, are
    called by it.

    What came of a program that was asked for is said also where others are right in the same use.
    """
    wrong = []
    for one in found.wrong:
        check = _wrong(subject, one, WRONG, found.ran)
        wrong.append(dataclasses.replace(check, name=f"{check.name}{_over(one, names)}"))
    off = f"at most {found.worst:.2g} of the largest logit off."
    right = [
        Check(
            use,
            RIGHT,
            f"right in {count} program{'s' * (count > 1)}: {off}",
            found.worst,
            subject.limit,
            tried=count,
            reach=found.reach[use],
        )
        for use, count in found.right.items()
    ]
    others = []
    for (word, _), one in found.others.items():
        given = origin if (origin := str(one.program)) in asked else ""
        one = shrink(subject, one, 0) if given and word == PLAIN else one
        # A batch of one that is off beside right ones of several is said.
        name = (
            f"{one.use}, one row"
            if word == PLAIN and len(one.program.rows.pads) == 1 and any(one.program.rows.pads)
            else one.use
        )
        others.append(
            Check(
                name,
                word,
                f"{one.why.rstrip('.')}.",
                tried=1,
                program=str(one.program),
                asked=given,
            )
        )
    checks = dict[str, Check]()
    for check in (*wrong, *(one for one in others if one.asked), *right, *others):
        checks.setdefault(check.name, check)
    return sorted(checks.values(), key=lambda check: (check.status != WRONG, check.status != RIGHT))


def _wrong(subject: Subject, one: Run, status: str, ran: int) -> Check:
    """What a wrong program says, and where."""
    first, lines = None, ""
    # What is wrong with the model may break the search for its place too.
    with contextlib.suppress(Exception):
        # The modules of a cache that loses are apart from the plain forward's wherever it reads.
        first = (
            placed(subject, one.program)
            if isinstance(subject, ModelSubject) and not subject.lossy
            else None
        )
    with contextlib.suppress(Exception):
        lines = pasted(one)
    # The number of the verdict is the one that the lines print.
    detail = f"{one.why if one.wrong is None else one.wrong}, in the program {one.program} (found by program {one.ran} of {ran})."
    where: dict[str, Any] = {}
    if status == WRONG and one.program.rows.told == "needed":
        # The very program, told the positions of its tokens: only then is it they that a call
        # leaves out.
        numbered = Program(dataclasses.replace(one.program.rows, told="all"), one.program.steps)
        with contextlib.suppress(Exception):
            where = {"hint": NUMBERS} if run_program(subject, numbered).word == RIGHT else {}
    if first is not None:
        where |= {
            "layer": first.layer,
            "tensor": first.tensor,
            "module": first.module,
            "step": first.column,
        }
    error = None if one.wrong is None else one.wrong.error
    return Check(
        one.use,
        status,
        detail,
        error,
        subject.limit,
        **where,
        tried=1,
        program=str(one.program),
        lines=lines,
    )


def _wrong_uses(checks: Sequence[Check]) -> set[str]:
    return {base_of(check.name) for check in checks if check.status == WRONG}


def _may_cast(subject: ModelSubject, found: Searched) -> bool:
    """Whether programs may go otherwise where casts to 16 bits are left as they are: no operation
    named a type of 16 bits in any that is tried first, so that these would run the same again.
    """
    return bool(subject.sixteen_met) or not {*map(str, found.cut)}.isdisjoint(
        str(program_named(text)) for text in FIRST
    )


def _narrow(
    adapter: Adapter,
    in_float64: ModelSubject,
    given: Sequence[Program],
    known: set[str],
    programs: int,
    seconds: float,
    make: Callable[..., ModelSubject] = ModelSubject,
) -> list[Check]:
    """What exists in a model's own 16 bits alone; in a wider one where casts to 16 bits change
    nothing in the plain forward.
    """
    own = adapter.dtype in SIXTEEN
    try:
        subject = make(adapter, () if own else (torch.float32,))
        text = subject.tokens[:9]
        if not own and apart(subject.alone(text), in_float64.alone(text)) > in_float64.limit:
            return []  # The model alone casts: the ladder says so.
        found = search(
            subject, programs if own else len(FIRST), seconds, given=given, faults=4 if own else 1
        )
        kept = [
            one
            for one in found.wrong
            if base_of(one.use) not in known and (not own or _again(subject, one.program))
        ]
    except OwnError:
        raise
    except Exception:  # In float64 it ran.
        return []
    checks = [_wrong(subject, one, WRONG, found.ran) for one in kept]
    if own:
        name = dtype_name(adapter.dtype)
        return [dataclasses.replace(check, name=f"{check.name} in {name}") for check in checks]
    # In float64 fewer programs may have run: of what is wrong there too no cast is the cause.
    right = [run_program(in_float64, one.program).word == RIGHT for one in kept]
    return [
        dataclasses.replace(
            check, hint=FEWER_BITS, detail=f"{check.detail.rstrip('.')}; {FEWER_BITS}."
        )
        if fine
        else check
        for check, fine in zip(checks, right, strict=True)
    ]


def _again(subject: Subject, program: Program) -> bool:
    """Whether other tokens show it too: what fails with one set of them is rounding that tipped a
    choice.
    """
    others = [
        Program(dataclasses.replace(program.rows, seed=program.rows.seed + n), program.steps)
        for n in (1, 2)
    ]
    return all(run_program(subject, other).word == WRONG for other in others)


def _over(one: Run, names: Mapping[str, tuple[str, int]]) -> str:
    """Which edge a program goes over still once it is shrunk, as the end of its name; empty where
    none.
    """
    # A piece that is wrong was not taken: what counts is how far the program goes.
    (edge, size), columns = names.get(one.origin, ("", 0)), one.program.columns
    if edge == past(size):
        size = max((n for n in (*EDGES, FURTHEST) if n <= columns), default=columns + 1)
        edge = past(size)
    return f" {edge}" if edge and columns >= size else ""


def _cut(
    found: Searched, names: Mapping[str, tuple[str, int]], programs: int, seconds: float
) -> list[Check]:
    """What programs or processor seconds cut off, of what would have been tried in any case."""
    over = (
        f"{programs} programs were"
        if found.ran >= programs
        else f"{seconds:.3g} processor seconds were"
    )
    hint = "--programs" if found.ran >= programs else "--seconds"
    each = dict[str, list[Program]]()
    for program in found.cut:
        each.setdefault(names.get(str(program), ("what is tried first", 0))[0], []).append(program)
    return [
        Check(
            name,
            NOT_RUN,
            f"{len(cut)} programs more, since {over} over, the first {cut[0]}.",
            hint=hint,
        )
        for name, cut in each.items()
    ]


def right_in_float64(checks: Sequence[Check]) -> bool:
    """Whether every program is right where rounding is 1e-15: what then differs in a narrower type
    is no wrong code.
    """
    fine = [
        check
        for check in checks
        if check.status == RIGHT and check.null is not None and check.null < 1e-6
    ]
    return any(check.name == "decode step" for check in fine) and not any(
        check.status == WRONG for check in checks
    )


@contextlib.contextmanager
def as_it_was(adapter: Adapter) -> Iterator[None]:
    """Restores what running a model can change: its mode, its attributes, the random state, what
    libraries say.
    """
    devices = [adapter.device] if adapter.device.type == "cuda" else []
    with (
        torch.random.fork_rng(devices),
        warnings.catch_warnings(),
        quiet_transformers(),
        evaluating(adapter),
    ):
        warnings.simplefilter("ignore")
        with adapter.left_as_found():
            yield
