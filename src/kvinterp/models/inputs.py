"""What goes in: prompts, tokens, layers, heads, steps, choices and numbers, each checked here once, before anything runs."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from torch import Tensor

from kvinterp.common.checks import check_whole, given_list, whole_number
from kvinterp.data import TASKS, Prompt, names_source
from kvinterp.data.chat import prompt_ids
from kvinterp.errors import InputError, shown

if TYPE_CHECKING:
    from kvinterp.models.adapter import Adapter


_GENERATOR = re.compile(rf"({'|'.join(TASKS)}):\d+(:\d+)?")


# Layers, heads and steps ------------------------------------------------------------------------------------------------


def chosen_layers(adapter: Adapter, layers: Iterable[int] | int | None) -> tuple[int, ...]:
    """The layers asked for, checked; all of them for None. Negative numbers count from the last.

    Raises:
        InputError: A layer does not exist.
    """
    count = adapter.facts.layers
    if layers is None:
        return tuple(range(count))
    wanted = (
        [layers]
        if whole_number(layers) is not None
        else given_list("layers", layers, "numbers as in (0, 2), or None for all")
    )
    numbers = _existing("layer", wanted, -count, count, f"{adapter.facts.name} has layers 0 to {count - 1}.")
    if not numbers:
        raise InputError("an empty list of layers was given: name at least one, or leave it out for all of them.")
    return tuple(dict.fromkeys(number % count for number in numbers))


def chosen_heads(heads: Iterable[int] | None, count: int, what: str) -> tuple[int, ...] | None:
    """The heads asked for, checked; None for all of them.

    Args:
        heads: Their numbers.
        count: How many there are.
        what: The kind of head.

    Raises:
        InputError: A head does not exist, or there is none.
    """
    if heads is None:
        return None
    wanted = given_list(f"{what}s", heads, "a list of whole numbers, or None for all")
    numbers = _existing(what, wanted, 0, count, f"this model has {what}s 0 to {count - 1}.")
    if not numbers:
        raise InputError(f"an empty list of {what}s was given: name at least one, or leave it out to keep all of them.")
    return tuple(dict.fromkeys(numbers))


def chosen_steps(steps: Iterable[int]) -> tuple[int, ...]:
    """The decode steps asked for, checked.

    Raises:
        InputError: One is no number of a step.
    """
    wanted = given_list("steps", steps, "a list of whole numbers, or None for all")
    return _existing("step", wanted, 0, math.inf, "steps are numbered 0, 1, 2, ...")


def _existing(what: str, wanted: Iterable[object], first: int, end: float, there_are: str) -> tuple[int, ...]:
    """The numbers of what was asked for, each from ``first`` on and before ``end``."""
    numbers = []
    for one in wanted:
        number = whole_number(one)
        if number is None or not first <= number < end:
            raise InputError(f"{what} {shown(one)} does not exist: {there_are}")
        numbers.append(number)
    return tuple(numbers)


# Prompts and tokens -------------------------------------------------------------------------------------------------------


def listed(prompts: Any, tokenizer: Any = None) -> tuple[list[Any], bool]:
    """Prompts as a list, and whether they were a single one.

    Args:
        prompts: A text, a :class:`Prompt` or token ids; or a list of these; or a tensor or array of token ids, of one
            dimension for one prompt or of two for several, whose padding is taken off.
        tokenizer: Whose token pads them.

    Raises:
        InputError: They are none of these, there is none, or what is padding cannot be told.
    """
    if isinstance(prompts, str | Prompt):
        return [prompts], True
    if isinstance(prompts, Tensor | np.ndarray):
        prompts = prompts.tolist()
        if isinstance(prompts, list) and all(isinstance(row, list) for row in prompts):
            prompts = _without_padding(prompts, tokenizer)
    if isinstance(prompts, Mapping) or not isinstance(prompts, Iterable):
        raise InputError(
            f"prompts of type {type(prompts).__name__} were given: expected a text, token ids, or a list of them."
        )
    items = list(prompts)
    if not items:
        raise InputError("the list of prompts is empty: give at least one.")
    single = not any(isinstance(item, str | Prompt | Iterable) for item in items)
    return ([items], True) if single else (items, False)


def _without_padding(rows: list[list[Any]], tokenizer: Any) -> list[list[Any]]:
    """The rows of one batch without the pad tokens with which ``to_tokens`` and tokenizers make them equally long.

    Pad tokens are padding where other rows have fewer of them. Where the same token also begins texts (at the right: ends
    them), every row keeps one of its own.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return rows
    cuts: list[list[int]] = []
    unclear = False
    for step, other in ((1, "bos_token_id"), (-1, "eos_token_id")):
        runs = [sum(1 for _ in itertools.takewhile(lambda token: token == pad, row[::step])) for row in rows]
        own = int(getattr(tokenizer, other, None) == pad)
        padded = len(set(runs)) > 1
        unclear |= padded and (min(runs) != own or any(map(any, cuts)))
        cuts.append([run - own if padded else 0 for run in runs])
    if unclear:
        raise InputError(
            f"the rows of the batch hold the pad token {pad} at their ends, and which of these belong to the text cannot be "
            "told: give the prompts as a list, each without padding."
        )
    return [row[left : len(row) - right] for row, left, right in zip(rows, *cuts, strict=True)]


def encode_all(adapter: Adapter, prompts: Any, max_new_tokens: int) -> list[list[int]]:
    """Token ids of one prompt or of several, each checked as :func:`encode` does."""
    return [encode(adapter, item, max_new_tokens) for item in listed(prompts, adapter.tokenizer)[0]]


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
    if isinstance(prompt, str) and (_GENERATOR.fullmatch(prompt) or names_source(prompt)):
        raise InputError(f"prompt {prompt!r} names a generator: give kv.load_prompts({prompt!r}), which makes the prompts.")
    text = prompt.text if isinstance(prompt, Prompt) else prompt
    if isinstance(text, str):
        tokens, begins = prompt_ids(adapter, prompt), repr(text[:40])
    else:
        tokens = _checked_ids(text, "prompt")
        begins = shown(tokens[:8])
    if not tokens:
        raise InputError(f"prompt {begins} has no token: give at least one.")
    facts = adapter.facts
    if (wrong := _not_in_vocabulary(tokens, facts.vocabulary)) is not None:
        raise InputError(
            f"token id {shown(wrong)} in prompt {begins} does not exist: {facts.name} has 0 to {facts.vocabulary - 1}."
        )
    if len(tokens) + max_new_tokens - 1 > facts.context:
        raise InputError(
            f"prompt {begins} has {len(tokens)} tokens, and with max_new_tokens={shown(max_new_tokens)} that is more than the "
            f"context of {facts.name}, {facts.context} positions: shorten the prompt or decode fewer tokens."
        )
    return tokens


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
    tokens = _checked_ids(continuation, "continuation")
    if (wrong := _not_in_vocabulary(tokens, adapter.facts.vocabulary)) is not None:
        raise InputError(
            f"continuation holds token id {shown(wrong)}: {adapter.facts.name} has 0 to {adapter.facts.vocabulary - 1}."
        )
    return tokens


def token_ids(given: object) -> list[int] | None:
    """What was given as a list of ints, None where it is no list, array or tensor of whole numbers."""
    items = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    if not isinstance(items, Iterable) or isinstance(items, bytes):
        return None
    numbers = [whole_number(item) for item in items]
    return None if None in numbers else [number for number in numbers if number is not None]


def _checked_ids(given: object, what: str) -> list[int]:
    rows = given.tolist() if isinstance(given, Tensor | np.ndarray) else given
    if isinstance(rows, Sequence) and rows and all(isinstance(row, list | tuple) for row in rows):
        # As to_tokens and tokenizers give one prompt: [1, position].
        if len(rows) > 1:
            raise InputError(f"{what} holds {len(rows)} rows, each a prompt: give one, such as tokens[:1].")
        given = rows[0]
    tokens = token_ids(given)
    if tokens is None:
        raise InputError(f"{what} {shown(given)} was given: expected whole numbers, the ids of tokens.")
    return tokens


def _not_in_vocabulary(tokens: Sequence[int], vocabulary: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocabulary), None)
