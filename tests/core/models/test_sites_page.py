"""docs/sites.md is the table of sites, with the axes that a trace has.

``python tests/core/models/test_sites_page.py`` writes the page's table anew.
"""

from __future__ import annotations

from pathlib import Path

from kvinterp.models import SITES
from kvinterp.models.hook_names import HOOKS_READ, hook_of
from kvinterp.models.sites import LAYOUTS

PAGE = Path(__file__).parents[3] / "docs" / "sites.md"
BEGIN, END = "<!-- the table: python tests/core/models/test_sites_page.py writes it -->\n", "<!-- end of the table -->\n"
HEAD = ("site", "what it is", "axes", "hook")


def row_of(site: str) -> tuple[str, ...]:
    """What the page says of a site, by :data:`HEAD`."""
    hook = next((hook for hook, of in HOOKS_READ.items() if of == site), "")
    return f"`{site}`", LAYOUTS[site].meaning, f"`{LAYOUTS[site].axes}`", f"`{hook}`" * bool(hook)


def table() -> str:
    lines = [HEAD, ["---"] * len(HEAD), *ROWS.values()]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


ROWS = {site: row_of(site) for site in SITES}


def test_the_page_shows_every_site_with_its_meaning_axes_and_hook():
    """Stale after a change: `python tests/core/models/test_sites_page.py` writes it anew."""
    assert BEGIN + table() + END in PAGE.read_text(encoding="utf-8")
    for site, row in ROWS.items():
        assert not row[-1] or hook_of(row[-1].strip("`")) in ((site, None), ("embed", 0))


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
