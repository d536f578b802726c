"""A patch as data: the site, layers, heads, positions and steps that it moves, and its donor."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvinterp.common import words
from kvinterp.common.checks import check_instance, check_known, given_list, whole_number
from kvinterp.errors import InputError, shown, unexpected
from kvinterp.models import Adapter
from kvinterp.models.hook_names import site_of
from kvinterp.models.sites import CACHE_SITES, SITES
from kvinterp.patching.ablations import ZERO, Ablation, HandedRows
from kvinterp.recording import Trace
from kvinterp.recording.activation_cache import is_activation_cache, records_of

Positions = str | tuple[int, int | None]
"""``"newest"``, ``"all"``, ``"earlier"``, or (start, stop); negative numbers count from the end,
None is the end.
"""
Where = Positions | int | slice | Sequence[int]
"""The forms of positions that users may give; see :func:`positions_of`."""
PATCH_SITES = {
    **{site: text for site, text in SITES.items() if site not in (*CACHE_SITES, "attn_scores")},
    "cache_k": "keys in the cache, as it holds them",
    "cache_v": "values in the cache",
    "kv": "keys and values in the cache",
}
PATCHED_CACHE = ("kv", "cache_k", "cache_v")


@dataclasses.dataclass(frozen=True)
class Patch:
    """A patch: what is moved, and where to.

    Attributes:
        site: A site of PATCH_SITES, or a hook by TransformerLens's name, which names the layer too.
            ``cache_k``, ``cache_v`` and ``kv`` move keys and values in the cache.
        layers: Layers; all for None.
        heads: Query heads (q, z, pattern) or KV heads (k, v and the cache sites); all for None.
        positions: ``"newest"`` (the default), ``"all"``, ``"earlier"`` (all but the newest), the
            span ``(start, stop)``, a slice, one position such as ``5``, or ``-1``, the newest; or a
            list of consecutive positions, such as ``[5, 6]``. To steer ``generate`` say ``"all"``:
            from a cache each token keeps what the newest position was patched to, without one every
            forward computes the earlier positions again, unpatched, and the text is another one.
        steps: ``"every"`` (inside :func:`patched` every forward; with two paths every decode step
            from step 1, since step 0 is the same on both), ``"first"`` (step 1, the first decode
            step), or a tuple of steps.
        donor: The trace to take from, recorded with the site at the positions moved
            (``positions="all"`` unless newest), of the same prompt or of another. Positions are
            matched by their absolute number, so its prompt has as many tokens as the patched one's;
            :func:`donor_trace` makes one of the user's own recorded forwards. Or ``"zero"``, an
            ablation. Or TransformerLens's ``ActivationCache``; a tensor whose shape torch
            broadcasts to the activation's; or a function of the activation (steering), which may
            take TransformerLens's hook as well.

    Raises:
        InputError: The site, the positions or the steps do not exist or have a wrong form.
    """

    site: words.PatchSite | str
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    positions: Positions = "newest"
    steps: str | tuple[int, ...] = "every"
    donor: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        set_field = functools.partial(object.__setattr__, self)
        site, layers = site_of(self.site) if isinstance(self.site, str) else (self.site, None)
        for name in ("layers", "heads"):
            set_field(
                name, self._parsed(name, "whole numbers such as (0, 2), or None for all", None)
            )
        if layers is not None and self.layers not in (None, layers):
            raise InputError(
                f"hook {self.site!r} is of layer {layers[0]}, and layers={self.layers!r} was given: leave it out."
            )
        set_field("site", site)
        set_field("layers", self.layers if layers is None else layers)
        check_patch_site(site)
        set_field("donor", donor_of(self.donor))
        if self.donor is not None:
            check_instance(
                "donor",
                self.donor,
                (Trace, Ablation, HandedRows),
                "a trace, of kv.run(...) (of several prompts, or ids [1, position], it returns a list: take one of it) or of "
                "kv.donor_trace(recorder, prompt); or the ablation 'zero'; or "
                "an ActivationCache, a tensor, or a function of the activation",
            )
        set_field("positions", positions_of(self.positions))
        set_field(
            "steps",
            self._parsed(
                "steps",
                "'every', 'first' or whole numbers from 0, such as (1, 4)",
                "every",
                "first",
            ),
        )
        if not isinstance(self.steps, str) and min(self.steps) < 0:
            raise InputError(
                f"steps={shown(self.steps)} names no step: expected whole numbers from 0, such as (1, 4)."
            )

    def _parsed(self, name: str, expected: str, *words: str | None) -> Any:
        """A field that is one of these words, or a tuple of ints made of whole numbers of any
        library's type, or of one.
        """
        field = getattr(self, name)
        if (number := whole_number(field)) is not None:
            return (number,)
        if field is None or isinstance(field, str):
            value: Any = field if field in words else ()
        else:
            value = tuple(map(whole_number, given_list(name, field, expected)))
        if value == () or (isinstance(value, tuple) and None in value):
            raise InputError(f"{name}={shown(field)} was given: expected {expected}.")
        return value

    def active(self, step: int, every_from: int = 1) -> bool:
        """Whether the patch applies at a step.

        Args:
            step: The step.
            every_from: The first step that ``"every"`` means. Step 0, the prefill, is the same on
                two paths of one prompt.
        """
        return (
            step >= every_from
            if self.steps == "every"
            else step == 1
            if self.steps == "first"
            else step in self.steps
        )

    @property
    def starts_at(self) -> int:
        """The first absolute position; 0 if positions are not given by number."""
        return max(self.positions[0], 0) if isinstance(self.positions, tuple) else 0

    def moves(self, step: int, prompt_length: int, form: str) -> bool:
        """Whether the patch moves anything at a step of a path of this form, ``"cached"`` or
        ``"recompute"``.
        """
        end = prompt_length + step
        low, high = self.span(end)
        if form == "cached" and step and self.site not in PATCHED_CACHE:
            # A decode step computes the newest position only; the cache has all of them.
            low = max(low, end - 1)
        return self.active(step) and low < high

    def span(self, end: int) -> tuple[int, int]:
        """The absolute positions that the patch moves when the context holds ``end`` positions."""
        if isinstance(self.positions, tuple):
            start, stop, _ = slice(*self.positions).indices(end)
            return start, stop
        return {"newest": (end - 1, end), "earlier": (0, end - 1), "all": (0, end)}[self.positions]


def check_patch_site(site: object) -> None:
    """Raises InputError for a site that does not exist or can only be recorded."""
    if site == "attn_scores":
        raise InputError(
            "'attn_scores' can be recorded and not patched: patch 'pattern', which is made of them."
        )
    check_known("patch site", site, PATCH_SITES)


def heads_at(adapter: Adapter, site: str, what: str) -> int:
    """Returns how many heads a site has.

    Raises:
        InputError: It has none, and ``what`` needs some.
    """
    count, _ = adapter.facts.heads_of(site)
    if not count:
        raise InputError(
            f"{what} needs a site with heads, and {site!r} has none: use q, k, v, z, pattern or kv."
        )
    return count


def donor_of(donor: Any) -> Any:
    """Converts ``"zero"``, a user's cache, tensor or function to a donor of ours; returns anything
    else unchanged.
    """
    if isinstance(donor, str) and donor == "zero":
        return ZERO
    if is_activation_cache(donor):
        return HandedRows("ActivationCache", records_of(donor, batched=True))
    if isinstance(donor, Tensor | np.ndarray):
        return HandedRows("donor tensor", tensor=torch.as_tensor(donor))
    if callable(donor) and not isinstance(donor, type):
        return HandedRows(
            f"function {getattr(donor, '__name__', type(donor).__name__)}", function=donor
        )
    return donor


def positions_of(where: Any) -> Positions:
    """Converts positions to a word or (start, stop); negative numbers count from the end, and None
    is the end.

    Args:
        where: A word; the tuple (start, stop); a slice or a range; one position, -1 the newest; or
            a list, an array or a tensor of one or several consecutive positions.

    Raises:
        InputError: It has another form, or holds no position.
    """
    expected = "'newest', 'all', 'earlier', a span (start, stop), a slice, one position such as -1, or a list such as [5, 6]"
    wrong = functools.partial(unexpected, "positions", where, expected)
    if isinstance(where, str):
        if where not in ("newest", "all", "earlier"):
            raise wrong()
        return where
    is_span = isinstance(where, tuple) and len(where) == 2 and where[0] is not None
    span = slice(*where) if is_span else where
    if isinstance(span, slice):
        ends = [
            None if end is None else whole_number(end) for end in (span.start, span.stop, span.step)
        ]
        if ends != [span.start, span.stop, span.step] or ends[2] not in (None, 1):
            raise wrong()
        start, stop = ends[0] or 0, ends[1]
    else:
        position = whole_number(where)
        numbers = (
            [position]
            if position is not None
            else [*map(whole_number, given_list("positions", where, expected))]
        )
        if not numbers or None in numbers:
            raise wrong()
        start, stop = numbers[0] or 0, (numbers[-1] or 0) + 1 or None
        if numbers != list(range(start, start + len(numbers))):
            raise InputError(
                f"positions={shown(where)} are not in a row: give a Patch for each, in a list of patches, or for a span "
                "the tuple (start, stop)."
            )
    if (start, stop) in _WORDS:
        return _WORDS[start, stop]
    if stop is not None and (start < 0 <= stop or ((start < 0) == (stop < 0) and start >= stop)):
        raise InputError(
            f"positions={shown(where)} holds no position: expected (start, stop) with 0 <= start < stop."
        )
    return start, stop


_WORDS: dict[tuple[int, int | None], str] = {
    (-1, None): "newest",
    (0, None): "all",
    (0, -1): "earlier",
}


def stored_sites(adapter: Adapter, site: str) -> tuple[str, ...]:
    """The sites that a patch takes from its donor: for keys of the cache the side of RoPE on which
    this model caches them.
    """
    keys = "cache_k" if adapter.facts.cached_keys_rotated else "cache_k_pre"
    return {"kv": (keys, "cache_v"), "cache_k": (keys,)}.get(site, (site,))
