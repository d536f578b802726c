"""What `kvinterp list policies` shows, and that the page of policies shows the same of each, but for its fields."""

import dataclasses
from pathlib import Path

import torch

import kvinterp as kv
from kvinterp.cli.listing import LISTED, POLICY_NOTE, policy_rows
from kvinterp.policies import POLICIES

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"
BEGIN, END = "<!-- the table: python tests/test_listing.py writes it -->\n", "<!-- end of the table -->\n"
COLUMNS = ("as text", "what it does", "KiB per token", "source")


def table() -> str:
    rows = [{name: row[name] for name in COLUMNS} for row in policy_rows()]
    lines = [[*rows[0]], ["---"] * len(rows[0]), *([*row.values()] for row in rows)]
    cells = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in lines]
    return "".join(f"| {row} |\n" for row in cells) + f"\n{POLICY_NOTE}.\n"


def test_every_policy_is_listed_with_what_it_stores():
    rows = {row["name"]: row for row in policy_rows()}
    assert list(rows) == list(POLICIES)
    assert rows["identity"]["KiB per token"] == "128"
    assert rows["uniform"]["as text"] == "uniform(-1,1)"
    assert "preserve=nothing" in rows["uniform"]["fields"]
    assert rows["q8_0"]["KiB per token"] == "68"  # 34 bytes of 32 elements


def test_the_bytes_of_a_cache_are_those_that_a_cache_holds():
    model = kv.load_model("zoo:gqa2-mini", dtype="float16", device="cpu")
    with torch.no_grad():
        cache = model.model(input_ids=torch.arange(1, 11)[None], use_cache=True).past_key_values
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    facts = model.facts
    assert facts.cache_bytes(10) == held
    assert facts.cache_bytes(10, bits=8.5) == held * 8.5 / 16
    windowed = dataclasses.replace(facts, windows=(4,) * facts.layers)
    assert windowed.cache_bytes(10) == facts.cache_bytes(4)
    (row,) = (row for row in LISTED["models"]() if row["name"] == "zoo:gqa2-mini")
    assert row["K and V"] == f"{held // 10:,} bytes a token in 16 bits"


def test_the_page_shows_what_is_listed():
    """Stale after a change: `python tests/test_listing.py` writes it anew."""
    assert table() in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
