"""How an adapter's hooks are attached, who hears them, and how a forward begins in the middle.

Hooks belong to modules: what hooks a model hears every forward of it, whichever thread runs it. Threads that use verbs at once
need a model each.
"""

from __future__ import annotations

import abc
import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.facts import ModelInfo
from kvinterp.models.hooks import LAST, Closing, Tap, sort_hooks, tap_hooks

Site = tuple[str, int]
"""A site's name and the layer."""

Listener = Callable[[Tensor], "Tensor | None"]


class Attaching(abc.ABC):
    """The hooks on one model: attached once, heard by whoever listens, gone without a trace."""

    model: nn.Module
    facts: ModelInfo

    def __init__(self) -> None:
        self._heard: list[tuple[Mapping[Site, Sequence[Listener]], int]] = []
        self._listeners: list[Mapping[Site, Sequence[Listener]]] = [{}, {}]
        self._attachments: dict[tuple[Site, int], list[Any]] = {}
        self._calls, self._evaluating = 0, False

    @property
    @abc.abstractmethod
    def blocks(self) -> nn.ModuleList:
        """The blocks, in order; each takes the residual stream first and returns it first."""

    @abc.abstractmethod
    def tap(self, site: str, layer: int) -> Tap:
        """Where a site is found; raises UnsupportedError, saying why and what to do, where this kind lacks it."""

    @property
    def alike_in_training(self) -> bool:
        """Whether the model computes the same in training mode."""
        return False

    @contextlib.contextmanager
    def attached(self, places: Sequence[Site], rank: int = 0) -> Iterator[None]:
        """Hooks the places once, for as long as the context lasts; :meth:`listening` says who hears them.

        Every hook goes through torch's own handles, so leaving the context, by an exception too, removes exactly the
        hooks it made and nothing of the user's. Nested contexts share a hook and the last one out removes it.

        Args:
            places: Sites and layers.
            rank: As for :meth:`listening`.

        Raises:
            InputError: A part of the model is in training mode.
            UnsupportedError: A part of the model is compiled.
        """
        # A verb asks at its door: each of its forwards would walk through every module again.
        if not self._calls:
            check_uncompiled(self.model, self.facts.name)
        if not self.alike_in_training and not self._evaluating:
            _check_evaluating(self.model, self.facts.name)
            self._evaluating = self._calls > 0
        mine: list[tuple[Site, int]] = []
        try:
            for place in dict.fromkeys(places):
                # What is put on heads reaches their sum alone, and so no second hook.
                key = place, rank if rank and self.tap(*place).side != "heads" else 0
                if key not in self._attachments:
                    tap = self.tap(*place)
                    self._attachments[key] = [0, self._attach(*key, tap), tap.module]
                self._attachments[key][0] += 1
                mine.append(key)
            yield
        finally:
            for key in mine:
                self._attachments[key][0] -= 1
                if not self._attachments[key][0]:
                    for handle in self._attachments.pop(key)[1]:
                        handle.remove()

    @contextlib.contextmanager
    def listening(self, listeners: Mapping[Site, Sequence[Listener]], rank: int = 0) -> Iterator[None]:
        """Sends what the attached hooks see to these listeners, in order.

        A tensor that a listener returns replaces the site's, for the listeners after it too. Contexts may nest, as a run
        inside a user's record() does: what was entered first hears first. They may be left in any order.

        Args:
            listeners: What is called, by site and layer.
            rank: ``LAST`` for what only looks, and shall hear what the model goes on with.
        """
        entry = listeners, rank
        self._heard = [*self._heard, entry]
        self._arrange()
        try:
            yield
        finally:
            self._heard = [held for held in self._heard if held is not entry]
            self._arrange()

    def _arrange(self) -> None:
        ranks: list[list[Mapping[Site, Sequence[Listener]]]] = [[], []]
        for listeners, rank in sorted(self._heard, key=lambda entry: entry[1]):
            own = {place for place in listeners if rank and (place, rank) in self._attachments}
            ranks[0].append({place: heard for place, heard in listeners.items() if place not in own} if own else listeners)
            ranks[LAST].append({place: listeners[place] for place in own})
        self._listeners = [_together(each) for each in ranks]

    def put_last_hooks_last(self) -> None:
        """Puts what hears last behind hooks that were added since, a user's among them; for the forward that begins."""
        for (_, rank), (_, _, module) in self._attachments.items():
            if rank == LAST:
                sort_hooks(module)

    @contextlib.contextmanager
    def resumed(self, layer: int, outputs: Sequence[Any]) -> Iterator[None]:
        """Makes forwards begin at a block: the blocks before it return what they returned before, without running.

        Args:
            layer: The first block that runs.
            outputs: What each block before it returned on the same tokens, as the block itself returns it.
        """
        skipped = list(self.blocks)[:layer]
        # Libraries that spread a model over devices put a forward of their own there, which must come back.
        before = [block.__dict__.get("forward") for block in skipped]
        try:
            for block, output in zip(skipped, outputs, strict=False):
                # Straight into __dict__: a bridge's blocks pass attributes that are set on to what they wrap.
                block.__dict__["forward"] = _returning(output)
            yield
        finally:
            for block, forward in zip(skipped, before, strict=True):
                if forward is None:
                    block.__dict__.pop("forward", None)
                else:
                    block.__dict__["forward"] = forward

    def close_interrupted(self) -> None:
        """Closes what hooks left open in a forward that a KeyboardInterrupt cut off, of which torch tells no hook."""
        for _, handles, _ in self._attachments.values():
            for handle in handles:
                if isinstance(handle, Closing):
                    handle.remove()

    def _attach(self, place: Site, rank: int, tap: Tap) -> list[Any]:
        def rows() -> str:
            heard = self._listeners[rank].get(place, ())
            newest = all(getattr(listener, "newest_row", False) for listener in heard)
            return "none" if not heard else "newest" if newest else "all"

        def emit(raw: Tensor) -> Tensor | None:
            changed: Tensor | None = None
            for listener in self._listeners[rank].get(place, ()):
                new = listener(tap.get(raw) if changed is None else changed)
                changed = changed if new is None else new
            return None if changed is None else tap.put(raw, changed)

        return tap_hooks(tap, place[0], emit, rows, rank)


def _together(heard: Sequence[Mapping[Site, Sequence[Listener]]]) -> Mapping[Site, Sequence[Listener]]:
    if len(heard) == 1:
        return heard[0]
    places = dict.fromkeys(place for listeners in heard for place in listeners)
    return {place: [one for listeners in heard for one in listeners.get(place, ())] for place in places}


def _returning(kept: Any) -> Callable[..., Any]:
    return lambda *_, **__: kept


# Whether a model computes what its hooks will see ---------------------------------------------------------------------


def _check_evaluating(model: nn.Module, name: str) -> None:
    """Raises InputError where any part of the model is in training mode."""
    part = next((path for path, module in model.named_modules() if module.training), None)
    if part is not None:
        where = f"the module {part!r} of model {name}" if part else f"model {name}"
        raise InputError(
            f"{where} is in training mode, in which dropout may change what it computes: call model.eval() first."
        )


def check_uncompiled(model: nn.Module, name: str) -> None:
    """Raises UnsupportedError where any part was compiled in place: what Dynamo compiled runs no hook that came later.

    By ``module.compile()`` or ``module.forward = torch.compile(module.forward)``.
    """
    for path, module in model.named_modules():
        forward = vars(module).get("forward")
        by_forward = hasattr(forward, "_torchdynamo_orig_callable")
        if getattr(module, "_compiled_call_impl", None) is not None or by_forward:
            where = f"the module {path!r} of model {name}" if path else f"model {name}"
            remedy = "delete its attribute 'forward'" if by_forward else "set its _compiled_call_impl to None"
            raise UnsupportedError(
                f"{where} is compiled, and compiled code runs no hooks, so nothing in it can be heard or patched: give the "
                f"model as it was before (copy.deepcopy(model), made before compiling), or {remedy}."
            )
