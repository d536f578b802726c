"""Whether cached rows are read: how many keys attention sees in the first forward on a filled
cache.

A model whose attention does not receive its cache, or does not read it, decodes without a word:
each step attends to its own rows alone. That is seen in what attention reads, whatever the model,
its library and their versions; never in a name.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.errors import CacheNotReadWarning
from kvinterp.models.adapter import Adapter
from kvinterp.models.attention_calls import Fused, Recogniser, Scores, visible_keys
from kvinterp.models.hooks import Functions, own_hook

NOT_READ = "cached rows are not read: each decode step attends to its own row alone"


@dataclasses.dataclass(frozen=True)
class Unread:
    """The first block whose attention does not read the cache.

    Attributes:
        layer: The block.
        module: The path of the module that attends.
        rows: The rows that the cache should hold.
        new: The rows that were fed, and all that were seen.
        layers: How many blocks do not.
    """

    layer: int
    module: str
    rows: int
    new: int
    layers: int = 1

    @property
    def where(self) -> str:
        """What was seen, and where."""
        others = f" and {self.layers - 1} more" * (self.layers > 1)
        step = "one token" if self.new == 1 else f"{self.new} tokens"
        keys = f"{self.new} key{'s' * (self.new > 1)}"
        return (
            f"{step} fed after {self.rows} saw {keys} in layer {self.layer} ({self.module}){others}"
        )

    def warn(self, who: str) -> None:
        """Warns whoever runs the model."""
        said = f"{who}: {NOT_READ} ({self.where}), so what follows a prompt is computed without it; kv.audit tells the rest."
        warnings.warn(said, CacheNotReadWarning, stacklevel=2)


@dataclasses.dataclass
class _Layer:
    """What the attention of one block read: its most keys, how many of them its newest row may see,
    and the module.
    """

    keys: int = 0
    visible: int = 0
    module: nn.Module | None = None


class CachedRows:
    """Listens to attention in a prompt's forward and in the first one on the cache that it filled,
    and in no other.

    Args:
        adapter: The model.

    Attributes:
        unread: The first block that does not read the cache, once that was seen.
        asked: Whether the first forward on a filled cache was over.
    """

    def __init__(self, adapter: Adapter) -> None:
        self.adapter = adapter
        self.unread: Unread | None = None
        self.asked = False
        self._prompt: dict[int, _Layer] = {}
        self._step: dict[int, _Layer] = {}
        self._into: dict[int, _Layer] | None = None
        self._rows = self._new = self._prompted = 0
        self._cache: Callable[[], Any] = lambda: None
        self._fed, self._took = 0, False

    def begins(self, cache: Any, new: int, cached: int) -> None:
        """A forward of ``new`` rows begins with a cache, or None, of ``cached`` rows."""
        self._into = None
        if self.asked or cache is None or not new:
            return
        again = self._cache() is cache
        # A cache that never took a row is empty; one that did and is empty now was emptied.
        self._rows, self._new = max(cached, self._fed if again and not self._took else 0), new
        self._fed = self._fed + new if again else new
        if not again:
            with contextlib.suppress(TypeError):
                self._cache = weakref.ref(cache)
        if self._rows:
            self._into = self._step
        elif new > 1 and not self._prompt:
            self._into, self._prompted = self._prompt, new

    def ends(self, cached: int) -> None:
        """That forward is over, and the cache has ``cached`` rows."""
        into, self._into = self._into, None
        self._took = cached > 0
        if into is self._step and into:
            self.asked = True
            self._judge()

    def cut(self) -> None:
        """That forward was cut off: what its cache took is not known."""
        if self._into is self._step:
            self._judge()
            self.asked = self.unread is not None
        self._into, self._cache, self._fed = None, lambda: None, 0

    @contextlib.contextmanager
    def listening(self, layer: int) -> Iterator[None]:
        """Listens for as long as a block of a forward runs."""
        into = self._into
        if into is None:
            yield
            return
        calls, seen = Recogniser(), into.setdefault(layer, _Layer())

        def called(func: Any, args: Any, kwargs: Any) -> Any:
            result = func(*args, **kwargs)
            part = calls.recognise(func, args, kwargs, result)
            if isinstance(part, Fused):
                self._note(seen, part.key.shape[-2], part.mask)
            elif isinstance(part, Scores):
                self._note(seen, part.product.result.shape[-1], part.scaled)
            return result

        try:
            with Functions(called):
                yield
        except Exception:
            # A mask of all rows does not fit scores of the new ones.
            if calls.product is not None:
                self._note(seen, calls.product.result.shape[-1], None)
            raise

    def _note(self, seen: _Layer, keys: int, mask: Tensor | None) -> None:
        if keys >= seen.keys:
            visible = keys
            if mask is not None and self._into is self._prompt:
                with torch._C.DisableTorchFunction():
                    visible = int(visible_keys(mask[..., -1:, :]).sum())
            seen.keys, seen.visible = keys, max(visible, seen.visible)
        seen.module = seen.module or _running(self.adapter)

    def _judge(self) -> None:
        found = []
        for layer, seen in sorted(self._step.items()):
            prompt = self._prompt.get(layer)
            # What attends to itself alone by design did so in the prompt, too; what attends to no
            # positions had other keys there.
            if self._prompt:
                attends = (
                    prompt is not None and prompt.keys >= self._prompted and prompt.visible > 1
                )
            else:
                attends = self.adapter.attention_only and self.adapter.facts.windows[layer] != 1
            if attends and 0 < seen.keys <= self._new:
                found.append(layer)
        if found:
            names = {module: name for name, module in self.adapter.source.named_modules()}
            module = self._step[found[0]].module
            name = (
                ""
                if module is None
                else names.get(module, type(module).__name__).replace("._original_component", "")
            )
            self.unread = Unread(found[0], name, self._rows, self._new, len(found))

    @contextlib.contextmanager
    def hearing(self, new: int, rows: int) -> Iterator[None]:
        """Listens to the forwards inside, each of ``new`` positions in all on a cache of
        ``rows``.
        """
        self._rows, self._new = rows, new
        self._into = self._step if rows else self._prompt
        self._prompted = self._prompted if rows else new
        open_blocks: list[contextlib.ExitStack] = []

        def enter(layer: int, *_: Any) -> None:
            open_blocks.append(contextlib.ExitStack())
            open_blocks[-1].enter_context(self.listening(layer))

        def leave(*_: Any) -> None:
            if open_blocks:
                open_blocks.pop().close()

        def left() -> None:
            while open_blocks:
                leave()

        with contextlib.ExitStack() as hooks:
            # torch calls no hook where a KeyboardInterrupt passes through.
            hooks.callback(left)
            for layer, block in enumerate(self.adapter.blocks):
                hooks.enter_context(
                    own_hook(block, functools.partial(enter, layer), "input", first=True)
                )
                hooks.enter_context(own_hook(block, leave, "output", always_call=True))
            try:
                yield
            finally:
                self._into = None
                if rows and self._step:
                    self.asked = True
                    self._judge()


def _running(adapter: Adapter) -> nn.Module | None:
    """The innermost module that runs."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_locals.get("self") if frame.f_code.co_name == "_call_impl" else None
        if isinstance(module, nn.Module):
            return module
        frame = frame.f_back
    return None
