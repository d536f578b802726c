"""The base of readers: how a format is recognised and which paths a record of it holds."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

from kvinterp.errors import InputError, shown
from kvinterp.recording.engine_path import EnginePath, token_ids

Token = Callable[[str], "int | None"]
"""Returns the id of a token's text; None if no token or several have it."""


class Reader(abc.ABC):
    """A format whose records are JSON objects: an answer of an engine, or a line of a dump."""

    fields: ClassVar[tuple[str, ...]] = ()
    """The fields by which a record is known, where these alone decide."""

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a record has this format."""
        return {*self.fields} <= record.keys()

    @abc.abstractmethod
    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields the paths of a record.

        Args:
            record: The record; an answer has its request under ``"request"`` if the file keeps it.
            where: The name of the record in errors.
            token: Returns the model's id of a text.

        Raises:
            InputError: A field is missing, or has an impossible value.
        """


def part(record: Any, name: str, kind: type, where: str, default: Any = None) -> Any:
    """Returns a field of a record and checks its type.

    Raises:
        InputError: The record is no object, or the field is of another type.
    """
    if not isinstance(record, Mapping):
        raise InputError(f"{where} has {shown(record)} where an object was expected: mend it.")
    value = record.get(name)
    value = default if value is None else value
    if not isinstance(value, kind):
        kinds: dict[Any, str] = {list: "a list", dict: "an object", str: "a text"}
        raise InputError(f"{where}: {name!r} is {shown(value)}, expected {kinds[kind]}; mend it.")
    return value


def choices_of(record: Mapping[str, Any], where: str) -> list[tuple[str, Any]]:
    """The choices of an answer, each with its name for errors."""
    choices = record["choices"]
    return [
        (where if len(choices) == 1 else f"{where}, choice {n}", choice)
        for n, choice in enumerate(choices)
    ]


def first_choice(record: Mapping[str, Any]) -> Mapping[str, Any]:
    """The first choice of an answer; empty if it has none."""
    choices = record.get("choices")
    first = choices[0] if isinstance(choices, list) and choices else None
    return first if isinstance(first, Mapping) else {}


def prompt_of(record: Mapping[str, Any], choice: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Returns the prompt's ids, from the answer or from the request beside it.

    Raises:
        InputError: Neither holds them. (A text might be tokenised another way here.)
    """
    request = part(record, "request", dict, where, {})
    fields = ((choice, "prompt_token_ids"), (record, "prompt_token_ids"), (record, "prompt_ids"), (request, "prompt"),
              (request, "input_ids"), (request, "prompt_token_ids"))  # fmt: skip
    ids = next(
        (holder[name] for holder, name in fields if isinstance(holder.get(name), list)), None
    )
    if ids is None:
        raise InputError(
            f"{where} holds no ids of the prompt: ask with return_token_ids=true, or write each line as "
            '{"request": {"prompt": [IDS], ...}, "response": {...}}.'
        )
    return token_ids(ids, f"{where}: the prompt")


def id_of(text: Any, token: Token, entry: Mapping[str, Any] | None = None) -> int:
    """Returns a token's id from its entry, from ``token_id:ID`` or from its text; -1 if no or
    several tokens have that text.
    """
    number = None if entry is None else entry.get("id")
    if type(number) is int:
        return number
    if (
        isinstance(text, str)
        and text.startswith("token_id:")
        and text[9:].isdecimal()
        and len(text) < 20
    ):
        return int(text[9:])
    number = token(text) if isinstance(text, str) else None
    return -1 if number is None else number


def checked_ids(answer_ids: Any, text_ids: list[int], where: str) -> list[int]:
    """Returns the ids of the tokens that the answer gives, or else those of their texts.

    Raises:
        InputError: The answer gives another number of ids, or a text has no single id.
    """
    ids = text_ids if answer_ids is None else list(token_ids(answer_ids, f"{where}: its token ids"))
    if len(ids) != len(text_ids):
        raise InputError(
            f"{where} has {len(ids)} token ids and {len(text_ids)} log-probs: expected one of each a token; ask again."
        )
    if -1 in ids:
        raise InputError(
            f"{where}: token {ids.index(-1)} has a text that stands for no single id of this model: ask with "
            "return_token_ids=true or return_tokens_as_token_ids=true."
        )
    return ids
