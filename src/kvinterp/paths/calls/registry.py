"""Finds every call plan in this folder, so that a new one is one new file."""

from __future__ import annotations

import kvinterp.paths.calls as folder
from kvinterp import spec
from kvinterp.errors import InputError
from kvinterp.paths.calls.base import Call

CALLS = spec.plugins_of(folder, Call)  # type: ignore[type-abstract]


def call_named(given: object) -> Call | None:
    """Reads a call plan's text form, such as ``padded(left,5)``; None for None.

    Raises:
        InputError: The name is unknown or the values do not fit.
    """
    if given is None or isinstance(given, Call):
        return given
    if not isinstance(given, str):
        raise InputError(
            f"call={given!r} was given: expected a call plan, one of {', '.join(CALLS)}, as in 'padded(left,5)'."
        )
    return spec.read("call plan", given, CALLS, "Values go in brackets, as in padded(left,5).")
