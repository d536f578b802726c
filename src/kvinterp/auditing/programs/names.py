"""Programs read from their text, and names for some: ``padded(left,5)`` is a program of whatever
prompt it is given.

A name writes the program for a prompt and so many tokens after it; several go together by ``+``
where one at most says what is
fed: ``padded(left,5)+static``.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import itertools
from typing import Any, ClassVar

import kvinterp.auditing.programs.operations as folder
from kvinterp.auditing.programs.operations.compile import Compile
from kvinterp.auditing.programs.operations.crop import Crop, Draft
from kvinterp.auditing.programs.operations.feed import Feed
from kvinterp.auditing.programs.operations.generate import Generate as Generation
from kvinterp.auditing.programs.operations.rows import Join, Reorder, Select
from kvinterp.auditing.programs.program import Operation, Program, Rows
from kvinterp.common import spec
from kvinterp.common.checks import check_choice, check_whole
from kvinterp.errors import InputError

OPERATIONS = spec.Plugins(folder, Operation)  # type: ignore[type-abstract]
KINDS = spec.by_name(Rows, *OPERATIONS.values())
HINT = (
    "A program is rows(PADS) and operations joined by +, as in rows(0+4)+feed(9)+crop(2)+feed(1)."
)
OTHERS, EVERY = 3, 2
"""Tokens of the other request behind a forked prefix; steps from a neighbour that leaves to one
that joins.
"""


class Draught:
    """A program as names write it.

    Attributes:
        length: Tokens of the prompt.
        steps: Most tokens after it.
        rows: Its rows.
        prompt: What feeds the prompt.
        each: What feeds each token after it; nothing where the prompt's operations do.
    """

    def __init__(self, length: int, steps: int) -> None:
        self.length, self.steps, self.rows = length, steps, Rows((0,))
        self.prompt: list[Operation] = [Feed(length)]
        self.each: list[list[Operation]] = [[Feed(1, 1)] for _ in range(steps)]

    def tells(self, **rows: Any) -> None:
        """Changes what is said of the rows."""
        self.rows = dataclasses.replace(self.rows, **rows)


@dataclasses.dataclass(frozen=True)
class Name(abc.ABC):
    """A name for programs: a frozen dataclass in this file.

    Attributes:
        feeds: Whether it says what is fed; of those that do one alone can be given.
    """

    feeds: ClassVar[bool] = True

    @abc.abstractmethod
    def write(self, made: Draught) -> None:
        """Writes its part of the program: rows, what feeds the prompt, or what feeds each token."""


@dataclasses.dataclass(frozen=True)
class Padded(Name):
    """The prompt with pads, as in a batch of unequal prompts; a mask hides them, and they get no
    position.

    Attributes:
        side: ``"left"``, as ``generate()`` pads; ``"right"``, between the prompt and what is
            decoded.
        pads: How many.
    """

    side: str = "left"
    pads: int = 5

    def __post_init__(self) -> None:
        check_choice("side", self.side, ("left", "right"))
        check_whole("pads", self.pads)

    def write(self, made: Draught) -> None:
        """Pads and prompt in one forward."""
        if self.side == "left":
            made.tells(pads=(self.pads,))
            made.prompt = [Feed(made.length + self.pads)]
        else:
            made.tells(beyond="yes")
            made.prompt = [Feed(made.length + self.pads, behind=(self.pads,))]


@dataclasses.dataclass(frozen=True)
class Chunked(Name):
    """The prompt in pieces.

    Attributes:
        size: Most tokens in one.
    """

    feeds = False
    size: int = 4

    def write(self, made: Draught) -> None:
        """Cuts what feeds the prompt."""
        made.prompt = [
            dataclasses.replace(step, cut=self.size)
            if isinstance(step, Feed) and step.width > self.size
            else step
            for step in made.prompt
        ]


@dataclasses.dataclass(frozen=True)
class Static(Name):
    """Keys and values in transformers' StaticCache, whose empty slots are masked."""

    feeds = False

    def write(self, made: Draught) -> None:
        """Says that the rows are kept in that cache."""
        made.tells(cache="static")


@dataclasses.dataclass(frozen=True)
class Compiled(Name):
    """Every forward through ``torch.compile``.

    Attributes:
        backend: As torch knows it.
    """

    feeds = False
    backend: str = "inductor"

    def write(self, made: Draught) -> None:
        """Compiles the forward before anything is fed."""
        made.prompt = [Compile(self.backend), *made.prompt]


@dataclasses.dataclass(frozen=True)
class Batched(Name):
    """The prompt among others, shorter and padded; every second step in turn one leaves or joins.

    Attributes:
        rows: Rows of the batch, the prompt's among them.
    """

    rows: int = 8

    def __post_init__(self) -> None:
        check_whole("rows", self.rows, 2, 1_000, ", the prompt's among them")

    def write(self, made: Draught) -> None:
        """The prompt stands in the middle; the one before it leaves, so that its own place
        changes.
        """
        count, own = self.rows, self.rows // 2
        made.tells(pads=tuple(abs(row - own) % made.length for row in range(count)))
        for step in range(EVERY - 1, made.steps, EVERY):
            if step % (2 * EVERY) == 2 * EVERY - 1:
                made.each[step].insert(0, Join())
                count += 1
            elif count > 2:
                kept = tuple(row for row in range(count) if row != (own - 1) % count)
                made.each[step].insert(0, Select(kept))
                count, own = count - 1, kept.index(own)


@dataclasses.dataclass(frozen=True)
class Forked(Name):
    """The prompt on a prefix that another request left in the cache; the rest of that request is
    taken back.

    Attributes:
        prefix: How many tokens of the prompt are its.
    """

    prefix: int = 4

    def write(self, made: Draught) -> None:
        """Fills, goes on otherwise, takes that back, goes on."""
        if made.length <= self.prefix:
            shorter = f", or forked({made.length - 1})" if made.length > 1 else ""
            raise InputError(
                f"{spec.text_of(self)} reuses {self.prefix} tokens of a prompt, and one has {made.length}: give a longer "
                f"prompt{shorter}."
            )
        made.prompt = [
            Feed(self.prefix),
            Feed(OTHERS, 1),
            Crop(OTHERS),
            Feed(made.length - self.prefix),
        ]


@dataclasses.dataclass(frozen=True)
class Verified(Name):
    """Each token comes with drafts behind it, as in speculative decoding: right ones stay, the
    others are taken back.

    Attributes:
        drafts: How many.
    """

    drafts: int = 3

    def write(self, made: Draught) -> None:
        """Drafts at every step."""
        made.each = [[Draft(self.drafts)] for _ in made.each]


@dataclasses.dataclass(frozen=True)
class Generate(Name):
    """Tokens, positions and masks as transformers' ``generate()`` gives them to the forward, on the
    cache that is tried.
    """

    how: ClassVar[str] = "whole"

    def write(self, made: Draught) -> None:
        """One operation feeds the prompt and makes every token."""
        more = dataclasses.asdict(self)
        made.prompt, made.each = [Generation(made.length, made.steps + 2, self.how, **more)], []


@dataclasses.dataclass(frozen=True)
class Assisted(Generate):
    """``generate(prompt_lookup_num_tokens=...)``, which drafts what followed the same tokens
    earlier in the text.

    Attributes:
        drafts: Most of them in one forward.
    """

    how = "lookup"
    drafts: int = 3


@dataclasses.dataclass(frozen=True)
class Beams(Name):
    """Several rows that ``reorder_cache`` rotates before each step, as in beam search.

    Attributes:
        beams: How many.
    """

    beams: int = 3

    def __post_init__(self) -> None:
        check_whole("beams", self.beams, 2, 1_000)

    def write(self, made: Draught) -> None:
        """Moves all rows before every step."""
        made.tells(pads=(0,) * self.beams)
        made.each = [
            [Reorder((self.beams - 1, *range(self.beams - 1))), *each] for each in made.each
        ]


NAMES = spec.by_name(
    Padded, Batched, Generate, Forked, Beams, Verified, Assisted, Compiled, Chunked, Static
)


@dataclasses.dataclass(frozen=True)
class Names:
    """One name or several: the program is written when the prompt is known."""

    parts: tuple[Name, ...]

    def __post_init__(self) -> None:
        kinds = [type(part) for part in self.parts]
        if sum(part.feeds for part in self.parts) > 1 or len(set(kinds)) < len(kinds):
            raise InputError(
                f"{self} was given, of which each says what is fed or the same thing twice: leave one out."
            )

    def program(self, length: int, steps: int) -> Program:
        """For a prompt of ``length`` tokens and ``steps`` after it."""
        made = Draught(length, steps)
        for part in sorted(self.parts, key=lambda part: not part.feeds):
            part.write(made)
        found = [*made.prompt]
        for step in itertools.chain(*made.each):
            last = found[-1]
            if step == Feed(1, 1) and isinstance(last, Feed) and last.cut == 1:
                found[-1] = Feed(last.width + 1, 1)
            else:
                found.append(step)
        return Program(made.rows, tuple(found))

    def __str__(self) -> str:
        return "+".join(map(spec.text_of, self.parts))


@functools.cache
def program_named(text: str) -> Program:
    """Reads a program's text form.

    Raises:
        InputError: It is none.
    """
    parts = [spec.read("operation", part, KINDS, HINT) for part in spec.split(text, "+")]  # type: ignore[type-var]
    if (
        not parts
        or not isinstance(parts[0], Rows)
        or any(isinstance(part, Rows) for part in parts[1:])
    ):
        raise InputError(f"program {text!r} cannot be read: {HINT}")
    return Program(parts[0], tuple(parts[1:]))  # type: ignore[arg-type]


def program_for(text: str, length: int, steps: int) -> Program:
    """Reads a program; or names for one, such as ``padded(left,5)+static``, which write it for a
    prompt.

    Args:
        text: The text.
        length: Tokens of the prompt.
        steps: Tokens after it.

    Raises:
        InputError: The text is neither.
    """
    if text.replace(" ", "").startswith("rows("):
        return program_named(text)
    hint = f"Names go together by +, as in padded(left,5)+static. {HINT}"
    names = [spec.read("program", part, NAMES, hint) for part in spec.split(text, "+") or [text]]  # type: ignore[type-var]
    return dataclasses.replace(Names(tuple(names)).program(length, steps), name=text.strip())


LENGTH, STEPS = 17, 8
"""Tokens of a prompt that a name writes its program for, and tokens after it."""
ALL = "padded(left,5),batched(3),chunked(4),forked(3),generate,assisted(3),beams,static,verified(3)"


def programs_named(calls: str) -> list[Program]:
    """The programs of a text with commas: each a program, or a name for one; ``"all"``: one of each
    that the library offers.

    Raises:
        InputError: One is neither.
    """
    texts = spec.split(ALL if calls == "all" else calls, ",")
    return [program_for(text, LENGTH, STEPS) for text in texts]
