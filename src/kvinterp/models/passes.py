"""Hears forward passes where the model computes them: at its blocks, whoever called what.

``model(...)``, ``model.forward(...)``, ``generate``, ``run_with_hooks``, a decoder without its head and a block alone all go
through the blocks, and not all of them through the model's own call. So a pass begins at the first block that runs and ends
when the last block returns. One that stops before (``stop_at_layer``) ends where the model returns, or at the latest where
the next pass begins. An error or an interruption within a block cuts a pass off.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kvinterp.errors import InputError
from kvinterp.models.adapter import Adapter
from kvinterp.models.attaching import Site
from kvinterp.models.hooks import BEHIND, own_hook


class WatchesPasses:
    """What is told of passes and of the blocks in them; the base takes no notice."""

    def pass_begins(self, new: int, held: int) -> None:
        """A pass begins that computes ``new`` positions after ``held`` ones in a cache."""

    def block_begins(self, layer: int, cache: Any) -> Callable[[], None] | None:
        """A block is about to run, with the cache that it was handed, or None; returns what is called when it was left."""
        return None

    def block_ends(self, layer: int, cache: Any) -> None:
        """A block ran."""

    def pass_ends(self, ran: Sequence[int]) -> None:
        """A pass ended in which these blocks ran."""

    def pass_cut(self) -> None:
        """A pass was cut off by an error or an interruption."""

    def pass_undone(self) -> None:
        """The pass that ended last is none: an error cut its forward off behind the blocks."""


class Passes:
    """Tells a watcher of every pass through a model's blocks, for as long as :meth:`heard` is open.

    Args:
        adapter: The model.
        watcher: What is told.
        context: What its user has opened, such as ``"kv.record"``, for messages.
        places: What is heard: with ``embed`` a pass begins before the first block, where the embedding runs.

    Attributes:
        count: Passes that ended.
        cut: Passes that were cut off.
    """

    def __init__(self, adapter: Adapter, watcher: WatchesPasses, context: str, places: Collection[Site] = ()) -> None:
        self.adapter, self.watcher, self.context = adapter, watcher, context
        self._embeds, self._held, self._embedded = ("embed", 0) in places, 0, False
        self.count = self.cut = 0
        self._ran: list[int] | None = None
        self._inside: int | None = None
        self._undo: Callable[[], None] | None = None
        self._errors: BaseException | None = None
        self._before: tuple[int, BaseException | None] = (0, None)
        self._last = adapter.facts.layers - 1

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Hooks the blocks. To be entered when everything that hears a site is attached: a pass ends after that."""
        handles = []
        blocks = list(self.adapter.blocks)
        try:
            for layer, block in enumerate(blocks):
                enter, leave = (functools.partial(each, layer) for each in (self._enter, self._leave))
                handles.append(own_hook(block, enter, "input", first=True))
                handles.append(own_hook(block, leave, "output", always_call=True, rank=BEHIND))
            if self._embeds:
                handles.append(own_hook(self.adapter.tap("embed", 0).module, self._embed, "input", first=True))
            handles.append(own_hook(self.adapter.model, self._called, "input", first=True))
            handles.append(own_hook(self.adapter.model, self._returned, "output", always_call=True))
            yield
            self._settle()
        except BaseException:
            # What was whole before the error stays.
            with contextlib.suppress(InputError):
                self._settle()
            raise
        finally:
            for handle in handles:
                handle.remove()

    @property
    def silent(self) -> bool:
        """Whether there was no pass, nor one that an error cut off and so was not silent."""
        return not self.count and not self.cut

    def silence(self) -> str:
        """Why no pass was heard, and what to do."""
        return (
            f"no forward of {self.adapter.facts.name} ran in it. Run this very model inside: a copy of it, a run in another "
            "dtype (which runs on a copy), and code that torch.compile compiled before are not heard."
        )

    def _enter(self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._inside is not None or (self._ran and layer <= self._ran[-1]):
            self._check_alone()
            self._settle()
        cache = self.adapter.block_cache(args, kwargs)
        held = self.adapter.cached_length(cache) if self._ran is None or self._embedded else 0
        if self._ran is None:
            self._begin(args, kwargs, held)
        elif self._embedded and held != self._held:
            self._cut()
            raise InputError(
                f"{self.context} hears 'embed' of {self.adapter.facts.name} before its cache of {held} positions is seen: call "
                f"the model itself and name the cache, as in model(tokens, {self.adapter.cache_name}=cache)."
            )
        self._embedded = False
        # A user may run the model where an error of his own is being handled.
        self._inside, self._errors = layer, sys.exc_info()[1]
        with self._cut_by_errors():
            self._undo = self.watcher.block_begins(layer, cache)

    def _begin(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], held: int) -> None:
        stream = next((given for given in (*args, *kwargs.values()) if isinstance(given, Tensor)), None)
        self._ran = []
        self.adapter.put_last_hooks_last()
        with self._cut_by_errors():
            self.watcher.pass_begins(0 if stream is None else stream.shape[1], held)

    def _embed(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        if self._inside is None:
            self._settle()
            self._embedded = True
            self._begin(args, kwargs, self._held)

    def _check_alone(self) -> None:
        """Refuses a forward that begins while a block of the one before it is still on Python's stack."""
        blocks = set(map(id, self.adapter.blocks))
        frame, running = inspect.currentframe(), 0
        while frame is not None:
            running += frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in blocks
            frame = frame.f_back
        if running > 1:
            self._cut()
            raise InputError(
                f"a forward of {self.adapter.facts.name} began within another one of it, from a hook on a block, and "
                f"{self.context} hears one forward at a time: run it once the first is over, or outside of {self.context}."
            )

    def _leave(self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], __: Any) -> None:
        if self._inside != layer:
            return
        self._left()
        error = sys.exc_info()[1]
        if error is not None and error is not self._errors:
            # The bridge stops at a layer by an error, which its forward catches.
            if type(error).__name__ != "StopAtLayerException":
                self._cut()
            return
        with self._cut_by_errors():
            self.watcher.block_ends(layer, self.adapter.block_cache(args, kwargs))
        if self._ran is not None:
            self._ran.append(layer)
            if layer == self._last:
                self._settle()

    def _called(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before = self.count, sys.exc_info()[1]
        # Before the first block too, whose own hooks torch takes up as it is called.
        self.adapter.put_last_hooks_last()
        if self._embeds:
            self._held = self.adapter.cached_length(self.adapter.call_cache(args, kwargs))

    def _returned(self, *_: Any) -> None:
        self._held = 0
        (count, handled), error = self._before, sys.exc_info()[1]
        if error is None or error is handled:
            self._settle()
            return
        while self.count > count:
            self.count, self.cut = self.count - 1, self.cut + 1
            self.watcher.pass_undone()

    def _settle(self) -> None:
        """Ends the pass that is under way, if one is: whole where no block was left in the middle."""
        if self._inside is not None:
            self.adapter.close_interrupted()
            self._left()
            self._cut()
        elif self._ran:
            ran, self._ran = self._ran, None
            self.watcher.pass_ends(ran)
            self.count += 1
        elif self._ran is not None:
            self._cut()

    def _left(self) -> None:
        undo, self._undo, self._inside = self._undo, None, None
        if undo is not None:
            undo()

    def _cut(self) -> None:
        self._ran = self._inside = None
        self.cut += 1
        self.watcher.pass_cut()

    @contextlib.contextmanager
    def _cut_by_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._cut()
            raise
