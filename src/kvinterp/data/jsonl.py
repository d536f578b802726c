"""Reads files of one JSON object a line: prompts, or questions and answers. Errors name the
line.
"""

from __future__ import annotations

import difflib
import json
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from kvinterp.common.files import is_file
from kvinterp.data.example import Example, Prompt
from kvinterp.data.few_shot import FewShot
from kvinterp.errors import InputError, located, shown

log = logging.getLogger("kvinterp")

_NUMBER = re.compile(r"-?(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)")
_JUDGED_BY_NUMBER = ("arithmetic", "gsm8k")


@dataclass(frozen=True)
class Jsonl(FewShot):
    """Prompts of a file, unchanged; those with answers can be worked examples.

    Attributes:
        file: The ``.jsonl`` file.
        shots: How many worked examples come before each.
        train: The file of the worked examples; by default those of the same file that were not
            drawn.
        cut: Off, because the beginning of a next problem is unknown.
    """

    file: str
    _: KW_ONLY
    shots: int = 0
    train: str | None = None
    cut: str = "off"

    def draw(self) -> tuple[list[Example], list[Example]]:
        """Draws from the file or files."""
        questions, train = (
            self._examples(self.file),
            None if self.train is None else self._examples(self.train),
        )
        return self.sampled(questions, train, self.file)

    def _examples(self, file: str) -> list[Example]:
        return [
            Example(prompt, f" {prompt.answer}" if prompt.answer else "")
            for prompt in prompts_of(Path(str(file)))
        ]


def objects_of(path: Path) -> list[tuple[str, dict[str, Any]]]:
    """Reads the objects of a file, each with its file and line for errors.

    Raises:
        InputError: The file does not exist, is no UTF-8, has no line, or a line is no object.
    """
    lines = _lines(path, ".jsonl", 'lines such as {"prompt": "..."}')
    return [(where, _object(where, line)) for where, line in lines]


def _lines(path: Path, suffix: str, expected: str) -> list[tuple[str, str]]:
    """Reads the lines of a file that are not blank, each with its file and line for errors."""
    if not is_file(path):
        raise InputError(
            f"prompt file {str(path)!r} does not exist or is no file: expected the path of a .jsonl or .txt file, a generator "
            "such as arithmetic:20, or a text with a space in it, which is a prompt; check the path."
        )
    name = f"prompt file {path.name!r}"
    if path.suffix.lower() != suffix:
        raise InputError(
            f"{name} ends with {path.suffix!r}: expected .jsonl, one JSON object a line."
        )
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{name} cannot be read ({error}): expected a file of UTF-8 text."
        ) from error
    # Only a line feed ends a line: JSON strings may hold U+2028, which str.splitlines would cut at.
    lines = [
        (f"{name}, line {number}", line)
        for number, line in enumerate(text.split("\n"), 1)
        if line.strip()
    ]
    if not lines:
        raise InputError(f"{name} is empty: expected {expected}; add one.")
    return lines


def _object(where: str, line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise InputError(
            f"{where} is not JSON ({error}): expected one object a line; mend it."
        ) from error
    if not isinstance(record, dict):
        raise InputError(
            f'{where} is JSON but no object: expected {{"prompt": "..."}}; wrap the text so.'
        )
    return record


def own_id(where: str, record: Mapping[str, Any], unless_given: str) -> str:
    """Returns the id of a record as a text.

    Raises:
        InputError: The id is neither a text nor a number.
    """
    value = record.get("id", unless_given)
    if not isinstance(value, str | int | float) or isinstance(value, bool):
        raise InputError(
            f'{where}: "id" is {shown(value)}, expected a text or a number; write one, or leave it out.'
        )
    return str(value)


def prompts_of(path: Path) -> list[Prompt]:
    """Reads the prompts of a file; see :func:`kvinterp.data.load_prompts`. In a ``.txt`` file each
    line is a prompt.
    """
    if path.suffix.lower() == ".txt":
        return [
            Prompt(id=_line_id(where), text=line)
            for where, line in _lines(path, ".txt", "a prompt a line")
        ]
    records = objects_of(path)
    _check_fields(records)
    return [_prompt(where, record) for where, record in records]


def _line_id(where: str) -> str:
    return f"line-{where.rpartition(' ')[2]}"


FIELDS = ("prompt", "text", "id", "task", "answer", "facts", "meta", "messages")
"""The fields of a record that are read."""


def _check_fields(records: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raises InputError for a field whose name nearly is one that is read, and logs the others that
    are not read.
    """
    unread = {
        name: where for where, record in reversed(records) for name in record if name not in FIELDS
    }
    for name, where in unread.items():
        if near := difflib.get_close_matches(name.lower(), FIELDS, n=1, cutoff=0.8):
            raise InputError(f"{where} has the field {shown(name)}, which is not read: did you mean {near[0]!r}? Rename it, or "
                             "leave it out.")  # fmt: skip
    if unread:
        log.warning("of the prompts in %s these fields are not read: %s", records[0][0].partition(",")[0],
                    ", ".join(map(shown, sorted(unread)[:8])))  # fmt: skip


def _prompt(where: str, record: Mapping[str, Any]) -> Prompt:
    if {"prompt", "text"} <= record.keys():
        raise InputError(
            f'{where} has both "prompt" and "text": expected one of the two; leave the other out.'
        )
    text = record.get("prompt", record.get("text"))
    if text is None:
        advice = "a file of questions is given as gsm8k(FILE)" if "question" in record else "add it"
        raise InputError(
            f'{where} has no field "prompt" (fields: {", ".join(record) or "none"}): expected the text there; {advice}.'
        )
    if not isinstance(text, str) or not text.strip():
        raise InputError(
            f"{where} has an empty prompt: expected a text with at least one visible character; write one."
        )
    answer, task = record.get("answer"), str(record.get("task") or "")
    if isinstance(answer, bool | list | dict):
        raise InputError(
            f'{where}: "answer" is {type(answer).__name__}, expected a text or a number; write one.'
        )
    answer = "" if answer is None else str(answer)
    answer = number_of(where, answer) if task in _JUDGED_BY_NUMBER else answer
    more = {name: record[name] for name in ("facts", "messages", "meta") if name in record}
    with located(where):
        return Prompt(own_id(where, record, _line_id(where)), text, task, answer, **more)


def normalised(number: str) -> str:
    """Removes commas, dollar signs and a final full stop from a number."""
    return re.sub(r"\.$", "", re.sub(r"[,$]", "", number))


def number_of(where: str, answer: str) -> str:
    """Returns the number of a worked answer, normalised: the text after its last ``####``, or all
    of it.

    Raises:
        InputError: This text is no number.
    """
    number = normalised(answer.rpartition("####")[2].strip())
    if _NUMBER.fullmatch(number) is None:
        what = 'after its last "####"' if "####" in answer else "as its answer"
        raise InputError(
            f"{where} has {shown(number)} {what}: expected a number such as 72 or 1,000; mend it."
        )
    return number
