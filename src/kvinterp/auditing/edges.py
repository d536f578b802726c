"""Edges that a config names, and positions that none names: which programs go over them, and what that would cost.

An edge is a window, a chunk, a switch of RoPE or the end of the context. ``uses.py`` runs the programs; what costs more than
it may is a check that was not run, with the option that runs it.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvinterp.auditing.checks import NOT_RUN, Check
from kvinterp.auditing.programs.search import FURTHEST, far
from kvinterp.models import Adapter

CHUNK_NAMES = ("chunk_size", "mamba_chunk_size", "attention_chunk_size")

SWITCHING = ("dynamic", "longrope", "yarn")
"""Kinds of RoPE whose frequencies are other ones beyond some length."""

POSITIONS, PRODUCTS = 4096, {"cpu": 8e10, "cuda": 5e13}
"""Positions of one program at the most, and products of a forward, a few seconds' worth; ``reach``
goes to any.
"""

FILL, LOGITS = 512, 2**26
"""Columns at once of a long text; and numbers that the logits of one may hold."""

REACH = "--reach"


def edges_of(adapter: Adapter) -> dict[int, str]:
    """The windows and chunks of more than two positions that a config names, by their size."""
    named = [(getattr(adapter.config, name, None), name) for name in reversed(CHUNK_NAMES)]
    named += [(window, "window") for window in adapter.facts.windows]
    return {size: f"{name} of {size}" for size, name in named if isinstance(size, int) and size > 2}


def edge_programs(
    adapter: Adapter, reach: str
) -> tuple[dict[tuple[str, int], list[str]], list[Check]]:
    """Programs over every edge that the config names, by its name and position, and those that cost
    too much.
    """
    facts, named = adapter.facts, edges_of(adapter)
    rope = getattr(adapter.config, "rope_parameters", None) or {}
    for part in [rope, *(rope.values() if isinstance(rope, Mapping) else ())]:
        if isinstance(part, Mapping) and part.get("rope_type") in SWITCHING:
            switch = int(part.get("original_max_position_embeddings") or facts.context)
            named.setdefault(switch, f"{part['rope_type']} RoPE that switches at {switch}")
    programs, far = dict[tuple[str, int], list[str]](), list[Check]()
    for size, name in sorted(named.items()):
        if size + 5 > facts.context:
            far.append(
                Check(
                    name,
                    NOT_RUN,
                    f"the context of {facts.context} positions ends before it is crossed.",
                )
            )
        elif why := _too_much(adapter, size + 5, reach):
            far.append(Check(name, NOT_RUN, f"{why}.", hint=REACH))
        else:
            # Three windows and a half: what comes round again has come round more than once.
            turns = [
                f"rows(0)+feed({7 * size // 2})+feed(4,1)",
                f"rows(0)+feed({size + 2})+feed(2,1)+feed({size + 1})+feed(2,1)+feed({size})+feed({size // 2},{FILL})+feed(2,1)",
            ]
            most = 7 * size // 2 + 8
            if most > facts.context or "RoPE" in name:
                turns = []
            elif why := _too_much(adapter, most, reach):
                turns, dear = (
                    [],
                    Check(f"three and a half times the {name}", NOT_RUN, f"{why}.", hint=REACH),
                )
                far.append(dear)
            programs[name, size] = [
                f"rows(0)+feed({size - 1})+feed(4,1)",
                f"rows(0)+feed({size + 2},{FILL})+feed(2,1)",
                *turns,
                # A static cache moves its columns once its window is full.
                f"rows(0)+generate({size - 1},4)"
                if "RoPE" in name
                else f"rows(0,cache=static)+feed({size - 1})+feed(4,1)",
            ]
    if facts.context < 2**31 and facts.context > 8:
        if why := _too_much(adapter, facts.context, reach, FURTHEST):
            far.append(Check("context end", NOT_RUN, f"{why}.", hint=REACH))
        else:
            programs["context end", facts.context] = [
                f"rows(0)+feed({facts.context - 3})+feed(3,1)"
            ]
    return programs, far


def far_programs(adapter: Adapter, reach: str) -> tuple[dict[str, int], list[Check]]:
    """Programs past positions that no config names, and those of them that cost too much."""
    programs = far(adapter.facts.context)
    edges = sorted({*programs.values()})
    logits = {edge: edge * adapter.facts.vocabulary > LOGITS and reach != "yes" for edge in edges}
    dear = {
        edge: why
        for edge in edges
        if (
            why := _too_much(adapter, edge + 8, reach)
            or "its logits alone take gigabytes" * logits[edge]
        )
    }
    checks = [Check(past(edge), NOT_RUN, f"{why}.", hint=REACH) for edge, why in dear.items()]
    return {text: edge for text, edge in programs.items() if edge not in dear}, checks


def _too_much(adapter: Adapter, length: int, reach: str, most: int = POSITIONS) -> str:
    if reach == "yes":
        return ""
    if length > most:
        return f"{length} positions are more than the {most} that are run"
    facts, weights = adapter.facts, sum(p.numel() for p in adapter.model.parameters())
    products = length * weights + 2 * facts.layers * facts.width * length**2
    spent = PRODUCTS.get(adapter.device.type, PRODUCTS["cpu"])
    return (
        f"a forward of {length} positions takes {products:.0e} products, more than the {spent:.0e} that are spent"
        * (products > spent)
    )


def past(edge: int) -> str:
    """The name of the programs that go past a position."""
    return f"past {edge:,} positions"
