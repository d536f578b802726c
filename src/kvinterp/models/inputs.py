"""Checks what users pass in (prompts, tokens, layers, heads, steps), once and before anything
runs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from kvinterp.common.checks import check_whole, given_list, whole_number
from kvinterp.data import Prompt
from kvinterp.data.chat import prompt_ids
from kvinterp.data.forms import names_generator, names_source
from kvinterp.errors import InputError, shown

if TYPE_CHECKING:
    from kvinterp.models.adapter import Adapter


# Layers, heads and steps --------------------------------------------------------------------------


def chosen_layers(adapter: Adapter, layers: Iterable[int] | int | None) -> tuple[int, ...]:
    """Checks layer numbers and returns them; all layers for None. Negative numbers count from the
    last.

    Raises:
        InputError: A layer does not exist.
    """
    count = adapter.facts.layers
    if layers is None:
        return tuple(range(count))
    items: Any = layers if whole_number(layers) is None else [layers]
    items = given_list("layers", items, "numbers as in (0, 2), or None for all")
    numbers = _existing(
        "layer", items, -count, count, f"{adapter.facts.name} has layers 0 to {count - 1}."
    )
    if not numbers:
        raise InputError(
            "an empty list of layers was given: name at least one, or leave it out for all of them."
        )
    return tuple(dict.fromkeys(number % count for number in numbers))


def chosen_heads(heads: Iterable[int] | None, count: int, what: str) -> tuple[int, ...] | None:
    """Checks head numbers and returns them; None for all heads.

    Args:
        heads: Their numbers.
        count: How many there are.
        what: The kind of head.

    Raises:
        InputError: A head does not exist, or there is none.
    """
    if heads is None:
        return None
    items = given_list(f"{what}s", heads, "a list of whole numbers, or None for all")
    numbers = _existing(what, items, 0, count, f"this model has {what}s 0 to {count - 1}.")
    if not numbers:
        raise InputError(
            f"an empty list of {what}s was given: name at least one, or leave it out to keep all of them."
        )
    return tuple(dict.fromkeys(numbers))


def chosen_steps(steps: Iterable[int]) -> tuple[int, ...]:
    """Checks the numbers of decode steps and returns them.

    Raises:
        InputError: One is not the number of a step.
    """
    items = given_list("steps", steps, "a list of whole numbers, or None for all")
    return _existing("step", items, 0, math.inf, "steps are numbered 0, 1, 2, ...")


def _existing(
    what: str, items: Iterable[object], first: int, end: float, there_are: str
) -> tuple[int, ...]:
    """Checks that each item is a whole number from ``first`` on and before ``end``; returns the
    numbers.
    """
    numbers = []
    for item in items:
        number = whole_number(item)
        if number is None or not first <= number < end:
            raise InputError(f"{what} {shown(item)} does not exist: {there_are}")
        numbers.append(number)
    return tuple(numbers)


# Prompts and tokens -------------------------------------------------------------------------------


def listed(prompts: Any, tokenizer: Any = None) -> tuple[list[Any], bool]:
    """Makes a list of prompts, and says whether there was a single one.

    Args:
        prompts: A text, a :class:`Prompt` or token ids; or a list of these; or a tensor or array of
            token ids, of one dimension for one prompt or of two for several, whose padding is
            removed.
        tokenizer: The tokenizer whose pad token pads them.

    Raises:
        InputError: They are none of these, there is none, or it is unclear which tokens are
            padding.
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


def pads_without_mask(adapter: Adapter, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str:
    """Says that rows begin with pad tokens and no mask tells the model so; empty where that is not
    so, or cannot be told.

    Args:
        adapter: The model.
        args: What its forward was called with.
        kwargs: The same by name.
    """
    tokens = next(
        (
            value
            for value in (*args[:1], kwargs.get("input_ids"), kwargs.get("input"))
            if value is not None
        ),
        None,
    )
    if kwargs.get("attention_mask") is not None or any(
        isinstance(value, Tensor) for value in args[1:]
    ):
        return ""
    if (
        not isinstance(tokens, Tensor)
        or tokens.dim() != 2
        or tokens.is_floating_point()
        or tokens.shape[1] < 2
    ):
        return ""
    tokenizer = adapter.tokenizer
    # A model of TransformerLens makes the mask itself where its tokenizer pads on the left.
    if not adapter.plain and getattr(tokenizer, "padding_side", "") == "left":
        return ""
    leading, least = _leading_pads(adapter, tokens)
    if not leading or max(leading) <= least:
        return ""
    pad = _special(adapter, "pad_token_id")
    count = sum(number > least for number in leading)
    rows = f"{count} of {len(leading)} rows begin" if len(leading) > 1 else "the row begins"
    return (
        f"{rows} with the pad token {pad} and the forward was given no attention_mask, so that the model reads the padding as "
        "text, at the positions of text: give attention_mask=(tokens != pad).long() and position_ids, as generate() makes them, "
        "or run each text alone."
    )


def leading_pads(adapter: Adapter, tokens: Tensor) -> list[int]:
    """How many pad tokens each row of a batch begins with, ``[batch, position]``.

    A token that begins every text, or ends the one before it, is no padding where each row has one.
    """
    leading, least = _leading_pads(adapter, tokens)
    begins = _special(adapter, "pad_token_id") in (
        _special(adapter, "bos_token_id"),
        _special(adapter, "eos_token_id"),
    )
    return [number - least * begins if number > least else 0 for number in leading] or [0] * len(
        tokens
    )


def _leading_pads(adapter: Adapter, tokens: Tensor) -> tuple[list[int], int]:
    """How many pad tokens each row begins with, and how many of these may be no padding; nothing
    where none is a pad token.
    """
    pad, bos, eos = (_special(adapter, f"{name}_token_id") for name in ("pad", "bos", "eos"))
    if pad is None:
        return [], 0
    # One reading from the device for all rows; a row of nothing else has 0.
    leading = (tokens != pad).int().argmax(1).tolist()
    return leading, min(int(pad in (bos, eos) or len(leading) == 1), *leading)


def left_padded(adapter: Adapter, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Makes one batch of prompts of several lengths, on the model's device.

    Returns:
        Token ids, padded at the left, and the mask, 0 for pads; both ``[batch, column]``.
    """
    pad, width = _special(adapter, "pad_token_id") or 0, max(map(len, rows))
    tokens = [[pad] * (width - len(row)) + list(row) for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return torch.tensor(tokens, device=adapter.device), torch.tensor(mask, device=adapter.device)


def _special(adapter: Adapter, name: str) -> int | None:
    """A special token's id, of the tokenizer or else of the model's config."""
    holders = (adapter.tokenizer, getattr(adapter.model, "generation_config", None), adapter.config)
    found = next(
        (value for holder in holders if (value := getattr(holder, name, None)) is not None), None
    )
    return found if isinstance(found, int) else None


def _without_padding(rows: list[list[Any]], tokenizer: Any) -> list[list[Any]]:
    """Removes the pad tokens with which ``to_tokens`` and tokenizers make the rows of a batch
    equally long.

    Pad tokens are padding where other rows have fewer of them. Where the same token also begins
    texts (at the right: ends them), every row keeps one.
    """
    pad = getattr(tokenizer, "pad_token_id", None)
    if pad is None:
        return rows
    cuts: list[list[int]] = []
    unclear = False
    for direction, name in ((1, "bos_token_id"), (-1, "eos_token_id")):
        runs = [
            sum(1 for _ in itertools.takewhile(lambda token: token == pad, row[::direction]))
            for row in rows
        ]
        special = int(getattr(tokenizer, name, None) == pad)
        padded = len(set(runs)) > 1
        unclear |= padded and (min(runs) != special or any(map(any, cuts)))
        cuts.append([run - special if padded else 0 for run in runs])
    if unclear:
        raise InputError(
            f"the rows of the batch hold the pad token {pad} at their ends, and which of these belong to the text cannot be "
            "told: give the prompts as a list, each without padding."
        )
    return [row[left : len(row) - right] for row, left, right in zip(rows, *cuts, strict=True)]


def encode_all(adapter: Adapter, prompts: Any, max_new_tokens: int) -> list[list[int]]:
    """Token ids of one prompt or of several, each checked as in :func:`encode`."""
    return [encode(adapter, item, max_new_tokens) for item in listed(prompts, adapter.tokenizer)[0]]


def encode(adapter: Adapter, prompt: Any, max_new_tokens: int) -> list[int]:
    """Token ids of a prompt, checked against the vocabulary and the context.

    Args:
        adapter: The model.
        prompt: A text, a :class:`Prompt`, or token ids.
        max_new_tokens: Tokens that will be decided; the last of them is not fed, so it needs no
            position.

    Raises:
        InputError: There is nothing to run, or it does not fit.
    """
    max_new_tokens = check_whole("max_new_tokens", max_new_tokens)
    if isinstance(prompt, str) and (names_generator(prompt) or names_source(prompt)):
        raise InputError(
            f"prompt {prompt!r} names a generator: give kv.load_prompts({prompt!r}), which makes the prompts."
        )
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
    """Checks the token ids to feed and returns them; None for None.

    Args:
        continuation: A list, an array or a tensor of token ids.
        prompts: The number of prompts.
        adapter: The model.

    Raises:
        InputError: There is more than one prompt, or something is no token of this model.
    """
    if continuation is None:
        return None
    if prompts != 1:
        raise InputError(
            f"continuation was given with {prompts} prompts: give one prompt at a time with it."
        )
    tokens = _checked_ids(continuation, "continuation")
    if (wrong := _not_in_vocabulary(tokens, adapter.facts.vocabulary)) is not None:
        raise InputError(
            f"continuation holds token id {shown(wrong)}: {adapter.facts.name} has 0 to {adapter.facts.vocabulary - 1}."
        )
    return tokens


def token_ids(ids: object) -> list[int] | None:
    """Makes a list of ints of a list, array or tensor of whole numbers; None for anything else."""
    items = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids
    if not isinstance(items, Iterable) or isinstance(items, bytes):
        return None
    numbers = [whole_number(item) for item in items]
    return None if None in numbers else [number for number in numbers if number is not None]


def _checked_ids(ids: object, what: str) -> list[int]:
    rows = ids.tolist() if isinstance(ids, Tensor | np.ndarray) else ids
    if isinstance(rows, Sequence) and rows and all(isinstance(row, list | tuple) for row in rows):
        # to_tokens and tokenizers return one prompt as [1, position].
        if len(rows) > 1:
            raise InputError(
                f"{what} holds {len(rows)} rows, each a prompt: give one, such as tokens[:1]."
            )
        ids = rows[0]
    tokens = token_ids(ids)
    if tokens is None:
        raise InputError(
            f"{what} {shown(ids)} was given: expected whole numbers, the ids of tokens."
        )
    return tokens


def _not_in_vocabulary(tokens: Sequence[int], vocabulary: int) -> int | None:
    return next((token for token in tokens if not 0 <= token < vocabulary), None)
