"""Generated problems with known answers, and the loader of prompts."""

from kvinterp.data.degeneracy import loop_at_end, outside_share, task_words
from kvinterp.data.example import Example, Prompt, split_of
from kvinterp.data.gsm8k import extracted
from kvinterp.data.prompts import load_prompts
from kvinterp.data.sources import names_source
from kvinterp.data.tasks import JUDGES, TASKS, score, stream
