"""What goes in: prompts, continuations and words, checked before anything runs."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvinterp.checks import check_choice, check_whole, shown, whole_number
from kvinterp.data import TASKS, Prompt, check_text
from kvinterp.errors import InputError
from kvinterp.models import Adapter

__all__ = ["check_choice", "checked_continuation", "encode", "end_tokens", "listed"]

_GENERATOR = re.compile(rf"({'|'.join(TASKS)}):\d+(:\d+)?")


def listed(prompts: Any) -> tuple[list[Any], bool]:
    """Prompts as a list, and whether they were a single one.

    Args:
        prompts: A text, a :class:`Prompt` or token ids; or a list of these; or a tensor or array of token ids, of one
            dimension for one prompt or of two for several.

    Raises:
        InputError: They are none of these.
    """
    if isinstance(prompts, str | Prompt):
        return [prompts], True
    if isinstance(prompts, Tensor | np.ndarray):
        prompts = prompts.tolist()
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise InputError(
            f"prompts of type {type(prompts).__name__} were given: expected a text, token ids, or a list of them."
        )
    items = list(prompts)
    if not items:
        raise InputError("the list of prompts is empty: give at least one.")
    single = not any(isinstance(item, str | Prompt | Iterable) for item in items)
    return ([items], True) if single else (items, False)


def encode(adapter: Adapter, prompt: Any, max_new_tokens: int) -> list[int]:
    """Token ids of a prompt, checked against the vocabulary and the context.

    Args:
        adapter: The model.
        prompt: A text, a :class:`Prompt`, or token ids.
        max_new_tokens: Tokens that will be decided; the last of them is not fed, so it needs no position.

    Raises:
        InputError: There is nothing to run, or it does not fit.
    """
    max_new_tokens = check_whole("max_new_tokens", max_new_tokens)
    if isinstance(prompt, str) and _GENERATOR.fullmatch(prompt):
        raise InputError(f"prompt {prompt!r} names a generator: give kv.load_prompts({prompt!r}), which makes the prompts.")
    text = prompt.text if isinstance(prompt, Prompt) else prompt
    if isinstance(text, str):
        check_text(text, f"prompt {text[:40]!r}")
    tokens = adapter.encode(text) if isinstance(text, str) else _token_ids(text, "prompt")
    shown = text[:40] if isinstance(text, str) else tokens[:8]
    if not tokens:
        raise InputError(f"prompt {shown!r} has no token: give at least one.")
    facts = adapter.facts
    wrong = next((t for t in tokens if not 0 <= t < facts.vocabulary), None)
    if wrong is not None:
        raise InputError(
            f"token id {wrong} in prompt {shown!r} does not exist: {facts.name} has 0 to {facts.vocabulary - 1}."
        )
    if len(tokens) + max_new_tokens - 1 > facts.context:
        raise InputError(
            f"prompt {shown!r} has {len(tokens)} tokens, and with max_new_tokens={max_new_tokens} that is more than the "
            f"context of {facts.name}, {facts.context} positions: shorten the prompt or decode fewer tokens."
        )
    return tokens


def _token_ids(given: Any, what: str) -> list[int]:
    items = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    tokens = [whole_number(item) for item in items] if isinstance(items, Iterable) else [None]
    if None in tokens:
        raise InputError(f"{what} {shown(given)} was given: expected whole numbers, the ids of tokens.")
    return [token for token in tokens if token is not None]


def end_tokens(adapter: Adapter, device: torch.device) -> Tensor:
    """The token ids that end a sequence, as a tensor."""
    return torch.tensor(sorted(adapter.end_tokens), dtype=torch.long, device=device)


def checked_continuation(continuation: Any, prompts: int, adapter: Adapter) -> list[int] | None:
    """The token ids to be fed, checked; None where none were given.

    Args:
        continuation: A list, an array or a tensor of token ids.
        prompts: How many prompts it came with.
        adapter: The model.

    Raises:
        InputError: There is more than one prompt, or something is no token of this model.
    """
    if continuation is None:
        return None
    if prompts != 1:
        raise InputError(f"continuation was given with {prompts} prompts: give one prompt at a time with it.")
    tokens = _token_ids(continuation, "continuation")
    wrong = next((t for t in tokens if not 0 <= t < adapter.facts.vocabulary), None)
    if wrong is not None:
        raise InputError(
            f"continuation holds token id {wrong}: {adapter.facts.name} has 0 to {adapter.facts.vocabulary - 1}."
        )
    return tokens
