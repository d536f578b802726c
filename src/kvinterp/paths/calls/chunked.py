"""``chunked(4)``: a name for ``chunk=4``, so that a prompt fed in pieces is a plan as the others are."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from kvinterp.common.checks import check_whole
from kvinterp.paths.calls.base import Call


@dataclasses.dataclass(frozen=True)
class Chunked(Call):
    """The prompt in pieces.

    Attributes:
        size: Most tokens in one.
    """

    forms: ClassVar = ("cached", "recompute")
    policies: ClassVar = True
    feeds: ClassVar = False

    size: int = 4

    def __post_init__(self) -> None:
        check_whole("size", self.size, hint=" of tokens")

    @property
    def options(self) -> dict[str, Any]:
        """What it is a name for."""
        return {"chunk": self.size}

    def seen(self, cache: str, length: int) -> dict[str, int]:
        """How many pieces there were."""
        return {"pieces of the prompt": -(-length // self.size)}

    def missing(self, witness: dict[str, int]) -> str:
        """A second piece."""
        return "" if witness.get("pieces of the prompt", 2) > 1 else "the prompt is one piece"
