"""Faults of named programs: an audit fails each, in its layer, and passes the model without it."""

from __future__ import annotations

import pytest

from plans_planted.everything import FAULTS
from plans_planted.fault import NOT_RIGHT, checked

SAMPLE = (
    "positions count the pads: gpt2",
    "a mask of pads takes the place of the causal one",
    "a stale prefix after an update of one layer's values",
    "of beams the keys alone move",
    "the first rows are kept, whichever were chosen",
    "a cache that becomes float32 when a request joins",
    "a router computed from padded rows",
    "accepted drafts are written in each other's place",
    "generate() numbers what it decodes one too late",
    "room of a static cache that nobody cleared",
)
"""What the audit once missed, and one of each family."""


def _case(name):
    return pytest.param(name, marks=pytest.mark.slow if name in SAMPLE else pytest.mark.long)


@pytest.mark.bits
@pytest.mark.parametrize("name", map(_case, FAULTS))
def test_a_fault_fails_its_plan_and_nothing_else_does(name):
    fault = FAULTS[name]
    assert checked(fault.build(), fault.plan).status == "right"
    found = checked(fault.plant(fault.build()), fault.plan)
    # What is planted in every forward is no fault of the cache's, and is said to be off without one.
    assert found.status in NOT_RIGHT, found.detail
    # Where the forward without a cache is what is off, no place is looked for.
    plain = found.status != "wrong" or "without a cache the same columns are off" in found.detail
    assert plain or fault.layer is None or found.layer == fault.layer
