"""Checks single values and lists of them; each error says what was given and what was expected."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, get_args

from kvinterp.errors import InputError, shown, unexpected, unknown

SEEDS = (-(2**63), 2**63 - 1)
"""The smallest and the largest seed: signed numbers of 64 bits, each with its own random
numbers.
"""

MOST = 1_000_000
"""The largest count of anything that an option accepts."""


def whole_number(value: object) -> int | None:
    """The value as an int where it is a whole number of any library's type, but no truth value;
    else None.
    """
    if isinstance(value, bool):
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_whole(
    name: str, value: object, least: int = 1, most: int | None = None, hint: str = ""
) -> int:
    """Checks that a value is a whole number in a range, and returns it as an int.

    Args:
        name: The caller's name for it.
        value: The value.
        least: The smallest allowed number.
        most: The largest allowed number, if there is one.
        hint: What else is allowed, as in ``", or None for all"``.

    Raises:
        InputError: It is something else.
    """
    number = whole_number(value)
    if number is None or number < least or (most is not None and number > most):
        span = f"of at least {least}" if most is None else f"from {least} to {most}"
        raise unexpected(name, value, f"a whole number {span}{hint}")
    return number


def check_number(name: str, value: object, hint: str = "") -> float:
    """Checks that a value is a finite number of any library's type, and returns it as a float.

    Raises:
        InputError: It is something else.
    """
    number = value if isinstance(value, float) else whole_number(value)
    if number is None or not -1e300 < number < 1e300:
        raise unexpected(name, value, f"a finite number{hint}")
    return float(number)


def check_seed(seed: object) -> int:
    """Checks that a seed is a whole number of 64 bits: a longer one would be cut, and have the
    random numbers of another.

    Raises:
        InputError: It is something else.
    """
    number = whole_number(seed)
    if number is None or not SEEDS[0] <= number <= SEEDS[1]:
        raise unexpected("seed", seed, "a whole number from -2**63 to 2**63 - 1")
    return number


def check_choice(name: str, value: object, choices: Any) -> None:
    """Raises InputError where a value is not one of a few words: some texts, or a type of
    :mod:`kvinterp.common.words`.
    """
    words = list(get_args(choices) or choices)
    if not isinstance(value, str) or value not in words:
        raise unexpected(name, value, " or ".join(map(repr, words)))


def check_known(what: str, value: object, names: Iterable[str]) -> None:
    """Raises InputError, with the near names, where a value is not one of many names."""
    names = list(names)
    if not isinstance(value, str) or value not in names:
        raise unknown(what, value, names)


def check_text(name: str, value: object, example: str) -> str:
    """Checks that a value is a text, and returns it.

    Raises:
        InputError: It is something else.
    """
    check_instance(name, value, str, f"a text, as in {example}")
    return str(value)


def check_instance(name: str, value: object, kind: type | tuple[type, ...], expected: str) -> None:
    """Raises InputError where a value is of none of these types."""
    if not isinstance(value, kind):
        raise unexpected(name, value, expected)


def check_unread(name: str, value: object, default: object, why: str) -> None:
    """Raises where a choice has no effect here: its user would believe that it has one.

    Args:
        name: The caller's name for it.
        value: The choice.
        default: Its value where the user made no choice, which is allowed.
        why: Why it has no effect, and what to do.

    Raises:
        InputError: It is not the default.
    """
    if value is not default and (type(value) is not type(default) or value != default):
        raise InputError(f"{name}={shown(value)} was given, and nothing reads it: {why}.")


def check_callable(name: str, value: Callable[..., Any] | None) -> None:
    """Raises InputError where a value is neither None nor a function."""
    if value is not None and not callable(value):
        raise unexpected(name, value, "a function, or None")


def given_list(name: str, values: object, expected: str) -> list[Any]:
    """Makes a list of the elements of a value; a text does not count as a list.

    Raises:
        InputError: It has no elements.
    """
    if isinstance(values, str | bytes):
        raise unexpected(name, values, expected)
    try:
        return list(values)  # type: ignore[call-overload,no-any-return]
    except TypeError as error:
        raise unexpected(name, values, expected) from error


def among(name: str, values: object, allowed: Iterable[int]) -> list[int]:
    """Checks that the elements of a value are among some numbers, and returns a list of ints.

    Args:
        name: The caller's name for them.
        values: The value.
        allowed: The numbers that are allowed.

    Raises:
        InputError: An element is none of these, or there are no elements.
    """
    allowed = list(allowed)
    expected = f"a list of at least one of the numbers {shown(allowed)}"
    numbers = [whole_number(item) for item in given_list(name, values, expected)]
    if not numbers or not set(numbers) <= set(allowed):
        raise unexpected(name, values, expected)
    return [number for number in numbers if number is not None]
