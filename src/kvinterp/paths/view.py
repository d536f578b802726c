"""What a hook sees of forwards that hold more than the path's own tokens: its own row, its own positions."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor

from kvinterp.models.attaching import Listener, Site
from kvinterp.models.sites import LAYOUTS
from kvinterp.policies import Place
from kvinterp.recording import LOGITS, PathHook

Axes = dict[int, Tensor]


class View:
    """Which part of the forward that runs is the path's.

    Attributes:
        row: Its row in the batch.
        own: Which of the positions so far are its own, ``[position]``.
        new: How many positions this forward feeds.
        shown: How many of them are shown, from the ``first`` on; None for all.
        writes: Whether a hook may change what it is shown, so that no row may be shown after its forward.
        silent: Whether the forward is another request's altogether.
    """

    def __init__(self) -> None:
        self.row, self.new, self.silent = 0, 0, False
        self.own: Bool[Tensor, " position"] = torch.zeros(0, dtype=torch.bool)
        self.first, self.writes = 0, False
        self.shown: int | None = None
        self._told: list[Callable[[], Any]] = []

    def feed(self, own: Bool[Tensor, " new"], shown: int | None = None) -> None:
        """New positions come, of which these are the path's own."""
        self.own, self.new, self.first, self.shown = torch.cat([self.own, own]), len(own), 0, shown
        self._told = []

    def lasting(self, tensor: Tensor) -> Tensor:
        """What is told later is told of a copy: a model may go on computing in the memory that it showed."""
        return tensor if self.shown is None else tensor.clone()

    def tell(self, hear: Callable[[], Any]) -> Any:
        """What a hook makes of this forward's shown rows; where others may be shown later it is kept until the next forward."""
        if self.shown is not None:
            self._told.append(hear)
        return hear()

    def show(self, at: int) -> None:
        """Shows another row of the forward that ran, as if it were the only one."""
        self.first, self.shown = at, 1
        for hear in self._told:
            hear()

    def crop(self, length: int) -> None:
        """Positions from ``length`` on are taken back."""
        self.own = self.own[:length]

    @property
    def begun(self) -> int:
        """The first position that this forward feeds."""
        return len(self.own) - self.new

    def queries(self) -> Tensor:
        """The rows of this forward that are shown."""
        shown = self.own[self.begun :].clone()
        shown[: self.first] = False
        return shown[: self._end()].nonzero().flatten()

    def _end(self) -> int | None:
        return None if self.shown is None else self.first + self.shown

    def keys(self, start: int, count: int) -> Tensor:
        """The keys that are shown, of ``count`` from position ``start`` on."""
        shown = self._end()
        end = len(self.own) if shown is None else self.begun + shown
        return self.own[start : min(start + count, end)].nonzero().flatten()


class Shown(PathHook):
    """A hook that hears of each forward what a :class:`View` shows; what it returns is put back there."""

    def __init__(self, hook: PathHook, view: View) -> None:
        self._hook, self._view, self._asked = hook, view, hook.reads
        self.listeners = {
            place: hear if place == LOGITS else self._cut(place, hear) for place, hear in hook.listeners.items()
        }

    @property
    def reads(self) -> bool:
        """Whether the hook is to be told of what attention reads."""
        return self._asked

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Shows the path's own keys and values."""
        keys, values = self._view.lasting(keys), self._view.lasting(values)
        return self._view.tell(functools.partial(self._read, place, keys, values))

    def _read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        view = self._view
        columns = view.keys(place.start, keys.shape[2])
        if view.silent or not len(columns):
            return None
        start = int(view.own[: place.start].sum())
        axes = _on(keys.device, {0: torch.tensor([view.row]), 2: columns})
        own_place = dataclasses.replace(place, start=start, stop=start + len(columns))
        changed = self._hook.on_read(own_place, _part(keys, axes), _part(values, axes))
        return None if changed is None else (_with(keys, axes, changed[0]), _with(values, axes, changed[1]))

    def _cut(self, place: Site, hear: Listener) -> Listener:
        layout, view = LAYOUTS[place[0]], self._view

        def heard(tensor: Tensor) -> Tensor | None:
            return view.tell(functools.partial(told, view.lasting(tensor)))

        def told(tensor: Tensor) -> Tensor | None:
            cached = layout.group == "cache"
            rows = view.keys(0, tensor.shape[layout.rows]) if cached else view.queries()
            if view.silent or not len(rows):
                return None
            columns = {0: torch.tensor([view.row]), layout.rows: rows}
            if layout.keys:
                # Of a window the newest keys are there; of a static cache the room behind them too.
                count = tensor.shape[layout.keys]
                columns[layout.keys] = view.keys(max(len(view.own) - count, 0), count)
            axes = _on(tensor.device, columns)
            changed = hear(_part(tensor, axes))
            return None if changed is None else _with(tensor, axes, changed)

        return heard


def _on(device: torch.device, axes: Axes) -> Axes:
    return {axis: columns.to(device) for axis, columns in axes.items()}


def _part(tensor: Tensor, axes: Mapping[int, Tensor]) -> Tensor:
    for axis, columns in axes.items():
        tensor = tensor.index_select(axis, columns)
    return tensor


def _with(tensor: Tensor, axes: Mapping[int, Tensor], part: Tensor) -> Tensor:
    """A copy in which what was chosen is another's."""
    if not axes:
        return part.to(tensor.dtype)
    (axis, columns), *inner = axes.items()
    return tensor.index_copy(axis, columns, _with(tensor.index_select(axis, columns), dict(inner), part))
