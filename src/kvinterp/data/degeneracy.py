"""Two ways in which a generated text fails: it repeats itself without end, or it leaves the words of its task.

Nothing here needs a model: loops are searched in the elements of a text, tokens or words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from kvinterp.data.example import Prompt
from kvinterp.data.tasks import TASKS, stream

LONGEST, TIMES, COVERED = 24, 3, 8
"""The longest period that is searched, how often it must occur, and how many elements it must cover (``111`` is a number)."""
_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_EXAMPLES = 500


class Loop(NamedTuple):
    """The repetition that a text ends in.

    Attributes:
        period: How many elements are repeated; 0 if none.
        covered: How many of the last elements the repetition covers.
    """

    period: int
    covered: int


def loop_at_end(elements: Sequence[object], longest: int = LONGEST, times: int = TIMES, covered: int = COVERED) -> Loop:
    """Finds the repetition of the smallest period in which a sequence ends.

    Args:
        elements: Tokens or words, or other values that compare equal.
        longest: The longest period that is searched.
        times: How often it must occur; the last time may be in part.
        covered: How many elements it must cover.
    """
    for period in range(1, min(longest, len(elements) // times) + 1):
        same = 0
        while same + period < len(elements) and elements[-1 - same] == elements[-1 - same - period]:
            same += 1
        if same + period >= max(times * period, covered):
            return Loop(period, same + period)
    return Loop(0, 0)


def words(text: str) -> list[str]:
    """Splits a text into words in lower case; every digit and sign of punctuation is a word of its own."""
    return [word.casefold() for word in _WORD.findall(text)]


def task_words(prompts: Iterable[Prompt]) -> frozenset[str]:
    """The words that completions of some prompts may use: those of the prompts, their answers and their generators."""
    listed = list(prompts)
    vocabulary = {word for prompt in listed for word in words(f"{prompt.text} {prompt.answer}")}
    return frozenset(
        vocabulary.union(*(_generated_words(task) for task in {prompt.task for prompt in listed} & TASKS.keys()))
    )


def outside_share(text: str, vocabulary: frozenset[str]) -> float:
    """The share of a text's words outside a vocabulary; 0 for an empty text.

    Args:
        text: A completion.
        vocabulary: The words of :func:`task_words`.
    """
    elements = words(text)
    return sum(word not in vocabulary for word in elements) / len(elements) if elements else 0.0


@functools.cache
def _generated_words(task: str) -> frozenset[str]:
    examples = islice(stream(task, 0), _EXAMPLES)
    return frozenset(word for example in examples for word in words(f"{example.prompt.text}{example.completion}"))
