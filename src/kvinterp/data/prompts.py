"""Loads prompts from a generator, a file, a text or a list."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvinterp.common.checks import check_whole
from kvinterp.common.files import is_file
from kvinterp.data.example import Prompt
from kvinterp.data.few_shot import FewShot
from kvinterp.data.forms import names_source
from kvinterp.data.jsonl import prompts_of
from kvinterp.data.sources import SOURCES, source_named
from kvinterp.data.tasks import TASKS
from kvinterp.errors import InputError, located, unknown

NATURAL = "natural"
"""The name of the prompts that come with the package: 48, in turn a chat question, an opening of a
book whose copyright has expired, and a word problem behind four worked ones, with its answer."""
_FORMS = (
    "expected a text with a space in it, a generator such as arithmetic:20 (or arithmetic:20:SEED) or natural:48, the path of a "
    ".jsonl or .txt file, or gsm8k(FILE)"
)
_FILES = (".jsonl", ".json", ".txt")
_PATH = re.compile(r"(?:/|\\|~|\.\.?[/\\]|[A-Za-z]:[/\\])[^\n]*")
_NUMBERED = re.compile(r"\s*(\w+)\s*(?::\s*\d+\s*){1,2}")
_CALLED = re.compile(r"\s*(\w+)\s*\(.*\)\s*", re.DOTALL)


def load_prompts(source: Any) -> list[Prompt]:
    """Loads prompts with unique ids.

    Args:
        source: ``"arithmetic:N"``, ``"restate:N"`` or ``"instructions:N"`` for N heldout problems
            (``":SEED"`` may follow; the seed is 0 otherwise); ``"natural:N"``, the first N of 48
            chat questions, book openings and word problems; or a ``.jsonl`` file whose lines are
            objects with ``"prompt"`` (or ``"text"``) and, if wanted, ``"id"``, ``"task"``,
            ``"answer"``, ``"facts"``, ``"meta"`` and ``"messages"``; or a ``.txt`` file, a line a
            prompt; or questions with worked examples before them and a sample of a file, as in
            ``"gsm8k(test.jsonl,count=700)"``, ``"jsonl(mine.jsonl,count=20)"`` or
            ``"arithmetic(20,shots=5)"`` (:mod:`kvinterp.data.sources`); or any other text with a
            space in it, which is one prompt; or a sequence of texts and prompts.

    Raises:
        InputError: If there is nothing to load or something cannot be read; one sentence says what
            and where.
    """
    if isinstance(source, FewShot):
        return _unique(source.prompts(), type(source).__name__)
    if (
        isinstance(source, Mapping)
        or not isinstance(source, str | Path | Iterable)
        or getattr(source, "ndim", 1) == 0
    ):
        raise InputError(
            f"prompts of type {type(source).__name__} were given: {_FORMS}, or a list of texts."
        )
    if isinstance(source, Path):
        return _unique(prompts_of(source), str(source))
    if isinstance(source, str):
        if names_source(source):
            return _unique(source_named(source).prompts(), source)
        if is_file(Path(source)):
            return _unique(prompts_of(Path(source)), source)
        if _is_text(source):
            return [_from_item(0, source)]
        return (
            _unique(prompts_of(Path(source)), source)
            if _looks_like_file(source)
            else [*_generated(source)]
        )
    prompts = [_from_item(index, item) for index, item in enumerate(source)]
    if not prompts:
        raise InputError("the sequence of prompts is empty: expected at least one text; add one.")
    return _unique(prompts, "the sequence of prompts")


def _is_text(source: str) -> bool:
    """Whether a text is itself a prompt, and neither a path nor a (perhaps mistyped) form.

    A text without spaces, of characters of paths and forms, is one of these: ``aritmetic:20``,
    ``data/mine``.
    """
    inner = source.strip()
    if not inner or inner.lower().endswith(_FILES) or _PATH.fullmatch(inner):
        return False
    form = _NUMBERED.fullmatch(inner) or _CALLED.fullmatch(inner)
    if form and difflib.get_close_matches(form[1].lower(), {*TASKS, *SOURCES}, n=1, cutoff=0.7):
        return False
    return re.fullmatch(r"[\w.:~/\\(),=*+-]+", inner, re.ASCII) is None


def _looks_like_file(source: str) -> bool:
    inner = source.strip()
    if inner.split(":", 1)[0] in (*TASKS, NATURAL):
        return False
    return inner.lower().endswith(_FILES) or "/" in inner or "\\" in inner


@functools.lru_cache(maxsize=16)
def _generated(source: str) -> list[Prompt]:
    """The prompts of a generator: the same for the same text, so that a command that asks several
    times makes them once.
    """
    name, *numbers = (part.strip() for part in source.split(":"))
    called, bracket, _ = name.partition("(")
    if bracket and called in SOURCES:
        raise InputError(f"prompts {source!r} cannot be read: the bracket is not closed; {_FORMS}.")
    if bracket or name not in (*TASKS, NATURAL):
        what, known = (
            ("source of prompts", [*SOURCES])
            if bracket
            else ("prompt generator", [*TASKS, NATURAL])
        )
        raise unknown(what, called, known, f"For prompts {_FORMS}.")
    if len(numbers) not in ((0, 1) if name == NATURAL else (1, 2)):
        raise InputError(f"prompts {source!r}: {_FORMS}; write {name}:20.")
    given = zip(("count", "seed"), (1, 0), numbers, strict=False)
    with located(f"prompts {source!r}"):
        counts = {
            what: check_whole(what, int(text) if re.fullmatch("[0-9]{1,19}", text) else text, least)
            for what, least, text in given
        }
        if name != NATURAL:
            return SOURCES[name](**counts, cut="off").prompts()  # type: ignore[arg-type]
        whole = prompts_of(Path(str(files(__package__))) / f"{NATURAL}.jsonl")
        return whole[: check_whole("count", counts.get("count", len(whole)), most=len(whole))]


def _from_item(index: int, item: object) -> Prompt:
    if isinstance(item, Prompt):
        prompt = item
    elif isinstance(item, str):
        prompt = Prompt(id=f"prompt-{index}", text=item)
    else:
        raise InputError(
            f"prompt {index} is {type(item).__name__}: expected a text or a Prompt; convert it first."
        )
    if not prompt.text.strip():
        raise InputError(
            f"prompt {index} has an empty text: expected at least one visible character; write or drop it."
        )
    return prompt


def _unique(prompts: list[Prompt], where: str) -> list[Prompt]:
    numbers: dict[str, int] = {}
    for index, prompt in enumerate(prompts, start=1):
        if prompt.id in numbers:
            raise InputError(
                f"{where}: prompts {numbers[prompt.id]} and {index} share the id {prompt.id!r}, expected every id once; "
                "rename one."
            )
        numbers[prompt.id] = index
    return prompts
