"""Detects forward passes at the model's blocks, whichever function the user called.

``model(...)``, ``model.forward(...)``, ``generate``, ``run_with_hooks``, a decoder without its head
and a block alone all run blocks, and not all of them go through the model's own call. So a pass
begins at the first block that runs and ends when the last block returns; where blocks run several
times in a forward, when the model returns. A pass that stops early (``stop_at_layer``) ends where
the model returns, or at the latest where the next pass begins. An error or an interruption within a
block cuts a pass off.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.errors import InputError
from kvinterp.models.adapter import Adapter
from kvinterp.models.attaching import HookPoint
from kvinterp.models.cached_rows import CachedRows, Unread
from kvinterp.models.hooks import BEHIND, own_hook
from kvinterp.models.inputs import pads_without_mask
from kvinterp.models.transformer_lens_api import generate

log = logging.getLogger("kvinterp")

PROMPT = 9
"""Tokens of the prompt behind which a step is asked whether it reads them."""


class WatchesPasses:
    """Receives the events of passes and of the blocks in them; this base class ignores them."""

    def pass_begins(self, new: int, cached: int) -> None:
        """Called where a pass begins that computes ``new`` positions after ``cached`` positions in
        a cache.
        """

    def block_begins(self, layer: int, cache: Any) -> Callable[[], None] | None:
        """Called before a block runs, with the block's cache or None; may return a function to call
        when the block is left.
        """
        return None

    def block_ends(self, layer: int, cache: Any) -> None:
        """Called after a block ran."""

    def pass_ends(self, ran: Sequence[int]) -> None:
        """Called where a pass ends, with the blocks that ran in it."""

    def pass_cut(self) -> None:
        """Called where an error or an interruption cuts a pass off."""

    def pass_undone(self) -> None:
        """Called where the last pass turns out to be none: an error cut its forward off behind the
        blocks.
        """


class Passes:
    """Tells a watcher of every pass through a model's blocks, while :meth:`watching` is open.

    Args:
        adapter: The model.
        watcher: Receives the events.
        context: What the user has opened, such as ``"kv.record"``, for messages; nothing is warned
            of where it is empty.
        hook_points: The sites and layers that are recorded; with ``embed`` a pass begins before the first block,
            where the embedding runs.

    Attributes:
        count: Passes that ended.
        cut: Passes that were cut off.
        rows: Whether cached rows are read.
    """

    def __init__(
        self,
        adapter: Adapter,
        watcher: WatchesPasses,
        context: str,
        hook_points: Collection[HookPoint] = (),
    ) -> None:
        self.adapter, self.watcher, self.context = adapter, watcher, context
        self._embeds, self._cached, self._embedded = ("embed", 0) in hook_points, 0, False
        self.count = self.cut = 0
        self._ran: list[int] | None = None
        self._inside: int | None = None
        self._undo: Callable[[], None] | None = None
        self._errors: BaseException | None = None
        self._before: tuple[int, BaseException | None] = (0, None)
        self._last = adapter.facts.layers - 1
        self._warned = False
        self.rows, self._took, self._warned = CachedRows(adapter), 0, False
        self._open = self._looping = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Hooks the blocks, while the context lasts; enter it after the hooks of sites are
        attached, since these run first.
        """
        handles = []
        try:
            for layer, block in enumerate(self.adapter.blocks):
                handles.append(
                    own_hook(
                        block, functools.partial(self._enter_block, layer), "input", first=True
                    )
                )
                leave = functools.partial(self._leave_block, layer)
                handles.append(own_hook(block, leave, "output", always_call=True, rank=BEHIND))
            if self._embeds:
                handles.append(
                    own_hook(
                        self.adapter.tap("embed", 0).module,
                        self._enter_embedding,
                        "input",
                        first=True,
                    )
                )
            handles.append(own_hook(self.adapter.model, self._enter_model, "input", first=True))
            handles.append(
                own_hook(self.adapter.model, self._leave_model, "output", always_call=True)
            )
            yield
            self._end_pass()
        except BaseException:
            # Passes that ended before the error stay.
            with contextlib.suppress(InputError):
                self._end_pass()
            raise
        finally:
            for handle in handles:
                handle.remove()

    @property
    def silent(self) -> bool:
        """Whether there was no pass at all, not even one that was cut off."""
        return not self.count and not self.cut

    def silence(self) -> str:
        """Says why there was no pass, and what to do."""
        return (
            f"no forward of {self.adapter.facts.name} ran in it. Run this very model inside: a copy of it, a run in another "
            "dtype (which runs on a copy), and code that torch.compile compiled before are not heard."
        )

    def _enter_block(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._inside is not None or (self._ran and layer <= self._ran[-1] and not self._loops):
            self._check_alone()
            self._end_pass()
        cache = self.adapter.block_cache(args, kwargs)
        cached = self.adapter.cached_length(cache) if self._ran is None or self._embedded else 0
        if self._ran is None or self._embedded:
            # A block that runs again within one call of the model reads what this call kept.
            self.rows.begins(None if self._looping else cache, _width(args, kwargs), cached)
            self._looping = self._open
        if self._ran is None:
            self._begin_pass(args, kwargs, cached)
        elif self._embedded and cached != self._cached:
            self._cut_pass()
            raise InputError(
                f"{self.context} hears 'embed' of {self.adapter.facts.name} before its cache of {cached} positions is seen: call "
                f"the model itself and name the cache, as in model(tokens, {self.adapter.cache_name}=cache)."
            )
        self._embedded = False
        # A user may run the model where an error of his own is being handled.
        self._inside, self._errors = layer, sys.exc_info()[1]
        with self._cutting_at_errors():
            undo = self.watcher.block_begins(layer, cache)
        listening = contextlib.ExitStack()
        listening.callback(undo or (lambda: None))
        listening.enter_context(self.rows.listening(layer))
        self._undo = listening.close

    @property
    def _loops(self) -> bool:
        """Whether blocks run several times in the call of the model that is under way, which then
        ends the pass.
        """
        return self._open and self.adapter.loops

    def _begin_pass(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], cached: int) -> None:
        self._ran = []
        self.adapter.put_last_hooks_last()
        with self._cutting_at_errors():
            self.watcher.pass_begins(_width(args, kwargs), cached)

    def _enter_embedding(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> None:
        if self._inside is None:
            self._end_pass()
            self._embedded = True
            self._begin_pass(args, kwargs, self._cached)

    def _check_alone(self) -> None:
        """Raises InputError where a forward begins while a block of the one before it is still on
        Python's stack.
        """
        blocks = set(map(id, self.adapter.blocks))
        frame, running = inspect.currentframe(), 0
        while frame is not None:
            running += (
                frame.f_code.co_name == "_call_impl" and id(frame.f_locals.get("self")) in blocks
            )
            frame = frame.f_back
        if running > 1:
            self._cut_pass()
            raise InputError(
                f"a forward of {self.adapter.facts.name} began within another one of it, from a hook on a block, and "
                f"{self.context} hears one forward at a time: run it once the first is over, or outside of {self.context}."
            )

    def _leave_block(
        self, layer: int, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], __: Any
    ) -> None:
        if self._inside != layer:
            return
        self._undo_block()
        error = sys.exc_info()[1]
        if error is not None and error is not self._errors:
            # The bridge stops at a layer by an error, which its forward catches.
            if type(error).__name__ != "StopAtLayerException":
                self._cut_pass()
            return
        with self._cutting_at_errors():
            self.watcher.block_ends(layer, self.adapter.block_cache(args, kwargs))
        if self._ran is not None:
            self._ran.append(layer)
            if layer == self._ran[0]:
                self._took = self.adapter.cached_length(self.adapter.block_cache(args, kwargs))
            if layer == self._last and not self._loops:
                self._end_pass()

    def _enter_model(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._before = self.count, sys.exc_info()[1]
        self._open, self._looping = True, False
        # Once, and on an empty cache alone: behind one an end token that is the pad token stands
        #     for no padding.
        if (
            not self._warned
            and self.adapter.cached_length(self.adapter.call_cache(args, kwargs)) == 0
        ):
            why = pads_without_mask(self.adapter, args, kwargs)
            if why:
                log.warning("%s: %s", self.context, why)
            self._warned = bool(why)
        # Also before the first block, since torch collects the block's hooks when it is called.
        self.adapter.put_last_hooks_last()
        if self._embeds:
            self._cached = self.adapter.cached_length(self.adapter.call_cache(args, kwargs))

    def _leave_model(self, *_: Any) -> None:
        self._cached, self._open, self._looping = 0, False, False
        (count, handled), error = self._before, sys.exc_info()[1]
        if error is None or error is handled:
            self._end_pass()
            return
        while self.count > count:
            self.count, self.cut = self.count - 1, self.cut + 1
            self.watcher.pass_undone()

    def _end_pass(self) -> None:
        """Ends the pass that is under way, if there is one; cuts it off where a block was left in
        the middle.
        """
        if self._inside is not None:
            self.adapter.close_interrupted()
            self._undo_block()
            self._cut_pass()
        elif self._ran:
            ran, self._ran = self._ran, None
            self.watcher.pass_ends(ran)
            self.count += 1
            self.rows.ends(self._took)
            if self.context and self.rows.unread is not None and not self._warned:
                self._warned = True
                self.rows.unread.warn(f"{self.context} of {self.adapter.facts.name}")
        elif self._ran is not None:
            self._cut_pass()

    def _undo_block(self) -> None:
        undo, self._undo, self._inside = self._undo, None, None
        if undo is not None:
            undo()

    def _cut_pass(self) -> None:
        self._undo_block()
        self._ran = None
        self.rows.cut()
        self.cut += 1
        self.watcher.pass_cut()

    @contextlib.contextmanager
    def _cutting_at_errors(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._cut_pass()
            raise


@torch.no_grad()
def unread_by(adapter: Adapter) -> Unread | None:
    """Feeds a prompt and a token on the model's own cache, and says which block did not read it;
    None where all do.
    """
    passes = Passes(adapter, WatchesPasses(), "")
    tokens = torch.arange(3, 4 + PROMPT, device=adapter.device)[None] % adapter.facts.vocabulary

    def fed() -> None:
        _, cache = adapter.call_with_cache(tokens[:, :PROMPT], None, None, None)
        adapter.call_with_cache(tokens[:, PROMPT:], cache, None, None)

    # TransformerLens's own loop gives no mask, which may not fit keys that lack the cached ones.
    for run in (fed, lambda: generate(adapter.model, tokens[:, :PROMPT], 2, "yes")):
        # What raises here raises again where it is told.
        with contextlib.suppress(Exception), adapter.own_state([]), passes.watching():
            run()
        if passes.rows.asked or adapter.plain:
            break
    return passes.rows.unread


def _width(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """How many positions a module is given: those of its first tensor."""
    stream = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
    return 0 if stream is None or stream.dim() < 2 else stream.shape[1]
