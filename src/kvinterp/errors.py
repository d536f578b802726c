"""One family of errors, each one sentence: what was given, what was expected, what to do.

Inner code raises them with what it knows; the boundary that knows more (model, path, layer, step) adds it once with
:func:`located`. The command line prints the sentence and exits with code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import os
import re
import sys
import traceback
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path


def visible(text: object) -> str:
    r"""Text that is safe on a terminal: control and direction characters are shown as escapes, as in ``\x1b``.

    Names, ids and keys come from files that others wrote; printed as they are, they could move the cursor, recolour what
    follows or retitle the window. Line feeds and tabs stay.
    """
    return "".join(c if c in "\n\t" or not _commands(c) else ascii(c)[1:-1] for c in str(text))


def in_one_line(text: object) -> str:
    r"""A name as sentences and tables show it: :func:`visible`, and a line feed as ``\n``, so that none forges a line."""
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def _commands(character: str) -> bool:
    return not character.isprintable() and unicodedata.category(character) in ("Cc", "Cf", "Cs", "Zl", "Zp")


def shown(value: object) -> str:
    """A value as an error shows it: on one line, its middle left out where it is long, its type where it shows nothing."""
    text = " ".join(_repr(str(value) if isinstance(value, Path) else value).split())
    if " object at 0x" in text or (text.startswith(("<", "tensor(", "array(")) and not isinstance(value, type)):
        kind = type(value).__name__
        article = "an" if kind[0].lower() in "aeiou" or kind == "ndarray" else "a"
        return f"{article} {kind}" + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")
    return text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}"


def _repr(value: object) -> str:
    try:
        return repr(value)
    # Python writes out no number of more than 4,300 digits.
    except ValueError:
        if isinstance(value, int):
            return f"{'-' * (value < 0)}10**{int(value.bit_length() * 0.30103)} or so"
        return f"a {type(value).__name__} that holds a number of thousands of digits"


_LINES, _LONG_WORD, _LONGEST = re.compile(r"\s*\n\s*"), re.compile(r"\S{400,}"), 2000


class KvinterpError(Exception):
    """Base of every error kvinterp raises on purpose; its sentence is safe to print."""

    def __str__(self) -> str:
        # One line, of which whatever was given may fill only a part.
        said = _LONG_WORD.sub(lambda found: f"{found[0][:80]}...{found[0][-30:]}", _LINES.sub(" ", super().__str__()))
        return visible(said if len(said) <= _LONGEST else f"{said[: _LONGEST // 2]} ... {said[-_LONGEST // 2 :]}")


class InputError(KvinterpError, ValueError):
    """What the caller gave cannot be used; the message says what was expected and what to do."""


class UnsupportedError(KvinterpError):
    """This model kind, architecture or attention implementation cannot give what was asked."""


class NonFiniteError(KvinterpError):
    """NaN or Inf appeared; the message names the path, step, layer and site where it appeared first."""


def unexpected(name: str, given: object, expected: str) -> InputError:
    """Builds the error for an argument that is not what it must be.

    Args:
        name: What the caller calls it.
        given: What was given.
        expected: What it must be, as in ``"a whole number of at least 1"``.
    """
    return InputError(f"{name}={shown(given)} was given: expected {expected}.")


def unknown(what: str, given: object, known: Iterable[str], hint: str = "") -> InputError:
    """Builds the error for a name that is not known: the near names first, then all of them.

    Args:
        what: The kind of thing, in the singular, such as ``"site"``.
        given: The name as the caller wrote it.
        known: Every name that would have worked.
        hint: One more sentence on what to do, if there is one.

    Returns:
        The error, to be raised by the caller.
    """
    names = sorted(known)
    text = _repr(given)
    near = difflib.get_close_matches((given if isinstance(given, str) else text)[:80], names, n=3, cutoff=0.5)
    guess = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    return InputError(f"unknown {what} {text}: {guess}known are {', '.join(names)}.{' ' + hint if hint else ''}")


def check_docstrings() -> None:
    """Raises where Python was started without docstrings, which transformers reads when its models are loaded.

    Raises:
        UnsupportedError: As with ``PYTHONOPTIMIZE=2``.
    """
    if sys.flags.optimize > 1:
        raise UnsupportedError(
            "Python was started without docstrings (PYTHONOPTIMIZE=2, or -OO), and transformers loads no model without them: "
            "unset PYTHONOPTIMIZE, or set it to 1."
        )


def check_epoch() -> None:
    """Raises where SOURCE_DATE_EPOCH is no time: numpy reads it as late as a figure is drawn.

    Raises:
        InputError: It is not a whole number of seconds up to the year 9999.
    """
    given = os.environ.get("SOURCE_DATE_EPOCH", "0")
    if not (given.isascii() and given.isdecimal() and len(given) < 13 and int(given) < 253_402_300_800):
        raise unexpected("SOURCE_DATE_EPOCH", given, "a whole number of seconds up to the year 9999, or the variable unset")


def imported_by(error: BaseException) -> str:
    """The library of others that raised while it was imported; empty where none did."""
    frames = traceback.extract_tb(error.__traceback__)
    importing = any(frame.name == "<module>" and _LIBRARIES in frame.filename for frame in frames)
    _, at, behind = (frames[-1].filename if frames else "").rpartition(_LIBRARIES)
    return behind.split(os.sep)[0] if at and importing else ""


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory, or none for another thread."""
    # On a CPU torch raises a plain RuntimeError, and so do others; a library may lack the room to be imported.
    said = ("not enough memory", "DefaultCPUAllocator", "allocate memory", "start new thread", "failed to map segment")
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or any(words in str(error) for words in said)


_LIBRARIES = f"{os.sep}site-packages{os.sep}"


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Adds the place (model, path, layer, step) once to a kvinterp error that passes through."""
    try:
        yield
    except KvinterpError as error:
        raise type(error)(f"{where}: {error}") from error
