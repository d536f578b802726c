"""KVBugBench: what is counted, what is drawn and held out, and detectors that find what they should and cry at nothing."""

from __future__ import annotations

import pytest
from bank.detectors import DETECTORS
from bank.subjects import subjects
from bugbench import CLEAN, tried


def test_the_bank_is_found_by_itself_and_names_each_subject_once():
    found = subjects()
    kinds = {one.kind.partition(":")[0] for one in found.values()}
    assert {"cache", "blocks", "paths", "forms", "call", CLEAN} <= kinds
    assert sum(one.kind != CLEAN for one in found.values()) >= 90
    assert sum(one.kind == CLEAN for one in found.values()) >= 110
    assert {
        "audit",
        "audit-calls",
        "transformers-tests",
        "allclose-default",
        "allclose-assert",
        "allclose-loose",
        "top1",
    } <= set(DETECTORS)


@pytest.mark.slow
def test_the_audit_as_a_detector_names_the_place():
    for subject, alarm, placed in (
        ("stale-slot", "yes", "yes"),
        ("clean: gpt2-one-layer", "no", ""),
        ("call: beams of which one tensor moves", "yes", ""),
    ):
        row = tried("audit", subject)
        assert (row["alarm"], row["placed"]) == (alarm, placed), row["said"]


def test_what_is_planted_outside_a_model_is_taken_out_again():
    from transformers import DynamicCache

    before = DynamicCache.crop
    tried("allclose-assert", "call: a crop that leaves rows")
    assert DynamicCache.crop is before
