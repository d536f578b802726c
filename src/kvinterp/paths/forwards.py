"""A path's forwards, with its kernels and whatever looks into it around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

from kvinterp.models import Adapter
from kvinterp.models.attaching import HookPoint, Listener
from kvinterp.models.state import Leftover
from kvinterp.paths.kernels.base import KernelMode
from kvinterp.recording import LOGITS

Returned = TypeVar("Returned")


class HookedForwards:
    """The hooks of one path: attached to the model by :meth:`attached`, heard in :meth:`call` and
    nowhere else.

    Args:
        adapter: The model, in the path's dtype.
        kernels: The path's kernels in motion, which hear first.
        listeners: Who else hears which site, in order.

    Attributes:
        listeners: Who hears which site.
    """

    def __init__(
        self,
        adapter: Adapter,
        kernels: KernelMode,
        listeners: Iterable[Mapping[HookPoint, Listener]] = (),
    ) -> None:
        self._adapter, self._kernels = adapter, kernels
        self._state: list[Leftover] = []
        self.listeners: dict[HookPoint, list[Listener]] = {}
        for by_site in (kernels.listeners, *listeners):
            for hook_point, listener in by_site.items():
                self.listeners.setdefault(hook_point, []).append(listener)

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks what is listened to, for as long as the context lasts; at its end the model is as
        it was found.
        """
        with (
            self._adapter.attached(
                [hook_point for hook_point in self.listeners if hook_point != LOGITS]
            ),
            self._adapter.left_as_found(),
        ):
            yield

    def call(self, forward: Callable[..., Returned], *args: Any) -> Returned:
        """What a forward gives under the path's kernels, heard by its hooks, on a state of its
        own.
        """
        context = (
            self._adapter.listening(self.listeners) if self.listeners else contextlib.nullcontext()
        )
        with context, self._adapter.own_state(self._state), self._kernels:
            return forward(*args)


def in_chunks(tokens: Tensor, chunk: int | None) -> tuple[Tensor, ...]:
    """Cuts tokens, ``[batch, position]``, into pieces of so many positions, the last of fewer; into
    one piece for None.
    """
    return tokens.split(min(chunk or tokens.shape[1], tokens.shape[1]), 1)
