"""``static``: a name for ``cache=static``, so that a cache of a fixed size is a plan as the others are."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter, caches
from kvinterp.paths.calls.base import Call


@dataclasses.dataclass(frozen=True)
class Static(Call):
    """Keys and values in transformers' StaticCache, whose empty slots are masked.

    Attributes:
        size: Its positions; as many as are run for None.
    """

    policies: ClassVar = True
    feeds: ClassVar = False

    size: int | None = None

    def __post_init__(self) -> None:
        caches.Static(self.size)

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """Refuses a transformers model that does not say that it can, as ``generate()`` does."""
        if adapter.plain and not adapter.takes_static:
            raise UnsupportedError(
                f"call={self} needs a model that says it runs on a StaticCache, and {adapter.facts.architecture} does not "
                "(_can_compile_fullgraph): leave it out."
            )

    @property
    def options(self) -> dict[str, Any]:
        """What it is a name for."""
        return {"cache": caches.Static(self.size)}

    def seen(self, cache: str, length: int) -> dict[str, int]:
        """Whether the cache was that."""
        return {"static caches": int(cache == "StaticCache")}

    def missing(self, witness: dict[str, int]) -> str:
        """That cache."""
        return "" if witness.get("static caches", 1) else "another cache was run"
