"""Generated problems with known answers, and the loader of prompts."""

from typing import TYPE_CHECKING

from kvinterp.common import on_demand

if TYPE_CHECKING:
    from kvinterp.data.degeneracy import loop_at_end, outside_share, task_words
    from kvinterp.data.example import Example, Prompt, split_of
    from kvinterp.data.forms import names_source
    from kvinterp.data.gsm8k import extracted
    from kvinterp.data.prompts import load_prompts
    from kvinterp.data.tasks import JUDGES, TASKS, score, stream

__all__ = [
    "JUDGES",
    "TASKS",
    "Example",
    "Prompt",
    "extracted",
    "load_prompts",
    "loop_at_end",
    "names_source",
    "outside_share",
    "score",
    "split_of",
    "stream",
    "task_words",
]

__getattr__ = on_demand.names_of(__name__)
