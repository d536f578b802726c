"""``kvinterp turns FILE``: conversations of a file, whose every border is looked at."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from command_line import kvinterp, wrong
from kvinterp.engines.commands.turns import conversations

EXACT = [{"prompt": [1, 20, 30, 40], "tokens": [50, 60]}, {"prompt": [1, 20, 30, 40, 50, 60, 70, 80], "tokens": [90, 91]}]
OFF = [{"prompt": [1, 20, 30, 40], "tokens": [50, 60]}, {"prompt": [1, 20, 30, 40, 51, 60, 70, 80], "tokens": [90, 91]}]


def written(folder: Path, records: list[Any]) -> Path:
    (folder / "turns.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder / "turns.jsonl"


@pytest.mark.parametrize("cost", ["measured", "not measured"])
def test_each_border_of_each_conversation_is_asked(cost: str, tmp_path: Path) -> None:
    file = written(tmp_path, [{"turns": EXACT}, {"turns": OFF}])
    more = ["--model", "zoo:gqa2-mini", "--dtype", "float32", "--cost", cost]
    made = kvinterp("turns", file, *more, "--out", tmp_path / "out")
    assert made.exit_code == 0, made.output
    said = " ".join(made.stdout.split())
    assert (
        "1 of 2 turns begin with exactly the tokens of the turns before them; 10 of 12 cached tokens can be used again"
        in said
    )
    assert "conversation 2, turn 2: other text; the first token that differs is 4 of 6 cached ones" in said
    table = pd.read_parquet(tmp_path / "out" / "turns.parquet")
    assert list(table["reusable"]) == [6, 4]
    assert ("nats" in table) == (cost == "measured")
    if cost == "measured":
        assert table["nats"][0] == 0
        assert table["nats"][1] > 1e-3


def test_a_list_of_turns_is_one_conversation(tmp_path: Path) -> None:
    (tmp_path / "one.json").write_text(json.dumps(EXACT))
    (tmp_path / "two.json").write_text(json.dumps([{"turns": EXACT}, {"messages": []}]))
    assert [len(conversations(tmp_path / name)) for name in ("one.json", "two.json")] == [1, 2]


@pytest.mark.parametrize(
    ("content", "says"),
    [("{", "neither JSON"), ("", "empty"), ("3", "expected an object with"), ('{"a": 1}', "'messages'")],
)
def test_another_file_is_refused_in_a_sentence(content: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "file.json").write_text(content)
    wrong(says, "turns", tmp_path / "file.json")
    wrong("does not exist", "turns", tmp_path / "none.json")
