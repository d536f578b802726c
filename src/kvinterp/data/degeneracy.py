"""Two ways in which a generated text fails: it repeats itself without end, or it leaves the words
of its task.

Nothing here needs a model: loops are searched in the elements of a text, tokens or words.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Sequence
from itertools import islice

from kvinterp.data.example import Prompt
from kvinterp.data.tasks import TASKS, stream

LONGEST, TIMES, COVERED = 24, 3, 8
"""The longest period that is searched, how often it must occur, and how many elements it must cover
(``111`` is a number).
"""
_WORD = re.compile(r"[^\W\d_]+|\d|[^\w\s]")
_EXAMPLES = 500


def loop_at_end(elements: Sequence[object]) -> int:
    """The smallest period of a repetition in which a sequence ends; 0 if it ends in none.

    Args:
        elements: Tokens or words, or other values that compare equal; the last period may be there
            in part.
    """
    for period in range(1, min(LONGEST, len(elements) // TIMES) + 1):
        same = 0
        while same + period < len(elements) and elements[-1 - same] == elements[-1 - same - period]:
            same += 1
        if same + period >= max(TIMES * period, COVERED):
            return period
    return 0


def words(text: str) -> list[str]:
    """Splits a text into words in lower case; every digit and sign of punctuation is a word of its
    own.
    """
    return [word.casefold() for word in _WORD.findall(text)]


def task_words(prompts: Iterable[Prompt]) -> frozenset[str]:
    """The words that completions of some prompts may use: those of the prompts, their answers and
    their generators.
    """
    listed = list(prompts)
    vocabulary = {word for prompt in listed for word in words(f"{prompt.text} {prompt.answer}")}
    return frozenset(
        vocabulary.union(
            *(_generated_words(task) for task in {prompt.task for prompt in listed} & TASKS.keys())
        )
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
    return frozenset(
        word for example in examples for word in words(f"{example.prompt.text}{example.completion}")
    )
