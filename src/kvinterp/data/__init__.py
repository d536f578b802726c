"""Generated problems with known answers, and the loader for prompts from anywhere."""

from __future__ import annotations

from kvinterp.data.degeneracy import Loop, loop_at_end, outside_share, task_words
from kvinterp.data.example import Example, Prompt, Split, split_of
from kvinterp.data.prompts import check_characters, load_prompts
from kvinterp.data.tasks import TASKS, Task, score, stream

__all__ = [
    "TASKS",
    "Example",
    "Loop",
    "Prompt",
    "Split",
    "Task",
    "check_characters",
    "load_prompts",
    "loop_at_end",
    "outside_share",
    "score",
    "split_of",
    "stream",
    "task_words",
]
