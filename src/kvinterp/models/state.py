"""What a model's modules keep between forwards: found at the start, each run's own while it runs, given back at the end.

Dozens of transformers models set attributes and buffers in their forward: positions of the images that were seen last
(``rope_deltas``), RoPE frequencies of the longest text so far, recurrent states, caches. So what was run on somebody's model
would show in what they run next, and of two runs that take turns on it one would read what the other left.

Noticed is whatever a module's ``__dict__`` and buffers hold: another object, and other numbers in the same tensor; what lists,
dictionaries, sets and transformers' caches among that hold, likewise. A module whose parameters are others than before, or
that keeps new handles of hooks, was made ready by its own code at its first forward (quantised layers, TransformerLens's
bridge), and is left so.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

log = logging.getLogger("kvinterp")

COPIED = 2**28
"""Bytes of tensors that are copied at most, the smallest first."""
_TORCHS = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""What every module has, its hooks among it, and what stands in for its forward."""
_DEPTH, _MANY = 4, 4096
"""How deep containers lie in each other, and the most that one holds, of those that are looked into."""


@dataclasses.dataclass(frozen=True)
class Leftover:
    """What a run left in a model's modules, where that is not what was found there.

    Attributes:
        contents: What each place holds, by its number.
        numbers: What each tensor holds that was written into, by its number.
    """

    contents: dict[int, Any] = dataclasses.field(default_factory=dict)
    numbers: dict[int, Tensor] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def as_made(model: nn.Module) -> Iterator[None]:
    """Puts aside what the user's own forwards left on a transformers model, as long as the context lasts.

    A tensor or a cache was left if a new model of the same class and config has None in its place. ``generate()`` begins such
    state anew, but a plain forward goes on from that of the batch before, and with another number of rows it raises.
    """
    left = [
        (path, module, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _TORCHS and (isinstance(value, Tensor) or hasattr(value, "get_seq_length"))
    ]
    made: dict[str, nn.Module] = {}
    if left and hasattr(model, "config"):
        # A class that wants more than its config, or does not build without numbers, is run as it is found.
        with contextlib.suppress(Exception), torch.random.fork_rng(devices=[]), torch.device("meta"):
            made = dict(type(model)(model.config).named_modules())
    left = [(path, module, name, value) for path, module, name, value in left if _none_at(made.get(path), name)]
    for _, module, name, _ in left:
        setattr(module, name, None)
    try:
        yield
    finally:
        for _, module, name, value in left:
            setattr(module, name, value)


def _none_at(module: nn.Module | None, name: str) -> bool:
    return module is not None and vars(module).get(name, ...) is None


class Snapshot:
    """What modules hold now.

    Args:
        models: Whatever has the modules.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._places: list[Any] = []
        self._owners: list[nn.Module] = []
        self._tensors: list[Tensor] = []
        self._parameters: dict[nn.Module, list[tuple[int, int]]] = {}
        seen: set[int] = set()
        for module in dict.fromkeys(itertools.chain.from_iterable(each.modules() for each in models)):
            self._parameters[module] = _addresses(module)
            for place in (vars(module), module._buffers, module._non_persistent_buffers_set):
                self._note(module, place, seen, _DEPTH)
        self._contents = [*map(_contents, self._places)]
        self._lengths = [*map(len, self._places)]
        # Every forward is followed by a look, which is one pass over all objects, by their identity alone.
        self._getters, self._values, self._of = list[Any](), list[Any](), list[int]()
        for number, (place, held) in enumerate(zip(self._places, self._contents, strict=True)):
            values = [*held.values()] if isinstance(held, dict) else held
            if values and not isinstance(held, set):
                self._getters.append((_getter(held), place))
                self._values += values
                self._of += [number] * len(values)
        self._versions = [*map(_version, self._tensors)]
        self._copies: dict[int, Tensor] = {}
        room = COPIED
        for number in sorted(range(len(self._tensors)), key=lambda number: self._tensors[number].nbytes):
            room -= self._tensors[number].nbytes
            if room >= 0:
                self._copies[number] = self._tensors[number].detach().clone()

    def taken(self, look: str = "quick") -> Leftover:
        """What is there now and was not found, taken out: what was found is there again.

        Args:
            look: ``"thorough"`` also asks tensors for numbers that torch was not told of (``.data``).
        """
        numbers = self._written(look == "thorough")
        contents = {number: _contents(self._places[number]) for number in self._changed()}
        kept = Leftover(contents, {number: self._tensors[number].detach().clone() for number in numbers})
        for number in contents:
            _fill(self._places[number], self._contents[number])
        for number in numbers:
            if number in self._copies:
                self._write(number, self._copies[number])
            else:
                size = self._tensors[number].nbytes >> 20
                log.warning("a forward wrote into a tensor of %d MB that a module keeps, too large to be given back", size)
                self._versions[number] = _version(self._tensors[number])
        return kept

    def put(self, kept: Leftover) -> None:
        """Puts in what was taken out; what was found is there now."""
        for number, held in kept.contents.items():
            _fill(self._places[number], held)
        for number, tensor in kept.numbers.items():
            self._write(number, tensor)
            # It is not what was found.
            self._versions[number] = -2

    def _note(self, owner: nn.Module, value: Any, seen: set[int], depth: int) -> None:
        """Notes a place or a tensor, and whatever is kept in it."""
        if id(value) in seen:
            return
        if isinstance(value, Tensor):
            plain = value.layout == torch.strided and not value.is_meta and not value.is_quantized
            if plain and not isinstance(value, nn.Parameter):
                seen.add(id(value))
                self._tensors.append(value)
            return
        # A transformers cache, and a layer of one.
        cache = (hasattr(value, "get_seq_length") or hasattr(value, "get_mask_sizes")) and hasattr(value, "__dict__")
        place = vars(value) if cache and not isinstance(value, nn.Module | type) else value
        if not isinstance(place, dict | list | set) or len(place) > _MANY or id(place) in seen or not depth:
            return
        seen.add(id(place))
        self._places.append(place)
        self._owners.append(owner)
        held = _contents(place)
        for inner in held.values() if isinstance(held, dict) else held:
            self._note(owner, inner, seen, depth - 1)

    def _changed(self) -> list[int]:
        """The places that hold something else now."""
        lengths = [*map(len, self._places)]
        try:
            now = [*itertools.chain.from_iterable([get(place) for get, place in self._getters])]
        except (KeyError, IndexError):
            changed = set(range(len(self._places)))
        else:
            if all(map(operator.is_, now, self._values)) and lengths == self._lengths:
                return []
            pairs = zip(self._of, now, self._values, strict=True)
            changed = {number for number, value, before in pairs if value is not before}
            changed |= {
                n for n, (length, before) in enumerate(zip(lengths, self._lengths, strict=True)) if length != before
            }
        changed = {n for n in changed if not _alike(_contents(self._places[n]), self._contents[n])}
        ready = {self._owners[n] for n in changed if self._made_ready(n)}
        return sorted(n for n in changed if self._owners[n] not in ready)

    def _made_ready(self, number: int) -> bool:
        place, owner = _contents(self._places[number]), self._owners[number]
        handles = any(
            isinstance(value, RemovableHandle) for value in (place.values() if isinstance(place, dict) else place)
        )
        return handles or _addresses(owner) != self._parameters[owner]

    def _written(self, thorough: bool) -> list[int]:
        """The tensors that hold other numbers now."""
        written = []
        for number, (tensor, before) in enumerate(zip(self._tensors, self._versions, strict=True)):
            now, copy = _version(tensor), self._copies.get(number)
            asked = (thorough or now < 0) and copy is not None
            if now != before or (asked and not (tensor.shape == copy.shape and torch.equal(tensor, copy))):  # type: ignore[union-attr, arg-type]
                written.append(number)
        return written

    @torch.no_grad()
    def _write(self, number: int, numbers: Tensor) -> None:
        tensor = self._tensors[number]
        with torch.inference_mode(tensor.is_inference()):
            if tensor.shape == numbers.shape:
                tensor.copy_(numbers)
            else:
                tensor.data = numbers.clone()
        self._versions[number] = _version(tensor)


def _contents(place: Any) -> Any:
    """What a place holds, in a container of its own; of a module's attributes those left out that torch has in every module."""
    if isinstance(place, dict):
        return (
            {n: v for n, v in place.items() if n not in _TORCHS} if "_non_persistent_buffers_set" in place else dict(place)
        )
    return {*place} if isinstance(place, set) else [*place]


def _fill(place: Any, held: Any) -> None:
    if isinstance(place, list):
        place[:] = held
        return
    for name in _contents(place) - held if isinstance(place, set) else [n for n in _contents(place) if n not in held]:
        place.discard(name) if isinstance(place, set) else place.pop(name)
    place.update(held)


def _alike(held: Any, before: Any) -> bool:
    if isinstance(held, set):
        return bool(held == before)
    if isinstance(held, dict):
        return held.keys() == before.keys() and all(value is before[name] for name, value in held.items())
    return len(held) == len(before) and all(map(operator.is_, held, before))


def _getter(held: Any) -> Callable[[Any], Iterable[Any]]:
    first, *others = held if isinstance(held, dict) else range(len(held))
    # Of one name alone a getter would give the value, and no tuple of one.
    return operator.itemgetter(first, *others) if others else lambda place: (place[first],)


def _version(tensor: Tensor) -> int:
    """How often torch saw the tensor written into; -1 where it does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _addresses(module: nn.Module) -> list[tuple[int, int]]:
    return [(id(p), 0 if p.is_meta else p.data_ptr()) for p in module._parameters.values() if p is not None]
