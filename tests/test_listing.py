"""What `kvinterp list policies` shows, and that the page of policies shows the same."""

from pathlib import Path

from kvinterp.cli.listing import POLICY_NOTE, policy_rows
from kvinterp.policies import POLICIES

PAGE = Path(__file__).parents[1] / "docs" / "policies.md"
BEGIN, END = "<!-- the table: python tests/test_listing.py writes it -->\n", "<!-- end of the table -->\n"


def table() -> str:
    rows = policy_rows()
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


def test_the_page_shows_what_is_listed():
    """Stale after a change: `python tests/test_listing.py` writes it anew."""
    assert table() in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
