"""What an audit is given, checked: precisions, prompts and their lengths, programs and their budget.

Whatever does not fit is an :class:`InputError` here, before anything runs; ``audit.py`` takes what comes out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from kvinterp.auditing.blocks import prompts_for
from kvinterp.auditing.edges import edges_of
from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.programs.names import programs_named
from kvinterp.auditing.programs.program import Program
from kvinterp.common.checks import check_text, given_list, whole_number
from kvinterp.data import Prompt
from kvinterp.data.chat import prompt_ids
from kvinterp.errors import InputError, shown
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.inputs import token_ids

RUNGS = ("bfloat16", "float16", "float32", "float64")

LENGTHS = (5, 63, 64, 65, 96, 97, 128)
"""Prompt lengths on and beside the usual tile, window and chunk sizes."""

CHECKS = ("default", "thorough", "quick", "each", "none")
"""How many programs of the cache are tried: as many as ``programs`` says, five times as many, each
use once until one is wrong, each use once, or none.
"""

THOROUGH = 5

LONGEST, MOST_STEPS = 32_768, 4_096
"""The longest prompt of an audit, and the most tokens that are fed singly in all."""

LONGEST_EDGE = 512
"""The longest window or chunk that default lengths reach over."""


def programs_asked_for(calls: Any, checks: str) -> list[Program]:
    """The programs that were asked for."""
    extra = programs_named(
        check_text("calls", calls, "programs such as 'rows(0+4)+feed(9)+feed(3,1)', or 'all'")
    )
    if extra and checks == "none":
        raise InputError(f"calls={calls!r} was given with checks='none': leave one of the two out.")
    return extra


def budget_of(programs: Any, seconds: Any) -> tuple[int, float]:
    """How many programs, and how long they take at most."""
    if (whole_number(programs) or 0) < 1 or not isinstance(seconds, int | float) or not seconds > 0:
        raise InputError(
            f"programs={shown(programs)}, seconds={shown(seconds)} was given: expected a whole number of at least 1, and "
            "seconds above 0."
        )
    return int(programs), float(seconds)


def precisions(rungs: Any, adapter: Adapter) -> dict[str, torch.dtype]:
    """The precisions to climb by name, the model's own among them."""
    expected = f"a list of at least one precision of {', '.join(RUNGS)}"
    rungs = given_list("rungs", rungs, expected)
    if not rungs:
        raise InputError(f"rungs={shown(rungs)} was given: expected {expected}.")
    dtypes = {dtype_name(dtype): dtype for dtype in map(dtype_named, rungs) if dtype is not None}
    dtypes.setdefault(dtype_name(adapter.dtype), adapter.dtype)
    return dtypes


def checked_lengths(lengths: Any, steps: Any) -> tuple[tuple[int, ...], int]:
    """The lengths and steps as whole numbers, where an audit of them ends."""
    expected = "whole numbers of at least 1, as in lengths=(5, 63, 64), steps=3"
    counts = [
        whole_number(value) or 0 for value in (*given_list("lengths", lengths, expected), steps)
    ]
    if len(counts) < 2 or min(counts) < 1:
        raise InputError(
            f"lengths={shown(lengths)}, steps={shown(steps)} was given: expected {expected}."
        )
    *lengths, steps = counts
    if max(lengths) > LONGEST or len(set(lengths)) * steps > MOST_STEPS:
        raise InputError(
            f"lengths={shown(lengths)} with {shown(steps)} steps each were asked for, and each step "
            f"recomputes its whole prefix at every precision: expected lengths up to {LONGEST:,} and at most {MOST_STEPS:,} "
            "steps in all; give fewer."
        )
    return tuple(lengths), steps


def own_lengths(adapter: Adapter) -> tuple[int, ...]:
    """The usual lengths, and those on both sides of the model's own windows and chunks."""
    edges = [edge for edge in edges_of(adapter) if edge <= LONGEST_EDGE]
    return tuple(sorted({*LENGTHS, *(edge + side for edge in edges for side in (-1, 1))}))


def prompt_tokens(
    adapter: Adapter, prompts: Sequence[Any] | None, length: int, seed: int
) -> list[Sequence[int]]:
    """The token ids of each prompt that was given; two random prompts of ``length`` tokens unless any was."""
    if prompts is None:
        return prompts_for(adapter, 2, length, seed)
    every: list[Sequence[int]] = []
    for prompt in given_list("prompts", prompts, "a list of prompts, each text or token ids"):
        if isinstance(prompt, str | Prompt):
            ids = prompt_ids(adapter, prompt)
        else:
            ids = (token_ids(prompt) or list(prompt)) if isinstance(prompt, Iterable) else [prompt]
        vocabulary = adapter.facts.vocabulary
        wrong = next((t for t in ids if not isinstance(t, int) or not 0 <= t < vocabulary), None)
        if wrong is not None or len(ids) < 3:
            what = "it has fewer than 3 tokens" if wrong is None else f"it holds token {wrong!r}"
            raise InputError(
                f"prompt {str(prompt)[:40]!r} cannot be audited: {what}; vocabulary {vocabulary}."
            )
        every.append(ids)
    if not every:
        raise InputError(
            "the list of prompts is empty: give at least one, or leave it out for random ones."
        )
    return every
