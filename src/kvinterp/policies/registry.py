"""Finds every policy in this folder, so that a new one is one new file."""

from __future__ import annotations

import ast
import dataclasses
import importlib
import pkgutil
import re

import kvinterp.policies as folder
from kvinterp.errors import InputError, unknown
from kvinterp.inputs import check_text
from kvinterp.policies.base import Policy

__all__ = ["POLICIES", "policy_named"]


def _discover() -> dict[str, type[Policy]]:
    found: dict[str, type[Policy]] = {}
    for module in pkgutil.iter_modules(folder.__path__):
        if module.name in ("base", "registry"):
            continue
        for value in vars(importlib.import_module(f"{folder.__name__}.{module.name}")).values():
            if isinstance(value, type) and issubclass(value, Policy) and value is not Policy:
                found[value.__name__.lower()] = value
    return found


POLICIES = _discover()


def policy_named(text: str) -> Policy:
    """Builds a policy from its text form, such as ``identity`` or ``name(1,2)``.

    Raises:
        InputError: No policy has that name, or its arguments do not fit its fields.
    """
    text = check_text("policy", text, "'identity', or a Policy")
    match = re.fullmatch(r"\s*(\w+)\s*(?:\((.*)\))?\s*", text)
    if match is None:
        raise InputError(f"policy {text!r} cannot be read: expected a name, or a name with values such as name(1,2).")
    name, given = match.group(1).lower(), match.group(2)
    if name not in POLICIES:
        raise unknown("policy", name, POLICIES)
    try:
        values = ast.literal_eval(f"({given},)") if given else ()
        return POLICIES[name](*values)
    except InputError as error:
        raise InputError(f"policy {text!r}: {error}") from error
    except (SyntaxError, ValueError, TypeError) as error:
        fields = ", ".join(field.name for field in dataclasses.fields(POLICIES[name])) or "no values"
        raise InputError(f"policy {text!r} cannot be built: {name} takes {fields} ({error}).") from error
