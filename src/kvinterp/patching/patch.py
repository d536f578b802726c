"""A patch as data: what is moved, and where to."""

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
"""``"newest"``, ``"all"``, ``"earlier"``, or from where to where; negative numbers count from the end, None is the end."""
Where = Positions | int | slice | Sequence[int]
"""How positions may be given; see :func:`positions_of`."""
PATCH_SITES = {
    **{site: text for site, text in SITES.items() if site not in (*CACHE_SITES, "attn_scores")},
    "cache_k": "keys in the cache, as it holds them",
    "cache_v": "values in the cache",
    "kv": "keys and values in the cache",
}
PATCHED_CACHE = ("kv", "cache_k", "cache_v")


@dataclasses.dataclass(frozen=True)
class Patch:
    """What is moved, and where to.

    Attributes:
        site: A site of PATCH_SITES, or a hook by TransformerLens's name, which says the layer too. ``cache_k``, ``cache_v`` and
            ``kv`` move what the cache holds.
        layers: Layers; all for None.
        heads: Query heads (q, z, pattern) or KV heads (k, v and the cache sites); all for None.
        positions: ``"newest"``, ``"all"``, ``"earlier"`` (all but the newest), the span ``(start, stop)``, a slice, one position
            such as ``5``, or ``-1``, the newest; or a list of positions in a row, such as ``[5, 6]``.
        steps: ``"every"`` (inside :func:`patched` every forward; where two paths are run, every decode step from step 1,
            since step 0 is the same on both), ``"first"`` (step 1, the first decode step), or a tuple of steps.
        donor: The trace to take from, recorded with the site at the positions moved (``positions="all"`` unless newest), of
            the same prompt or of another. Positions are matched by their absolute number, so its prompt has as many tokens
            as the patched one's; :func:`donor_trace` makes one of the user's own recorded forwards. Or an ablation:
            ``"zero"``, or what :func:`mean_donor` or :func:`resample_donor` made of given prompts. Or TransformerLens's
            ``ActivationCache``; a tensor of the activation's shape, or of one that torch broadcasts to it; or a function of the
            activation (steering), which may take TransformerLens's hook besides.

    Raises:
        InputError: The site, positions or steps are not of a form that exists.
    """

    site: words.PatchSite | str
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    positions: Positions = "newest"
    steps: str | tuple[int, ...] = "every"
    donor: Any = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        keep = functools.partial(object.__setattr__, self)
        site, layers = site_of(self.site) if isinstance(self.site, str) else (self.site, None)
        for name in ("layers", "heads", "steps"):
            if (number := whole_number(getattr(self, name))) is not None:
                keep(name, (number,))
        if layers is not None and self.layers not in (None, layers):
            raise InputError(
                f"hook {self.site!r} is of layer {layers[0]}, and layers={self.layers!r} was given: leave it out."
            )
        keep("site", site)
        keep("layers", self.layers if layers is None else layers)
        check_patch_site(site)
        keep("donor", given_donor(self.donor))
        if self.donor is not None:
            check_instance(
                "donor",
                self.donor,
                (Trace, Ablation, HandedRows),
                "a trace, of kv.run(...) (of several prompts, or ids [1, position], it returns a list: take one of it) or of "
                "kv.donor_trace(recorder, prompt); or an ablation, 'zero', kv.mean_donor(model, prompts, site) or "
                "kv.resample_donor(model, prompts, site); or an ActivationCache, a tensor, or a function of the activation",
            )
        for name in ("layers", "heads"):
            keep(name, self._read(name, "whole numbers such as (0, 2), or None for all", None))
        keep("positions", positions_of(self.positions))
        keep("steps", self._read("steps", "'every', 'first' or whole numbers from 0, such as (1, 4)", "every", "first"))
        if not isinstance(self.steps, str) and min(self.steps) < 0:
            raise InputError(f"steps={shown(self.steps)} names no step: expected whole numbers from 0, such as (1, 4).")

    def _read(self, name: str, expected: str, *words: str | None) -> Any:
        """A field that is one of these words, or some whole numbers of any library's type, as a tuple of ints."""
        given = getattr(self, name)
        if given is None or isinstance(given, str):
            read: Any = given if given in words else ()
        else:
            read = tuple(map(whole_number, given_list(name, given, expected)))
        if read == () or (isinstance(read, tuple) and None in read):
            raise InputError(f"{name}={shown(given)} was given: expected {expected}.")
        return read

    def active(self, step: int, every_from: int = 1) -> bool:
        """Whether it applies at a step.

        Args:
            step: The step.
            every_from: The first that ``"every"`` means. The prefill, step 0, is the same on two paths of one prompt.
        """
        return step >= every_from if self.steps == "every" else step == 1 if self.steps == "first" else step in self.steps

    @property
    def starts_at(self) -> int:
        """The first absolute position named; 0 where positions are not named by number."""
        return max(self.positions[0], 0) if isinstance(self.positions, tuple) else 0

    def moves(self, step: int, prompt_length: int, form: str) -> bool:
        """Whether it moves anything at a step of a path of this form, ``"cached"`` or ``"recompute"``."""
        end = prompt_length + step
        low, high = self.span(end)
        if form == "cached" and step and self.site not in PATCHED_CACHE:
            # A decode step computes the newest position only; what the cache holds is moved whole.
            low = max(low, end - 1)
        return self.active(step) and low < high

    def span(self, end: int) -> tuple[int, int]:
        """The absolute positions it moves when the context holds ``end`` positions."""
        if isinstance(self.positions, tuple):
            start, stop, _ = slice(*self.positions).indices(end)
            return start, stop
        return {"newest": (end - 1, end), "earlier": (0, end - 1), "all": (0, end)}[self.positions]


def check_patch_site(site: object) -> None:
    """Raises InputError where no patch goes to a site: it is none, or one that is only recorded."""
    if site == "attn_scores":
        raise InputError("'attn_scores' can be recorded and not patched: patch 'pattern', which is made of them.")
    if site == "experts":
        raise InputError("'experts' can be recorded and not patched: patch 'router', the logits that they are chosen by.")
    check_known("patch site", site, PATCH_SITES)


def heads_at(adapter: Adapter, site: str, what: str) -> int:
    """How many heads a site has.

    Raises:
        InputError: It has none, and ``what`` needs some.
    """
    count, _ = adapter.facts.heads_of(site)
    if not count:
        raise InputError(f"{what} needs a site with heads, and {site!r} has none: use q, k, v, z, pattern or kv.")
    return count


def given_donor(donor: Any) -> Any:
    """A donor as patches take from it: a word or a user's cache, tensor or function in a form of ours, else as it is."""
    if isinstance(donor, str) and donor == "zero":
        return ZERO
    if is_activation_cache(donor):
        return HandedRows("ActivationCache", records_of(donor, batched=True))
    if isinstance(donor, Tensor | np.ndarray):
        return HandedRows("donor tensor", tensor=torch.as_tensor(donor))
    if callable(donor) and not isinstance(donor, type):
        return HandedRows(f"function {getattr(donor, '__name__', type(donor).__name__)}", function=donor)
    return donor


def positions_of(given: Any) -> Positions:
    """Positions in one form: a word, or (start, stop), of which negative numbers count from the end and None is the end.

    Args:
        given: A word; the tuple (start, stop); a slice or a range; one position, -1 the newest; or a list, an array or a tensor
            of one or of several in a row.

    Raises:
        InputError: It is something else, or holds no position.
    """
    expected = (
        "'newest', 'all', 'earlier', a span (start, stop), a slice, one position such as -1, or a list such as [5, 6]"
    )
    wrong = unexpected("positions", given, expected)
    if isinstance(given, str):
        if given not in ("newest", "all", "earlier"):
            raise wrong
        return given
    if isinstance(given, range):
        given = slice(given.start, given.stop, given.step) if len(given) else slice(0, 0)
    spans = isinstance(given, tuple) and len(given) == 2 and given[0] is not None
    span = slice(*given) if spans else given
    if isinstance(span, slice):
        ends = [None if end is None else whole_number(end) for end in (span.start, span.stop, span.step)]
        if ends != [span.start, span.stop, span.step] or ends[2] not in (None, 1):
            raise wrong
        start, stop = ends[0] or 0, ends[1]
    else:
        one = whole_number(given)
        listed = [one] if one is not None else [*map(whole_number, given_list("positions", given, expected))]
        if not listed or None in listed:
            raise wrong
        start, stop = listed[0] or 0, (listed[-1] or 0) + 1 or None
        if listed != list(range(start, start + len(listed))):
            raise InputError(
                f"positions={shown(given)} are not in a row: give a Patch for each, in a list of patches, or for a span "
                "the tuple (start, stop)."
            )
    if (start, stop) in _WORDS:
        return _WORDS[start, stop]
    if stop is not None and (start < 0 <= stop or ((start < 0) == (stop < 0) and start >= stop)):
        raise InputError(f"positions={shown(given)} holds no position: expected (start, stop) with 0 <= start < stop.")
    return start, stop


_WORDS: dict[tuple[int, int | None], str] = {(-1, None): "newest", (0, None): "all", (0, -1): "earlier"}


def stored_sites(adapter: Adapter, site: str) -> tuple[str, ...]:
    """The sites a patch of the cache takes from its donor: keys on the side of RoPE on which this model caches them."""
    keys = "cache_k" if adapter.facts.cached_keys_rotated else "cache_k_pre"
    return {"kv": (keys, "cache_v"), "cache_k": (keys,)}.get(site, (site,))
