"""Finding a cause, and checking the finder on causes we planted ourselves.

The search runs at the first decode step, where nothing has accumulated yet: the cache then holds the prompt's keys and
values, written by the same prefill on both paths, and only the newest row is computed anew. There a difference has three
places it can be made:

- **K and V as the prefill wrote them** at a layer: putting the other path's keys and values of the prompt back at that
  layer recovers it;
- **the one-row computation** of a layer: putting the residual stream back recovers nothing before that layer and all of it
  from that layer on, so the gain from one layer to the next is the measure;
- **the unembedding**: what is left when the last residual stream is put back.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd
from torch import Tensor

from kvinterp.errors import InputError, located, unknown
from kvinterp.models import SITES, Adapter, dtype_named, wrap
from kvinterp.models.adapter import CACHE_SITES, Listener, Site
from kvinterp.models.threads import own_threads
from kvinterp.patching.lanes import Donor, RunnerLane, two_paths
from kvinterp.patching.patch import Patch, PatchWatcher, stored_sites
from kvinterp.paths import ExecutionPath
from kvinterp.paths.runner import LOGITS, encode
from kvinterp.policies import Place
from kvinterp.policies.planted import Planted, nudged

__all__ = ["ONE_ROW", "PLACES", "Cause", "Plant", "PlantWatcher", "localise"]

PLACES = {
    "kv": "K and V as the prefill writes them at a layer",
    "row": "the one-row computation of a layer",
    "unembedding": "the unembedding",
}
ONE_ROW = tuple(site for site in SITES if site not in (*CACHE_SITES, "attn_scores", "pattern", "resid_pre"))
"""Where a layer's one-row result can be moved; ``resid_pre`` is the result of the layer before."""


@dataclasses.dataclass(frozen=True)
class Plant:
    """A difference of a few units in the last place, put into the cached path in one place only.

    Attributes:
        place: One of PLACES.
        layer: The layer, for ``kv`` and ``row``.
        units: How many units in the last place.
        bits: Significant bits of the format meant: 11 is float16.
        site: For ``row``: the site whose one-row result is moved; one of ONE_ROW.

    Raises:
        InputError: The place or site does not exist.
    """

    place: str
    layer: int = 0
    units: float = 4.0
    bits: int = 11
    site: str = "mlp_out"

    def __post_init__(self) -> None:
        if self.place not in PLACES:
            raise unknown("place to plant a difference", self.place, PLACES)
        if self.site not in ONE_ROW:
            raise unknown("site to plant a difference at", self.site, ONE_ROW)

    def check(self, adapter: Adapter) -> None:
        """Raises InputError where the model has no such layer."""
        if not 0 <= self.layer < adapter.facts.layers:
            raise InputError(
                f"layer {self.layer} does not exist: {adapter.facts.name} has layers 0 to {adapter.facts.layers - 1}."
            )

    def written(self, path: ExecutionPath, prompt_length: int) -> ExecutionPath:
        """The path with the difference where the prompt's K and V are written, if that is the place."""
        if self.place != "kv":
            return path
        return dataclasses.replace(path, policy=Planted(self.layer, self.units, self.bits, prompt_length))

    def watcher(self) -> PlantWatcher:
        """What puts the difference into one-row computations, if that is the place."""
        return PlantWatcher(self)


class PlantWatcher:
    """Puts the difference into the one-row computations of one path, from step 1 on."""

    def __init__(self, plant: Plant) -> None:
        self.plant = plant
        place: Site = LOGITS if plant.place == "unembedding" else (plant.site, plant.layer)
        self.listeners: Mapping[Site, Listener] = {} if plant.place == "kv" else {place: self._nudge}
        self.places: Sequence[Site] = [site for site in self.listeners if site != LOGITS]
        self.step = 0

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self.step = step

    def begin_pass(self) -> None:
        """A forward from position 0 follows."""

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        """K and V are planted where they are written, by the policy."""

    def _nudge(self, tensor: Tensor) -> Tensor | None:
        return nudged(tensor, float(self.plant.units), self.plant.bits) if self.step else None


@dataclasses.dataclass
class Cause:
    """Where the difference at the first decode step is made.

    Attributes:
        place: One of PLACES, or ``"none"`` where the paths are bitwise equal, or ``"spread"`` where none has half of it.
        layer: The layer, or -1.
        share: The share of the difference recovered at that place.
        table: One row a place and layer: share (gain for rows, recovery for K and V, rest for the unembedding).
    """

    place: str
    layer: int
    share: float
    table: pd.DataFrame

    def __str__(self) -> str:
        """One sentence."""
        if self.place == "none":
            return "At the first decode step the paths are bitwise equal."
        if self.place == "spread":
            return "At the first decode step no single place makes half of the difference."
        place = PLACES[self.place].replace("a layer", f"layer {self.layer}")
        return f"At the first decode step {self.share:.0%} of the difference is made by {place}."


def localise(
    model: Any,
    prompt: Any,
    plant: Plant | None = None,
    *,
    cached: str | ExecutionPath = "cached",
    recompute: str | ExecutionPath = "recompute",
    dtype: str | None = None,
) -> Cause:
    """Names the place where cached and recompute part at the first decode step.

    Args:
        model: A model of any kind, or an adapter.
        prompt: One prompt.
        plant: A difference to plant in the cached path first, to check that it is found.
        cached: The cached path.
        recompute: The recompute path.
        dtype: Compute dtype of both paths instead of their own; float64 leaves nothing but what is planted.

    Returns:
        The place, by the L2 distance of the logits.

    Raises:
        InputError: The plant's layer does not exist, or the prompt does not fit.
    """
    adapter = wrap(model)
    if plant is not None:
        plant.check(adapter)
    tokens = encode(adapter, prompt, 2)
    with located(f"model {adapter.facts.name}"), own_threads(adapter):
        return _localise(adapter, tokens, plant, *two_paths(cached, recompute, "this search", dtype))


def _localise(
    adapter: Adapter, prompt: Sequence[int], plant: Plant | None, cached: ExecutionPath, recompute: ExecutionPath
) -> Cause:
    if plant is not None:
        cached = plant.written(cached, len(prompt))
    model, giver = (adapter.at(dtype_named(path.dtype)) for path in (cached, recompute))
    layers = range(model.facts.layers)
    wanted: list[Site] = [(s, x) for s in ("resid_post", *stored_sites(model, "kv")) for x in layers]
    donor = Donor(giver, wanted, len(prompt))
    patches = [Patch("kv", (x,), None, "earlier", "first") for x in layers]
    patches += [Patch("resid_post", (x,), None, "newest", "first") for x in layers]
    with contextlib.ExitStack() as stack:

        def lane(patch: Patch | None) -> RunnerLane:
            watchers: list[Any] = [] if plant is None else [plant.watcher()]
            if patch is not None:
                watchers.append(PatchWatcher(model, [patch], donor.window, len(prompt)))
            return stack.enter_context(RunnerLane(adapter, cached, prompt, 1, watchers))

        giving = stack.enter_context(RunnerLane(adapter, recompute, prompt, 1, [donor]))
        lanes = [lane(None), *map(lane, patches)]
        token = int(giving.advance(None).argmax())
        for each in lanes:
            each.advance(None)
        target = giving.advance(token)
        distances = [float((each.advance(token).double() - target.double()).norm()) for each in lanes]
    return _named(distances[0], distances[1 : 1 + len(layers)], distances[1 + len(layers) :])


def _named(before: float, after_kv: Sequence[float], after_resid: Sequence[float]) -> Cause:
    if before == 0:
        return Cause("none", -1, 0.0, pd.DataFrame(columns=["place", "layer", "share"]))
    left = [before, *after_resid]
    rows = [{"place": "kv", "layer": x, "share": 1 - d / before} for x, d in enumerate(after_kv)]
    rows += [{"place": "row", "layer": x, "share": (left[x] - left[x + 1]) / before} for x in range(len(after_resid))]
    rows.append({"place": "unembedding", "layer": -1, "share": after_resid[-1] / before})
    table = pd.DataFrame(rows)
    # A residual put back at or after a layer also undoes what that layer read from the cache, so K and V are asked first.
    for place in PLACES:
        best = table[table["place"] == place].sort_values("share").iloc[-1]
        if best["share"] > 0.5:
            return Cause(place, int(best["layer"]), float(best["share"]), table)
    return Cause("spread", -1, float(table["share"].max()), table)
