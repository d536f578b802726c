"""The hook that applies patches: it moves tensors of one trace into the other path.

A patch does not edit activations in place: it gives the model a copy with the donor's rows. In a
cache it edits the store's own memory, so a patched cache stays patched in the following steps.

The residual stream between attention and MLP needs more. A HookedTransformer shows that stream
itself. A bridge and a transformers model show it only where it enters the norm before the MLP,
while the stream goes around that norm: a patch there reaches the MLP and nothing else. So the
block's output is computed again as the block computes it: the patched stream plus the MLP's output.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import HookPoint, Listener
from kvinterp.models.inputs import chosen_heads, chosen_layers
from kvinterp.models.sites import LAYOUTS
from kvinterp.patching.ablations import Ablation, HandedRows
from kvinterp.patching.donors import check_donor, rows_of
from kvinterp.patching.patch import PATCHED_CACHE, Patch, heads_at, stored_sites
from kvinterp.policies import CacheRows
from kvinterp.recording import PathHook

Window = Callable[[str, int], "tuple[int, Tensor]"]
"""Returns for a site and layer the absolute position of the first row and the donor's tensor at
this step.
"""


class PatchHook(PathHook):
    """Applies patches to the forwards of one path.

    Args:
        adapter: The model that is patched.
        patches: The patches.
        window: Returns the donor's tensors, for patches that carry no donor of their own.
        prompt_length: Tokens in the prompt of the patched path, if a Runner drives it.
        every_from: The first step that ``steps="every"`` means: 1 if both paths compute the same at
            step 0.

    Attributes:
        moved: For each patch how often it moved something.
        first_layer: The first block whose computation it changes.
        changed: For each patch, on the model's device, 1 if it wrote a value that was not there
            already; 2 is added to the first if a block's output was not the stream of ``resid_mid``
            plus ``mlp_out``. :func:`read_changes` reads them.
        newest_alone: For each patch by a function, on the model's device, whether of every forward
            of several rows it changed the newest one only; None where there was none.
    """

    def __init__(
        self,
        adapter: Adapter,
        patches: Iterable[Patch],
        window: Window | None = None,
        prompt_length: int | None = None,
        every_from: int = 1,
    ) -> None:
        self.adapter, self.patches, self.window = adapter, tuple(patches), window
        self.prompt_length, self.every_from = prompt_length, every_from
        self.moved = [0] * len(self.patches)
        self.changed = [torch.zeros((), dtype=torch.long, device=adapter.device)] * len(
            self.patches
        )
        self.newest_alone: list[Tensor | None] = [None] * len(self.patches)
        self.step, self.end = 0, 0
        self.listeners: dict[HookPoint, Listener] = {}
        self._cache: dict[int, list[int]] = {}
        self._evicted: dict[int, CacheRows] = {}
        at_hook_point: dict[HookPoint, list[int]] = {}
        for number, patch in enumerate(self.patches):
            self._check(patch)
            for layer in chosen_layers(adapter, patch.layers):
                if patch.site in PATCHED_CACHE:
                    self._cache.setdefault(layer, []).append(number)
                else:
                    at_hook_point.setdefault((patch.site, layer), []).append(number)
        for hook_point, numbers in at_hook_point.items():
            adapter.tap(*hook_point)
            self.listeners[hook_point] = functools.partial(self._listen, hook_point, numbers)
        for layer in [at for site, at in at_hook_point if site == "resid_mid"]:
            rebuild_outputs(self, layer)
        self.first_layer = min(
            [*self._cache, *(layer for _, layer in self.listeners)], default=adapter.facts.layers
        )

    def only_output(self, layer: int) -> Listener | None:
        """The listener of a block's output, if nothing else in the block is patched; else None."""
        sites = {site for site, at in self.listeners if at == layer}
        return (
            self.listeners["resid_post", layer]
            if sites == {"resid_post"} and layer not in self._cache
            else None
        )

    def active_in_cache(self, layer: int) -> list[int]:
        """The numbers of the patches that change what attention reads from a layer's cache at this
        step.
        """
        return self._active_now(self._cache.get(layer, ()))

    def _active_now(self, numbers: Iterable[int]) -> list[int]:
        return [
            number for number in numbers if self.patches[number].active(self.step, self.every_from)
        ]

    def active(self, step: int) -> bool:
        """Whether any patch applies at a step."""
        return any(patch.active(step, self.every_from) for patch in self.patches)

    def begin_step(self, step: int) -> None:
        """Sets the step and the length of the context, if a Runner drives the path."""
        if self.prompt_length is not None:
            self.at(step, self.prompt_length + step)

    def at(self, step: int, end: int) -> None:
        """Sets the step and how many positions the context then holds."""
        self.step, self.end = step, end

    def on_read(
        self, cache_rows: CacheRows, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Replaces cached keys and values by the donor's."""
        if cache_rows.positions_left is not None:
            self._evicted[cache_rows.layer] = cache_rows
        numbers = self.active_in_cache(cache_rows.layer)
        for number in numbers:
            patched_site = self.patches[number].site
            cache_rows.check_whole(patched_site)
            for site in stored_sites(self.adapter, patched_site):
                cached = values if site == "cache_v" else keys
                new = self._patched(number, site, cache_rows.layer, cached, cache_rows.start)
                keys, values = (keys, new) if site == "cache_v" else (new, values)
        return (keys, values) if numbers else None

    def _listen(
        self, hook_point: HookPoint, numbers: Sequence[int], tensor: Tensor
    ) -> Tensor | None:
        """Applies the patches of a site that are active now, each to the result of those before
        it.
        """
        site, layer = hook_point
        rows, changed = tensor.shape[LAYOUTS[site].row_axis], None
        for number in self._active_now(numbers):
            before = tensor if changed is None else changed
            changed = self._patched(number, site, layer, before, (self.end or rows) - rows)
        return changed

    def _patched(self, number: int, site: str, layer: int, tensor: Tensor, start: int) -> Tensor:
        """A copy of a tensor with the donor's rows; the tensor itself if the patch moves none of
        its rows.
        """
        patch, layout = self.patches[number], LAYOUTS[site]
        rows, heads = layout.row_axis, layout.heads
        stop = start + tensor.shape[rows]
        low, high = patch.span(stop)
        low, high = max(low, start), min(high, stop)
        if low >= high:
            return tensor
        donor_start, donor = self._donor(patch, site, layer, start, tensor, low, high)
        if layout.group == "cache" and self.adapter.facts.windows[layer] is not None:
            # A sliding cache has dropped the first positions, and the newest query does not read
            # them.
            low = max(low, donor_start)
            if low >= high:
                return tensor
        donor_stop = donor_start + donor.shape[rows]
        if low < donor_start or high > donor_stop:
            remedy = "record the donor from step 0 with positions='all', or use positions='newest'"
            if site == "pattern":
                remedy = "a cached path computes one row of the pattern a step, so use positions='newest'"
            raise InputError(
                f"the donor's {site} at layer {layer} covers positions {donor_start} to {donor_stop - 1} at step "
                f"{self.step}, and {low} to {high - 1} are to be moved: {remedy}."
            )
        new = tensor.clone()
        target = new.narrow(rows, low - start, high - low)
        source = self._fitted(
            site, layer, donor.narrow(rows, low - donor_start, high - low), target
        )
        if patch.heads is not None and heads:
            index = torch.tensor(patch.heads, device=new.device)
            target.index_copy_(heads, index, source.index_select(heads, index))
        else:
            target.copy_(source)
        self.moved[number] += 1
        # Stays on the device: reading it waits for the device.
        differs = new != tensor
        self.changed[number] = self.changed[number] | differs.any().to(self.adapter.device)
        if (
            isinstance(patch.donor, HandedRows)
            and patch.donor.function is not None
            and high - low > 1
        ):
            by_row = differs.movedim(rows, 0).flatten(1).any(1).to(self.adapter.device)
            alone, before = by_row[-1] & ~by_row[:-1].any(), self.newest_alone[number]
            self.newest_alone[number] = alone if before is None else before & alone
        return new

    def _fitted(self, site: str, layer: int, source: Tensor, target: Tensor) -> Tensor:
        """The donor's rows in the shape, dtype and device of the rows they replace."""
        source = source.to(target)
        if site == "pattern":
            if layer in self._evicted:
                self._evicted[layer].check_whole(site)
            if target.shape[-1] > self.end > 0:
                raise UnsupportedError(
                    f"the pattern at layer {layer} has {target.shape[-1]} keys in a context of {self.end} positions, as with a "
                    "static cache, so keys cannot be matched: use a cache that grows."
                )
            # Where one of the two keeps a sliding window of keys, the newest keys are the last of
            # both.
            source = pad(source, (target.shape[-1] - source.shape[-1], 0))
        if source.shape[1:] != target.shape[1:]:
            raise InputError(
                f"the donor's {site} at layer {layer} has shape {tuple(source.shape[1:])} and cannot be put where "
                f"{tuple(target.shape[1:])} is: give a donor of the same model, recorded with all its heads."
            )
        if source.shape[0] != target.shape[0]:
            raise InputError(
                f"{target.shape[0]} prompts are run at once and the donor holds {source.shape[0]}: patch one prompt at a time, "
                "each with a donor of its own."
            )
        return source

    def _donor(
        self, patch: Patch, site: str, layer: int, start: int, like: Tensor, low: int, high: int
    ) -> tuple[int, Tensor]:
        """The donor's tensor for the positions from ``low`` to ``high``, after the position of its
        first row.
        """
        if isinstance(patch.donor, HandedRows):
            return low, patch.donor.rows(site, layer, start, like, low, high)
        if isinstance(patch.donor, Ablation):
            return start, patch.donor.rows(like)
        if patch.donor is None:
            if self.window is None:
                raise InputError(
                    f"the patch of {patch.site!r} has no donor: give Patch(..., donor=trace)."
                )
            return self.window(site, layer)
        length = len(patch.donor.prompt) + self.step
        stop = start + like.shape[LAYOUTS[site].row_axis]
        if length != stop:
            raise InputError(
                f"the donor trace holds {length} positions at step {self.step} and the patched context {stop}, so positions "
                "cannot be matched: give a donor whose prompt is tokenised to the same length."
            )
        return rows_of(patch.donor, site, layer, self.step)

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
            heads_at(self.adapter, patch.site, f"heads={patch.heads}")
            chosen_heads(patch.heads, *facts.heads_of(patch.site))
        last = (
            max(patch.starts_at, (patch.positions[1] or 0) - 1)
            if isinstance(patch.positions, tuple)
            else 0
        )
        if last >= facts.context:
            raise InputError(
                f"position {last} does not exist: {facts.name} has positions 0 to {facts.context - 1}."
            )
        if patch.donor is not None:
            check_donor(self.adapter, patch, patch.donor)


def read_changes(hooks: Sequence[PatchHook]) -> list[list[bool]]:
    """For each hook and patch whether it changed anything; one read from the device for all, when
    their forwards have run.

    Raises:
        UnsupportedError: A patch of ``resid_mid`` was applied where a block's output is not that
            stream plus ``mlp_out``.
    """
    flags = [flag for hook in hooks for flag in hook.changed]
    numbers = torch.stack(flags).tolist() if flags else []
    if max(numbers, default=0) > 1:
        raise UnsupportedError(
            f"resid_mid cannot be patched: {hooks[0].adapter.facts.architecture} does not make a block's output as that stream "
            "plus mlp_out; patch attn_out, mlp_out or resid_post instead."
        )
    read = iter(numbers)
    return [[bool(next(read)) for _ in hook.changed] for hook in hooks]


def rebuild_outputs(hook: PatchHook, layer: int) -> None:
    """Adds the listeners that a patch of ``resid_mid`` needs to rebuild the block's output.

    They keep the stream before and after the patch, and what the MLP adds, after any patch of that.

    Raises:
        UnsupportedError: This kind of model cannot show what the MLP adds.
    """
    hook.adapter.tap("mlp_out", layer)
    sites = [(site, layer) for site in ("resid_mid", "mlp_out", "resid_post")]
    patch, mlp, output = map(hook.listeners.get, sites)
    seen: dict[str, Tensor] = {}

    def mid(tensor: Tensor) -> Tensor | None:
        seen.clear()
        before = tensor.clone()
        after = None if patch is None else patch(tensor)
        if after is not None:
            seen.update(before=before, after=after.clone())
        return after

    def added(tensor: Tensor) -> Tensor | None:
        new = None if mlp is None else mlp(tensor)
        seen["added"] = (tensor if new is None else new).clone()
        return new

    def post(tensor: Tensor) -> Tensor | None:
        """The block's output with the patched stream, if it does not hold it already; then what
        patches of it make of that.
        """
        rebuilt = None
        if {"after", "added"} <= seen.keys():
            patched, changed = seen["after"] + seen["added"], hook.changed
            holds = (tensor == patched).all()
            misfit = ~(holds | (tensor == seen["before"] + seen["added"]).all())
            # Stays on the device: reading it waits for the device.
            changed[0] = changed[0] | 2 * misfit.to(changed[0].device)
            rebuilt = torch.where(holds, tensor, patched)
        seen.clear()
        new = None if output is None else output(tensor if rebuilt is None else rebuilt)
        return rebuilt if new is None else new

    hook.listeners.update(zip(sites, (mid, added, post), strict=True))
