"""Faults of named programs: an audit fails each, in its layer, and passes the model without it."""

from __future__ import annotations

import pytest
from plans_planted.everything import FAULTS
from plans_planted.fault import found, placed

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

# None by default: each is two whole audits, and test_programs, test_ways_of_others and the bank plant faults by each use.
pytestmark = pytest.mark.slow


def _case(name):
    return pytest.param(name, marks=[] if name in SAMPLE else pytest.mark.long)


@pytest.mark.bits
@pytest.mark.parametrize("name", map(_case, FAULTS))
def test_a_fault_fails_its_plan_and_nothing_else_does(name):
    fault = FAULTS[name]
    check = found(fault)
    assert check is not None
    assert placed(fault, check), check
