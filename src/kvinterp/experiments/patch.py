"""Move tensors of one path into the other, one place at a time, and write how much of the difference each recovers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from kvinterp.cells import Cell, Made, joined, loaded
from kvinterp.data import load_prompts
from kvinterp.errors import unknown
from kvinterp.experiments.base import Experiment, Outcome, model, numbered, option, shared

__all__ = ["Patch"]


@dataclasses.dataclass(frozen=True)
class Patch(Experiment):
    """What carries the difference: which layer, head or block of positions, moved from one path into the other?"""

    TABLES: ClassVar = ("recovery", "steps", "controls")
    DRAWN: ClassVar = ("recovery",)
    RESULT: ClassVar = "kvinterp.patching:Sweep"
    FIGURES: ClassVar = "kvinterp.report:sweep_figures"
    READING: ClassVar = "kvinterp.reading.patching:said_of_sweep"
    UNIT: ClassVar = "prompts"

    model: str = model()
    site: str = option("kv", "kv, cache_k, cache_v, resid_post, attn_out, ...")
    sweep: str = option("single", "single, cumulative, cumulative-from, heads, kv-heads or blocks.")
    direction: str = option("into-recompute", "into-recompute or into-cached.")
    steps: str = option("every", "every, first, or numbers of steps with commas between.")
    protocol: str = option("matched", "matched or free.")
    distance: str = option("l2,kl", "l2, kl, margin or logit_difference; several with commas, the first leads.")
    answers: tuple[str, ...] = option(
        (),
        "For logit_difference: the answer that counts, and again the one that is taken off; of one token each.",
        flag="--answer",
    )
    examples: int | None = option(None, "Patch only so many prompts, those of the highest KL.")
    preset: str | None = option(
        None, "paper or matched: sets site, sweep, direction, steps, protocol, examples and distance."
    )
    prompts: str = shared("prompts")
    kind: str = shared("kind")
    dtype: str = shared("dtype")
    max_new_tokens: int = option(32, "Most steps a prompt.")
    device: str | None = shared("device")
    attention: str | None = shared("attention")
    batch_size: int = option(1, "Most patches in a forward; used where it keeps the bits.", decides="nothing", min=1)
    controls: str = option("all", "all, quick (without planted causes) or none.")

    def settled(self) -> Patch:
        """With what its preset sets."""
        if self.preset is None:
            return self
        from kvinterp.patching import PRESETS

        if self.preset not in PRESETS:
            raise unknown("preset", self.preset, PRESETS)
        values = PRESETS[self.preset].items()
        return dataclasses.replace(self, **{"sweep" if name == "over" else name: value for name, value in values})

    def check(self) -> None:
        """What is moved, and at which steps, too."""
        from kvinterp.inputs import check_known
        from kvinterp.models.hook_names import site_of
        from kvinterp.patching import PATCH_SITES
        from kvinterp.patching import Patch as Moved

        super().check()
        site, _ = site_of(self.site)
        check_known("patch site", site, PATCH_SITES)
        Moved(site, steps=_steps(self.steps))

    def cells(self) -> list[Cell]:
        """A cell a prompt that is patched, in the order of their KL where only some are."""
        from kvinterp.inputs import check_whole

        count = len(load_prompts(self.prompts))
        if self.examples is not None:
            count = min(count, check_whole("examples", self.examples, hint=", or None for all"))
        given = {name: getattr(self, name) for name in _PASSED}
        settings = {"model": self.named(), **given, "over": self.sweep, "steps": _steps(self.steps)}
        return [Cell(f"patched-{place}", f"{__name__}:patched", settings) for place in range(count)]

    def reduce(self, made: Mapping[str, Made], settings: Mapping[str, Any], folder: Path | None) -> Outcome:
        """The sweep over all of them."""
        from kvinterp.patching import Sweep

        tables, abouts = joined(made), [about for _, about in made.values()]
        if len(tables["controls"]):
            # Those of the prompts, and behind them the planted ones.
            planted = tables["controls"]["control"].str.startswith("planted")
            tables["controls"] = tables["controls"].loc[planted.sort_values(kind="stable").index].reset_index(drop=True)
        work = {name: sum(about["work"][name] for about in abouts) for name in abouts[0]["work"]}
        found = Sweep(**tables, provenance={**abouts[0], "work": work})
        return Outcome(found, *found.written())


def _steps(given: str) -> str | tuple[int, ...]:
    """A word, or the steps that are named with commas between."""
    named = [each.strip() for each in given.strip("() ,").split(",")]
    return tuple(map(int, named)) if all(map(str.isdecimal, named)) else given


_PASSED = (
    "prompts",
    "site",
    "direction",
    "protocol",
    "distance",
    "answers",
    "examples",
    "max_new_tokens",
    "controls",
    "batch_size",
)


def patched(
    keys: Sequence[str],
    keep: Callable[..., None],
    model: Mapping[str, Any],
    prompts: str,
    examples: int | None,
    controls: str,
    progress: str = "none",
    **settings: Any,
) -> None:
    """Sweeps over some of the prompts that are patched, and keeps what each gave."""
    from kvinterp.patching import highest_kl, sweep

    adapter, given = loaded(model), load_prompts(prompts)
    chosen = list(range(len(given)))
    if examples is not None:
        how = {name: settings[name] for name in ("protocol", "max_new_tokens")}
        chosen = highest_kl(adapter, given, examples, **how, progress=progress)
    for place, key in numbered(keys).items():
        # The planted causes are a matter of the model: they are looked for once.
        wanted = "quick" if controls == "all" and place else controls
        found = sweep(adapter, given, **settings, only=[chosen[place]], controls=wanted, progress="none")
        keep(key, {"recovery": found.recovery, "steps": found.steps, "controls": found.controls}, found.provenance)
