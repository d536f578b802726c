"""Copy tensors from one path into the other, one place at a time, and measure how much of the
difference each recovers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from kvinterp.commands.kit import (
    Cell,
    CellResults,
    OfModel,
    Result,
    check_known,
    joined,
    numbered,
    option,
    shared,
)
from kvinterp.common import words
from kvinterp.common.checks import check_text
from kvinterp.common.source import parameters
from kvinterp.models.hook_names import site_of
from kvinterp.patching import DIRECTIONS, PRESETS, Sweep, highest_kl, sweep
from kvinterp.patching import Patch as Moved
from kvinterp.patching.patch import check_patch_site
from kvinterp.patching.side_by_side import two_paths

_FUNCTION = "kvinterp.patching.sweeping:sweep"
# The command shows first what most look for, the function what the paper sweeps.
_UNLESS_GIVEN = {"site": "kv", "sweep": "cumulative", "direction": "into-cached"} | {
    name: parameters(_FUNCTION)[name][0].default
    for name in ("steps", "protocol", "distance", "max_new_tokens")
}
"""What a preset may set, where neither it nor anybody else does."""


class Patch(
    OfModel,
    of=_FUNCTION,
    without=("positions", "only", "block", "logits", "stop"),
    cached="a",
    recompute="b",
    over="sweep",
):
    """What carries the difference: which layer, head or block of positions, moved from one path
    into the other?
    """

    RESULT = Sweep

    prompts: str = shared("prompts")
    preset: str | None = option(
        None,
        "paper or matched: settings for site, sweep, direction, steps, protocol, examples, distance and max-new-tokens, unless "
        "you give them.",
    )
    a: Any = option()
    b: Any = option()
    site: Any = option(None, show_default=str(_UNLESS_GIVEN["site"]))
    sweep: Any = option(
        None, show_default=str(_UNLESS_GIVEN["sweep"]), among=words.Over, commas="between"
    )
    direction: Any = option(None, show_default=str(_UNLESS_GIVEN["direction"]), among=DIRECTIONS)
    steps: Any = option(None, show_default=str(_UNLESS_GIVEN["steps"]))
    protocol: Any = option(None, show_default=str(_UNLESS_GIVEN["protocol"]), among=words.Protocol)
    distance: Any = option(
        None, show_default=str(_UNLESS_GIVEN["distance"]), among=words.Distance, commas="between"
    )
    answers: Any = option(
        (),
        flag="--answer",
        only=(
            lambda asked: "logit_difference" in asked.distance,
            "no distance that was asked for is of answers; leave it out, or add logit_difference to --distance",
        ),
    )
    layers: Any = option(example="0,2,-1")
    examples: Any = option(min=1)
    max_new_tokens: Any = option(None, show_default=str(_UNLESS_GIVEN["max_new_tokens"]), min=1)
    batch_size: Any = option(decides="nothing", min=1)
    controls: Any = option(among=words.Controls)

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
        return [Cell(f"patched-{number}", self.patched) for number in range(count)]

    def patched(
        self, keys: Sequence[str], keep: Callable[..., None], progress: str = "none"
    ) -> None:
        """Sweeps over some of the prompts that are patched, and keeps what each gave."""
        adapter, prompts = self.adapter(), self.prompt_list
        settings = self.arguments() | {"examples": None, "steps": _steps(self.steps)}
        chosen = list(range(len(prompts)))
        if self.examples is not None:
            names = "cached", "recompute", "protocol", "max_new_tokens"
            options = {name: settings[name] for name in names}
            chosen = highest_kl(adapter, prompts, self.examples, **options, progress=progress)
        for number, key in numbered(keys).items():
            # The planted causes are a matter of the model: they are looked for once.
            controls = "quick" if self.controls == "all" and number else self.controls
            settings |= {"only": [chosen[number]], "controls": controls, "progress": "none"}
            swept = sweep(adapter, prompts, **settings)
            keep(key, swept.tables, swept.provenance)

    def reduce(self, results: CellResults) -> Result:
        """The sweep over all of them."""
        tables, abouts = joined(results), [about for _, about in results.values()]
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
