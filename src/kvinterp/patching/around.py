"""Applies patches to the user's own forwards."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor

from kvinterp.common.checks import check_instance, given_list
from kvinterp.common.vocabulary import UNCHANGED
from kvinterp.errors import InputError
from kvinterp.models import Adapter, wrap
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.passes import Passes, WatchesPasses
from kvinterp.patching.hook import PatchHook, read_changes
from kvinterp.patching.patch import PATCHED_CACHE, Patch
from kvinterp.policies import CacheRows
from kvinterp.recording import Trace

log = logging.getLogger("kvinterp")
CONTEXT = "kv.patched"


@contextlib.contextmanager
def patched(model: Any, patches: Patch | Iterable[Patch]) -> Iterator[PatchHook]:
    """Patches the forwards that run inside the ``with`` block; each pass through the model's blocks
    is one step, from 0.

    Passes are counted as :func:`kvinterp.record` counts them, and every pass is patched unless
    ``steps`` names some: inside ``generate`` step 0 is the prompt and step 1 the first token fed
    after it.

    Cache patches change what attention reads from the cache of the forward. The cache itself stays
    as it is, so a recorder of cache sites shows it unpatched.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        patches: Patches, each with a donor; a donor trace must have recorded every step that is
            patched.

    Raises:
        InputError: A patch does not fit the model or its donor, several prompts are run at once, or
            a patch moved nothing until the end.
        UnsupportedError: The model cannot be patched there, or a part of it is compiled.

    The logger ``kvinterp`` warns of a patch that wrote only values that were there already, and of
    an ablation or a steering of the newest position alone while a text is generated, whether by its
    positions or by what its function changes: with a cache that is another computation than without
        one. :func:`steer` means the same either way.

    Example:
        >>> clean = kv.run(model, prompt, "cached", record="resid_post", positions="all")  # doctest: +SKIP
        >>> with kv.patched(model, kv.Patch("resid_post", (3,), donor=clean)):  # doctest: +SKIP
        ...     logits = model(other_prompt_of_the_same_length)
    """
    adapter = wrap(model)
    expected = "a Patch, or a list of them"
    listing = (
        (patches,)
        if isinstance(patches, Patch)
        else tuple(given_list("patches", patches, expected))
    )
    for patch in listing:
        check_instance("patches", patch, Patch, expected)
        if patch.donor is None:
            raise InputError(
                f"the patch of {patch.site!r} has no donor: give Patch(..., donor=trace)."
            )
    with applied(adapter, listing, CONTEXT) as (hook, patching):
        yield hook
    for patch, moved, alone, changed in zip(
        listing, hook.moved, hook.newest_alone, *read_changes([hook]), strict=True
    ):
        if moved and not changed:
            log.warning(
                "%s: the patch of %r %s: its donor is equal to what it replaces",
                CONTEXT,
                patch.site,
                UNCHANGED,
            )
        if changed and patching.grew and _means_another_text(patch, alone):
            log.warning(
                "%s: the patch of %r moves the newest position of each forward alone, and leaves %s as they are. From a "
                "cache every token keeps what it was patched to; without one each forward computes the earlier tokens "
                "again, unpatched, so that use_cache changes the text. positions='all' patches every position and means "
                "the same with and without a cache; kv.steer(..., positions='generated') adds a vector to what is written",
                CONTEXT, patch.site, f"positions 0 to {patching.prompt - 2}" if patching.prompt > 2 else "earlier positions",
            )  # fmt: skip
        if not moved and not patching.cut:
            raise InputError(
                f"{CONTEXT} changed nothing by the patch of {patch.site!r}: {patching.why_not(patch)}"
            )


@contextlib.contextmanager
def applied(
    adapter: Adapter, patches: Sequence[Patch], context: str
) -> Iterator[tuple[PatchHook, Patching]]:
    """Applies patches to the user's own forwards while the context lasts, with no word on what they
    moved.

    Args:
        adapter: The model.
        patches: The patches, each with a donor.
        context: What the user has opened, for messages.

    Yields:
        The hook that applies them, and what counts the passes.

    Raises:
        InputError: No forward ran.
    """
    hook = PatchHook(adapter, patches, every_from=0)
    patching = Patching(adapter, hook)
    passes = Passes(adapter, patching, context, hook.hook_points)
    listeners = {hook_point: [listener] for hook_point, listener in hook.listeners.items()}
    with adapter.attached(hook.hook_points), adapter.listening(listeners), passes.watching():
        yield hook, patching
    if passes.silent:
        raise InputError(f"{context} changed nothing: {passes.silence()}")
    patching.cut = passes.cut


def _means_another_text(patch: Patch, alone: Tensor | None) -> bool:
    """Whether a patch of every forward leaves earlier positions as they are, where a forward
    computes them again.
    """
    newest = patch.positions == "newest" or (alone is not None and bool(alone))
    steers = newest and patch.steps == "every" and patch.site not in PATCHED_CACHE
    return steers and not isinstance(patch.donor, Trace)


class Patching(WatchesPasses):
    """Makes every pass one step, and applies cache patches to what attention reads from the user's
    cache.

    Attributes:
        step: The passes that ended.
        grew: Whether a text was generated.
        prompt: The columns that the first pass was fed, with those before them in its cache.
        cut: The passes that were cut off, once all is over.
        longest: The most positions that the context held. A text that is generated may grow to a
            position that a patch names.
    """

    def __init__(self, adapter: Adapter, hook: PatchHook) -> None:
        self.adapter, self.hook = adapter, hook
        self.step = self.end = self.prompt = self.cut = self.longest = 0
        self.grew = False
        self.ran: set[int] = set()

    def pass_begins(self, new: int, cached: int) -> None:
        """Begins a step: what is patched at the first alone looks at its number."""
        # Generation: behind a cache, or without one the same text and a token more.
        self.grew |= cached > 0 or (self.step > 0 and new == self.end + 1)
        self.end = cached + new
        self.prompt, self.longest = self.prompt or self.end, max(self.longest, self.end)
        self.hook.at(self.step, cached + new)

    def block_begins(self, layer: int, cache: Any) -> Callable[[], None] | None:
        """Lets patches of the cache replace what this block's attention reads."""
        return (
            self.adapter.intercept_cache(layer, cache, self._reads)
            if self.hook.active_in_cache(layer)
            else None
        )

    def pass_ends(self, ran: Sequence[int]) -> None:
        """Ends the step, and counts it."""
        self.step += 1
        self.ran.update(ran)

    def pass_undone(self) -> None:
        """Gives the step to the next pass."""
        self.step -= 1

    def why_not(self, patch: Patch) -> str:
        """Says why a patch moved nothing, and what to do."""
        ran = f"{self.step} forward{'s' if self.step > 1 else ''} ran, step 0{f' to {self.step - 1}' if self.step > 1 else ''}"
        if not any(patch.active(step, self.hook.every_from) for step in range(self.step)):
            steps = "step 1" if patch.steps == "first" else f"steps={patch.steps!r}"
            return f"it is for {steps}, and {ran}: name one that runs, such as steps=(0,), or leave steps out for all of them."
        layers = chosen_layers(self.adapter, patch.layers)
        if not self.ran.intersection(layers):
            return f"it is for layer {', '.join(map(str, layers))}, and the forwards ran the layers {sorted(self.ran)} only."
        if patch.starts_at >= self.longest:
            return f"position {patch.starts_at} does not exist: the context held {self.longest} positions at most."
        return (
            f"{ran}, and none computed the positions it names, positions={patch.positions!r}: with a cache a forward computes "
            "the new positions only, so patch them where they are computed, or patch site 'kv' for those in the cache. A patch "
            "of the cache also leaves positions alone where its donor's cache slid past them."
        )

    def _reads(
        self, layer: int, start: int, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        cache_rows = CacheRows(
            layer, start, start + keys.shape[2], self.adapter.facts.cached_keys_rotated
        )
        return self.hook.on_read(cache_rows, keys, values)
