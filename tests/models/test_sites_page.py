"""docs/sites.md is the table of sites, and its shapes are those that a trace has.

``python tests/models/test_sites_page.py`` writes the page's table anew.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import kvinterp as kv
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
STEPS = 3


def test_the_page_shows_every_site_with_its_meaning_shapes_and_hook():
    """Stale after a change: `python tests/models/test_sites_page.py` writes it anew."""
    assert BEGIN + table() + END in PAGE.read_text(encoding="utf-8")
    for site, row in ROWS.items():
        assert not row["hook"] or hook_of(row["hook"].strip("`")) in ((site, None), ("embed", 0))


@pytest.mark.parametrize("kind", [pytest.param("hooked", marks=pytest.mark.hooked), "native"])
@pytest.mark.parametrize("path", ["recompute", "cached"])
@pytest.mark.parametrize("name", ["moe-mini", "gqa2-mini"])
def test_the_shapes_are_those_of_a_trace(kind, path, name):
    model = kv.load_model(f"zoo:{name}", kind=kind, attention="eager" if kind == "native" else None)
    facts = model.facts
    sizes = {
        "width": facts.width,
        "query_head": facts.query_heads,
        "kv_head": facts.kv_heads,
        "head_dim": facts.head_dim,
        "neuron": 384,
        "expert": 8,
        "chosen": 2,
    }
    prompt = len(model.encode("1 + 1 ="))
    for positions, column in (("newest", "newest"), ("all", path)):
        lacking = "mlp" if name == "moe-mini" else "routing"
        sites = [site for site in SITES if LAYOUTS[site].group != lacking]
        how = {"record": sites, "positions": positions, "layers": [1], "max_new_tokens": STEPS, "stop": "length"}
        trace = kv.run(model, "1 + 1 =", path, **how)
        for site in sites:
            row, layer = ROWS[site], 0 if site == "embed" else 1
            said = re.findall(r"`([^`]+)`", row[column])
            for step in range(STEPS):
                names = said[min(step, len(said) - 1)].split(", ")
                known = {**sizes, "P": prompt, "T": prompt + step, "1": 1}
                shape = tuple(trace.records[site, layer][step].shape)
                assert shape == tuple(known[name] for name in names), (site, positions, step)


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(before + BEGIN + table() + END + rest.split(END)[1], encoding="utf-8")
