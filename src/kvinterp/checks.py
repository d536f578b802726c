"""What is given to a verb, looked at before anything runs: one check a kind of value, and one way of showing it."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Hashable, Iterable
from pathlib import Path
from typing import Any

from kvinterp.errors import InputError, unknown

__all__ = [
    "SEEDS",
    "among",
    "check_callable",
    "check_choice",
    "check_instance",
    "check_known",
    "check_number",
    "check_seed",
    "check_text",
    "check_whole",
    "given_list",
    "is_among",
    "is_file",
    "shown",
    "whole_number",
]

SEEDS = (-(2**63), 2**63 - 1)
"""The seeds there are, each with random numbers of its own: those of 64 bits with a sign."""


def shown(value: object) -> str:
    """A value as an error shows it: on one line, its middle left out where it is long, its type where it shows nothing."""
    text = " ".join(repr(str(value) if isinstance(value, Path) else value).split())
    if " object at 0x" in text or (text.startswith(("<", "tensor(", "array(")) and not isinstance(value, type)):
        kind = type(value).__name__
        article = "an" if kind[0].lower() in "aeiou" or kind == "ndarray" else "a"
        return f"{article} {kind}" + (f" of shape {tuple(value.shape)}" if hasattr(value, "shape") else "")
    return text if len(text) <= 120 else f"{text[:80]}...{text[-30:]}"


def whole_number(value: object) -> int | None:
    """The value as an int where it is a whole number of any library's type, else None; truth values are none."""
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_whole(name: str, value: object, least: int = 1, most: int | None = None, hint: str = "") -> int:
    """The value as an int, where it is a whole number of this range.

    Args:
        name: What the caller calls it.
        value: What was given.
        least: The smallest there is.
        most: The largest there is, if there is one.
        hint: What else would do, as in ``", or None for all"``.

    Raises:
        InputError: It is something else.
    """
    number = whole_number(value)
    if number is None or number < least or (most is not None and number > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise InputError(f"{name}={shown(value)} was given: expected a whole number {span}{hint}.")
    return number


def check_number(name: str, value: object, hint: str = "") -> float:
    """The value as a float, where it is a finite number of any library's type.

    Raises:
        InputError: It is something else.
    """
    number = value if isinstance(value, float) else whole_number(value)
    if number is None or not -1e300 < number < 1e300 or math.isnan(number):
        raise InputError(f"{name}={shown(value)} was given: expected a finite number{hint}.")
    return float(number)


def check_seed(seed: object) -> int:
    """The seed, where it is a whole number of 64 bits: a longer one would be cut, and share another's random numbers.

    Raises:
        InputError: It is something else.
    """
    number = whole_number(seed)
    if number is None or not SEEDS[0] <= number <= SEEDS[1]:
        raise InputError(f"seed={shown(seed)} was given: expected a whole number from -2**63 to 2**63 - 1.")
    return number


def is_among(given: object, known: Iterable[Any]) -> bool:
    """Whether a value is one of those known, whatever type it has."""
    return isinstance(given, Hashable) and _hashes(given) and given in set(known)


def _hashes(value: Hashable) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def check_choice(name: str, given: object, known: Iterable[str]) -> None:
    """Raises InputError where ``given`` is not one of the known words."""
    words = list(known)
    if not isinstance(given, str) or given not in words:
        raise InputError(f"{name}={shown(given)} was given: expected {' or '.join(map(repr, words))}.")


def check_known(what: str, given: object, known: Iterable[str], hint: str = "") -> None:
    """Raises InputError, with the near names, where ``given`` is not one of many names."""
    names = list(known)
    if not isinstance(given, str) or given not in names:
        raise unknown(what, given, names, hint)


def check_text(name: str, given: object, example: str) -> str:
    """The value, where it is a text.

    Raises:
        InputError: It is something else.
    """
    if not isinstance(given, str):
        raise InputError(f"{name}={shown(given)} was given: expected a text, as in {example}.")
    return given


def check_instance(name: str, given: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises InputError where a value is of none of these types."""
    if not isinstance(given, kind):
        raise InputError(f"{name}={shown(given)} was given: expected {expected}.")


def check_callable(name: str, given: Callable[..., Any] | None) -> None:
    """Raises InputError where what shall be called cannot be."""
    if given is not None and not callable(given):
        raise InputError(f"{name}={shown(given)} was given: expected a function, or None.")


def is_file(path: Path) -> bool:
    """Whether a file is there; no for what no file can be called."""
    try:
        return path.is_file()
    # Longer than a name can be, or with a character that no name can have.
    except (OSError, ValueError):
        return False


def given_list(name: str, values: object, expected: str) -> list[Any]:
    """What was given as a list of its elements; a text is none.

    Raises:
        InputError: It has no elements.
    """
    if not isinstance(values, str | bytes):
        try:
            return list(values)  # type: ignore[call-overload,no-any-return]
        except TypeError:
            pass
    raise InputError(f"{name}={shown(values)} was given: expected {expected}.")


def among(name: str, given: object, known: Iterable[int]) -> list[int]:
    """The whole numbers given, where each is one of those known.

    Args:
        name: What the caller calls them.
        given: What was given.
        known: The numbers there are.

    Raises:
        InputError: One is none of them, or there are none.
    """
    numbers = list(known)
    expected = f"a list of at least one of the numbers {shown(numbers)}"
    wanted = [whole_number(value) for value in given_list(name, given, expected)]
    if not wanted or not set(wanted) <= set(numbers):
        raise InputError(f"{name}={shown(given)} was given: expected {expected}.")
    return [number for number in wanted if number is not None]
