"""Runs the path that gives, the path that takes, and one lane a patch beside each other, and measures every step."""

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
from kvinterp.models.attaching import Site
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.sites import LAYOUTS, layout_of
from kvinterp.patching.by_row import OneRow, PatchesByRow, together
from kvinterp.patching.distances import Distance
from kvinterp.patching.hook import PatchHook
from kvinterp.patching.patch import Patch, stored_sites
from kvinterp.patching.recompute import PureRecompute
from kvinterp.paths import ExecutionPath, Runner, path_named
from kvinterp.paths.decode import Lane, lockstep
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.recording import PathHook, SiteHook


def two_paths(
    cached: str | ExecutionPath, recompute: str | ExecutionPath, what: str, dtype: str | None = None, calls: bool = False
) -> tuple[ExecutionPath, ExecutionPath]:
    """Both paths by name, checked, and in another dtype where one is given; ``calls`` where the cached one may have a call plan.

    Raises:
        InputError: The first is no cached path, or the second no recompute path in one piece; or one has a call plan.
    """
    paths = path_named(cached), path_named(recompute)
    if paths[0].form != "cached" or paths[1].form != "recompute" or paths[1].chunk is not None:
        raise InputError(
            f"{what} needs a cached and an unchunked recompute path, and {paths[0]} and {paths[1]} were given."
        )
    called = next((path for path in paths[calls:] if path.call is not None), None)
    if called is not None:
        raise InputError(
            f"{what} follows the rows of one prompt by their number, and path {called} was given: leave call out."
        )
    if dtype is None:
        return paths
    return dataclasses.replace(paths[0], dtype=dtype), dataclasses.replace(paths[1], dtype=dtype)


class Donor(SiteHook):
    """Holds what its path shows at this step, whole, for patches to take from.

    Args:
        adapter: The model the donor path runs.
        wanted: Sites and layers to hold.
        prompt_length: Tokens in the prompt that is patched, by which the newest row is counted.
        gather: Sites of which the rows of all steps are kept, so that a cached path can give earlier positions too.
    """

    def __init__(self, adapter: Adapter, wanted: Iterable[Site], prompt_length: int, gather: Collection[str] = ()) -> None:
        super().__init__(adapter, dict.fromkeys(wanted))
        self.prompt_length, self.gather = prompt_length, frozenset(gather)
        self.end = prompt_length
        self._now: dict[Site, Tensor] = {}
        self._gathered: dict[Site, list[Tensor]] = {}

    def begin_step(self, step: int) -> None:
        """What follows belongs to this step."""
        self.end = self.prompt_length + step
        self._now.clear()

    def begin_pass(self) -> None:
        """A forward from position 0 follows: rows gathered before are computed anew."""
        super().begin_pass()
        self._gathered.clear()

    def window(self, site: str, layer: int) -> tuple[int, Tensor]:
        """The tensor of a site at this step and the absolute position of its first row."""
        gathered = self._gathered.get((site, layer))
        tensor = self._now[site, layer] if gathered is None else torch.cat(gathered, 1)
        return self.end - tensor.shape[LAYOUTS[site].rows], tensor

    def see(self, site: str, layer: int, start: int, tensor: Tensor) -> None:
        """Holds a copy: into the cache's memory a patch may write, and into any other the model itself."""
        held = self._now[site, layer] = tensor.clone()
        if site in self.gather:
            self._gathered.setdefault((site, layer), []).append(held)


class PureLane:
    """A recompute path with patches: a pure function of its tokens, so steps without a patch are looked up.

    Args:
        pure: The path.
        prompt: Token ids.
        hook: The patches, or None for the path as it is.
        captured: The steps at which every block's output is kept for the lanes on the same tokens.
        heard: What hears the forwards of those steps.
    """

    def __init__(
        self,
        pure: PureRecompute,
        prompt: Sequence[int],
        hook: PatchHook | None,
        captured: Collection[int] = (),
        heard: PathHook | None = None,
    ) -> None:
        self.pure, self.tokens, self.hook, self.captured = pure, list(prompt), hook, frozenset(captured)
        self.heard = heard
        self.step = -1

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step."""
        self.step += 1
        if tokens is not None:
            self.tokens.append(self.pure.number(tokens))
        if self.hook is not None and self.hook.active(self.step):
            return self.pure.patched(self.tokens, self.step, self.hook)[None]
        if self.step not in self.captured:
            return self.pure.logits(self.tokens)[None]
        if self.heard is not None:
            self.heard.begin_step(self.step)
            self.heard.begin_pass()
        return self.pure.capture(self.tokens, self.heard)[None]


class Until:
    """A lane that runs as far as it is needed, and then shows what it showed last.

    Args:
        lane: The lane.
        last: The last step at which it is needed.
    """

    def __init__(self, lane: Lane, last: int) -> None:
        self.lane, self.left = lane, last + 1
        self._shown: Tensor | None = None

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step, or of the last that was needed."""
        if self._shown is None or self.left > 0:
            self._shown = self.lane.advance(tokens)
            self.left -= 1
        return self._shown


@dataclasses.dataclass(frozen=True)
class PlannedLane:
    """What one row of a sweep's table patches.

    Attributes:
        labels: The columns that say so.
        patch: What is moved.
        control: The control's name, or empty.
    """

    labels: dict[str, Any]
    patch: Patch
    control: str = ""

    @property
    def source(self) -> str:
        """The control that takes from a path of its own; empty where the donor path gives."""
        return self.control if self.control in ("self", "other-prompt") else ""


@dataclasses.dataclass(frozen=True)
class Setting:
    """How an example is run: the model, both paths, and the choices of :func:`kvinterp.sweep` of the same names.

    Attributes:
        distances: What is measured, by name; L2 is always among it, and the first leads.
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
        """The path whose tensors are moved."""
        return self.cached if self.direction == "into-recompute" else self.recompute

    @property
    def base(self) -> ExecutionPath:
        """The path they are moved into."""
        return self.recompute if self.direction == "into-recompute" else self.cached

    def reaches(self, patch: Patch, prompt_length: int) -> bool:
        """Whether a patch moves anything at any step of a prompt."""
        # A refresh computes every row anew, as recomputing does.
        form = "recompute" if self.base.refresh else self.base.form
        return any(patch.moves(step, prompt_length, form) for step in range(self.max_new_tokens))


class Advanced(NamedTuple):
    """One example, measured.

    Attributes:
        distances: D(donor, base) and then D(donor, lane) for every lane, at every step that ran, by every distance of
            the setting.
        unchanged: Of every lane whether all that it wrote was there already.
        logits: Of donor, base and every lane, where they were asked for.
        work: Forwards of the recompute path that ran, resumed ones included, and blocks that ran in them.
    """

    distances: Float64[Tensor, "distance step path"]
    unchanged: list[bool]
    logits: Float[Tensor, "step path vocab"] | None
    work: Counter[str]


def advance_beside(setting: Setting, lanes: Sequence[PlannedLane], prompt: Sequence[int], other: Sequence[int]) -> Advanced:
    """Runs one example: the path that gives, the one that takes as it is, that of another prompt, and the patched ones.

    Args:
        setting: How.
        lanes: What is patched.
        prompt: Token ids.
        other: Token ids of another prompt, for the control that takes from it.
    """
    adapter, room, count, cached = setting.adapter, setting.max_new_tokens, len(prompt), setting.base.form == "cached"
    gives, takes = (adapter.at(dtype_named(path.dtype)) for path in (setting.donor, setting.base))
    pure, measured, kept = PureRecompute(adapter, setting.recompute), [], []
    # Lanes that patch the same from the same donor, along the same paths, are one run.
    runs = [(lane.patch, lane.source) for lane in lanes]
    wanted = {
        source: [place for patch, of in dict.fromkeys(runs) if of == source for place in _taken(adapter, patch)]
        for source in ("", "self", "other-prompt")
    }
    moved = {patch.site for patch, _ in runs if patch.positions != "newest" and setting.donor.form == "cached"}
    donors = {
        # Of a cached donor the rows of every step are kept where earlier positions are moved too.
        "": Donor(gives, wanted[""], count, [site for site in moved if layout_of(site).gathers]),
        "self": Donor(takes, wanted["self"], count),
        # Its newest row counts as the newest of this prompt, whatever its length.
        "other-prompt": Donor(gives, wanted["other-prompt"], count),
    }
    hooks = {run: PatchHook(takes, [run[0]], donors[run[1]].window, count) for run in dict.fromkeys(runs)}
    with contextlib.ExitStack() as stack:

        def runner(path: ExecutionPath, tokens: Sequence[int], hook: PathHook, rows: int = 1) -> Runner:
            row = torch.tensor([list(tokens)] * rows, device=adapter.device)
            return stack.enter_context(Runner(adapter, path, row, room, [hook]))

        def patched(several: Sequence[PatchHook]) -> Iterator[Lane]:
            if not cached:
                pure.together(several, prompt, room, setting.batch_size)
                yield from (PureLane(pure, prompt, hook) for hook in several)
                return
            # Fed each its own tokens, lanes that leave the text would leave a batch in which their caches are.
            size = setting.batch_size if setting.protocol == "matched" else 1
            for batch in together(adapter, setting.base, several, prompt, room, size):
                if len(batch) == 1:
                    yield runner(setting.base, prompt, batch[0])
                else:
                    one = runner(setting.base, prompt, PatchesByRow(batch), len(batch))
                    shown = [torch.empty(0)] * len(batch)
                    yield from (OneRow(one, number, shown) for number in range(len(batch)))

        # Captured so that the lanes whose tokens agree can begin at their first patched block.
        captured = [step for step in range(room) if any(lane.patch.active(step) for lane in lanes)]
        running: list[Lane] = [runner(setting.donor, prompt, donors[""])]
        running.append(
            runner(setting.base, prompt, donors["self"])
            if cached
            else PureLane(pure, prompt, None, captured, donors["self"])
        )
        if wanted["other-prompt"]:
            stranger = runner(setting.donor, other, donors["other-prompt"])
            running.append(Until(stranger, max(captured, default=0)))
        strangers = range(2, len(running))
        columns = dict(zip(hooks, itertools.count(len(running))))
        running += patched([*hooks.values()])
        lead = 1 if cached else 0
        matched = setting.protocol == "matched"
        follows = [lead if matched and number not in strangers else number for number in range(len(running))]
        ends = end_tokens(adapter, adapter.device) if setting.stop == "end of sequence" else None
        for now in lockstep(running, room, follows=follows, ends=ends, ended_by=[lead]):
            giving, *rows = (now.logits[at][0] for at in (0, 1, *map(columns.__getitem__, runs)))
            measured.append(_measured(setting.distances, giving, rows))
            if setting.logits == "keep":
                kept.append(torch.stack([row.to(giving) for row in (giving, *rows)]))
    took = [hooks[run] for run in runs]
    changed = torch.stack([torch.stack(hook.changed).any() for hook in took]).tolist() if took else []
    unchanged = [any(hook.moved) and not found for hook, found in zip(took, changed, strict=True)]
    work = Counter(forwards=pure.forwards, blocks=pure.blocks_run)
    return Advanced(torch.stack(measured, 1).cpu(), unchanged, torch.stack(kept) if kept else None, work)


def not_the_same(prompts: Sequence[Sequence[int]], example: int, vocabulary: int) -> list[int]:
    """Another prompt than this example's: the next one that differs, or its own tokens in another order, or others."""
    prompt = list(prompts[example])
    shifted = [(token + 1) % vocabulary for token in prompt]
    candidates = [*map(list, prompts[example + 1 :]), *map(list, prompts[:example]), prompt[::-1], shifted]
    return next(candidate for candidate in candidates if candidate != prompt)


def _measured(distances: Mapping[str, Distance], donor: Tensor, rows: Sequence[Tensor]) -> Float64[Tensor, "distance path"]:
    # Lanes that stand on equal tokens hand over one remembered tensor, which is measured once.
    different = {row.data_ptr(): row.to(donor.device) for row in rows}
    stacked = torch.stack(list(different.values()))
    found = torch.stack([distance(donor.expand_as(stacked), stacked).double() for distance in distances.values()])
    index = {key: number for number, key in enumerate(different)}
    return found[:, [index[row.data_ptr()] for row in rows]]


def _taken(adapter: Adapter, patch: Patch) -> list[Site]:
    """What a patch takes from its donor."""
    layers = chosen_layers(adapter, patch.layers)
    return [(site, layer) for site in stored_sites(adapter, patch.site) for layer in layers]
