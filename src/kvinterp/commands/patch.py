"""Copy tensors from one path into the other, one place at a time, and measure how much of the
difference each recovers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvinterp.commands.kit import (
    Cell,
    OfModel,
    Parts,
    Result,
    check_known,
    joined,
    numbered,
    option,
    shared,
)
from kvinterp.common import words
from kvinterp.common.checks import check_text
from kvinterp.models.hook_names import site_of
from kvinterp.patching import DIRECTIONS, PRESETS, Sweep, highest_kl, sweep
from kvinterp.patching import Patch as Moved
from kvinterp.patching.patch import check_patch_site
from kvinterp.patching.side_by_side import two_paths

_UNLESS_GIVEN = {
    "site": "kv",
    "sweep": "cumulative",
    "direction": "into-cached",
    "steps": "every",
    "protocol": "matched",
    "distance": "l2,kl",
    "max_new_tokens": 32,
}
"""What a preset may set, where neither it nor anybody else does."""


class Patch(OfModel):
    """What carries the difference: which layer, head or block of positions, moved from one path
    into the other?
    """

    RESULT = Sweep

    a: str = option(
        "cached", "Path A, which decodes from a cache, such as cached+int8; it chooses the tokens."
    )
    b: str = option("recompute", "Path B, which computes the whole prefix again.")
    site: str = option(
        None,
        "What to patch: kv, cache_k, cache_v, resid_post, attn_out, ... (kvinterp list sites).",
        show_default=_UNLESS_GIVEN["site"],
    )
    sweep: str = option(
        None,
        "Which patches to make: single (one layer each), cumulative, cumulative-from, heads, kv-heads or blocks (of positions).",
        show_default=_UNLESS_GIVEN["sweep"],
        among=words.Over,
        commas="between",
    )
    direction: str = option(
        None,
        "Which path receives the patch: into-recompute or into-cached.",
        among=DIRECTIONS,
        show_default=_UNLESS_GIVEN["direction"],
    )
    steps: str = option(
        None,
        "Which decode steps to patch: every, first, or step numbers with commas.",
        show_default=_UNLESS_GIVEN["steps"],
    )
    protocol: str = option(
        None,
        "matched: both paths get the same tokens. free: each gets its own.",
        among=words.Protocol,
        show_default=_UNLESS_GIVEN["protocol"],
    )
    distance: str = option(
        None,
        "How far apart the paths are, by l2, kl, margin or logit_difference; several with commas, the first one leads.",
        show_default=_UNLESS_GIVEN["distance"],
        among=words.Distance,
        commas="between",
    )
    answers: tuple[str, ...] = option(
        (),
        "For logit_difference, given twice: the right answer, then the wrong one, one token each.",
        flag="--answer",
        only=(
            lambda asked: "logit_difference" in asked.distance,
            "no distance that was asked for is of answers; leave it out, or add logit_difference to --distance",
        ),
    )
    layers: tuple[int, ...] | None = option(
        None, "Patch only in these layers, such as 0,2,-1. Default: all.", example="0,2,-1"
    )
    examples: int | None = option(
        None, "Patch only this many prompts: those with the highest KL.", min=1
    )
    preset: str | None = option(
        None,
        "paper or matched: settings for site, sweep, direction, steps, protocol, examples, distance and max-new-tokens, unless "
        "you give them.",
    )
    prompts: str = shared("prompts")
    max_new_tokens: int = option(
        None,
        "The most tokens to decode per prompt.",
        show_default=str(_UNLESS_GIVEN["max_new_tokens"]),
        min=1,
    )
    batch_size: int = option(
        1,
        "The most patches in one forward pass. Batching is used only where it gives the same bits.",
        decides="nothing",
        min=1,
    )
    controls: str = option(
        "quick",
        "Which controls to run: quick, all (planted causes too, which need the model in float64) or none.",
        among=words.Controls,
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        # Here and not when it is run: what was not given is told from what was given as its
        #     default.
        settings: dict[str, Any] = dict(_UNLESS_GIVEN)
        if self.preset is not None:
            check_known("preset", self.preset, PRESETS)
            settings |= {
                "sweep" if name == "over" else name: value
                for name, value in PRESETS[self.preset].items()
            }
        for name, value in settings.items():
            if getattr(self, name) is None:
                object.__setattr__(self, name, value)

    def check(self) -> None:
        """What is moved, and at which steps, too."""
        for name in _UNLESS_GIVEN.keys() - {"max_new_tokens"}:
            check_text(name, getattr(self, name), repr(_UNLESS_GIVEN[name]))
        super().check()
        site, _ = site_of(self.site)
        check_patch_site(site)
        Moved(site, steps=_steps(self.steps))
        two_paths(self.a, self.b, "a sweep")

    def cells(self) -> list[Cell]:
        """A cell a prompt that is patched, in the order of their KL where only some are."""
        count = len(self.prompt_list[: self.examples])
        return [Cell(f"patched-{place}", self.patched) for place in range(count)]

    def patched(
        self, keys: Sequence[str], keep: Callable[..., None], progress: str = "none"
    ) -> None:
        """Sweeps over some of the prompts that are patched, and keeps what each gave."""
        adapter, prompts = self.adapter(), self.prompt_list
        paths: dict[str, Any] = {"cached": self.a, "recompute": self.b}
        chosen = list(range(len(prompts)))
        if self.examples is not None:
            options = self.choices("protocol", "max_new_tokens")
            chosen = highest_kl(
                adapter, prompts, self.examples, **options, **paths, progress=progress
            )
        names = (
            "site",
            "direction",
            "protocol",
            "layers",
            "max_new_tokens",
            "distance",
            "answers",
            "batch_size",
        )
        settings = self.choices(*names) | {
            "over": self.sweep,
            "steps": _steps(self.steps),
            "progress": "none",
        }
        for place, key in numbered(keys).items():
            # The planted causes are a matter of the model: they are looked for once.
            controls = "quick" if self.controls == "all" and place else self.controls
            swept = sweep(
                adapter, prompts, **settings, **paths, only=[chosen[place]], controls=controls
            )
            keep(key, swept.tables, swept.provenance)

    def reduce(self, parts: Parts) -> Result:
        """The sweep over all of them."""
        tables, abouts = joined(parts), [about for _, about in parts.values()]
        if len(tables["controls"]):
            # Those of the prompts, and behind them the planted ones.
            planted = tables["controls"]["control"].str.startswith("planted")
            tables["controls"] = (
                tables["controls"]
                .loc[planted.sort_values(kind="stable").index]
                .reset_index(drop=True)
            )
        work = {name: sum(about["work"][name] for about in abouts) for name in abouts[0]["work"]}
        return Sweep(**tables, provenance={**abouts[0], "work": work})


def _steps(text: str) -> str | tuple[int, ...]:
    """A word, or the steps that are named with commas between."""
    named = [part.strip() for part in text.strip("() ,").split(",")]
    return tuple(map(int, named)) if all(map(str.isdecimal, named)) else text
