"""docs/sites.md is the table of sites, and its shapes are those that a trace has.

``python tests/models/test_sites_page.py`` writes the page's table anew.
"""

from __future__ import annotations

from pathlib import Path

from kvinterp.models import SITES
from kvinterp.models.hook_names import HOOKS_READ, hook_of
from kvinterp.models.sites import LAYOUTS

PAGE = Path(__file__).parents[2] / "docs" / "sites.md"
BEGIN, END = "<!-- the table: python tests/models/test_sites_page.py writes it -->\n", "<!-- end of the table -->\n"
COLUMNS = ("site", "meaning", "newest", "recompute", "cached", "hook")
HEAD = ("site", "what it is", '`positions="newest"`', '`"all"`, recompute', '`"all"`, cached (step 0, later)', "hook")


def shape(axes: list[str], rows: str, keys: str) -> str:
    """A shape as the page has it, with so many rows and keys."""
    lengths = {"position": rows, "query": rows, "key": keys}
    return f"`{', '.join(lengths.get(axis, axis) for axis in axes)}`"


def row_of(site: str) -> dict[str, str]:
    """What the page says of a site, by :data:`COLUMNS`."""
    layout = LAYOUTS[site]
    axes = layout.axes.split(", ")
    hook = next((hook for hook, of in HOOKS_READ.items() if of == site), "")
    every, first, later = shape(axes, "T", "T"), shape(axes, "P", "P"), shape(axes, "1", "T")
    cells = (
        f"`{site}`",
        layout.meaning,
        shape([axis for axis in axes if axis not in ("position", "query")], "", "T"),
        every,
        every if layout.group == "cache" else f"{first}, then {later}",
        f"`{hook}`" * bool(hook),
    )
    return dict(zip(COLUMNS, cells, strict=True))


def table() -> str:
    lines = [HEAD, ["---"] * len(HEAD), *(row.values() for row in ROWS.values())]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


ROWS = {site: row_of(site) for site in SITES}


def test_the_page_shows_every_site_with_its_meaning_shapes_and_hook():
    """Stale after a change: `python tests/models/test_sites_page.py` writes it anew."""
    assert BEGIN + table() + END in PAGE.read_text(encoding="utf-8")
    for site, row in ROWS.items():
        assert not row["hook"] or hook_of(row["hook"].strip("`")) in ((site, None), ("embed", 0))


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
