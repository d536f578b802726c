"""The page on claims lists every claim as it is declared."""

from pathlib import Path

from worlds import told, worlds_of

from kvinterp.study.claims import CLAIMS

PAGE = Path(__file__).parents[2] / "docs" / "claims.md"
BEGIN, END = "<!-- the table: python tests/claims/test_claims_page.py writes it -->\n", "<!-- end of the table -->\n"


def table() -> str:
    rows = [["id", "source", "claim", "its number", "rule", "holds in", "does not in", "open in"], ["---"] * 8]
    for claim in CLAIMS:
        answers = [told(world) for world in worlds_of(claim)]
        if claim.construction:
            answers = [f"by construction: {claim.construction}", "–", "–"]
        rows.append(
            [f"`{claim.id}`", f"{claim.source}, {claim.section}", claim.claim, claim.value or "–", claim.rule, *answers]
        )
    return "".join(f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in row)} |\n" for row in rows)


def test_the_page_shows_what_is_claimed():
    """Stale after a change: `python tests/claims/test_claims_page.py` writes it anew."""
    assert BEGIN + table() + END in PAGE.read_text(encoding="utf-8")


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
