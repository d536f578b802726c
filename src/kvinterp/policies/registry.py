"""Finds every policy in this folder, so that a new one is one new file."""

from __future__ import annotations

import kvinterp.policies as folder
from kvinterp.common import spec
from kvinterp.common.checks import check_text
from kvinterp.policies.base import ComposedPolicy, Policy

POLICIES = spec.Plugins(folder, Policy)


def policy_named(text: str) -> Policy:
    """Builds a policy from its text form, such as ``identity`` or ``name(1,2)``; from ``a+b`` it
    builds a :class:`ComposedPolicy`.

    Raises:
        InputError: No policy has that name, or its arguments do not fit its fields.
    """
    parts = spec.split(check_text("policy", text, "'identity', or a Policy"), "+") or [text]
    policies = [
        spec.read("policy", part, POLICIES, "Values go in brackets, as in name(1,2).")
        for part in parts
    ]
    return policies[0] if len(policies) == 1 else ComposedPolicy(tuple(policies))
