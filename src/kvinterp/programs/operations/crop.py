"""``crop``: the last columns are taken back, as rejected drafts are."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvinterp.programs.program import Operation
from kvinterp.programs.running import Run
from kvinterp.programs.subject import ModelSubject


@dataclasses.dataclass(frozen=True)
class Crop(Operation):
    """The last columns are taken back.

    Attributes:
        count: How many.
    """

    count: int
    between = (1, 3)

    def offered(self, run: Run) -> bool:
        """Where the library itself would: each layer can, and a window or a state is not asked for more than was fed since."""
        if not super().offered(run) or not isinstance(run.subject, ModelSubject) or not run.subject.adapter.plain:
            return False
        cache: Any = run.cache
        layers = getattr(cache, "layers", [None])
        rolls = getattr(cache, "is_croppable", False) and not getattr(run.subject.model, "_is_stateful", False)
        if not rolls or not has(cache, "crop"):
            return False
        deep = self.count > run.since and any(type(layer).__name__ != "DynamicLayer" for layer in layers)
        real = bool((run.mask[:, -self.count :] == 1).all()) and min(map(len, run.texts)) > self.count
        return real and not any(run.pads) and (not deep or run.beyond)

    def do(self, run: Run) -> None:
        """Takes them back; what is fed next is judged."""
        run.tries("crop and go on")
        run.lines.append(f"cache.crop({-self.count})")
        run.cache.crop(-self.count)
        run.texts, run.since = [text[: -self.count] for text in run.texts], 0
        run.ids, run.mask = run.ids[:, : -self.count], run.mask[:, : -self.count]


def has(cache: Any, method: str) -> bool:
    """Whether a cache and all its layers have a method."""
    layers = getattr(cache, "layers", None) or getattr(getattr(cache, "self_attention_cache", None), "layers", None)
    return hasattr(cache, method) and all(hasattr(layer, method) for layer in layers or ())
