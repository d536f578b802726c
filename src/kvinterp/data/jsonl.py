"""Files of one JSON object a line: prompts, or questions and answers; what is wrong is said with its line."""

from __future__ import annotations

import difflib
import io
import json
import logging
import math
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvinterp.common.files import bytes_of, is_file
from kvinterp.data.example import Example, Prompt, check_characters
from kvinterp.data.few_shot import MOST, FewShot, sampled
from kvinterp.errors import InputError, shown

log = logging.getLogger("kvinterp")

_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_JUDGED_BY_NUMBER = ("arithmetic", "gsm8k")


@dataclass(frozen=True)
class Jsonl(FewShot):
    """Prompts of a file, as they stand there; its answers, where they have any, are the worked examples.

    Attributes:
        file: The ``.jsonl`` file.
        shots: How many worked examples come before each.
        train: The file of the worked examples; those of the same file that were not drawn unless given.
        cut: Off, since what begins the next problem is known of no file.
    """

    file: str
    shots: int = field(default=0, kw_only=True)
    train: str | None = field(default=None, kw_only=True)
    cut: str = field(default="off", kw_only=True)

    def drawn(self) -> tuple[list[Example], list[Example]]:
        """Those asked, and the worked examples."""
        asked, train = self._examples(self.file), None if self.train is None else self._examples(self.train)
        return sampled(asked, train, self, self.file)

    def mark(self, prompt: Prompt) -> str:
        """Nothing: what begins the next prompt is not known."""
        return ""

    def _examples(self, file: str) -> list[Example]:
        return [Example(prompt, f" {prompt.answer}" if prompt.answer else "") for prompt in prompts_of(Path(str(file)))]


def lines_of(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """The objects of a file, each with what errors call it (its file and line).

    Raises:
        InputError: There is no such file, it is no UTF-8, it has no line, or one of them is no object.
    """
    lines = _lines(path, ".jsonl", 'lines such as {"prompt": "..."}')
    return [(where, _object(where, line)) for where, line in lines]


def _lines(path: Path, suffix: str, expected: str) -> list[tuple[str, str]]:
    """The lines of a file that are not blank, each with what errors call it."""
    if not is_file(path):
        raise InputError(
            f"prompt file {str(path)!r} does not exist or is no file: expected the path of a .jsonl or .txt file, a generator "
            "such as arithmetic:20, or a text with a space in it, which is a prompt; check the path."
        )
    named = f"prompt file {path.name!r}"
    if path.suffix.lower() != suffix:
        raise InputError(f"{named} ends with {path.suffix!r}: expected .jsonl, one JSON object a line.")
    try:
        text = io.StringIO(bytes_of(path).decode("utf-8-sig"), newline=None).getvalue()
    except UnicodeDecodeError as error:
        raise InputError(f"{named} is not UTF-8 text (byte {error.start}): save it as UTF-8 and try again.") from error
    except OSError as error:
        raise InputError(
            f"{named} cannot be read ({error.strerror or error}): check the file, or copy it again."
        ) from error
    # Only a line feed ends a line: JSON strings may hold U+2028, which str.splitlines would cut at.
    lines = text.removesuffix("\n").split("\n")
    if len(lines) > MOST:
        raise InputError(f"{named} has {len(lines):,} lines: expected at most {MOST:,}; take fewer.")
    found = [(f"{named}, line {number}", line.removesuffix("\r")) for number, line in enumerate(lines, 1) if line.strip()]
    if not found:
        raise InputError(f"{named} is empty: expected {expected}; add one.")
    return found


def ids_of(records: Sequence[tuple[str, Mapping[str, Any]]], unless_given: Callable[[int], str]) -> list[str]:
    """The ids of records, each of which is there once.

    Args:
        records: The records, each with what errors call it.
        unless_given: The id of the record of a number that has none.

    Raises:
        InputError: One is no text and no number, or two are the same.
    """
    seen: dict[str, str] = {}
    for number, (where, record) in enumerate(records):
        given = record.get("id", unless_given(number))
        if not isinstance(given, str | int | float) or isinstance(given, bool):
            raise InputError(f'{where}: "id" is {shown(given)}, expected a text or a number; write one, or leave it out.')
        if (first := seen.setdefault(str(given), where)) != where:
            line = first.rpartition(", ")[2]
            raise InputError(f"{where} has the id {shown(str(given))} of {line}: expected every id once; rename one.")
    return list(seen)


def _object(where: str, line: str) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            twice = Counter(name for name, _ in pairs).most_common(1)[0][0]
            raise InputError(f"{where} has the field {shown(twice)} twice: expected every field once; leave one out.")
        return found

    def no_number(name: str) -> Any:
        raise InputError(f"{where} has {name}, which is no JSON: expected a number, a text or null; mend it.")

    def finite(text: str) -> float:
        if not math.isfinite(number := float(text)):
            raise InputError(f"{where} has {shown(text)}, which is larger than any number: expected a finite one; mend it.")
        return number

    try:
        record = json.loads(line, object_pairs_hook=once, parse_constant=no_number, parse_float=finite)
    except InputError:
        raise
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON ({error.msg}, column {error.colno}): expected one object a line; mend it."
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{where} is nested too deeply or holds a number too long to read: mend it.") from error
    if not isinstance(record, dict):
        raise InputError(f'{where} is JSON but no object: expected {{"prompt": "..."}}; wrap the text so.')
    return record


def prompts_of(path: Path) -> list[Prompt]:
    """The prompts of a file, as :func:`kvinterp.data.load_prompts` says; of a ``.txt`` file each line as it stands there."""
    if path.suffix.lower() == ".txt":
        lines = _lines(path, ".txt", "a prompt a line")
        for where, line in lines:
            check_characters(line, where)
        return [Prompt(id=_line_id(where), text=line) for where, line in lines]
    records = lines_of(path)
    _check_fields(records)
    ids = ids_of(records, lambda number: _line_id(records[number][0]))
    return [_prompt(where, record, own) for (where, record), own in zip(records, ids, strict=True)]


def _line_id(where: str) -> str:
    return f"line-{where.rpartition(' ')[2]}"


FIELDS = ("prompt", "text", "id", "task", "answer", "facts", "meta", "messages")
"""What is read of a record."""


def _check_fields(records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises where a field's name is nearly that of one that is read; says which others are not read."""
    others = {name: where for where, record in reversed(records) for name in record if name not in FIELDS}
    for name, where in others.items():
        if near := difflib.get_close_matches(name.lower(), FIELDS, n=1, cutoff=0.8):
            raise InputError(f"{where} has the field {shown(name)}, which is not read: did you mean {near[0]!r}? Rename it, or "
                             "leave it out.")  # fmt: skip
    if others:
        log.warning("of the prompts in %s these fields are not read: %s", records[0][0].partition(",")[0],
                    ", ".join(map(shown, sorted(others)[:8])))  # fmt: skip


def _prompt(where: str, record: dict[str, Any], own: str) -> Prompt:
    if {"prompt", "text"} <= record.keys():
        raise InputError(f'{where} has both "prompt" and "text": expected one of the two; leave the other out.')
    text = record.get("prompt", record.get("text"))
    if text is None:
        given = ", ".join(map(str, record)) or "none"
        other = "a file of questions is given as gsm8k(FILE)" if "question" in record else "add it"
        raise InputError(f'{where} has no field "prompt" (fields: {given}): expected the text there; {other}.')
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where} has an empty prompt: expected a text with at least one visible character; write one.")
    check_characters(own + text, where)
    answer, task = record.get("answer"), str(record.get("task") or "")
    if isinstance(answer, bool | list | dict):
        raise InputError(f'{where}: "answer" is {type(answer).__name__}, expected a text or a number; write one.')
    answer = "" if answer is None else str(answer)
    return Prompt(
        id=own,
        text=text,
        task=task,
        answer=number_of(where, answer) if task in _JUDGED_BY_NUMBER else answer,
        facts=_facts(where, record.get("facts", ())),
        meta=_meta(where, record.get("meta", {})),
        messages=_messages(where, record.get("messages", ())),
    )


def normalised(number: str) -> str:
    """A number without commas, dollar signs and a full stop at its end."""
    return re.sub(r"\.$", "", re.sub(r"[,$]", "", number))


def number_of(where: str, answer: str) -> str:
    """The number of a worked answer, normalised: what comes after its last ``####``, or all of it.

    Raises:
        InputError: That is no number.
    """
    number = normalised(answer.rpartition("####")[2].strip())
    if _NUMBER.fullmatch(number) is None:
        what = 'after its last "####"' if "####" in answer else "as its answer"
        raise InputError(f"{where} has {shown(number)} {what}: expected a number such as 72 or 1,000; mend it.")
    return number


def _facts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(f'{where}: "facts" is {type(value).__name__}, expected a list of texts; write one.')
    return tuple(map(str, value))


def _meta(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f'{where}: "meta" is {type(value).__name__}, expected an object; write one.')
    until = value.get("until", [])
    if not (isinstance(until, list) and all(isinstance(each, str) and each for each in until)):
        raise InputError(f'{where}: "until" in "meta" must be a list of texts at which a completion is cut; mend it.')
    return value


def _messages(where: str, value: Any) -> tuple[Mapping[str, str], ...]:
    fit = isinstance(value, list | tuple) and all(
        isinstance(each, dict) and isinstance(each.get("role"), str) and isinstance(each.get("content"), str)
        for each in value
    )
    if not fit:
        raise InputError(f'{where}: "messages" must be a list of objects with the texts "role" and "content"; mend it.')
    for each in value:
        check_characters(each["content"], where)
    return tuple(value)
