"""One family of errors, each one sentence: what was given, what was expected, what to do.

Inner code raises them with what it knows; the boundary that knows more (model, path, layer, step)
adds it once with :func:`located`. The command line prints the sentence and exits with code 2.
"""

from __future__ import annotations

import contextlib
import difflib
import unicodedata
from collections.abc import Iterable, Iterator
from pathlib import Path


def visible(text: object) -> str:
    r"""Text that is safe on a terminal: control and direction characters are shown as escapes, as
    in ``\x1b``.

    Names, ids and keys come from files that others wrote; printed as they are, they could move the
    cursor, recolour what follows or retitle the window. Line feeds and tabs stay.
    """
    given = str(text)
    # Nearly all that is said is plain, and it is said hundreds of thousands of times.
    if given.replace("\n", "").replace("\t", "").isprintable():
        return given
    return "".join(c if c in "\n\t" or not _commands(c) else ascii(c)[1:-1] for c in given)


def in_one_line(text: object) -> str:
    r"""A name as sentences and tables show it: :func:`visible`, and a line feed as ``\n``, so that
    none forges a line.
    """
    return visible(text).replace("\n", r"\n").replace("\t", r"\t")


def _commands(character: str) -> bool:
    return not character.isprintable() and unicodedata.category(character) in (
        "Cc",
        "Cf",
        "Cs",
        "Zl",
        "Zp",
    )


def shown(value: object) -> str:
    """A value as an error shows it: on one line, its middle left out where it is long, its type
    where it shows nothing.
    """
    text = " ".join(repr(str(value) if isinstance(value, Path) else value).split())
    if " object at 0x" in text or (
        text.startswith(("<", "tensor(", "array(")) and not isinstance(value, type)
    ):
        kind = type(value).__name__
        article = "an" if kind[0].lower() in "aeiou" or kind == "ndarray" else "a"
        return f"{article} {kind}" + (
            f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else ""
        )
    return text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}"


_LONGEST = 2000


class KvinterpError(Exception):
    """Base of every error kvinterp raises on purpose; its sentence is safe to print."""

    def __str__(self) -> str:
        said = " ".join(super().__str__().split("\n"))
        return visible(
            said
            if len(said) <= _LONGEST
            else f"{said[: _LONGEST // 2]} ... {said[-_LONGEST // 2 :]}"
        )


class InputError(KvinterpError, ValueError):
    """What the caller gave cannot be used; the message says what was expected and what to do."""


class UnsupportedError(KvinterpError):
    """This model kind, architecture or attention implementation cannot give what was asked."""


class NonFiniteError(KvinterpError):
    """NaN or Inf appeared; the message names the path, step, layer and site where it appeared
    first.
    """


class CacheNotReadWarning(UserWarning):
    """A model decodes from a cache whose rows its attention does not read."""


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
    text = shown(given)
    near = difflib.get_close_matches(
        given[:80] if isinstance(given, str) else text, names, n=3, cutoff=0.5
    )
    guess = f"did you mean {' or '.join(repr(name) for name in near)}? " if near else ""
    return InputError(
        f"unknown {what} {text}: {guess}known are {', '.join(names)}.{' ' + hint if hint else ''}"
    )


def out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is too little memory, or none for another thread."""
    # On a CPU torch raises a plain RuntimeError, and so do others; a library may lack the room to
    # be imported.
    said = (
        "not enough memory",
        "DefaultCPUAllocator",
        "allocate memory",
        "start new thread",
        "failed to map segment",
    )
    kinds = {kind.__name__ for kind in type(error).__mro__}
    return bool(kinds & {"MemoryError", "OutOfMemoryError"}) or any(
        words in str(error) for words in said
    )


@contextlib.contextmanager
def located(where: str) -> Iterator[None]:
    """Adds the place (model, path, layer, step) once to a kvinterp error that passes through."""
    try:
        yield
    except KvinterpError as error:
        raise type(error)(f"{where}: {error}") from error


def reason(error: BaseException) -> str:
    """What an error of another library says, in one line of at most 240 characters."""
    said = " ".join(str(error).split())
    if (
        isinstance(
            error, KeyError | IndexError | AssertionError | ZeroDivisionError | StopIteration
        )
        or not said
    ):
        said = f"{type(error).__name__} {said}".strip()
    return said if len(said) <= 240 else said[:237].rstrip() + "..."


def named(error: BaseException) -> str:
    """An error's kind and what it says, to be quoted."""
    kind, said = type(error).__name__, " ".join(reason(error).split())[:300].rstrip(". ")
    return said if said.startswith(kind) else f"{kind}: {said}"
