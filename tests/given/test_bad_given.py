"""What is wrong with a file of ``compare --b 'given(FILE)'`` is said in one sentence, with exit code 2, and nothing is written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from command_line import kvinterp, wrong

MODEL = "zoo:gqa2-mini"
IDS = list(range(5, 60))


def own(**changes: Any) -> bytes:
    return json.dumps({"prompt": IDS[:12], "tokens": IDS[12:], "logprobs": [-2.0] * 43, **changes}).encode()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (own(tokens=[*IDS[12:54], 151_643]), "has the token 151643, and zoo:gqa2-mini has"),
        (own(tokens=IDS[12:] * 60, logprobs=[-2.0] * 43 * 60), "and the context of zoo:gqa2-mini"),
        (own(logprobs=[None] * 43), "no log-prob of a token that ours can be beside"),
        (own(logprobs=[float("nan")] * 43), "no log-prob of a token that ours can be beside"),
        (own(logprobs=[-9999.0] * 43), "no log-prob of a token that ours can be beside"),
        (own(logprobs=[0.5] * 43), "values are above 0, which no log-prob is"),
        (own(logprobs=[float("inf")] * 43), "for a log-prob"),
        (own(logprobs=[-2.0]), "expected one for each"),
        (own(trainer_logprobs=[3.0] * 43), "values are above 0, which no log-prob is"),
        (own(top=[[[10**30, -1.0]], *[None] * 42]), "expected a list of token ids"),
        (own(top=[[[n, -6.0] for n in range(1, 513)], *[None] * 42]), "has the token 512, and zoo:gqa2-mini has"),
        (own(routed_experts=[[[0, 1]]] * 55), "has experts, and zoo:gqa2-mini has no router"),
        (own(routed_experts=[[[0, 1]]] * 3), "has the experts of 3 positions"),
        (own()[:60], "is not JSON"),
        (b"", "is empty"),
        (bytes(range(256)), "is not UTF-8 text"),
        (b"<html>busy</html>", "is not JSON"),
        (b"\x1f\x8b\x08", "is compressed (gzip)"),
        (b"\x80\x04\x95.", "is a pickle or an archive"),
        (None, "does not exist or is no file"),
    ],
)  # fmt: skip
def test_one_sentence(content: bytes | None, says: str, tmp_path: Path) -> None:
    file, out = tmp_path / "given.jsonl", tmp_path / "out"
    if content is None:
        file.mkdir()
    else:
        file.write_bytes(content)
    wrong(says, "compare", MODEL, "--dtype", "float32", "--b", f"given({file})", "--out", out)
    assert not (out / "given.parquet").exists()


def test_positions_that_are_missing_are_left_out_and_no_error(tmp_path: Path) -> None:
    (file := tmp_path / "given.jsonl").write_bytes(own(logprobs=[None, float("nan"), -9999.0, *[-2.0] * 40]))
    asked = ("compare", MODEL, "--dtype", "float32", "--b", f"given({file})", "--out", tmp_path / "out")
    found = kvinterp(*asked)
    assert found.exit_code == 0, found.output
    assert "n = 40 tokens of 1 sequences" in json.loads((tmp_path / "out" / "summary.json").read_text())["reading"][0]


def test_two_sequences_of_one_name_stay_two(tmp_path: Path) -> None:
    (file := tmp_path / "given.jsonl").write_bytes(own(id="a") + b"\n" + own(id="a"))
    kvinterp("compare", MODEL, "--dtype", "float32", "--b", f"given({file})", "--out", tmp_path / "out")
    assert "n = 86 tokens of 2 sequences" in json.loads((tmp_path / "out" / "summary.json").read_text())["reading"][0]
