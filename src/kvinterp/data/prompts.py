"""Prompts from a generator, a file or a list: the one door through which text comes in."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvinterp.data.example import Prompt
from kvinterp.data.tasks import TASKS
from kvinterp.errors import InputError, unknown
from kvinterp.files import is_file

__all__ = ["Prompt", "check_characters", "load_prompts"]

_FORMS = "expected a generator such as arithmetic:20 (or arithmetic:20:SEED) or the path of a .jsonl file"


def load_prompts(source: Any) -> list[Prompt]:
    """Loads prompts, each with an id of its own.

    Args:
        source: ``"arithmetic:N"``, ``"restate:N"`` or ``"instructions:N"`` for N heldout problems (``":SEED"`` may
            follow; the seed is 0 otherwise); or a ``.jsonl`` file whose lines are objects with ``"prompt"`` (or
            ``"text"``) and, if wanted, ``"id"``, ``"task"``, ``"answer"``, ``"facts"`` and ``"meta"``; or a sequence
            of texts and prompts.

    Raises:
        InputError: If there is nothing to load or something cannot be read; one sentence says what and where.
    """
    if isinstance(source, Mapping) or not isinstance(source, str | Path | Iterable) or getattr(source, "ndim", 1) == 0:
        raise InputError(f"prompts of type {type(source).__name__} were given: {_FORMS}, or a list of texts.")
    if isinstance(source, Path):
        return _unique(_from_file(source), str(source))
    if isinstance(source, str):
        if _looks_like_file(source):
            return _unique(_from_file(Path(source)), source)
        return _generated(source)
    prompts = [_from_item(index, item) for index, item in enumerate(source)]
    if not prompts:
        raise InputError("the sequence of prompts is empty: expected at least one text; add one.")
    return _unique(prompts, "the sequence of prompts")


def _looks_like_file(source: str) -> bool:
    head = source.split(":", 1)[0]
    if head in TASKS:
        return False
    return source.endswith((".jsonl", ".json", ".txt")) or "/" in source or "\\" in source or is_file(Path(source))


def _generated(source: str) -> list[Prompt]:
    name, *numbers = source.strip().split(":")
    if name not in TASKS:
        raise unknown("prompt generator", name, TASKS, f"For prompts {_FORMS}.")
    if len(numbers) not in (1, 2):
        raise InputError(f"prompts {source!r}: {_FORMS}; write {name}:20.")
    count = _number(source, "count", numbers[0], least=1)
    seed = _number(source, "seed", numbers[1], least=0) if len(numbers) == 2 else 0
    examples = TASKS[name].generate(count, seed, "heldout")
    return [replace(example.prompt, id=f"{name}-{seed}-{index}") for index, example in enumerate(examples)]


def _number(source: str, what: str, text: str, least: int) -> int:
    kind = "a positive integer" if least == 1 else "an integer of at least 0"
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) >= least):
        raise InputError(f"prompts {source!r}: the {what} is {text!r}, expected {kind}; write for example arithmetic:20.")
    if what == "count" and int(text) > MOST:
        raise InputError(
            f"prompts {source!r}: {int(text):,} problems were asked for, expected at most {MOST:,}; ask for fewer."
        )
    return int(text)


MOST = 1_000_000
"""More problems than any generator has different ones."""


def check_characters(text: str, where: str) -> None:
    """Raises where a text holds half of a character, which no tokenizer and no file takes.

    Args:
        text: The text.
        where: What it is, for the message.

    Raises:
        InputError: It holds a lone surrogate.
    """
    wrong = next((character for character in text if "\ud800" <= character <= "\udfff"), None)
    if wrong is not None:
        raise InputError(
            f"{where} holds the lone surrogate {ascii(wrong)[1:-1]}, which is no character: replace it or save the text anew."
        )


def _from_item(index: int, item: object) -> Prompt:
    if isinstance(item, Prompt):
        prompt = item
    elif isinstance(item, str):
        prompt = Prompt(id=f"prompt-{index}", text=item)
    else:
        raise InputError(f"prompt {index} is {type(item).__name__}: expected a text or a Prompt; convert it first.")
    if not prompt.text.strip():
        raise InputError(f"prompt {index} has an empty text: expected at least one visible character; write or drop it.")
    check_characters(prompt.id + prompt.text, f"prompt {index}")
    return prompt


def _from_file(path: Path) -> list[Prompt]:
    if not is_file(path):
        raise InputError(f"prompt file {str(path)!r} does not exist or is no file: {_FORMS}; check the path.")
    if path.suffix != ".jsonl":
        raise InputError(f"prompt file {path.name!r} ends with {path.suffix!r}: expected .jsonl, one JSON object a line.")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"prompt file {path.name!r} is not UTF-8 text (byte {error.start}): save it as UTF-8 and try again."
        ) from error
    # Only a line feed ends a line: JSON strings may hold U+2028, which str.splitlines would cut at.
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    if not lines:
        raise InputError(f'prompt file {path.name!r} is empty: expected lines such as {{"prompt": "..."}}; add one.')
    return [_from_line(path.name, number, line) for number, line in lines]


def _from_line(file: str, number: int, line: str) -> Prompt:
    where = f"prompt file {file!r}, line {number}"
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON ({error.msg}, column {error.colno}): expected one object a line; mend it."
        ) from error
    except (RecursionError, ValueError) as error:
        raise InputError(f"{where} is nested too deeply or holds a number too long to read: mend it.") from error
    if not isinstance(record, dict):
        raise InputError(f'{where} is JSON but no object: expected {{"prompt": "..."}}; wrap the text so.')
    text = record.get("prompt", record.get("text"))
    if text is None:
        given = ", ".join(map(str, record)) or "none"
        raise InputError(f'{where} has no field "prompt" (fields: {given}): expected the text there; add it.')
    if not isinstance(text, str) or not text.strip():
        raise InputError(f"{where} has an empty prompt: expected a text with at least one visible character; write one.")
    check_characters(f"{record.get('id', '')}{text}", where)
    task = str(record.get("task") or "")
    return Prompt(
        id=str(record.get("id", f"line-{number}")),
        text=text,
        task=task,
        answer=str(record.get("answer", "")),
        facts=_facts(where, record.get("facts", ())),
        meta=_meta(where, record.get("meta", {})),
    )


def _facts(where: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list | tuple):
        raise InputError(f'{where}: "facts" is {type(value).__name__}, expected a list of texts; write one.')
    return tuple(map(str, value))


def _meta(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f'{where}: "meta" is {type(value).__name__}, expected an object; write one.')
    return value


def _unique(prompts: list[Prompt], where: str) -> list[Prompt]:
    seen: dict[str, int] = {}
    for index, prompt in enumerate(prompts, start=1):
        if prompt.id in seen:
            raise InputError(
                f"{where}: prompts {seen[prompt.id]} and {index} share the id {prompt.id!r}, expected every id once; "
                "rename one."
            )
        seen[prompt.id] = index
    return prompts
