"""One prompt along both paths and the lanes that stand between them, so that every difference has one cause.

What a cache changes is the company in which a row is computed: alone when it is decoded, among the whole prefix when the
prefix is recomputed. The recompute path is no fixed truth either: at every step it makes the old rows anew among another
number of rows. So the lanes go from one path to the other and change one company at a time, on the same tokens:

==============  ================================  =================================  ==========================
lane            K and V of the prompt's rows      K and V of the decoded rows        the newest row
==============  ================================  =================================  ==========================
``recompute``   of the recompute path, now        of the recompute path, now         among the prefix
``one_row``     of the recompute path, now        of the recompute path, now         alone
``row_by_row``  of the recompute path, now        each made alone, on those          alone
``as_written``  of the recompute path at step 0   each made alone, on those          alone
``cached``      as the cached path keeps them     as the cached path keeps them      alone
==============  ================================  =================================  ==========================

The differences from lane to lane are the **parts** (``fresh``, ``decoded``, ``prompt``, ``kept``): as vectors they add up to
the whole. Each has a **null** in which the same rows are computed by the recompute path among more rows, so that no cache has
to do with it.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.models import Adapter, dtype_named
from kvinterp.models.adapter import Listener, Site
from kvinterp.patching.lanes import Donor, RunnerLane
from kvinterp.patching.planted import Plant
from kvinterp.paths import ExecutionPath
from kvinterp.paths.cache import PassThrough
from kvinterp.paths.runner import LOGITS
from kvinterp.policies import Identity, Place

__all__ = ["DIFFERENCES", "PARTS", "KeysValues", "Lane", "Rows", "Shown", "Split", "leading_part"]

PARTS = {
    "fresh": "the newest row, computed alone at this step",
    "decoded": "K and V of the decoded rows, each computed alone at its own step",
    "prompt": "K and V of the prompt, which the recompute path makes anew among another number of rows",
    "kept": "K and V that the cached path keeps otherwise than the recompute path wrote them at step 0",
}
"""What lies between one lane and the next; as vectors they add up to the whole difference."""

DIFFERENCES = {
    "total": ("cached", "recompute"),
    "fresh": ("one_row", "recompute"),
    "decoded": ("row_by_row", "one_row"),
    "prompt": ("as_written", "row_by_row"),
    "kept": ("cached", "as_written"),
    "state": ("cached", "one_row"),
    "cache": ("row_by_row", "recompute"),
    "null": ("longer", "recompute"),
    "null_fresh": ("longer_newest", "recompute"),
    "null_decoded": ("longer_decoded", "one_row"),
    "null_prompt": ("longer_prompt", "row_by_row"),
    "null_state": ("longer_state", "one_row"),
    "null_cache": ("longer_cache", "recompute"),
}
"""Which two lanes each difference is between. ``state`` is decoded, prompt and kept together, ``cache`` (what a cache as such
contributes) is fresh and decoded together; each ``null_`` is the same change of company without a cache."""

KeysValues = Sequence[tuple[Tensor, Tensor]]
"""K and V of every layer, each ``[1, kv_head, position, head_dim]`` from position 0 on."""


def leading_part(lengths: Mapping[str, float], total: float) -> tuple[str, float]:
    """The part that is longer than all others together, and its share of the lengths.

    Only then can no way of adding the parts up make another one the cause. ``"none"`` where there is no difference,
    ``"spread"`` (with the largest share) where no part is that long.

    Args:
        lengths: L2 length of every part.
        total: L2 length of the whole difference.
    """
    if total == 0:
        return "none", 0.0
    name = max(lengths, key=lambda part: lengths[part])
    share = lengths[name] / sum(lengths.values())
    return (name if share > 0.5 else "spread"), share


@dataclasses.dataclass(frozen=True)
class Shown:
    """What a lane shows at a step.

    Attributes:
        logits: Of the newest row.
        stream: ``resid_post`` of the newest row, layer by layer.
    """

    logits: Float[Tensor, " vocab"]
    stream: Float[Tensor, "layer width"]


class Rows:
    """A watcher that puts given keys and values in place of those of earlier positions, as attention reads them.

    Attributes:
        held: What to put there; set before a step.
        stop: One past the last position to replace; 0 replaces nothing.
    """

    def __init__(self, layers: Collection[int] | None = None) -> None:
        self.layers = layers
        self.held: KeysValues = ()
        self.stop = 0
        self.places: Sequence[Site] = ()
        self.listeners: Mapping[Site, Listener] = {}

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""

    def begin_pass(self) -> None:
        """A forward from position 0 follows."""

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Replaces the rows, in the memory where they are: a kernel may add up in another order for other strides."""
        stop = min(self.stop, place.stop)
        if stop <= place.start or (self.layers is not None and place.layer not in self.layers):
            return None
        for tensor, given in zip((keys, values), self.held[place.layer], strict=True):
            tensor[:, :, : stop - place.start].copy_(given[:, :, place.start : stop])
        return keys, values


class _Reads:
    """A watcher that keeps what attention reads in a forward over the whole context."""

    def __init__(self, layers: int) -> None:
        self.now: dict[int, tuple[Tensor, Tensor]] = {}
        self.layers = layers
        self.places: Sequence[Site] = ()
        self.listeners: Mapping[Site, Listener] = {}

    def begin_step(self, step: int) -> None:
        self.now = {}

    def begin_pass(self) -> None:
        pass

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> None:
        # The model's own memory, which another watcher may write into.
        self.now[place.layer] = keys.clone(), values.clone()

    def whole(self) -> KeysValues:
        return [self.now[layer] for layer in range(self.layers)]


class Lane:
    """A path advanced step by step that shows its logits and its residual stream.

    Args:
        split: Whose model, prompt and plant.
        path: How to run it.
        watchers: More that look in.
        plants: Whether the planted one-row difference is made here too.
    """

    def __init__(self, split: Split, path: ExecutionPath, watchers: Sequence[Any] = (), plants: bool = True) -> None:
        model = split.adapter.at(dtype_named(path.dtype))
        self._donor = Donor(model, split.residual, len(split.prompt))
        planted = [] if split.plant is None or not plants else [split.plant.watcher()]
        self._lane = RunnerLane(split.adapter, path, split.prompt, split.room, [*planted, *watchers, self._donor])
        self._layers = range(model.facts.layers)

    def __enter__(self) -> Lane:
        self._lane.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._lane.__exit__(*error)

    def advance(self, token: int | None) -> Shown:
        """The next step."""
        logits = self._lane.advance(token)
        rows = [self._donor.window("resid_post", layer)[1][0, -1] for layer in self._layers]
        return Shown(logits.clone(), torch.stack(rows))


class _RowByRow:
    """Decodes from given keys and values of the prompt, one row a step, from the first decoded token to the newest.

    Where they are those of the step before, to the bit, it goes on from there instead of beginning again.
    """

    def __init__(self, split: Split) -> None:
        self.split = split
        self._rows, self._lane = Rows(), None

    def __enter__(self) -> _RowByRow:
        return self

    def __exit__(self, *error: Any) -> None:
        if self._lane is not None:
            self._lane.__exit__(*error)
            self._lane = None

    def after(self, fed: Sequence[int], held: KeysValues) -> Shown:
        prompt = [(k[:, :, : self._length], v[:, :, : self._length]) for k, v in held]
        if self._lane is None or not _alike(prompt, self._rows.held):
            self.__exit__(None, None, None)
            self._rows = Rows()
            self._lane = Lane(self.split, self.split.one_row, [self._rows]).__enter__()
            self._lane.advance(None)
            self._rows.held, self._rows.stop = prompt, self._length
            for token in fed[:-1]:
                self._lane.advance(token)
        return self._lane.advance(fed[-1])

    @property
    def _length(self) -> int:
        return len(self.split.prompt)


class Split:
    """The lanes of one prompt.

    Args:
        adapter: The model.
        paths: The cached and the recompute path.
        prompt: Token ids.
        room: Most steps.
        suffix: Tokens put behind the prefix for the nulls.
        plant: A difference to plant in the cached path.
        stop: ``"end of sequence"`` or ``"length"``.

    Attributes:
        one_row: The cached path's one-row computation alone: without its policy, its cache's dtype and its chunks, which
            all belong to ``kept``.
        at_step_0: K and V of the prompt as the recompute path wrote them at step 0.
        now: K and V as the recompute path reads them at this step.
    """

    def __init__(
        self,
        adapter: Adapter,
        paths: tuple[ExecutionPath, ExecutionPath],
        prompt: Sequence[int],
        room: int,
        suffix: int,
        plant: Plant | None,
        stop: str = "end of sequence",
    ) -> None:
        self.adapter, self.prompt, self.room, self.plant = adapter, list(prompt), room, plant
        self.ends = adapter.end_tokens if stop == "end of sequence" else frozenset()
        cached, self.recompute = paths
        self.one_row = dataclasses.replace(cached, policy=Identity(), cache_dtype=None, chunk=None)
        self.cached = cached if plant is None else plant.written(cached, len(self.prompt))
        self.filler = (self.prompt * (suffix // len(self.prompt) + 1))[:suffix]
        self.residual: list[Site] = [("resid_post", layer) for layer in range(adapter.facts.layers)]
        self.at_step_0: KeysValues = ()
        self.now: KeysValues = ()

    def steps(self) -> Iterator[tuple[int, dict[str, Shown]]]:
        """At every step what each lane of DIFFERENCES shows."""
        reads, layers = _Reads(self.adapter.facts.layers), self.adapter.facts.layers
        one, decoded, state = Rows(), Rows(), Rows()
        written = Rows()
        with contextlib.ExitStack() as stack:

            def lane(path: ExecutionPath, *watchers: Any, plants: bool = True) -> Lane:
                return stack.enter_context(Lane(self, path, watchers, plants))

            cached, recompute = lane(self.cached), lane(self.recompute, reads, plants=False)
            as_written, one_row = lane(self.one_row, written), lane(self.one_row, one)
            longer_decoded, longer_state = lane(self.one_row, decoded), lane(self.one_row, state)
            row_by_row, longer_prompt = (stack.enter_context(_RowByRow(self)) for _ in range(2))
            fed: list[int] = []
            for step in range(self.room):
                token = fed[-1] if fed else None
                shown = {"cached": cached.advance(token), "recompute": recompute.advance(token)}
                self.now, end = reads.whole(), len(self.prompt) + step
                longer = self._longer(fed, 0)
                shown["longer"] = longer[0]
                if step == 0:
                    self.at_step_0 = self.now
                    for each in (as_written, one_row, longer_decoded, longer_state):
                        each.advance(None)
                    shown |= dict.fromkeys(("one_row", "row_by_row", "as_written"), shown["recompute"])
                    nulls = [name for name, _ in DIFFERENCES.values() if name.startswith("longer_")]
                    shown |= dict.fromkeys(nulls, shown["recompute"])
                else:
                    held = self._longer(fed, len(self.prompt))
                    shown["longer_cache"], shown["longer_newest"] = held[0], self._longer(fed, end - 1)[0]
                    given = (self.at_step_0, self.now, held[1], longer[1])
                    for rows, what in zip((written, one, decoded, state), given, strict=True):
                        rows.held, rows.stop = what, end - 1
                    written.stop = len(self.prompt)
                    shown["as_written"], shown["one_row"] = as_written.advance(token), one_row.advance(token)
                    shown["longer_decoded"], shown["longer_state"] = longer_decoded.advance(token), longer_state.advance(token)
                    shown["row_by_row"] = row_by_row.after(fed, self.now)
                    shown["longer_prompt"] = longer_prompt.after(fed, longer[1])
                assert len(self.now) == layers
                yield step, shown
                fed = [*fed, int(shown["cached"].logits.argmax())]
                if fed[-1] in self.ends:
                    break

    def _longer(self, fed: Sequence[int], stop: int) -> tuple[Shown, KeysValues]:
        """The recompute path with more tokens behind the prefix, which a causal model must not see.

        Args:
            fed: Tokens decoded so far.
            stop: Positions before this one keep the K and V that the recompute path itself has at this step.

        Returns:
            What it shows at the newest position of the prefix, and K and V.
        """
        model, path = self.adapter.at(dtype_named(self.recompute.dtype)), self.recompute
        newest = len(self.prompt) + len(fed) - 1
        tokens = torch.tensor([[*self.prompt, *fed, *self.filler]], device=model.device)
        rows, reads = Rows(), _Reads(model.facts.layers)
        rows.held, rows.stop = self.now, stop
        seen: dict[int, Tensor] = {}
        kernels = path.kernels.mode(model)
        listeners: dict[Site, list[Listener]] = {place: [hear] for place, hear in kernels.listeners.items()}
        for site, layer in self.residual:
            model.tap(site, layer)
            listeners.setdefault((site, layer), []).append(_keeping(seen, layer, newest))
        # The recompute path's own store, so that the suffix is all that differs.
        store = PassThrough(model.facts, path.policy, 1, model.dtype, model.device, [rows.on_read, reads.on_read])
        places = [place for place in listeners if place != LOGITS]
        with torch.no_grad(), model.attached(places), model.listening(listeners), kernels:
            logits = model.forward(tokens, store)[0, newest].clone()
        return Shown(logits, torch.stack([seen[layer] for layer in range(model.facts.layers)])), reads.whole()


def _keeping(seen: dict[int, Tensor], layer: int, position: int) -> Callable[[Tensor], None]:
    def listener(tensor: Tensor) -> None:
        seen[layer] = tensor[0, position].clone()

    return listener


def _alike(one: KeysValues, other: KeysValues) -> bool:
    pairs = zip(one, other, strict=True)
    return len(one) == len(other) and all(torch.equal(a, b) for mine, theirs in pairs for a, b in zip(mine, theirs, strict=True))
