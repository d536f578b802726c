"""Programs are drawn, and the first that is wrong is shrunk to the few operations that make it
wrong.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import random
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from kvinterp.auditing.programs.names import OPERATIONS, program_named
from kvinterp.auditing.programs.operations.compile import Compile
from kvinterp.auditing.programs.operations.feed import Feed
from kvinterp.auditing.programs.operations.fork import Again
from kvinterp.auditing.programs.operations.generate import Generate
from kvinterp.auditing.programs.outcome import RIGHT, WRONG
from kvinterp.auditing.programs.program import (
    CACHES,
    MASKS,
    PADS,
    TOKENS,
    TOLD,
    Operation,
    Program,
    Rows,
)
from kvinterp.auditing.programs.reach import Reach
from kvinterp.auditing.programs.running import PADDED, Run
from kvinterp.auditing.programs.subject import Subject

FIRST = (
    "rows(0)+feed(9)+feed(3,1)",
    "rows(0)+feed(1)+feed(3,1)",
    "rows(0+0+0)+feed(9)+feed(3,1)",
    "rows(0,told=all)+feed(9)+feed(3,1)",
    "rows(0)+feed(17,5)+feed(2,1)",
    "rows(0)+feed(48,16)+feed(32)+feed(2,1)",
    "rows(0+4+1)+feed(9)+feed(3,1)",
    "rows(0+4+1,told=mask_alone)+feed(9)+feed(3,1)",
    "rows(0+6)+feed(4)+feed(8)+feed(2,1)",
    "rows(0)+generate(6,3)",
    "rows(0+4+1)+generate(9,3)",
    "rows(0)+generate(6,3)+generate(4,3)",
    "rows(0)+feed(6)+generate(3,3,new)",
    "rows(0)+generate(8,3,chunks)",
    "rows(0)+feed(6)+feed(3,1)+crop(2)+feed(3,1)",
    "rows(0,cache=recording)+feed(6)+feed(3,1)+crop(2)+feed(3,1)",
    "rows(0+0+0)+feed(40)+feed(1)+reorder(2+0+1)+feed(2,1)",
    "rows(0+0+0)+feed(6)+feed(1)+select(2+0)+feed(2,1)",
    "rows(0+0)+feed(14)+feed(1)+repeat(5)+feed(2,1)",
    "rows(0)+feed(11)+fork(2)+feed(2,1)",
    "rows(0)+feed(6)+request(5)+feed(2,1)",
    "rows(0)+feed(6)+feed(3,1)+again()+feed(6)+feed(3,1)",
    # One of each kind that follows below: of a large model no more may be affordable.
    "rows(4)+feed(9)+feed(3,1)",
    "rows(0,tokens=special)+feed(9)+feed(6,1)+feed(6,1)",
    "rows(0+4)+feed(9)+request(9,3,rows=same)+feed(3,1)",
    f"rows({'+'.join('0' * 9)})+feed(5)+feed(3,1)",
    "rows(0)+feed(40)+feed(18)+crop(17)+feed(20)+feed(2,1)",
    "rows(0+0)+feed(6)+join()+feed(2,1)",
    "rows(0)+feed(6)+draft(3)+draft(3)+feed(2,1)",
    "rows(0,cache=static)+feed(6)+feed(3,1)",
    "rows(0,cache=bare)+feed(6)+feed(3,1)",
    "rows(0+0)+generate(5,8,beams)",
    "rows(0)+generate(5,4,static)",
    "rows(0)+generate(9,6,lookup)",
    "rows(0)+generate(5,6,assistant)",
    "rows(0)+generate(5,4,uncached)",
    "rows(0)+generate(5,3,embeds)",
    "rows(0)+generate(1,3,embeds)",
    "rows(0+2)+generate(5,3,beside)",
    "rows(0,fed=embeds)+feed(6)+feed(3)+feed(2,1)",
    "rows(0+3,fed=embeds)+feed(6)+generate(3,3)",
    "rows(0,fed=embeds)+generate(5,6,beams)",
    "rows(0,fed=embeds,cache=static)+feed(6)+feed(3)+feed(2,1)",
    "rows(0+3,fed=types)+feed(6)+feed(3)+feed(2,1)",
    "rows(0+3,told=bool_mask)+feed(6)+feed(3)+feed(2,1)",
    "rows(0+3,told=float_mask)+feed(6)+feed(3)+feed(2,1)",
    "rows(0+3)+feed(6)+tree(2+3)+feed(2,1)",
    "rows(0)+pack(5+3+4)+feed(2)",
    "rows(0+3,asks=attentions)+feed(6)+feed(3)+generate(2,3)",
    "rows(0+3,asks=last)+feed(6)+feed(4)+feed(2,1)",
    "rows(0+3,asks=some)+feed(6)+feed(4)+feed(2,1)",
    "rows(0+3,attention=eager)+feed(6)+feed(3)+generate(2,3)",
    "rows(0+3,attention=eager,asks=attentions)+feed(6)+feed(3)+feed(2,1)",
    "rows(0+3,attention=sdpa)+feed(6)+feed(3)+generate(2,3)",
    "rows(0+3,attention=flex_attention)+feed(6)+feed(3)+generate(2,3)",
    "rows(0)+generate(5,4,sampled)",
    "rows(0)+generate(5,6,sampled_assistant)",
    "rows(0)+feed(6)+spoil()+feed(2,1)",
    "rows(0)+feed(5)+compile(eager)+feed(1)",
    # A batch of one takes other branches: it is a padded prompt by itself, as generate() and a
    #     prefill in chunks have it.
    "rows(3)+feed(12,4)+feed(2,1)",
    "rows(4)+generate(9,3)",
    # Tokens that a chat is full of.
    "rows(0+4,tokens=special,pad=end)+feed(9)+feed(8)+feed(6,1)",
    "rows(0,tokens=special)+generate(6,3)+generate(5,3)+generate(4,3)",
    "rows(0+0+0)+generate(6,8,ends)",
    "rows(0+3,pad=model)+generate(9,8,ends)",
    # What was kept by its shape belongs to another batch.
    "rows(0+4)+request(9,3,rows=same)+feed(9)+feed(3,1)",
    "rows(0)+reset(7)+feed(9)+feed(3,1)",
    "rows(0+0,cache=static)+reset(11)+feed(9)+feed(3,1)",
    "rows(0,told=mask)+request(9,3,rows=same)+feed(9)+feed(3,1)",
    "rows(0)+feed(20)+feed(7,1)+feed(6,1)+crop(12)+feed(13)+feed(3,1)",
    "rows(0,cache=recording)+feed(19)+feed(7,1)+feed(6,1)+crop(12)+feed(3,1)",
    f"rows({'+'.join('012' * 3)})+generate(6,3)",
    f"rows({'+'.join('01200' * 3)}+3+0)+feed(6)+feed(2,1)",
    f"rows({'+'.join('0' * 17)})+feed(5)+feed(1)+reorder({'+'.join(map(str, range(16, -1, -1)))})+feed(2,1)",
)
"""What is tried first: each use once."""
ONCE = {"quick": 1, "each": 8}
"""The ways of trying each use once, and how many faults are looked for then."""
EARLY = 22
"""Behind so many of them the nearest of those that go far is tried: of a large model no more may be
affordable.
"""
EDGES, FURTHEST = (256, 512, 1024), 1100
"""Positions that one byte holds, and those of tiles, tables and pages; and a prompt that goes past
them all.
"""


WAYS = 1 / 3
"""How many of the drawn programs are called in another way than with ids and a mask."""
FLEX = 1 / 4
"""How many of those that are drawn with flex attention keep it: uncompiled it takes ten times as
long as any other kind.
"""
UNMET = 3
"""Columns of a text that hardly any other begins with."""

OF_TRANSFORMER_LENS = ("rows(0+4+1)+generate(9,3,texts)", "rows(0+4+1)+generate(9,3,padded)")
"""And of its models: a batch of unequal prompts as its own ``generate()`` is given them."""


def base_of(use: str) -> str:
    """A use, whether rows were padded or not."""
    return use.removesuffix(PADDED)


def sample_program(draw: random.Random, subject: Subject, beyond: str = "no") -> Program:
    """A program of a few kinds of operations: so each kind meets each other often."""
    rows, most = draw.randint(1, subject.rows), draw.choice([0, 4, 4, 18])
    others = [kind for kind in OPERATIONS.values() if kind is not Feed for _ in range(kind.weight)]
    kinds: list[type[Operation]] = [Feed, Feed, *draw.sample(others, draw.randint(1, 3))]
    firsts: list[type[Operation]] = [Feed, Feed, Feed, Generate]
    first = draw.choice(firsts)
    # What a step did to the cache is seen by the next.
    steps: list[type[Operation]] = [
        first,
        *(draw.choice(kinds) for _ in range(draw.randint(0, 5))),
        Feed,
    ]
    made, columns = list[Operation](), 0
    for kind in steps:
        step = kind.sample(draw, rows, subject, beyond)
        if columns + step.columns <= subject.max_columns:
            made, columns = [*made, step], columns + step.columns
    pads, given = tuple(draw.randint(0, most) for _ in range(rows)), draw.choice(TOLD)
    cache, pad, tokens = (
        draw.choice(["own", *subject.caches]),
        draw.choice(PADS),
        draw.choice(["plain", *TOKENS]),
    )
    begun = Rows(pads, told=given, cache=cache, pad=pad, tokens=tokens, beyond=beyond)
    rows_of = _called(begun, tuple(made), subject)
    rows_of = rows_of if subject.offers(rows_of) else dataclasses.replace(rows_of, told=TOLD[0])
    # Where rows begin otherwise, a seed says which of them is the first.
    begins = random.Random(str(Program(rows_of, tuple(made)))).randrange(len(subject.begins))
    return Program(dataclasses.replace(rows_of, seed=begins), tuple(made))


def _called(rows: Rows, steps: tuple[Operation, ...], subject: Subject) -> Rows:
    """The same, in one program of three called in a way of its own; drawn by the program itself, so
    that others stay.
    """
    draw = random.Random(str(Program(rows, steps)))
    offered = [name for name, choices in subject.choices.items() if choices]
    if not offered or draw.random() > WAYS:
        return rows
    changed: Any = {(name := draw.choice(offered)): draw.choice(subject.choices[name])}
    made = dataclasses.replace(rows, **changed)
    if made.attention == "flex_attention":
        # On a static cache it is wrong in transformers (docs/upstream/flex_static.md), whatever
        # model is asked about.
        static = rows.cache == "static" or any(
            isinstance(step, Generate) and step.how == "static" for step in steps
        )
        made = rows if static or draw.random() > FLEX else made
    return made if subject.offers(made) else rows


def far(context: int) -> dict[str, int]:
    """Programs over the positions that configs do not name, each with the edge that it goes over,
    the nearest first.
    """
    found = dict[str, int]()
    # A context that ends between two of them is gone through to its end.
    for edge in (*EDGES, context - 5):
        if min(EDGES) <= edge <= context - 5 and (edge in EDGES or edge < FURTHEST):
            found[f"rows(0)+feed({edge - 2})+feed(5,1)"] = edge
            # Its rows go over it one after the other: columns first, then positions.
            found[f"rows(0+3)+feed({edge - 1})+feed(6,1)"] = edge
            found[f"rows(0)+feed({edge - 40})+feed(60)+feed(3,1)"] = edge
    if found:
        # Rows of a large cache are moved and taken back: beams and drafts do so far behind a
        # prompt.
        near, last = min(found.values()), max(found.values())
        found[
            f"rows(0+0+0)+feed({near - 9})+feed(1)+reorder(2+0+1)+feed(1)+select(2+0)+feed(1)+repeat(3)+feed(1)"
        ] = near
        found[f"rows(0)+feed({near - 12})+feed(20)+crop(18)+feed(20)+feed(2,1)"] = near
        found[f"rows(0,cache=static)+feed({last - 2})+feed(5,1)"] = last
        found[f"rows(0)+generate({last - 2},5)"] = last
    if context >= FURTHEST + 3:
        found[f"rows(0)+feed({FURTHEST})+feed(3,1)"] = FURTHEST
        found[
            "rows(0)+feed(140)+feed(5,1)+feed(155)+feed(5,1)+feed(290)+feed(5,1)+feed(500)+feed(3,1)"
        ] = FURTHEST
    return found


def smaller(program: Program) -> Iterator[Program]:
    """Programs that are simpler in one thing: a step less, a row less, a plainer choice, a smaller
    number.
    """
    rows, steps = program.rows, program.steps
    for n in range(len(steps)):
        yield Program(rows, steps[:n] + steps[n + 1 :])
    for r in range(len(rows.pads) if len(rows.pads) > 1 else 0):
        yield Program(dataclasses.replace(rows, pads=rows.pads[:r] + rows.pads[r + 1 :]), steps)
    for name, plain in {
        "cache": CACHES[0], "told": TOLD[0], "pad": PADS[0], "tokens": TOKENS[0], "beyond": "no", "fed": Rows.fed,
        "asks": Rows.asks, "attention": Rows.attention,
    }.items():  # fmt: skip
        if getattr(rows, name) != plain:
            changed: Any = {name: plain}
            yield Program(dataclasses.replace(rows, **changed), steps)
    for r, n in enumerate(rows.pads):
        for less in sorted({0, n // 2, n - 1} if n else ()):
            yield Program(_padded(rows, r, less), steps)
        # Pads, and the columns that hold them.
        for (i, step), k in itertools.product(
            enumerate(steps), sorted({n, n // 2, 1}, reverse=True)
        ):
            if isinstance(step, Feed) and 0 < k <= n and step.width > k:
                fewer = dataclasses.replace(step, width=step.width - k)
                yield Program(_padded(rows, r, n - k), (*steps[:i], fewer, *steps[i + 1 :]))
    for i, step in enumerate(steps):
        for other in step.smaller():
            yield Program(rows, (*steps[:i], other, *steps[i + 1 :]))


def _called_plainly(subject: Subject, one: Run) -> Run:
    """The run of the same program called with ids and a mask, where that is wrong too: its way of
    calling is no part of it.
    """
    rows = one.program.rows
    given = TOLD[0] if rows.told in MASKS else rows.told
    plain = dataclasses.replace(
        rows, told=given, fed=Rows.fed, asks=Rows.asks, attention=Rows.attention
    )
    if plain == rows:
        return one
    other = run_program(subject, Program(plain, one.program.steps))
    other.ran = one.ran
    return other if other.word == WRONG else one


def _affordable(subject: Subject, program: Program) -> bool:
    """Whether a program is tried without being asked for: a decode step is compiled where that
    takes seconds.
    """
    return subject.compiles or not compiles(program)


def compiles(program: Program) -> bool:
    """Whether a step of it compiles the model."""
    return any(isinstance(step, Compile) for step in program.steps)


def _padded(rows: Rows, row: int, pads: int) -> Rows:
    return dataclasses.replace(rows, pads=(*rows.pads[:row], pads, *rows.pads[row + 1 :]))


def shrunk(program: Program, wrong: Callable[[Program], bool], until: float) -> Program:
    """The first simpler program that is wrong too, and so on, until none is or the time is over."""
    seen = {program}
    while time.process_time() < until:
        for less in smaller(program):
            if less not in seen and time.process_time() < until:
                seen.add(less)
                if wrong(less):
                    program = less
                    break
        else:
            break
    return program


@dataclasses.dataclass
class Searched:
    """What a search found.

    Attributes:
        right: How many programs came to each use and were right in it.
        wrong: Each fault, its program shrunk.
        others: Programs whose plain forward is off too, or that are refused: the first of each use.
        ran: How many programs ran.
        reach: How far those went that came to each use and were right in it.
        cut: What was to be tried and was not, as programs or processor seconds were over.
        spent: Processor seconds by stage.
        worst: The largest error of those that are right, of the largest logit.
    """

    right: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    wrong: list[Run] = dataclasses.field(default_factory=list)
    others: dict[tuple[str, str], Run] = dataclasses.field(default_factory=dict)
    ran: int = 0
    reach: dict[str, Reach] = dataclasses.field(default_factory=dict)
    cut: list[Program] = dataclasses.field(default_factory=list)
    spent: dict[str, float] = dataclasses.field(default_factory=dict)
    worst: float = 0.0


def run_program(subject: Subject, program: Program) -> Run:
    """Runs a program on the model, and says how it ended."""
    run = Run(subject, program)
    run.word, run.why = run.run()
    return run


def shrink(
    subject: Subject, one: Run, seconds: float, repeats: str = "no", at_least: float = 5.0
) -> Run:
    """The run of the smallest program that comes to the same word in the same way: a crash, or
    other numbers, by about as much.

    Args:
        subject: The model.
        one: The run that is wrong.
        seconds: Processor seconds that this takes at most, but for those of ``at_least``.
        repeats: ``"yes"`` where it is wrong since something is kept between requests, outside the
            model: the smallest program is one whose request comes again, and every trial has tokens
                that nobody fed before.
        at_least: Processor seconds that it may take however few ``seconds`` are.
    """
    # Nearer to the error than to the limit, on a scale of logarithms: else a fault is made so small
    # that in float32, as its users run it, rounding hides it.
    least = 0.0 if one.wrong is None else (one.wrong.error * subject.limit) ** 0.5

    def came(run: Run) -> tuple[str, bool, bool]:
        return run.word, bool(run.raised), run.wrong is None or run.wrong.error >= least

    until = time.process_time() + max(seconds, at_least)
    if repeats == "yes":
        seeds = itertools.count(one.program.rows.seed + 1)

        def fresh(program: Program) -> Run:
            return run_program(
                subject, Program(dataclasses.replace(program.rows, seed=next(seeds)), program.steps)
            )

        def stays(program: Program) -> bool:
            # There are few short texts.
            long = all(
                step.columns >= UNMET for step in program.steps if isinstance(step, Feed | Generate)
            )
            return long and Again() in program.steps and came(fresh(program)) == came(one)

        steps = one.program.steps
        both = Program(one.program.rows, steps if Again() in steps else (*steps, Again(), *steps))
        small = fresh(shrunk(both, stays, until))
        small.ran, small.origin = one.ran, str(one.program)
        return small if came(small) == came(one) else one
    small = run_program(
        subject,
        shrunk(
            one.program, lambda program: came(run_program(subject, program)) == came(one), until
        ),
    )
    # What is right when it is run again depends on what ran before.
    if came(small) != came(one):
        return one
    small.ran, small.origin = one.ran, str(one.program)
    return small


class _Pace:
    """How far programs can go: half of the time that is left when the first of them comes is
    theirs.

    Args:
        ends: When all time is over.
    """

    def __init__(self, ends: float) -> None:
        self.ends, self.until, self.slowest = ends, 0.0, 0.0

    def allows(self, program: Program, now: float) -> bool:
        """Whether it ends in time if each of its positions takes as long as of those before: of
        more none takes less.
        """
        self.until = self.until or now + (self.ends - now) / 2
        return now + self.slowest * self._size(program) <= self.until

    def took(self, program: Program, seconds: float) -> None:
        """Notes how long one took."""
        self.slowest = max(self.slowest, seconds / self._size(program))

    @staticmethod
    def _size(program: Program) -> int:
        return program.columns * len(program.rows.pads)


def _stage(number: int, given: int, at_first: int, meant: int, beyond: str) -> str:
    """What a program is part of, by its number in the queue."""
    if beyond == "yes":
        return "what no contract promises"
    if number < given:
        return "asked for or over an edge"
    return "tried first" if number < at_first else "far" if number < meant else "drawn"


def search(
    subject: Subject,
    programs: int,
    seconds: float,
    seed: int = 0,
    given: Sequence[Program] = (),
    faults: int = 4,
    beyond: str = "no",
    progress: Callable[[str], None] = lambda _: None,
    further: Sequence[Program] = (),
    breadth: str = "default",
) -> Searched:
    """Runs what was given, what is tried first, and programs that are drawn; each fault is shrunk
    and then looked past.

    Args:
        subject: The model.
        programs: How many are run in all.
        seconds: How long at most.
        seed: Draws them.
        given: Programs that are run before all others.
        faults: How many are shrunk; then nothing more is drawn. What is tried first is run whatever
            is wrong, unless it is quick.
        beyond: ``"yes"`` draws what no contract of a cache promises, and tries nothing before that.
        progress: Told how many have run.
        further: Programs behind what is tried first, the nearest first: as far as half of the time
            that is left then takes them. The nearest of all comes early.
        breadth: ``"quick"`` or ``"each"``: what was given and what is tried first alone, and nothing
            compiled; with ``"quick"`` nothing behind the first faults.
    """
    quick = breadth in ONCE
    began, draw, found = time.process_time(), random.Random(seed), Searched()
    known: set[str] = set()
    right: Program | None = None
    kept = False
    tried_first = (
        *FIRST,
        *(OF_TRANSFORMER_LENS if subject.generates and not subject.native else ()),
    )
    first = [program_named(text) for text in tried_first if beyond == "no"]
    first = [
        program for program in first if subject.offers(program.rows) and subject.holds(program)
    ]
    first = [
        program
        for program in first
        if _affordable(subject, program) and not (quick and compiles(program))
    ]
    further = [
        program for program in further if subject.offers(program.rows) and subject.holds(program)
    ]
    first, further = [*first[:EARLY], *further[:1], *first[EARLY:]], further[1:]
    further = [] if quick else further
    numbers = range(0) if quick else itertools.count()
    more = filter(subject.holds, (sample_program(draw, subject, beyond) for _ in numbers))
    queue = itertools.chain(given, first, further, more)
    pace, at_first = _Pace(began + seconds), len(given) + len(first)
    meant = at_first + len(further)
    for number, program in enumerate(queue):
        now = time.process_time()
        enough, over = len(found.wrong) >= faults, found.ran >= programs or now > pace.ends
        if number >= len(given) and (over or (enough and (quick or number >= at_first))):
            if programs and not enough:
                found.cut += itertools.islice(
                    itertools.chain([program], queue), max(meant - number, 0)
                )
            break
        if at_first <= number < meant and not pace.allows(program, now):
            found.cut.append(program)
            continue
        one = run_program(subject, program)
        took = time.process_time() - now
        stage = _stage(number, len(given), at_first, meant, beyond)
        found.spent[stage] = found.spent.get(stage, 0.0) + took
        if at_first <= number < meant:
            pace.took(program, took)
        one.ran = found.ran = found.ran + 1
        progress(f"program {found.ran} of {max(programs, len(given))}")
        if one.word == RIGHT:
            right = right or program
            found.right.update(one.uses)
            found.reach |= {
                use: one.reach.beside(found.reach.get(use, one.reach)) for use in one.uses
            }
            found.worst = max(found.worst, one.worst)
        elif one.word == WRONG and not kept and not known & set(map(base_of, one.uses)):
            one = _called_plainly(subject, one)
            if known & set(map(base_of, one.uses)):
                continue
            # What was right and no longer is met something that was kept in between, which explains
            # whatever follows.
            kept = right is not None and run_program(subject, right).word == WRONG
            if not enough:
                # What is quick ends with this one: it has all the time that is left.
                left = max(pace.ends - time.process_time(), 0.5) if faults == 1 else 1.0
                least = left if quick else 5.0
                now = time.process_time()
                one = shrink(subject, one, seconds / 4, "yes" if kept else "no", least)
                took = time.process_time() - now
                found.spent["shrinking"] = found.spent.get("shrinking", 0.0) + took
            if not known & set(map(base_of, one.uses)):
                found.wrong.append(one)
                known.add(base_of(one.use))
        elif one.word != WRONG and ("compiled" not in one.uses or program in given):
            found.others.setdefault((one.word, one.use), one)
    return found
