"""The three tasks by name: how to make examples of each and how to score a completion."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from random import Random

from kvinterp.data import arithmetic, instructions, restate
from kvinterp.data.example import Example, Prompt, Split, draws
from kvinterp.errors import unknown

__all__ = ["TASKS", "Task", "get", "score", "stream"]


@dataclass(frozen=True)
class Task:
    """One task: a maker of examples and a judge of completions.

    Attributes:
        name: What ``Prompt.task`` says.
        draw: Makes one example, of either split, from a random state.
        generate: ``generate(count, seed, split)`` gives that many different examples.
        score: Tells whether a completion is right.
    """

    name: str
    draw: Callable[[Random], Example]
    generate: Callable[[int, int, Split], list[Example]]
    score: Callable[[Prompt, str], bool]


TASKS: dict[str, Task] = {
    "arithmetic": Task("arithmetic", arithmetic.draw, arithmetic.generate, arithmetic.score),
    "restate": Task("restate", restate.draw, restate.generate, restate.score),
    "instructions": Task("instructions", instructions.draw, instructions.generate, instructions.score),
}


def get(name: str) -> Task:
    """Finds a task.

    Raises:
        InputError: If there is none of that name; the message gives the near names.
    """
    if name not in TASKS:
        raise unknown("task", name, TASKS)
    return TASKS[name]


def score(prompt: Prompt, completion: str) -> bool:
    """Judges a completion by the prompt's own task.

    Raises:
        InputError: If the prompt has no task, or one that is not known.
    """
    return get(prompt.task).score(prompt, completion)


def stream(name: str, seed: int, split: Split = "train") -> Iterator[Example]:
    """Yields a task's examples without end; problems may repeat. See ``generate`` for different ones."""
    return draws(get(name).draw, seed, split)
