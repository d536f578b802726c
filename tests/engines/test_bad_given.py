"""What is wrong with a file of ``audit --against FILE`` is said in one sentence, with exit code 2, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import kvinterp as kv

MODEL = "zoo:gqa2-mini"
IDS = list(range(5, 60))


def own(**changes: Any) -> bytes:
    return json.dumps({"prompt": IDS[:12], "tokens": IDS[12:], "logprobs": [-2.0] * 43, **changes}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (own(logprobs=[None] * 43), "0 tokens have a log-prob"),
        (own(logprobs=[float("nan")] * 43), "0 tokens have a log-prob"),
        (own(logprobs=[-9999.0] * 43), "0 tokens have a log-prob"),
        (own(logprobs=[0.5] * 43), "values are above 0, which no log-prob is"),
        (own(trainer_logprobs=[3.0] * 43), "values are above 0, which no log-prob is"),
    ],
)
def test_what_holds_no_log_prob_cannot_be_judged(content: bytes, says: str, tmp_path: Path) -> None:
    (file := tmp_path / "given.jsonl").write_bytes(content)
    found = kv.audit(kv.load_model(MODEL, kind="native"), against=file)
    # Both sides of a file are judged: beside a trainer that cannot be, the engine's values are no log-probs of this model's.
    assert found.exit_code == (1 if b"trainer" in content else 3)
    assert says in str(found)


def test_positions_that_are_missing_are_left_out_and_two_sequences_of_one_name_stay_two(tmp_path: Path) -> None:
    first = own(id="a", logprobs=[None, float("nan"), -9999.0, *[-2.0] * 40])
    (file := tmp_path / "given.jsonl").write_bytes(first + b"\n" + own(id="a"))
    found = kv.audit(kv.load_model(MODEL, kind="native"), against=file)
    assert (found.given["tokens"], found.given["sequences"]) == (83, 2)
    assert found.tokens["sequence"].nunique() == 2
