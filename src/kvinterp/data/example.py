"""Prompts, worked examples, and the train and heldout splits.

The split of a problem is a function of its text alone, so no seed, order or later change of a
generator's mixture can move a heldout problem into the training stream.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import Any, Literal, get_args

from kvinterp.common.checks import check_instance, check_known
from kvinterp.errors import InputError, unexpected

Split = Literal["train", "heldout"]


@dataclass(frozen=True)
class Prompt:
    """A text for a model to continue, and the data to judge the continuation.

    Attributes:
        id: A name that is unique in a list of prompts.
        text: The text given to the tokenizer, without the beginning-of-sequence token.
        task: The task whose ``score`` judges a completion; empty if there is none.
        answer: The final answer, or a whole correct completion if the task has no single short
            answer.
        facts: The facts that a restatement must keep.
        meta: Further data for the task's ``score``; ``until`` are texts at which a completion is
            cut before it is judged.
        messages: Messages of a chat, each with ``role`` and ``content``. If there are any, the
            tokenizer gets these in the model's chat template, and ``text`` only repeats their
            content.
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
            value = getattr(self, name)
            check_instance(
                f"a prompt's {name}", value, str, "a text, as in Prompt(id='mine', text='2 + 2 =')"
            )
        until = self.meta.get("until", []) if isinstance(self.meta, Mapping) else None
        for name, value, fits, what in (
            ("facts", self.facts, _is_text, "a list of texts"),
            (
                "messages",
                self.messages,
                _is_message,
                "a list of objects with the texts role and content",
            ),
            (
                "meta",
                until,
                _is_text,
                "an object, whose until, if it has one, is a list of texts at which a completion is cut",
            ),
        ):
            if not isinstance(value, list | tuple) or not all(map(fits, value)):
                raise unexpected(f"a prompt's {name}", getattr(self, name), what)
            if name != "meta":
                object.__setattr__(self, name, tuple(value))


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


def _is_message(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(name), str) for name in ("role", "content")
    )


@dataclass(frozen=True)
class Example:
    """A prompt and a full worked completion; small models are trained on both in a row.

    Attributes:
        prompt: The problem.
        completion: The worked solution, beginning with a space and without the end-of-sequence
            token.
    """

    prompt: Prompt
    completion: str


def split_of(text: str) -> Split:
    """Returns the split of a problem text: one in ten is held out, by SHA-256 of the text."""
    digest = hashlib.sha256(text.encode("utf-8")).digest()
    return "heldout" if int.from_bytes(digest, "big") % 10 == 0 else "train"


def draws(draw: Callable[[Random], Example], seed: int, split: str) -> Iterator[Example]:
    """Yields one task's examples of one split without end; the same problem may come again.

    Args:
        draw: Makes one example from a random state.
        seed: Seed of the stream.
        split: The split of the problems.

    Raises:
        InputError: There is no such split.
    """
    check_known("split", split, get_args(Split))
    rng = Random(seed)
    while True:
        example = draw(rng)
        if split_of(example.prompt.text) == split:
            yield example


@functools.lru_cache(maxsize=8)
def distinct(
    draw: Callable[[Random], Example], count: int, seed: int, split: Split, most: int | None = None
) -> tuple[Example, ...]:
    """Collects ``count`` examples with pairwise different problem texts. The result is cached,
    since thousands take seconds.

    Args:
        draw: Makes one example from a random state.
        count: How many examples.
        seed: Seed of the stream.
        split: The split of the problems.
        most: How many different problems the split has, if known: a larger count is refused without
            a search.

    Raises:
        InputError: ``count`` is below one, the split is unknown, or there are too few different
            problems.
    """
    if count < 1:
        raise InputError(f"asked for {count:,} problems: expected at least 1.")
    examples: dict[str, Example] = {}
    for example in islice(
        draws(draw, seed, split), 200 + 20 * count if most is None or count <= most else 0
    ):
        examples.setdefault(example.prompt.text, example)
        if len(examples) == count:
            return tuple(examples.values())
    raise InputError(
        f"asked for {count:,} different {split} problems, but the generator has only {most or len(examples):,}: ask for fewer."
    )
