"""Whether a single value, or a list of them, is what it must be: each sentence says what was given and what was expected."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable
from typing import Any, get_args

from kvinterp.errors import InputError, shown, unexpected, unknown

SEEDS = (-(2**63), 2**63 - 1)
"""The seeds there are, each with random numbers of its own: those of 64 bits with a sign."""

MOST = 1_000_000
"""The largest count there is, of anything and of what is run in all."""


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
        raise unexpected(name, value, f"a whole number {span}{hint}")
    return number


def check_number(name: str, value: object, hint: str = "") -> float:
    """The value as a float, where it is a finite number of any library's type.

    Raises:
        InputError: It is something else.
    """
    number = value if isinstance(value, float) else whole_number(value)
    if number is None or not -1e300 < number < 1e300 or math.isnan(number):
        raise unexpected(name, value, f"a finite number{hint}")
    return float(number)


def check_seed(seed: object) -> int:
    """The seed, where it is a whole number of 64 bits: a longer one would be cut, and share another's random numbers.

    Raises:
        InputError: It is something else.
    """
    number = whole_number(seed)
    if number is None or not SEEDS[0] <= number <= SEEDS[1]:
        raise unexpected("seed", seed, "a whole number from -2**63 to 2**63 - 1")
    return number


def check_choice(name: str, given: object, known: Any) -> None:
    """Raises InputError where ``given`` is not one of the known words: some texts, or a type of :mod:`kvinterp.common.words`."""
    words = list(get_args(known) or known)
    if not isinstance(given, str) or given not in words:
        raise unexpected(name, given, " or ".join(map(repr, words)))


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
    check_instance(name, given, str, f"a text, as in {example}")
    return str(given)


def check_instance(name: str, given: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises InputError where a value is of none of these types."""
    if not isinstance(given, kind):
        raise unexpected(name, given, expected)


def check_unread(name: str, given: object, default: object, why: str) -> None:
    """Raises where a choice was given that nothing reads here: what is given and not used would be believed to be used.

    Args:
        name: What the caller calls it.
        given: What was given.
        default: What it is where nothing was given, which is nothing to refuse.
        why: Why nothing reads it, and what to do.

    Raises:
        InputError: It is not the default.
    """
    if given is not default and (type(given) is not type(default) or given != default):
        raise InputError(f"{name}={shown(given)} was given, and nothing reads it: {why}.")


def check_callable(name: str, given: Callable[..., Any] | None) -> None:
    """Raises InputError where what shall be called cannot be."""
    if given is not None and not callable(given):
        raise unexpected(name, given, "a function, or None")


def given_list(name: str, values: object, expected: str) -> list[Any]:
    """What was given as a list of its elements; a text is none.

    Raises:
        InputError: It has no elements.
    """
    if isinstance(values, str | bytes):
        raise unexpected(name, values, expected)
    try:
        return list(values)  # type: ignore[call-overload,no-any-return]
    except TypeError as error:
        raise unexpected(name, values, expected) from error


def whole_numbers(name: str, values: object, expected: str, least: int = 0, most: int = SEEDS[1]) -> list[int]:
    """What was given as a list of ints, where each is a whole number of this range.

    Raises:
        InputError: It is no list, or one of them is something else.
    """
    given = given_list(name, values, expected)
    kept = [number for value in given if (number := whole_number(value)) is not None and least <= number <= most]
    if len(kept) != len(given):
        raise unexpected(name, values, expected)
    return kept


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
    wanted = whole_numbers(name, given, expected)
    if not wanted or not set(wanted) <= set(numbers):
        raise unexpected(name, given, expected)
    return wanted
