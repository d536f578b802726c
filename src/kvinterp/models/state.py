"""The state that a model's modules keep between forwards: noted at the start, separate for each
run, restored at the end.

Dozens of transformers models set attributes and buffers in their forward: positions of the last
images (``rope_deltas``), RoPE frequencies of the longest text so far, recurrent states, caches.
Without this file a run on somebody's model would change what they run next, and two runs that take
turns on a model would read each other's state.

A snapshot covers the ``__dict__`` and the buffers of every module, and the containers,
transformers' caches and plain objects in them. It notices another object in a holder, and other
numbers in the same tensor. A module that has other parameters than before, or new handles of hooks,
was set up by its own code at its first forward (quantised layers, TransformerLens's bridge) and is
left as it is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import logging
import operator
import sys
from collections import deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

log = logging.getLogger("kvinterp")

COPIED = 2**28
"""The most bytes of tensors that are copied, the smallest first."""
_IN_EVERY_MODULE = frozenset(vars(nn.Module())) | {"forward", "_compiled_call_impl"}
"""Attributes that torch gives every module, its hooks among them, and those that replace its
forward.
"""
_SET_BY_RUNS = frozenset({"_attn_implementation_internal", "_experts_implementation_internal"})
"""Entries of a config that this package's own contexts set and set back: another attention for some
forwards.
"""
_DEPTH, _LONGEST = 4, 4096
"""Containers nested deeper, or with more items, are not looked into."""
_STATELESS = sys.stdlib_module_names - {"types"} | {"torch"}
"""Packages whose objects keep no state of a model: loggers, locks, handles of hooks."""


@dataclasses.dataclass(frozen=True)
class Leftover:
    """What a run left in a model's modules, as far as it differs from the snapshot.

    Attributes:
        contents: The contents of each changed holder, by its number.
        numbers: The numbers in each tensor that was written into, by the number of the tensor.
    """

    contents: dict[int, Any] = dataclasses.field(default_factory=dict)
    numbers: dict[int, Tensor] = dataclasses.field(default_factory=dict)


@contextlib.contextmanager
def as_made(model: nn.Module) -> Iterator[None]:
    """Sets aside what the user's own forwards left on a transformers model, while the context
    lasts.

    A tensor or a cache was left by a forward if a new model of the same class and config has None
    in its place. ``generate()`` resets such state, but a plain forward goes on from the previous
    batch and raises where the number of rows differs. Configs that ask for tuples
    (``return_dict=False``) ask for named outputs meanwhile, as ``generate()`` does.
    """
    left = [
        (path, module, name, value)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name not in _IN_EVERY_MODULE
        and (isinstance(value, Tensor) or hasattr(type(value), "get_seq_length"))
    ]
    if left:
        fresh: dict[str, nn.Module] = {}
        # A class that needs more than its config, or cannot be built without numbers, runs as it
        # is.
        with (
            contextlib.suppress(Exception),
            torch.random.fork_rng(devices=[]),
            torch.device("meta"),
        ):
            fresh = dict(type(model)(model.config).named_modules())
        left = [
            entry
            for entry in left
            if entry[0] in fresh and vars(fresh[entry[0]]).get(entry[2], ...) is None
        ]
    configs: Iterator[Any] = (vars(module).get("config") for module in model.modules())
    tuples = {
        id(config): config for config in configs if getattr(config, "return_dict", True) is False
    }.values()
    try:
        for _, module, name, _ in left:
            setattr(module, name, None)
        for config in tuples:
            config.return_dict = True
        yield
    finally:
        for config in tuples:
            config.return_dict = False
        for _, module, name, value in left:
            setattr(module, name, value)


class Snapshot:
    """The state of all modules at one moment.

    Args:
        models: The models with the modules.
    """

    def __init__(self, *models: nn.Module) -> None:
        self._holders: list[Any] = []
        self._owners: list[nn.Module] = []
        self._tensors: list[Tensor] = []
        self._parameters: dict[nn.Module, list[tuple[int, int]]] = {}
        self._contents: list[Any] = []
        visited: set[int] = set()
        for module in dict.fromkeys(
            itertools.chain.from_iterable(model.modules() for model in models)
        ):
            self._parameters[module] = _addresses(module)
            own = vars(module), module._buffers, module._non_persistent_buffers_set
            waiting = deque(zip(own, itertools.repeat(_DEPTH)))
            while waiting:
                value, depth = waiting.popleft()
                if isinstance(value, Tensor):
                    plain = (
                        value.layout == torch.strided
                        and not value.is_meta
                        and not value.is_quantized
                    )
                    if plain and not isinstance(value, nn.Parameter) and id(value) not in visited:
                        visited.add(id(value))
                        self._tensors.append(value)
                    continue
                holder: Any = vars(value) if _has_state(value) else value
                if (
                    not isinstance(holder, dict | list | deque | set | tuple)
                    or len(holder) > _LONGEST
                ):
                    continue
                if id(holder) in visited or not depth:
                    continue
                contents = holder
                # What a tuple holds is the same for good, but for what is inside.
                if not isinstance(holder, tuple):
                    contents = _contents(holder)
                    visited.add(id(holder))
                    self._holders.append(holder)
                    self._owners.append(module)
                    self._contents.append(contents)
                inside = contents.values() if isinstance(contents, dict) else contents
                waiting.extend(zip(inside, itertools.repeat(depth - 1)))
        self._lengths = [*map(len, self._holders)]
        # The comparison after every forward is one pass over all objects, by their identity alone.
        self._getters, self._values, self._numbers = list[Any](), list[Any](), list[int]()
        for number, (holder, contents) in enumerate(
            zip(self._holders, self._contents, strict=True)
        ):
            names = [*contents] if isinstance(contents, dict) else [*range(len(contents))]
            if names and not isinstance(contents, set):
                # The first name twice, since for one name alone an itemgetter returns the value and
                # no tuple.
                get = operator.itemgetter(names[0], *names)
                self._getters.append((get, holder))
                self._values += get(contents)
                self._numbers += [number] * (1 + len(names))
        self._versions = [*map(_version, self._tensors)]
        self._copies: dict[int, Tensor] = {}
        budget = COPIED
        for number in sorted(
            range(len(self._tensors)), key=lambda number: self._tensors[number].nbytes
        ):
            budget -= self._tensors[number].nbytes
            if budget >= 0:
                self._copies[number] = self._tensors[number].detach().clone()

    def take_out(self, search: str = "quick") -> Leftover:
        """Restores the state of the snapshot, and returns what was there instead.

        Args:
            search: ``"thorough"`` also compares tensors whose numbers may have changed without
                torch's knowledge (``.data``).
        """
        numbers = []
        for number, (tensor, before) in enumerate(zip(self._tensors, self._versions, strict=True)):
            now, copy = _version(tensor), self._copies.get(number)
            same = now == before
            if same and copy is not None and (search == "thorough" or now < 0):
                same = tensor.shape == copy.shape and torch.equal(tensor, copy)
            if not same:
                numbers.append(number)
        changed = self._changed()
        if not changed and not numbers:
            return Leftover()
        contents = {number: _contents(self._holders[number]) for number in changed}
        leftover = Leftover(
            contents, {number: self._tensors[number].detach().clone() for number in numbers}
        )
        for number in contents:
            _fill(self._holders[number], self._contents[number])
        for number in numbers:
            if number in self._copies:
                self._write(number, self._copies[number])
            else:
                size = self._tensors[number].nbytes >> 20
                log.warning(
                    "a forward wrote into a tensor of %d MB that a module keeps, too large to be given back",
                    size,
                )
                self._versions[number] = _version(self._tensors[number])
        return leftover

    def put_in(self, leftover: Leftover) -> None:
        """Puts back what :meth:`take_out` returned; the state of the snapshot must be there."""
        for number, contents in leftover.contents.items():
            _fill(self._holders[number], contents)
        for number, tensor in leftover.numbers.items():
            self._write(number, tensor)
            # A version that no tensor has, so that the next comparison notices it.
            self._versions[number] = -2

    def _changed(self) -> list[int]:
        """The numbers of the holders whose contents differ from the snapshot, but for those of
        modules that were set up since.
        """
        lengths = [*map(len, self._holders)]
        try:
            now = [*itertools.chain.from_iterable([get(holder) for get, holder in self._getters])]
        except (KeyError, IndexError):
            changed = set(range(len(self._holders)))
        else:
            if all(map(operator.is_, now, self._values)) and lengths == self._lengths:
                return []
            pairs = zip(self._numbers, now, self._values, strict=True)
            changed = {number for number, value, before in pairs if value is not before}
            changed |= {
                n
                for n, (length, before) in enumerate(zip(lengths, self._lengths, strict=True))
                if length != before
            }
        changed = {
            n for n in changed if not _same_objects(_contents(self._holders[n]), self._contents[n])
        }
        set_up = set()
        for number in changed:
            contents, owner = _contents(self._holders[number]), self._owners[number]
            values = contents.values() if isinstance(contents, dict) else contents
            if (
                any(isinstance(value, RemovableHandle) for value in values)
                or _addresses(owner) != self._parameters[owner]
            ):
                set_up.add(owner)
        return sorted(n for n in changed if self._owners[n] not in set_up)

    @torch.no_grad()
    def _write(self, number: int, numbers: Tensor) -> None:
        tensor = self._tensors[number]
        with torch.inference_mode(tensor.is_inference()):
            if tensor.shape == numbers.shape:
                tensor.copy_(numbers)
            else:
                tensor.data = numbers.clone()
        self._versions[number] = _version(tensor)


def _has_state(value: Any) -> bool:
    """Whether attributes of an object may be state: a transformers cache, a layer of one, a plain
    object of the user's code.
    """
    if not isinstance(getattr(value, "__dict__", None), dict) or isinstance(
        value, nn.Module | tuple
    ):
        return False
    # The class is asked, since an object of the user's may raise whatever it likes where it lacks
    # an attribute.
    if hasattr(type(value), "get_seq_length") or hasattr(type(value), "get_mask_sizes"):
        return True
    # What can be called is code.
    return not callable(value) and type(value).__module__.split(".")[0] not in _STATELESS


def _contents(holder: Any) -> Any:
    """Copies the contents of a holder; for a module or a config, without what
    :data:`_IN_EVERY_MODULE` and its like name.
    """
    if isinstance(holder, dict):
        others = _IN_EVERY_MODULE if "_non_persistent_buffers_set" in holder else _SET_BY_RUNS
        return {name: value for name, value in holder.items() if name not in others}
    return {*holder} if isinstance(holder, set) else [*holder]


def _fill(holder: Any, contents: Any) -> None:
    """Makes a holder hold these contents."""
    if isinstance(holder, list | deque):
        holder.clear()
        holder.extend(contents)
        return
    for name in _contents(holder):
        if name not in contents:
            holder.discard(name) if isinstance(holder, set) else holder.pop(name)
    holder.update(contents)


def _same_objects(contents: Any, before: Any) -> bool:
    if isinstance(contents, set):
        return bool(contents == before)
    if isinstance(contents, dict):
        return contents.keys() == before.keys() and all(
            value is before[name] for name, value in contents.items()
        )
    return len(contents) == len(before) and all(map(operator.is_, contents, before))


def _version(tensor: Tensor) -> int:
    """How often torch saw the tensor written into; -1 where torch does not count."""
    return -1 if tensor.is_inference() else tensor._version


def _addresses(module: nn.Module) -> list[tuple[int, int]]:
    return [
        (id(p), 0 if p.is_meta else p.data_ptr())
        for p in module._parameters.values()
        if p is not None
    ]
