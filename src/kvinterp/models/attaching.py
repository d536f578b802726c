"""Attaches an adapter's hooks, sends their tensors to listeners, and begins a forward in the
middle.

Hooks belong to modules, so a listener receives every forward of the model, whichever thread runs
it. Threads that use verbs at the same time need a model each.
"""

from __future__ import annotations

import abc
import contextlib
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.facts import ModelInfo
from kvinterp.models.hooks import LAST, Closing, sort_hooks, tap_hooks, wrapping_methods
from kvinterp.models.taps import Tap

HookPoint = tuple[str, int]
"""A site's name and the layer."""

Listener = Callable[[Tensor], "Tensor | None"]


class Attaching(abc.ABC):
    """The hooks on one model: attached once, with any number of listeners, and removed without a
    trace.
    """

    model: nn.Module
    facts: ModelInfo

    def __init__(self) -> None:
        self._entries: list[tuple[Mapping[HookPoint, Sequence[Listener]], int]] = []
        self._listeners: list[Mapping[HookPoint, Sequence[Listener]]] = [{}, {}]
        self._attachments: dict[tuple[HookPoint, int], list[Any]] = {}
        self._calls, self._evaluating = 0, False

    @property
    @abc.abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The blocks, in order; the residual stream is the first argument and the first output of
        each.
        """

    @property
    @abc.abstractmethod
    def embedding(self) -> nn.Module | None:
        """The module that is given the token ids; None where the model does not say which."""

    @abc.abstractmethod
    def tap(self, site: str, layer: int) -> Tap:
        """Finds a site; raises UnsupportedError, saying why and what to do, where the model has
        none.
        """

    @property
    def alike_in_training(self) -> bool:
        """Whether the model computes the same in training mode."""
        return False

    @contextlib.contextmanager
    def attached(self, hook_points: Sequence[HookPoint], rank: int = 0) -> Iterator[None]:
        """Hooks modules, while the context lasts; :meth:`listening` adds the listeners.

        Every hook has a handle of torch's, so leaving the context, by an exception too, removes
        exactly the hooks that it made and none of the user's. Nested contexts share a hook, and the
        last one to be left removes it.

        Args:
            hook_points: Sites and layers.
            rank: As for :meth:`listening`.

        Raises:
            InputError: A part of the model is in training mode.
            UnsupportedError: A part of the model is compiled.
        """
        # A verb has checked this at its beginning: each of its forwards would walk through every
        #     module again.
        if not self._calls:
            check_uncompiled(self.model, self.facts.name)
        if not self.alike_in_training and not self._evaluating:
            part = next(
                (path for path, module in self.model.named_modules() if module.training), None
            )
            if part is not None:
                raise InputError(
                    f"{_part_of(part, self.facts.name)} is in training mode, in which dropout may change what it computes: call "
                    "model.eval() first."
                )
            self._evaluating = self._calls > 0
        keys: list[tuple[HookPoint, int]] = []
        try:
            for hook_point in dict.fromkeys(hook_points):
                # A change of heads reaches their sum only, so that a second hook on heads would not
                # see it.
                key = hook_point, rank if rank and self.tap(*hook_point).side != "heads" else 0
                if key not in self._attachments:
                    tap = self.tap(*hook_point)
                    self._attachments[key] = [0, self._attach(*key, tap), tap.module]
                self._attachments[key][0] += 1
                keys.append(key)
            yield
        finally:
            for key in keys:
                self._attachments[key][0] -= 1
                if not self._attachments[key][0]:
                    for handle in self._attachments.pop(key)[1]:
                        handle.remove()

    @contextlib.contextmanager
    def listening(
        self, listeners: Mapping[HookPoint, Sequence[Listener]], rank: int = 0
    ) -> Iterator[None]:
        """Sends the tensors of the attached hooks to these listeners, in order.

        A tensor that a listener returns replaces the site's, for the listeners after it too.
        Contexts may nest, as a run inside a user's record() does: listeners of the outer context
        are called first. Contexts may be left in any order.

        Args:
            listeners: The listeners, by site and layer.
            rank: ``LAST`` for listeners that only look and shall receive the tensor that the model
                goes on with.
        """
        entry = listeners, rank
        self._entries = [*self._entries, entry]
        self._arrange()
        try:
            yield
        finally:
            self._entries = [other for other in self._entries if other is not entry]
            self._arrange()

    def _arrange(self) -> None:
        """Groups the listeners by the rank of the hook that calls them, and by hook point."""
        ranks: list[dict[HookPoint, list[Listener]]] = [{}, {}]
        for listeners, rank in sorted(self._entries, key=operator.itemgetter(1)):
            for hook_point, called in listeners.items():
                ranks[rank if (hook_point, rank) in self._attachments else 0].setdefault(
                    hook_point, []
                ).extend(called)
        self._listeners = [*ranks]

    def put_last_hooks_last(self) -> None:
        """Sorts the hooks of rank LAST behind hooks that were added since, a user's among them, for
        the forward that begins.
        """
        lasts = (kept[2] for (_, rank), kept in self._attachments.items() if rank == LAST)
        for module in dict.fromkeys(lasts):
            sort_hooks(module)

    def resumed(
        self, layer: int, outputs: Sequence[Any]
    ) -> contextlib.AbstractContextManager[None]:
        """Makes forwards begin at a block: the blocks before it return earlier outputs without
        running.

        Args:
            layer: The first block that runs.
            outputs: What each block before it returned on the same tokens, in the form in which the
                block returns it.
        """
        return wrapping_methods(
            list(self.blocks)[:layer], "forward", lambda number, *_, **__: outputs[number]
        )

    def close_interrupted(self) -> None:
        """Closes what hooks left open in a forward that a KeyboardInterrupt cut off: torch calls no
        hook for it.
        """
        for _, handles, _ in self._attachments.values():
            for handle in handles:
                if isinstance(handle, Closing):
                    handle.remove()

    def _attach(self, hook_point: HookPoint, rank: int, tap: Tap) -> list[Any]:
        def rows() -> str:
            listeners = self._listeners[rank].get(hook_point, ())
            newest = all(getattr(listener, "newest_row", False) for listener in listeners)
            return "none" if not listeners else "newest" if newest else "all"

        def emit(raw: Tensor) -> Tensor | None:
            changed: Tensor | None = None
            for listener in self._listeners[rank].get(hook_point, ()):
                new = listener(tap.get(raw) if changed is None else changed)
                changed = changed if new is None else new
            return None if changed is None else tap.put(raw, changed)

        return tap_hooks(tap, hook_point[0], emit, rows, rank)


# Whether a model can be hooked as it is -----------------------------------------------------------


def _part_of(path: str, name: str) -> str:
    return f"the module {path!r} of model {name}" if path else f"model {name}"


def check_uncompiled(model: nn.Module, name: str) -> None:
    """Raises UnsupportedError where any part was compiled in place: what Dynamo compiled runs no
    hook that was added later.

    A part is compiled in place by ``module.compile()`` or
    ``module.forward = torch.compile(module.forward)``.
    """
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        by_forward = hasattr(forward, "_torchdynamo_orig_callable")
        if getattr(module, "_compiled_call_impl", None) is not None or by_forward:
            remedy = (
                "delete its attribute 'forward'"
                if by_forward
                else "set its _compiled_call_impl to None"
            )
            raise UnsupportedError(
                f"{_part_of(path, name)} is compiled, and compiled code runs no hooks, so nothing in it can be heard or patched: "
                f"give the model as it was before (copy.deepcopy(model), made before compiling), or {remedy}."
            )
