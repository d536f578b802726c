"""A patch as data, and the watcher that applies it: moving tensors of one trace into the other path.

Nothing is edited in place: a patch hands the model a copy in which its rows are the donor's. What it changes in a cache it
changes in the store's own memory, so a patched cache stays patched for the steps that follow.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.errors import InputError, UnsupportedError, unknown
from kvinterp.models import SITES, Adapter, wrap
from kvinterp.models.adapter import CACHE_SITES, Listener, Site
from kvinterp.patching.midstream import carry_on
from kvinterp.policies import Place
from kvinterp.recording import Recorder, Trace, chosen_layers
from kvinterp.recording.recorder import HEADS

__all__ = ["PATCHED_CACHE", "PATCH_SITES", "Patch", "PatchWatcher", "Window", "donor_trace", "patched", "stored_sites"]

Positions = str | tuple[int, int]
Window = Callable[[str, int], "tuple[int, Tensor]"]
"""Given a site and layer, the donor's tensor at this step and the absolute position of its first row."""

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
        site: A site of PATCH_SITES. ``cache_k``, ``cache_v`` and ``kv`` move what the cache holds.
        layers: Layers; all for None.
        heads: Query heads (q, z, pattern) or KV heads (k, v and the cache sites); all for None.
        positions: ``"newest"``, ``"all"``, ``"earlier"`` (all but the newest), or absolute positions ``(start, stop)``.
        steps: ``"every"`` (every decode step from step 1), ``"first"`` (step 1), or a tuple of steps.
        donor: The trace to take from, recorded with the site at the positions moved (``positions="all"`` unless newest).
            Positions are matched by their absolute number, so its prompt has as many tokens as the patched one's;
            :func:`donor_trace` makes one of the user's own recorded forwards.

    Raises:
        InputError: The site, positions or steps are not of a form that exists.
    """

    site: str
    layers: tuple[int, ...] | None = None
    heads: tuple[int, ...] | None = None
    positions: Positions = "newest"
    steps: str | tuple[int, ...] = "every"
    donor: Trace | None = dataclasses.field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.site not in PATCH_SITES:
            raise unknown("patch site", self.site, PATCH_SITES)
        if self.donor is not None and not isinstance(self.donor, Trace):
            raise InputError(
                f"donor is a {type(self.donor).__name__}: expected a trace, of kv.run(...) or of kv.donor_trace(recorder, "
                "prompt)."
            )
        for name in ("layers", "heads"):
            given = getattr(self, name)
            if given is not None and not (given and all(isinstance(number, int) for number in given)):
                raise InputError(f"{name}={given!r} was given: expected whole numbers such as (0, 2), or None for all.")
        if not (isinstance(self.positions, tuple) or self.positions in ("newest", "all", "earlier")):
            raise InputError(
                f"positions={self.positions!r} was given: expected 'newest', 'all', 'earlier' or absolute positions "
                "(start, stop)."
            )
        if isinstance(self.positions, tuple) and not (
            len(self.positions) == 2 and 0 <= self.positions[0] < self.positions[1]
        ):
            raise InputError(
                f"positions={self.positions!r} holds no position: expected (start, stop) with 0 <= start < stop."
            )
        if not (isinstance(self.steps, tuple) or self.steps in ("every", "first")):
            raise InputError(f"steps={self.steps!r} was given: expected 'every', 'first' or a tuple of steps.")
        if isinstance(self.steps, tuple) and not (self.steps and all(isinstance(s, int) and s >= 0 for s in self.steps)):
            raise InputError(f"steps={self.steps!r} names no step: expected whole numbers from 0, such as (1, 4).")

    def active(self, step: int) -> bool:
        """Whether it applies at a step; the prefill, step 0, is the same on both paths and only patched when named."""
        return step >= 1 if self.steps == "every" else step == 1 if self.steps == "first" else step in self.steps

    @property
    def starts_at(self) -> int:
        """The first absolute position named; 0 where positions are not named by number."""
        return self.positions[0] if isinstance(self.positions, tuple) else 0

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
            return self.positions[0], min(self.positions[1], end)
        return {"newest": (end - 1, end), "earlier": (0, end - 1), "all": (0, end)}[self.positions]


def stored_sites(adapter: Adapter, site: str) -> tuple[str, ...]:
    """The sites a patch of the cache takes from its donor: keys on the side of RoPE on which this model caches them."""
    keys = "cache_k" if adapter.facts.cached_keys_rotated else "cache_k_pre"
    return {"kv": (keys, "cache_v"), "cache_k": (keys,)}.get(site, (site,))


class PatchWatcher:
    """Applies patches to the forwards of one path.

    Args:
        adapter: The model that is patched.
        patches: What to move.
        window: Where the donor's tensors come from, for patches that carry no trace of their own.
        prompt_length: Tokens in the prompt of the path that is patched, when a Runner drives it.
    """

    def __init__(
        self, adapter: Adapter, patches: Iterable[Patch], window: Window | None = None, prompt_length: int | None = None
    ) -> None:
        self.adapter, self.patches, self.window = adapter, tuple(patches), window
        self.prompt_length = prompt_length
        self.step, self.end = 0, 0
        self.listeners: dict[Site, Listener] = {}
        self._cache: dict[int, list[Patch]] = {}
        for patch in self.patches:
            self._check(patch)
            for layer in chosen_layers(adapter, patch.layers):
                if patch.site in PATCHED_CACHE:
                    self._cache.setdefault(layer, []).append(patch)
                else:
                    adapter.tap(patch.site, layer)
                    self.listeners[patch.site, layer] = self._listener(
                        patch, layer, self.listeners.get((patch.site, layer))
                    )
        carry_on(adapter, self.listeners)

    @property
    def places(self) -> list[Site]:
        """The hooks it needs."""
        return list(self.listeners)

    @property
    def first_layer(self) -> int:
        """The first block whose computation it changes."""
        return min([layer for _, layer in self.listeners] + list(self._cache), default=self.adapter.facts.layers)

    def only_output(self, layer: int) -> Listener | None:
        """What it does to a block's output, where that is all it does to the block; else None."""
        sites = {site for site, at in self.listeners if at == layer}
        return self.listeners["resid_post", layer] if sites == {"resid_post"} and layer not in self._cache else None

    def reads_cache(self, step: int) -> bool:
        """Whether it changes what attention reads from the cache at a step."""
        return any(patch.active(step) for patches in self._cache.values() for patch in patches)

    def active(self, step: int) -> bool:
        """Whether any patch applies at a step."""
        return any(patch.active(step) for patch in self.patches)

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        if self.prompt_length is not None:
            self.at(step, self.prompt_length + step)

    def begin_pass(self) -> None:
        """A forward from position 0 follows."""

    def at(self, step: int, end: int) -> None:
        """Says which step runs and how many positions the context then holds."""
        self.step, self.end = step, end

    def on_read(self, place: Place, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Replaces cached keys and values by the donor's."""
        changed = False
        for patch in self._cache.get(place.layer, ()):
            if not patch.active(self.step):
                continue
            place.check_known(patch.site)
            for site in stored_sites(self.adapter, patch.site):
                held = values if site == "cache_v" else keys
                new = self._moved(patch, site, place.layer, held, 2, 1, place.start, place.stop)
                keys, values = (keys, new) if site == "cache_v" else (new, values)
            changed = True
        return (keys, values) if changed else None

    def _listener(self, patch: Patch, layer: int, before: Listener | None) -> Listener:
        # Rows are positions; for scores and patterns they are query positions. Heads are numbered by HEADS.
        rows = 2 if patch.site == "pattern" else 1
        heads = HEADS[patch.site][0] if patch.site in HEADS else None

        def listener(tensor: Tensor) -> Tensor | None:
            earlier = before(tensor) if before is not None else None
            if not patch.active(self.step):
                return earlier
            tensor = tensor if earlier is None else earlier
            end = self.end or tensor.shape[rows]
            return self._moved(patch, patch.site, layer, tensor, rows, heads, end - tensor.shape[rows], end)

        return listener

    def _moved(
        self, patch: Patch, site: str, layer: int, tensor: Tensor, rows: int, heads: int | None, start: int, stop: int
    ) -> Tensor:
        low, high = patch.span(stop)
        low, high = max(low, start), min(high, stop)
        if low >= high:
            return tensor
        donor_start, donor = self._donor(patch, site, layer, rows, stop)
        if site in CACHE_SITES and self.adapter.facts.windows[layer] is not None:
            # A cache that slides has forgotten the first positions, and the newest query does not read them.
            low = max(low, donor_start)
            if low >= high:
                return tensor
        donor_stop = donor_start + donor.shape[rows]
        if low < donor_start or high > donor_stop:
            raise InputError(
                f"the donor's {site} at layer {layer} covers positions {donor_start} to {donor_stop - 1} at step "
                f"{self.step}, and {low} to {high - 1} are to be moved: {self._remedy(patch)}."
            )
        new = tensor.clone()
        into, taken = new.narrow(rows, low - start, high - low), donor.narrow(rows, low - donor_start, high - low)
        if patch.heads is not None and heads is not None:
            index = torch.tensor(patch.heads, device=new.device)
            into.index_copy_(heads, index, self._fitted(site, layer, taken, into).index_select(heads, index))
        else:
            into.copy_(self._fitted(site, layer, taken, into))
        return new

    def _fitted(self, site: str, layer: int, taken: Tensor, into: Tensor) -> Tensor:
        """The donor's rows in the shape, dtype and place of those they replace."""
        taken = taken.to(into)
        if site == "pattern" and into.shape[-1] > self.end > 0:
            raise UnsupportedError(
                f"the pattern at layer {layer} has {into.shape[-1]} keys in a context of {self.end} positions, as with a "
                "static cache, so keys cannot be matched: use a cache that grows."
            )
        if site == "pattern" and taken.shape[-1] != into.shape[-1]:
            # One of the two keeps a sliding window of keys: the newest keys are the last of both.
            fitted = taken.new_zeros(*taken.shape[:-1], into.shape[-1])
            keys = min(taken.shape[-1], into.shape[-1])
            fitted[..., -keys:] = taken[..., -keys:]
            taken = fitted
        if taken.shape[1:] != into.shape[1:]:
            raise InputError(
                f"the donor's {site} at layer {layer} has shape {tuple(taken.shape[1:])} and cannot be put where "
                f"{tuple(into.shape[1:])} is: give a donor of the same model, recorded with all its heads."
            )
        if taken.shape[0] != into.shape[0]:
            raise InputError(
                f"{into.shape[0]} prompts are run at once and the donor holds {taken.shape[0]}: patch one prompt at a time, "
                "each with a donor of its own."
            )
        return taken

    @staticmethod
    def _remedy(patch: Patch) -> str:
        if patch.site == "pattern":
            return "a cached path computes one row of the pattern a step, so use positions='newest'"
        return "record the donor from step 0 with positions='all', or use positions='newest'"

    def _donor(self, patch: Patch, site: str, layer: int, rows: int, stop: int) -> tuple[int, Tensor]:
        if patch.donor is None:
            if self.window is None:
                raise InputError(f"the patch of {patch.site!r} has no donor: give Patch(..., donor=trace).")
            return self.window(site, layer)
        held = len(patch.donor.prompt) + self.step
        if held != stop:
            raise InputError(
                f"the donor trace holds {held} positions at step {self.step} and the patched context {stop}, so positions "
                "cannot be matched: give a donor whose prompt is tokenised to the same length."
            )
        return _from_trace(patch.donor, site, layer, self.step, rows)

    def _check(self, patch: Patch) -> None:
        facts = self.adapter.facts
        if self.adapter.derives(patch.site):
            raise UnsupportedError(
                f"the {patch.site} cannot be patched under attention {facts.attention!r}, where it never leaves the kernel and "
                "is derived beside it: load the model with attention='eager' (attn_implementation='eager' in transformers), "
                "or patch q, k, v or z."
            )
        if patch.site in PATCHED_CACHE and not self.adapter.attention_only:
            raise UnsupportedError(
                f"site {patch.site!r} needs a cache of keys and values in every layer, and {facts.architecture} keeps "
                "other state in some: patch resid_post, attn_out or mlp_out instead."
            )
        if patch.heads is not None:
            if patch.site not in HEADS and patch.site != "kv":
                raise InputError(f"site {patch.site!r} has no heads, and heads={patch.heads} was given: leave heads out.")
            query = patch.site in HEADS and HEADS[patch.site][1] == "query"
            count, what = (facts.query_heads, "query head") if query else (facts.kv_heads, "KV head")
            for head in patch.heads:
                if not 0 <= head < count:
                    raise InputError(
                        f"{what} {head} does not exist for site {patch.site!r}: {facts.name} has {what}s 0 to {count - 1}."
                    )
        if isinstance(patch.positions, tuple) and patch.positions[1] > facts.context:
            raise InputError(
                f"position {patch.positions[1] - 1} does not exist: {facts.name} has positions 0 to {facts.context - 1}."
            )
        if patch.donor is not None:
            self._check_donor(patch, patch.donor)

    def _check_donor(self, patch: Patch, donor: Trace) -> None:
        for site in stored_sites(self.adapter, patch.site):
            for layer in chosen_layers(self.adapter, patch.layers):
                if (site, layer) not in donor.records:
                    have = ", ".join(sorted({s for s, _ in donor.records})) or "nothing"
                    raise InputError(
                        f"the donor trace holds no {site!r} of layer {layer} (it recorded {have}): run the donor with "
                        f"record={site!r}."
                    )
        named = patch.steps if isinstance(patch.steps, tuple) else (1,) if patch.steps == "first" else ()
        missing = next((step for step in named if step not in donor.steps), None)
        if missing is not None:
            raise _no_step(donor, missing)
        wrong = next((t for t in donor.prompt if t >= self.adapter.facts.vocabulary), None)
        if wrong is not None:
            raise InputError(
                f"the donor trace holds token id {wrong}, which {self.adapter.facts.name} does not have: it was made with "
                "another tokenisation; run the donor with the same model."
            )


def _no_step(donor: Trace, step: int) -> InputError:
    shown = ", ".join(map(str, donor.steps[:8])) + (", ..." if len(donor.steps) > 8 else "")
    return InputError(f"the donor trace did not record step {step} (it has {shown or 'none'}): run it for as many steps.")


def _from_trace(donor: Trace, site: str, layer: int, step: int, rows: int) -> tuple[int, Tensor]:
    """The donor's rows at a step with the absolute position of the first, gathered over steps for a cached donor."""
    if step not in donor.steps:
        raise _no_step(donor, step)
    index = donor.steps.index(step)
    kept = donor.records[site, layer]
    whole = _dimensions(site)
    if kept[index].dim() < whole:
        # Recorded at the newest position: one row, without the dimension.
        return len(donor.prompt) + step - 1, kept[index].unsqueeze(rows - 1)[None]
    here = kept[index]
    held = len(donor.prompt) + step
    if site == "pattern" and here.shape[-1] > held:
        raise UnsupportedError(
            f"the donor's pattern at layer {layer} has {here.shape[-1]} keys in a context of {held} positions, as with a "
            "static cache, so keys cannot be matched: record it with a cache that grows."
        )
    gathers = site not in CACHE_SITES and site != "pattern" and donor.path.startswith("cached")
    if gathers and list(donor.steps[: index + 1]) == list(range(step + 1)):
        here = torch.cat(kept[: index + 1], rows - 1)
    return len(donor.prompt) + step - here.shape[rows - 1], here[None]


def _dimensions(site: str) -> int:
    """Dimensions of a site's record at all positions, without the batch."""
    return 3 if site in HEADS else 2


def donor_trace(recorder: Recorder, prompt: Sequence[int], fed: Sequence[int] = ()) -> Trace:
    """What :func:`kvinterp.record` kept of the user's own forwards, as a trace that patches can take from.

    Args:
        recorder: What recorded them, one prompt at a time.
        prompt: Token ids of the first forward.
        fed: Token ids fed after it, one a forward (alone with a cache, or behind the whole prefix without one).

    Raises:
        InputError: The forwards were of several prompts at once, or are not as many as the tokens say.

    Example:
        >>> with kv.record(model, "resid_pre", positions="all") as clean:  # doctest: +SKIP
        ...     model(clean_tokens)
        >>> donor = donor_trace(clean, clean_tokens[0].tolist())  # doctest: +SKIP
    """
    recorder.end_step()
    steps = tuple(recorder.recorded_steps)
    if len(steps) != 1 + len(fed):
        raise InputError(
            f"{len(steps)} forwards were recorded, and a prompt with {len(fed)} tokens fed after it takes {1 + len(fed)}: "
            "give the tokens that were fed, one for each forward after the first."
        )
    if any(tensor.shape[0] != 1 for kept in recorder.kept.values() for tensor in kept):
        raise InputError("the recorded forwards hold several prompts at once: record one prompt at a time.")
    # Every row from position 0 in a later forward means that it ran without a cache.
    rows = [kept[-1].shape[1] for (site, _), kept in recorder.kept.items() if site not in CACHE_SITES and site != "pattern"]
    cached = bool(fed) and recorder.positions == "all" and bool(rows) and rows[0] == 1
    records = {place: [tensor[0] for tensor in kept] for place, kept in recorder.kept.items()}
    form = "cached" if cached else "recompute"
    return Trace(form, tuple(prompt), (), tuple(fed), records, steps)


@contextlib.contextmanager
def patched(model: Any, patches: Patch | Iterable[Patch]) -> Iterator[PatchWatcher]:
    """Patches the user's own forwards on anyone's model; each call of the model is one step, from 0.

    Cache patches change what attention reads from the cache the user passes; the user's cache itself is left as it is, so
    that a recorder of cache sites shows it unpatched.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        patches: Patches that each carry a donor trace. ``steps`` counts the calls; name step 0 to patch the first.

    Raises:
        InputError: A patch does not fit the model or its donor, or several prompts are run at once.

    Example:
        >>> clean = kv.run(model, prompt, "cached", record="resid_post", positions="all")  # doctest: +SKIP
        >>> with kv.patched(model, kv.Patch("resid_post", (3,), steps=(0,), donor=clean)):  # doctest: +SKIP
        ...     logits = model(other_prompt_of_the_same_length)
    """
    adapter = wrap(model)
    given = (patches,) if isinstance(patches, Patch) else tuple(patches)
    for patch in given:
        if patch.donor is None:
            raise InputError(f"the patch of {patch.site!r} has no donor: give Patch(..., donor=trace).")
    watcher = PatchWatcher(adapter, given)
    calls = iter(range(2**31))
    undo: list[Callable[[], None]] = []

    def reads(layer: int, start: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        place = Place(layer, start, start + keys.shape[2], adapter.facts.cached_keys_rotated)
        return watcher.on_read(place, keys, values)

    signature = inspect.signature(adapter.model.forward)

    def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given_here = dict(signature.bind_partial(*args, **kwargs).arguments)
        given_here |= given_here.pop("kwargs", {})
        tokens = next((a for a in (*args, kwargs.get("input_ids"), kwargs.get("input")) if isinstance(a, Tensor)), None)
        watcher.at(next(calls), 0 if tokens is None else adapter.cached_length(given_here) + tokens.shape[-1])
        for patch in given:
            if tokens is not None and patch.active(watcher.step) and patch.starts_at >= watcher.end:
                raise InputError(
                    f"position {patch.starts_at} does not exist: the context holds {watcher.end} positions at step "
                    f"{watcher.step}."
                )
        if watcher.reads_cache(watcher.step):
            undo.extend(adapter.intercept_cache(given_here, reads))

    def after(*_: Any) -> None:
        while undo:
            undo.pop()()

    with contextlib.ExitStack() as stack:
        stack.callback(after)
        stack.enter_context(adapter.attached(watcher.places))
        stack.callback(adapter.model.register_forward_pre_hook(before, with_kwargs=True).remove)
        stack.callback(adapter.model.register_forward_hook(after, always_call=True).remove)
        stack.enter_context(adapter.listening({place: [heard] for place, heard in watcher.listeners.items()}))
        yield watcher
