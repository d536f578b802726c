"""The policy that changes nothing: keys and values go in and come out bitwise the same."""

from __future__ import annotations

import dataclasses

from kvinterp.policies.base import Policy


@dataclasses.dataclass(frozen=True)
class Identity(Policy):
    """Changes nothing (docs/laws.md, law 5)."""
