"""Runs the donor path, the base path and each patch side by side, and measures every step."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.attaching import HookPoint
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.sites import LAYOUTS, layout_of
from kvinterp.patching.by_row import OneRow, PatchesByRow, batches
from kvinterp.patching.distances import Distance
from kvinterp.patching.hook import PatchHook, read_changes
from kvinterp.patching.patch import Patch, stored_sites
from kvinterp.patching.recompute import PureRecompute
from kvinterp.paths import ExecutionPath, Runner, path_named
from kvinterp.paths.decode import Decoder, lockstep
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.recording import PathHook, SiteHook


def two_paths(
    cached: str | ExecutionPath, recompute: str | ExecutionPath, what: str, dtype: str | None = None
) -> tuple[ExecutionPath, ExecutionPath]:
    """Returns both paths by name, checked, in ``dtype`` if it is given.

    Raises:
        InputError: The first is no cached path, or the second no unchunked recompute path.
    """
    paths = path_named(cached), path_named(recompute)
    if paths[0].form != "cached" or paths[1].form != "recompute" or paths[1].chunk is not None:
        raise InputError(
            f"{what} needs a cached and an unchunked recompute path, in this order, and {paths[0]} and {paths[1]} were given: "
            "give such, as in cached+int8 and recompute."
        )
    if dtype is None:
        return paths
    return dataclasses.replace(paths[0], dtype=dtype), dataclasses.replace(paths[1], dtype=dtype)


class Donor(SiteHook):
    """Keeps the whole tensors of its path at the current step, as the donor of patches.

    Args:
        adapter: The model that the donor path runs.
        hook_points: Sites and layers to keep.
        prompt_length: Tokens in the patched prompt; the newest row counts as its newest position.
        gather: Sites whose rows are kept over all steps, so that a cached path has earlier
            positions too.
    """

    def __init__(
        self,
        adapter: Adapter,
        hook_points: Iterable[HookPoint],
        prompt_length: int,
        gather: Collection[str] = (),
    ) -> None:
        super().__init__(adapter, dict.fromkeys(hook_points))
        self.prompt_length, self.gather = prompt_length, gather
        self.end = prompt_length
        self._tensors: dict[HookPoint, Tensor] = {}
        self._gathered: dict[HookPoint, list[Tensor]] = {}

    def begin_step(self, step: int) -> None:
        """Forgets the tensors of the step before."""
        self.end = self.prompt_length + step
        self._tensors.clear()

    def begin_pass(self) -> None:
        """Forgets the gathered rows, because a forward from position 0 computes them again."""
        super().begin_pass()
        self._gathered.clear()

    def window(self, site: str, layer: int) -> tuple[int, Tensor]:
        """The absolute position of the first row, and the tensor of a site at this step."""
        gathered = self._gathered.get((site, layer))
        tensor = self._tensors[site, layer] if gathered is None else torch.cat(gathered, 1)
        return self.end - tensor.shape[LAYOUTS[site].row_axis], tensor

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Keeps a copy, because patches write into the cache's memory and the model may write into
        any other.
        """
        copy = self._tensors[site, layer] = tensor.clone()
        if site in self.gather:
            self._gathered.setdefault((site, layer), []).append(copy)


class RecomputeDecoder:
    """A recompute path with patches. It is a pure function of its tokens, so steps without a patch
    are looked up.

    Args:
        pure: The path.
        prompt: Token ids.
        hook: The patches, or None for the path as it is.
        captured: The steps at which every block's output is kept for the runs on the same tokens.
        observer: A hook of the forwards of those steps.
    """

    def __init__(
        self,
        pure: PureRecompute,
        prompt: Sequence[int],
        hook: PatchHook | None,
        captured: Collection[int] = (),
        observer: PathHook | None = None,
    ) -> None:
        self.pure, self.tokens, self.hook = pure, list(prompt), hook
        self.captured, self.observer = captured, observer
        self.step = -1

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step."""
        self.step += 1
        if tokens is not None:
            self.tokens.append(self.pure.fed[tokens])
        if self.hook is not None and self.hook.active(self.step):
            return self.pure.patched(self.tokens, self.step, self.hook)[None]
        if self.step not in self.captured:
            return self.pure.logits(self.tokens)[None]
        if self.observer is not None:
            self.observer.begin_step(self.step)
            self.observer.begin_pass()
        return self.pure.capture(self.tokens, self.observer)[None]


class Until:
    """A decoder that runs until a last step and repeats the logits of that step afterwards.

    Args:
        decoder: The decoder.
        last: The last step that runs.
    """

    def __init__(self, decoder: Decoder, last: int) -> None:
        self.decoder, self.left = decoder, last + 1
        self._logits = torch.empty(0)

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step, or of the last step that ran."""
        if self.left > 0:
            self._logits = self.decoder.advance(tokens)
            self.left -= 1
        return self._logits


@dataclasses.dataclass(frozen=True)
class PlannedPatch:
    """The patch of one row of a sweep's table.

    Attributes:
        labels: The columns that name the patch.
        patch: The patch.
        control: The control's name, or empty.
    """

    labels: dict[str, Any]
    patch: Patch
    control: str = ""

    @property
    def source(self) -> str:
        """The control whose donor is another path than the sweep's; else empty."""
        return self.control if self.control in ("self", "other-prompt") else ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """The settings of a sweep: the model, both paths, and the arguments of :func:`kvinterp.sweep`
    of the same names.

    Attributes:
        distances: The distances by name; L2 is always among them, and the first one leads.
    """

    adapter: Adapter
    cached: ExecutionPath
    recompute: ExecutionPath
    direction: str
    protocol: str
    distances: Mapping[str, Distance]
    max_new_tokens: int
    logits: str = "discard"
    stop: str = "end of sequence"
    batch_size: int = 1

    @property
    def donor(self) -> ExecutionPath:
        """The path that the tensors come from."""
        return self.cached if self.direction == "into-recompute" else self.recompute

    @property
    def base(self) -> ExecutionPath:
        """The path that the tensors are moved into."""
        return self.recompute if self.direction == "into-recompute" else self.cached

    def reaches(self, patch: Patch, prompt_length: int) -> bool:
        """Whether a patch moves anything at any step of a prompt."""
        # A refresh computes every row again, as the recompute path does.
        form = "recompute" if self.base.refresh else self.base.form
        return any(patch.moves(step, prompt_length, form) for step in range(self.max_new_tokens))


class Advanced(NamedTuple):
    """The measurements of one example.

    Attributes:
        distances: D(donor, base) and then D(donor, patched) for every patched run, at every step that ran, by
            every distance of the setting.
        unchanged: For every patched run whether each value that it wrote was there already.
        logits: The logits of donor, base and every patched run, with ``logits="keep"``.
        work: Forwards of the recompute path that ran, resumed ones included, and blocks that ran in
            them.
    """

    distances: Float64[Tensor, "distance step path"]
    unchanged: list[bool]
    logits: Float[Tensor, "step path vocab"] | None
    work: Counter[str]


def advance_beside(
    setting: Setting, planned: Sequence[PlannedPatch], prompt: Sequence[int], other: Sequence[int]
) -> Advanced:
    """Runs one example: the donor path, the unpatched base path, the donor path of another prompt,
    and the patched ones.

    Args:
        setting: The settings of the sweep.
        planned: The patches.
        prompt: Token ids.
        other: Token ids of another prompt, for the control whose donor it is.
    """
    adapter, max_new_tokens, count, cached = (
        setting.adapter,
        setting.max_new_tokens,
        len(prompt),
        setting.base.form == "cached",
    )
    donor_model, base_model = (
        adapter.at(dtype_named(path.dtype)) for path in (setting.donor, setting.base)
    )
    pure, distances, logits = PureRecompute(adapter, setting.recompute), [], []
    matched = setting.protocol == "matched"
    # Plans with the same patch and the same donor are one run.
    runs = [(plan.patch, plan.source) for plan in planned]
    hook_points: dict[str, list[HookPoint]] = {"": [], "self": [], "other-prompt": []}
    for patch, source in dict.fromkeys(runs):
        layers = chosen_layers(adapter, patch.layers)
        hook_points[source] += itertools.product(stored_sites(adapter, patch.site), layers)
    moved = {
        patch.site
        for patch, _ in runs
        if patch.positions != "newest" and layout_of(patch.site).gathers
    }
    donors = {
        # If earlier positions are moved too, a cached donor keeps the rows of every step.
        "": Donor(
            donor_model, hook_points[""], count, moved if setting.donor.form == "cached" else ()
        ),
        "self": Donor(base_model, hook_points["self"], count),
        # The other prompt may have another length: its newest row counts as this prompt's newest.
        "other-prompt": Donor(donor_model, hook_points["other-prompt"], count),
    }
    hooks = {
        run: PatchHook(base_model, [run[0]], donors[run[1]].window, count)
        for run in dict.fromkeys(runs)
    }
    with contextlib.ExitStack() as stack:

        def runner(
            path: ExecutionPath, tokens: Sequence[int], hook: PathHook, rows: int = 1
        ) -> Runner:
            row = torch.tensor([list(tokens)] * rows, device=adapter.device)
            return stack.enter_context(Runner(adapter, path, row, max_new_tokens, [hook]))

        def patched_decoders(patch_hooks: Sequence[PatchHook]) -> Iterator[Decoder]:
            if not cached:
                pure.batch(patch_hooks, prompt, max_new_tokens, setting.batch_size)
                yield from (RecomputeDecoder(pure, prompt, hook) for hook in patch_hooks)
                return
            # Runs that are fed their own tokens cannot share a batch: their caches would differ in length
            # and text.
            for batch in batches(
                adapter,
                setting.base,
                patch_hooks,
                prompt,
                max_new_tokens,
                setting.batch_size if matched else 1,
            ):
                if len(batch) == 1:
                    yield runner(setting.base, prompt, batch[0])
                else:
                    shared = runner(setting.base, prompt, PatchesByRow(batch), len(batch))
                    rows = [torch.empty(0)] * len(batch)
                    yield from (OneRow(shared, number, rows) for number in range(len(batch)))

        # Blocks' outputs are kept at these steps, so that runs on the same tokens can begin at
        # their first patched block.
        captured = [
            step
            for step in range(max_new_tokens)
            if any(plan.patch.active(step) for plan in planned)
        ]
        running: list[Decoder] = [runner(setting.donor, prompt, donors[""])]
        running.append(
            runner(setting.base, prompt, donors["self"])
            if cached
            else RecomputeDecoder(pure, prompt, None, captured, donors["self"])
        )
        if hook_points["other-prompt"]:
            other_decoder = runner(setting.donor, other, donors["other-prompt"])
            running.append(Until(other_decoder, max(captured, default=0)))
        on_other_prompt = range(2, len(running))
        columns = dict(zip(hooks, itertools.count(len(running))))
        running += patched_decoders([*hooks.values()])
        lead = int(cached)
        follows = [
            lead if matched and number not in on_other_prompt else number
            for number in range(len(running))
        ]
        ends = end_tokens(adapter, adapter.device) if setting.stop == "end of sequence" else None
        for step in lockstep(running, max_new_tokens, follows=follows, ends=ends, ended_by=[lead]):
            donor, *rows = (step.logits[at][0] for at in (0, 1, *map(columns.__getitem__, runs)))
            distances.append(_distances(setting.distances, donor, rows))
            if not cached:
                pure.fed = dict(zip(step.feeds, torch.cat([*step.feeds]).tolist(), strict=True))
            if setting.logits == "keep":
                logits.append(torch.stack([row.to(donor) for row in (donor, *rows)]))
    hook_of = [hooks[run] for run in runs]
    unchanged = [
        any(hook.moved) and not any(wrote)
        for hook, wrote in zip(hook_of, read_changes(hook_of), strict=True)
    ]
    work = Counter(forwards=pure.forwards, blocks=pure.blocks_run)
    return Advanced(
        torch.stack(distances, 1).cpu(), unchanged, torch.stack(logits) if logits else None, work
    )


def other_prompt(prompts: Sequence[Sequence[int]], example: int, vocabulary: int) -> list[int]:
    """A prompt other than this example's: the next one that differs, else its own tokens reversed
    or shifted.
    """
    prompt = list(prompts[example])
    shifted = [(token + 1) % vocabulary for token in prompt]
    candidates = [
        *map(list, prompts[example + 1 :]),
        *map(list, prompts[:example]),
        prompt[::-1],
        shifted,
    ]
    return next(candidate for candidate in candidates if candidate != prompt)


def _distances(
    distances: Mapping[str, Distance], donor: Tensor, rows: Sequence[Tensor]
) -> Float64[Tensor, "distance path"]:
    # Runs on equal tokens share one tensor, which is measured once.
    different = {row.data_ptr(): row.to(donor.device) for row in rows}
    stacked = torch.stack(list(different.values()))
    values = torch.stack(
        [distance(donor.expand_as(stacked), stacked).double() for distance in distances.values()]
    )
    numbers = dict(zip(different, itertools.count()))
    return values[:, [numbers[row.data_ptr()] for row in rows]]
