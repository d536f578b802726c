"""Attaches a recorder to the user's own forwards."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from kvinterp.common import words
from kvinterp.errors import InputError
from kvinterp.models import wrap
from kvinterp.models.hooks import LAST
from kvinterp.models.passes import Passes, WatchesPasses
from kvinterp.recording.recorder import Recorder

CONTEXT = "kv.record"


@contextlib.contextmanager
def record(
    model: Any,
    sites: words.Site | str | Sequence[words.Site | str] | Callable[[str], bool],
    layers: Iterable[int] | int | None = None,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    positions: words.Positions | str | int = "newest",
) -> Iterator[Recorder]:
    """Records the forwards that run inside the ``with`` block; each pass through the model's blocks is one step.

    Passes are counted where the model computes, not where it is called: ``model(...)``, ``model.forward(...)``, ``generate``
    (a step a forward, whatever it decodes with), ``run_with_hooks``, ``run_with_cache`` and a decoder inside the model all
    count. A forward that an error or an interruption cuts off is no step, and nothing of it is kept.

    The recorder sees the tensors that the model goes on with: its hooks run after all patches and after the user's own hooks
    that are on the same module when the forward begins, in whichever order they were opened.

    Cache sites are read from the cache that the user's forward used or made.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        sites: As for :class:`Recorder`.
        layers: As for :class:`Recorder`.
        heads: As for :class:`Recorder`.
        kv_heads: As for :class:`Recorder`.
        positions: As for :class:`Recorder`.

    Yields:
        The recorder; ``recorder["resid_post", 3]`` is a tensor, with several forwards stacked; ``.kept`` has each.

    Raises:
        InputError: No forward ran in the block, or one did not run a layer that is recorded.
        UnsupportedError: The model cannot give a site, or a part of it is compiled.

    Example:
        >>> with kvinterp.record(model, "resid_post,pattern") as recorder:  # doctest: +SKIP
        ...     model(tokens)
        >>> recorder["pattern", 0].shape  # doctest: +SKIP
    """
    adapter = wrap(model)
    recorder = _Recording(adapter, sites, layers, heads, kv_heads, None, positions)
    passes = Passes(adapter, recorder, CONTEXT, recorder.places)
    listeners = {place: [listener] for place, listener in recorder.listeners.items()}
    with adapter.attached(recorder.places, LAST), adapter.listening(listeners, LAST), passes.watching():
        yield recorder
    if passes.silent:
        raise InputError(f"{CONTEXT} heard nothing: {passes.silence()}")


class _Recording(Recorder, WatchesPasses):
    """A recorder whose steps are the passes."""

    def pass_begins(self, new: int, cached: int) -> None:
        """Begins a step."""
        self.begin_step(len(self.recorded_steps))
        self.begin_pass()

    def block_ends(self, layer: int, cache: Any) -> None:
        """Reads the cache sites that no hook shows."""
        for site in self._reads.get(layer, ()):
            tensor = self.adapter.read_cache(site, layer, cache)
            if tensor is None:
                raise InputError(
                    f"site {site!r} was asked for, but this forward used no cache that holds it: call the model with "
                    f"a cache ({self.adapter.cache_name}=..., or use_cache=True)."
                )
            self._show(site, layer, 0, tensor)

    def pass_ends(self, ran: Sequence[int]) -> None:
        """Ends the step, if it showed every recorded site."""
        missing = [place for place in self.kept if place not in self._pieces]
        if missing:
            self.pass_cut()
            raise InputError(self._error(*missing[0], ran))
        self.end_step()

    def pass_cut(self) -> None:
        """Forgets the step."""
        if self._on:
            self.recorded_steps.pop()
        self._pieces = {}
        self._on = False

    def pass_undone(self) -> None:
        """Forgets the newest step."""
        self.recorded_steps.pop()
        for tensors in self.kept.values():
            tensors.pop()

    def _error(self, site: str, layer: int, ran: Sequence[int]) -> str:
        """Says why a forward did not show a site."""
        name = self.adapter.facts.name
        if layer in ran:
            return (
                f"a forward of {name} ran layer {layer} and did not show its {site!r}: that part of the model was replaced after "
                "kv.record was opened (its attention by AttentionInterface.register, say), or torch.compile compiled it before, "
                "so that it runs no hooks: replace it before, and run the model uncompiled."
            )
        return (
            f"{site!r} of layer {layer} was asked for, and a forward of {name} ran the layers {ran[0]} to {ran[-1]} only: leave "
            f"out what stops it there, or ask for those, layers=range({ran[0]}, {ran[-1] + 1})."
        )
