"""How a generated text fails where a scorer only says that it does: it repeats itself without end, or leaves its task's words.

Nothing here needs a model: a loop is looked for in whatever a text is made of, tokens or words.
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
"""The longest period looked for, how often it must be seen, and how many elements that must cover: ``111`` is a number."""
_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_EXAMPLES = 500


class Loop(NamedTuple):
    """The repetition that a text ends in.

    Attributes:
        period: Elements of what is repeated; 0 where nothing is.
        covered: How many of the last elements it accounts for.
    """

    period: int
    covered: int


def loop_at_end(elements: Sequence[object], longest: int = LONGEST, times: int = TIMES, covered: int = COVERED) -> Loop:
    """The repetition in which a sequence ends: that of the smallest period.

    Args:
        elements: Tokens or words, whatever compares equal.
        longest: The longest period that is looked for.
        times: How often it must be there, the last time perhaps in part.
        covered: How many elements that must make at least.
    """
    for period in range(1, min(longest, len(elements) // times) + 1):
        same = 0
        while same + period < len(elements) and elements[-1 - same] == elements[-1 - same - period]:
            same += 1
        if same + period >= max(times * period, covered):
            return Loop(period, same + period)
    return Loop(0, 0)


def words(text: str) -> list[str]:
    """The words of a text without regard to capitals, every digit and sign of punctuation one of its own."""
    return [word.casefold() for word in _WORD.findall(text)]


def task_words(prompts: Iterable[Prompt]) -> frozenset[str]:
    """The words that completions of some prompts are made of: those of prompts and answers, and of their generators."""
    listed = list(prompts)
    known = {word for prompt in listed for word in words(f"{prompt.text} {prompt.answer}")}
    return frozenset(known.union(*(_generated_words(task) for task in {prompt.task for prompt in listed} & TASKS.keys())))


def outside_share(text: str, known: frozenset[str]) -> float:
    """The share of a text's words that are none of those known; 0 of an empty text.

    Args:
        text: A completion.
        known: As :func:`task_words` gives them.
    """
    found = words(text)
    return sum(word not in known for word in found) / len(found) if found else 0.0


@functools.cache
def _generated_words(task: str) -> frozenset[str]:
    made = islice(stream(task, 0), _EXAMPLES)
    return frozenset(word for example in made for word in words(f"{example.prompt.text}{example.completion}"))
