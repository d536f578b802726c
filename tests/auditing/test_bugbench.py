"""KVBugBench: what is counted, what is drawn and held out, and detectors that find what they should and cry at nothing."""

from __future__ import annotations

import bugbench
import pandas as pd
import pytest
from bank.detector import Detector, Found
from bank.detectors import DETECTORS
from bank.subjects import subjects
from bugbench import CLEAN, held_out, scores_of, share, tried


def cases(*rows):
    names = ["detector", "kind", "split", "alarm", "layer", "tensor", "placed"]
    return pd.DataFrame(rows, columns=names).astype({"layer": "Int64"})


def test_scores_count_bugs_false_alarms_and_places():
    found = scores_of(
        cases(
            ("a", "cache: K", "shown", "yes", 1, "K", "yes"),
            ("a", "cache: K", "shown", "yes", 0, "V", "no"),
            ("a", "call: beams", "held out", "yes", None, "", ""),
            ("a", "call: beams", "held out", "cannot tell", None, "", "no"),
            ("a", CLEAN, CLEAN, "yes", None, "", ""),
            ("a", CLEAN, CLEAN, "no", None, "", ""),
            ("b", CLEAN, CLEAN, "no", None, "", ""),
        )
    ).set_index(["detector", "split"])
    whole = found.loc[("a", "all")]
    assert (whole["found"], whole["bugs"], whole["false_alarms"], whole["clean"]) == (3, 4, 1, 2)
    assert (whole["placed"], whole["placeable"], whole["cannot_tell"]) == (1, 2, 1)
    assert (found.loc[("a", "held out")]["found"], found.loc[("a", "held out")]["bugs"]) == (1, 2)
    assert not found.loc[("b", "all")]["names_places"]


def test_an_interval_is_exact():
    """Of 0 of 10 the upper end is 1 - 0.025 ** 0.1, which is 30.8%."""
    assert share(0, 10) == "0 of 10 (0.0% to 30.8%)"


def test_half_of_the_kinds_are_held_out_by_the_seed():
    kinds = {one.kind for one in subjects().values()} - {CLEAN}
    assert len(held_out(0)) == len(kinds) // 2
    assert held_out(0) == held_out(0)
    assert held_out(0) != held_out(1)
    assert held_out(0) < kinds


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


@pytest.mark.parametrize(
    ("detector", "subject", "alarm"),
    [
        ("allclose-assert", "stale-slot", "yes"),
        ("allclose-loose", "keys-two-percent-float32-only", "yes"),
        ("allclose-loose", "clean: llama-eager", "no"),
        ("top1", "logits-shifted-by-a-token-id", "yes"),
        ("top1", "clean: gpt2", "no"),
        ("transformers-tests", "stale-slot", "yes"),
        ("transformers-tests", "clean: llama", "no"),
        # Nothing of a reordered cache is asked by plain decoding.
        ("allclose-assert", "values-not-reordered", "no"),
    ],
)
def test_detectors_see_what_they_look_at_and_nothing_else(detector, subject, alarm):
    row = tried(detector, subject)
    assert row["alarm"] == alarm, row["said"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("detector", "subject", "alarm", "placed"),
    [
        ("audit", "stale-slot", "yes", "yes"),
        ("audit", "clean: gpt2-one-layer", "no", ""),
        ("audit", "call: beams of which one tensor moves", "yes", ""),
    ],
)
def test_the_audit_as_a_detector_names_the_place(detector, subject, alarm, placed):
    row = tried(detector, subject)
    assert (row["alarm"], row["placed"]) == (alarm, placed), row["said"]


def test_what_is_planted_outside_a_model_is_taken_out_again():
    from transformers import DynamicCache

    before = DynamicCache.crop
    tried("allclose-assert", "call: a crop that leaves rows")
    assert DynamicCache.crop is before


def test_a_model_that_a_bug_breaks_is_seen(monkeypatch):
    def breaks(subject, model):
        raise RuntimeError("shapes do not fit")

    monkeypatch.setitem(DETECTORS, "breaks", Detector("breaks", "", breaks))
    row = tried("breaks", "stale-slot")
    assert (row["alarm"], row["said"]) == ("yes", "it raised RuntimeError: shapes do not fit")


def test_a_run_prints_its_split_and_keeps_every_verdict(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(DETECTORS, "always", Detector("always", "", lambda subject, model: Found("yes", "so", 1, "K")))
    line = ["bugbench.py", "--detector", "always", "--most", "3", "--out", str(tmp_path)]
    monkeypatch.setattr("sys.argv", line)
    bugbench.main()
    assert len(pd.read_csv(tmp_path / "cases.csv")) == 6
    said = capsys.readouterr().out
    assert "always, all: found 3 of 3 (29.2% to 100.0%), false alarms 3 of 3" in said
    assert "Kinds shown: " in said
    assert "Kinds held out: " in said


@pytest.mark.parametrize(
    "options", [["--detector", "audits"], ["--only", "no such thing"], ["--most", "0"], ["--seed", "x"]]
)
def test_bad_input_is_refused(options, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["bugbench.py", *options])
    with pytest.raises(SystemExit) as left:
        bugbench.main()
    assert left.value.code == 2
    assert "error: " in capsys.readouterr().err
