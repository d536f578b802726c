"""Plants a difference in one known place, to check that the search for causes finds it."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvinterp.common.checks import check_known, check_number, check_whole
from kvinterp.models.attaching import HookPoint
from kvinterp.models.sites import LAYOUTS
from kvinterp.paths import ExecutionPath
from kvinterp.policies import CacheRows, Policy
from kvinterp.policies.base import KV
from kvinterp.recording import LOGITS, PathHook

PLACES = {
    "kv": "K and V as the cached path keeps them at a layer",
    "row": "the one-row computation of a layer",
    "unembedding": "the unembedding",
    "prompt": "K and V of the prompt at a layer, which the recompute path makes anew among another number of rows",
}
"""The places that can cause a difference."""
PLANTED = ("kv", "row", "unembedding")
"""The places where one can be planted: those of the cached path."""
STEPS = ("every", "first")
ONE_ROW = tuple(
    site
    for site, layout in LAYOUTS.items()
    if layout.gathers and site not in ("embed", "resid_pre", "router")
)
"""The sites of a layer's one-row result; ``resid_pre`` is the result of the layer before."""


@dataclasses.dataclass(frozen=True)
class Plant:
    """A difference of a few units in the last place, in one place of the cached path.

    Attributes:
        place: One of PLANTED.
        layer: The layer, for ``kv`` and ``row``.
        units: How many units in the last place.
        bits: Significant bits of the format whose last place is meant: 11 is float16.
        site: For ``row``: the site whose one-row result is moved; one of ONE_ROW.
        steps: For ``row`` and ``unembedding``: ``"every"`` decode step, or only the ``"first"``,
            after which the difference lives on in the K and V written by then.

    Raises:
        InputError: The place, the site or the steps do not exist.
    """

    place: str
    layer: int = 0
    units: float = 4.0
    bits: int = 11
    site: str = "mlp_out"
    steps: str = "every"

    def __post_init__(self) -> None:
        check_known("place to plant a difference", self.place, PLANTED)
        check_known("steps to plant a difference at", self.steps, STEPS)
        check_known("site to plant a difference at", self.site, ONE_ROW)
        check_whole("layer", self.layer, 0)
        check_number("units", self.units)
        check_whole("bits", self.bits, 2, 53)

    def written(self, path: ExecutionPath, prompt_length: int) -> ExecutionPath:
        """Returns the path, with a policy that plants the difference in the prompt's K and V if
        that is the place.
        """
        if self.place != "kv":
            return path
        return dataclasses.replace(
            path, policy=Planted(self.layer, self.units, self.bits, prompt_length)
        )


class PlantHook(PathHook):
    """Plants the difference in the one-row computations of a path, from step 1 on."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant
        hook_point: HookPoint = (
            LOGITS if plant.place == "unembedding" else (plant.site, plant.layer)
        )
        self.listeners = {} if plant.place == "kv" else {hook_point: self._nudge}
        self.step = 0

    def begin_step(self, step: int) -> None:
        """Notes which step begins, since the difference is planted at some steps alone."""
        self.step = step

    def _nudge(self, tensor: Tensor) -> Tensor | None:
        planted = self.step >= 1 if self.plant.steps == "every" else self.step == 1
        return nudged(tensor, float(self.plant.units), self.plant.bits) if planted else None


@dataclasses.dataclass(frozen=True)
class Planted(Policy):
    """A policy that moves K and V of one layer by a few units in the last place as they are written
    (docs/laws.md, law 6).

    A :class:`Plant` makes it and has checked its numbers. It is an instrument for tests, so it is
    in no registry and no text names it.

    Attributes:
        layer: The layer whose cache writes are changed.
        units: How many units in the last place of ``bits``.
        bits: Significant bits of the format whose last place is meant: 11 is float16, 8 bfloat16,
            24 float32.
        until: Only writes of positions before this one are changed; every write for 0.
    """

    layer: int = 0
    units: float = 4.0
    bits: int = 11
    until: int = 0

    def write(self, keys: Tensor, values: Tensor, cache_rows: CacheRows) -> KV:
        """Moves K and V of the planted layer and returns the others unchanged."""
        if cache_rows.layer != self.layer or (self.until and cache_rows.stop > self.until):
            return keys, values
        units = float(self.units)
        return nudged(keys, units, self.bits), nudged(values, units, self.bits)


def nudged(tensor: Tensor, units: float, bits: int) -> Tensor:
    """Returns a tensor whose elements are moved by ``units`` in the last of ``bits`` significant
    bits, with alternating signs.

    Args:
        tensor: Any float tensor.
        units: How far.
        bits: Significant bits of the format whose last place is meant.
    """
    # CUDA has no frexp of BF16.
    _, exponent = torch.frexp(tensor.double())
    last_place = torch.ldexp(torch.ones_like(tensor), exponent - bits)
    sign = 1 - 2 * (torch.arange(tensor.shape[-1], device=tensor.device) % 2)
    return tensor + units * last_place * sign.to(tensor.dtype)
