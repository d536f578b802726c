"""``crop`` and ``draft``: the last columns are taken back, as rejected drafts are."""

from __future__ import annotations

import dataclasses
from typing import Any

from kvinterp.auditing.programs.operations.feed import Feed
from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run
from kvinterp.models.caches import offers


def croppable(cache: Any) -> bool:
    """Whether a transformers cache offers to take columns back, by a method of its own or by layers
    that all say so.
    """
    own = "crop" in dir(cache) and not type(cache).crop.__module__.startswith("transformers.")
    return offers(cache, "crop") and (own or bool(getattr(cache, "is_croppable", False)))


@dataclasses.dataclass(frozen=True)
class Crop(Operation):
    """The last columns are taken back.

    Attributes:
        count: How many.
    """

    count: int
    between = (1, 3)

    def offered(self, run: Run) -> bool:
        """Where the library itself would: each layer can, and a window or a state is not asked for
        more than was fed since.
        """
        if not super().offered(run) or not run.subject.native or run.subject.stateful:
            return False
        if not croppable(run.cache) or run.ids.shape[1] > run.subject.crops_within:
            return False
        layers = {type(layer).__name__ for layer in getattr(run.cache, "layers", [None])}
        deep = self.count > run.since and layers != {"DynamicLayer"}
        real = (
            bool((run.mask[:, -self.count :] == 1).all()) and min(map(len, run.texts)) > self.count
        )
        real = real and all(
            len(text) - len(begin) >= self.count
            for text, begin in zip(run.texts, run.begins, strict=True)
        )
        return real and not any(run.pads) and (not deep or run.beyond)

    def do(self, run: Run) -> None:
        """Takes them back; what is fed next is judged."""
        run.tries("crop and go on", f"cache.crop({-self.count})")
        run.lines.note(f"ids = ids[:, :-{self.count}]")
        run.cache.crop(-self.count)
        run.texts, run.since = [text[: -self.count] for text in run.texts], 0
        run.reaches(taken_back=self.count)
        left = run.ids.shape[1] - self.count
        run.ids, run.mask = run.ids[:, :left], run.mask[:, :left]
        run.ends = [*(end for end in run.ends if end < left), left]

    @property
    def columns(self) -> int:
        """How many columns it takes back, as a negative number."""
        return -self.count


@dataclasses.dataclass(frozen=True)
class Draft(Operation):
    """The next column with drafts behind it, as in speculative decoding: those that are right stay,
    the others are taken back.

    Not drawn, since drawn programs feed and crop.

    Attributes:
        count: How many drafts.
    """

    count: int
    weight = 0

    def offered(self, run: Run) -> bool:
        """Where they can be fed and taken back."""
        return run.ids.shape[1] + self.count + 3 <= run.max_columns and Crop(self.count).offered(
            run
        )

    def do(self, run: Run) -> None:
        """Feeds a token with its drafts, of which as many stay as are drawn."""
        run.tries("drafts checked")
        Feed(1 + self.count).do(run)
        if wrong := self.count - run.draw.randint(0, self.count):
            Crop(wrong).do(run)

    @property
    def columns(self) -> int:
        """That of the token; those of right drafts save others."""
        return 1
