"""What a reader is: a format, how it is known by its content, and the paths that a record of it holds."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from kvinterp.errors import InputError, shown
from kvinterp.recording.engine_path import EnginePath, token_ids

Token = Callable[[str], "int | None"]
"""The id of a token's text, None where no token or several have it."""


class Reader(abc.ABC):
    """A format of which each record is a JSON object: one answer of an engine, or a line of a dump."""

    @abc.abstractmethod
    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether a record is of this format."""

    @abc.abstractmethod
    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """The paths that a record holds.

        Args:
            record: The record; an answer has its request under ``"request"`` where the file keeps it.
            where: What errors call it.
            token: The model's own ids of texts.

        Raises:
            InputError: It lacks what is needed, or holds what cannot be.
        """


def part(record: Any, name: str, kind: type, where: str, default: Any = None) -> Any:
    """A field of a record, of a type.

    Raises:
        InputError: The record is no object, or the field is of another type.
    """
    if not isinstance(record, Mapping):
        raise InputError(f"{where} has {shown(record)} where an object was expected: mend it.")
    found = record.get(name)
    found = default if found is None else found
    if not isinstance(found, kind):
        kinds: dict[Any, str] = {list: "a list", dict: "an object", str: "a text"}
        raise InputError(f"{where}: {name!r} is {shown(found)}, expected {kinds[kind]}; mend it.")
    return found


def prompt_of(record: Mapping[str, Any], choice: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """The prompt's ids, of the answer or of the request beside it.

    Raises:
        InputError: Neither holds them: a text would be cut into tokens anew, and another way.
    """
    request = part(record, "request", dict, where, {})
    found = (choice.get("prompt_token_ids"), record.get("prompt_token_ids"), record.get("prompt_ids"))
    asked = (request.get("prompt"), request.get("input_ids"), request.get("prompt_token_ids"))
    given = next((each for each in (*found, *asked) if isinstance(each, list)), None)
    if given is None:
        raise InputError(
            f"{where} holds no ids of the prompt: ask with return_token_ids=true, or write each line as "
            '{"request": {"prompt": [IDS], ...}, "response": {...}}.'
        )
    return token_ids(given, f"{where}: the prompt")


def id_of(text: Any, token: Token, entry: Mapping[str, Any] | None = None) -> int:
    """A token's id, of its entry, of ``token_id:ID`` or of its text; -1 where none or several have that text."""
    own = None if entry is None else entry.get("id")
    if type(own) is int:
        return own
    if isinstance(text, str) and text.startswith("token_id:") and text[9:].isdecimal() and len(text) < 20:
        return int(text[9:])
    found = token(text) if isinstance(text, str) else None
    return -1 if found is None else found


def ids_beside(given: Any, found: list[int], where: str) -> list[int]:
    """The ids of the tokens: those that the answer gives, or those that were found of their texts.

    Raises:
        InputError: As many are not given, or a text has none.
    """
    ids = found if given is None else list(token_ids(given, f"{where}: its token ids"))
    if len(ids) != len(found):
        raise InputError(
            f"{where} has {len(ids)} token ids and {len(found)} log-probs: expected one of each a token; ask again."
        )
    if -1 in ids:
        raise InputError(
            f"{where}: token {ids.index(-1)} has a text that stands for no single id of this model: ask with "
            "return_token_ids=true or return_tokens_as_token_ids=true."
        )
    return ids
