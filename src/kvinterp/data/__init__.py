"""Generated problems with known answers, and the loader for prompts from anywhere."""

from __future__ import annotations

from kvinterp.data.example import Example, Prompt, Split, split_of
from kvinterp.data.prompts import check_characters, load_prompts
from kvinterp.data.tasks import TASKS, Task, score, stream

__all__ = [
    "TASKS",
    "Example",
    "Prompt",
    "Split",
    "Task",
    "check_characters",
    "load_prompts",
    "score",
    "split_of",
    "stream",
]
