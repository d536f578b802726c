"""What one prompt is, what one worked example is, and how the train and heldout splits are kept apart.

The split of a problem is a function of its text alone, so no seed, order or later change of a generator's
mixture can move a heldout problem into the training stream.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any, Literal, get_args

from kvinterp.errors import InputError, unexpected, unknown

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Prompt:
    """A text a model is asked to continue, with what is needed to judge the continuation.

    Attributes:
        id: A name that no other prompt of the same list has.
        text: The text given to the tokenizer, without the beginning-of-sequence token.
        task: The task whose ``score`` judges a completion; empty if nothing does.
        answer: The final answer, or a whole correct completion where the task has no single short answer.
        facts: What a restatement has to keep.
        meta: Whatever else the task's ``score`` reads; ``until`` are texts at which a completion is cut before it is judged.
        messages: What a chat is asked, each with ``role`` and ``content``. Where there are any, the tokenizer is given these in
            the model's chat template, and ``text`` only says what they hold.
    """

    id: str
    text: str
    task: str = ""
    answer: str = ""
    facts: tuple[str, ...] = ()
    meta: Mapping[str, Any] = field(default_factory=dict, hash=False)
    messages: Sequence[Mapping[str, str]] = field(default=(), hash=False)

    def __post_init__(self) -> None:
        for name in ("id", "text", "task", "answer"):
            given = getattr(self, name)
            if not isinstance(given, str):
                raise unexpected(f"a prompt's {name}", given, "a text, as in Prompt(id='mine', text='2 + 2 =')")
        check_fields(self.facts, self.messages, self.meta)


def check_fields(facts: Any, messages: Any, meta: Any) -> None:
    """Raises where one of these is none that a prompt can have.

    Raises:
        InputError: It is something else than :class:`Prompt` says.
    """
    until = meta.get("until", []) if isinstance(meta, Mapping) else None
    for name, given, fits, what in (
        ("facts", facts, _is_text, "a list of texts"),
        ("messages", messages, _is_message, "a list of objects with the texts role and content"),
        ("meta", until, _is_text, "an object, whose until, if it has one, is a list of texts at which a completion is cut"),
    ):
        if not isinstance(given, list | tuple) or not all(map(fits, given)):
            raise unexpected(f"a prompt's {name}", meta if name == "meta" else given, what)


def _is_text(given: object) -> bool:
    return isinstance(given, str) and bool(given)


def _is_message(given: object) -> bool:
    return isinstance(given, Mapping) and all(isinstance(given.get(name), str) for name in ("role", "content"))


@dataclass(frozen=True)
class Example:
    """A prompt and a full worked completion; what a small model is trained on is the two in a row.

    Attributes:
        prompt: The problem.
        completion: The worked solution, beginning with a space and without the end-of-sequence token.
    """

    prompt: Prompt
    completion: str


def split_of(text: str) -> Split:
    """Gives the split a problem text belongs to: one in ten is held out, by SHA-256 of the text."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "heldout" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def draws(draw: Callable[[Random], Example], seed: int, split: str) -> Iterator[Example]:
    """Yields one task's examples of one split without end; the same problem may come again.

    Args:
        draw: Makes one example from a random state.
        seed: Seed of the stream.
        split: Which split the problems are taken from.

    Raises:
        InputError: There is no such split.
    """
    if split not in get_args(Split):
        raise unknown("split", split, get_args(Split))
    rng = Random(seed)
    while True:
        example = draw(rng)
        if split_of(example.prompt.text) == split:
            yield example


@functools.lru_cache(maxsize=8)
def distinct(
    draw: Callable[[Random], Example], count: int, seed: int, split: Split, most: int | None = None
) -> tuple[Example, ...]:
    """Collects ``count`` examples with pairwise different problem texts; kept, for thousands of them take seconds.

    Args:
        draw: Makes one example from a random state.
        count: How many.
        seed: Seed of the stream.
        split: Which split the problems are taken from.
        most: How many different ones the split has, where they were counted: more are refused without a search for them.

    Raises:
        InputError: ``count`` is below one, the split is unknown, or there are too few different problems.
    """
    if count < 1:
        raise InputError(f"asked for {count:,} problems: expected at least 1.")
    found: dict[str, Example] = {}
    for example in islice(draws(draw, seed, split), 200 + 20 * count if most is None or count <= most else 0):
        found.setdefault(example.prompt.text, example)
        if len(found) == count:
            return tuple(found.values())
    raise InputError(
        f"asked for {count:,} different {split} problems, but the generator has only {most or len(found):,}: ask for fewer."
    )
