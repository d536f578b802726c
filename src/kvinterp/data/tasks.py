"""The tasks by name: generators of examples and judges of completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from random import Random

from kvinterp.common.checks import check_known
from kvinterp.data import arithmetic, gsm8k, instructions, restate
from kvinterp.data.example import Example, Prompt, Split, distinct, draws
from kvinterp.data.few_shot import cut_at


@dataclass(frozen=True)
class Task:
    """One task: a maker of examples and a judge of completions.

    Attributes:
        draw: Makes one example, of either split, from a random state.
        score: Tells whether a completion is right.
        most: How many different examples a split has, if known.
    """

    draw: Callable[[Random], Example]
    score: Callable[[Prompt, str], bool]
    most: Mapping[str, int] = field(default_factory=dict)

    def generate(self, count: int, seed: int, split: Split = "heldout") -> list[Example]:
        """Makes ``count`` different examples.

        Args:
            count: How many.
            seed: Seed of the generator; the same count, seed and split give the same examples.
            split: ``"train"`` or ``"heldout"``; no problem text is ever in both.
        """
        return list(distinct(self.draw, count, seed, split, self.most.get(split)))


TASKS: dict[str, Task] = {
    "arithmetic": Task(arithmetic.draw, arithmetic.score),
    "restate": Task(restate.draw, restate.score),
    "instructions": Task(instructions.draw, instructions.score, instructions.MOST),
}
"""The tasks by the value of ``Prompt.task``."""

JUDGES: dict[str, Callable[[Prompt, str], bool]] = {
    **{name: task.score for name, task in TASKS.items()},
    "gsm8k": gsm8k.score,
}
"""The judge of completions for each value of ``Prompt.task``: those of all tasks, and those of
problems from files.
"""


def score(prompt: Prompt, completion: str) -> bool:
    """Judges a completion by the prompt's task, after cutting it at ``prompt.meta["until"]``.

    Raises:
        InputError: The prompt has no task, or an unknown one.
    """
    check_known("task", prompt.task, JUDGES)
    return JUDGES[prompt.task](prompt, cut_at(completion, prompt.meta.get("until", ())))


def judged(prompt: Prompt | None, text: object) -> bool | None:
    """Whether a prompt was answered right; None if its task has no judge."""
    return None if prompt is None or prompt.task not in JUDGES else score(prompt, str(text))


def stream(name: str, seed: int, split: Split = "train") -> Iterator[Example]:
    """Yields a task's examples without end; problems may repeat. See :meth:`Task.generate` for
    different ones.

    Raises:
        InputError: If there is no task of that name; the message gives the near names.
    """
    check_known("task", name, TASKS)
    return draws(TASKS[name].draw, seed, split)
