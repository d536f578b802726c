"""Advances the path that gives, the path that takes, and one lane a patch beside each other, and measures every step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp import metrics
from kvinterp.errors import InputError, NonFiniteError
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.answers import LOGIT_DIFFERENCE, logit_difference
from kvinterp.models.attaching import Site
from kvinterp.models.inputs import chosen_layers
from kvinterp.models.sites import layout_of
from kvinterp.patching.by_row import OneBatch, PatchesByRow, together
from kvinterp.patching.hook import PatchHook, Window
from kvinterp.patching.lanes import Donor, PureLane, Until
from kvinterp.patching.patch import Patch, stored_sites
from kvinterp.patching.path_patching import Sending, held_between
from kvinterp.patching.recompute import PureRecompute
from kvinterp.paths import ExecutionPath, Runner
from kvinterp.paths.decode import Lane, lockstep
from kvinterp.paths.vocabulary import end_tokens
from kvinterp.recording import PathHook

DISTANCES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": metrics.kl_divergence,
    "l2": lambda donor, other: (donor.double() - other.double()).norm(dim=-1),
    "margin": lambda donor, other: (metrics.logit_margin(donor) - metrics.logit_margin(other)).abs(),
}


@dataclasses.dataclass(frozen=True)
class PlannedLane:
    """What one row of a sweep's table patches.

    Attributes:
        labels: The columns that say so.
        patches: What is moved.
        control: The control's name, or empty.
    """

    labels: dict[str, Any]
    patches: tuple[Patch, ...]
    control: str = ""

    def active(self, step: int) -> bool:
        """Whether it changes anything at a step."""
        return any(patch.active(step) for patch in self.patches)

    @property
    def run(self) -> tuple[tuple[Patch, ...], str]:
        """What tells its run from another lane's: the patches, and where they take from."""
        return self.patches, self.control if self.control in ("self", "other-prompt") else ""

    @property
    def starts_at(self) -> int:
        """The first absolute position it names."""
        return min(patch.starts_at for patch in self.patches)


@dataclasses.dataclass(frozen=True)
class Setting:
    """How an example is run: the model, both paths, and the choices of :func:`kvinterp.sweep` of the same names."""

    adapter: Adapter
    cached: ExecutionPath
    recompute: ExecutionPath
    direction: str
    protocol: str
    distance: str
    max_new_tokens: int
    logits: str = "discard"
    stop: str = "end of sequence"
    answers: tuple[int, int] | None = None
    batch_size: int = 1
    functions: Mapping[str, Callable[[Tensor], Any]] = dataclasses.field(default_factory=dict)
    receivers: tuple[Patch, ...] = ()

    def distance_of(self, name: str) -> Callable[[Tensor, Tensor], Tensor]:
        """What a distance is, given the logits of the donor and of another."""
        if name in self.functions:
            return functools.partial(_by_function, name, self.functions[name])
        if name != LOGIT_DIFFERENCE:
            return DISTANCES[name]
        assert self.answers is not None, "checked where they are given"
        of = functools.partial(logit_difference, pair=self.answers)
        return lambda donor, patched: (of(donor) - of(patched)).abs()

    @property
    def distances(self) -> tuple[str, ...]:
        """What is measured: the distances asked for, and L2, which tells paths that are bitwise equal."""
        asked = tuple(name.strip() for name in self.distance.split(","))
        return tuple(dict.fromkeys([*asked, "l2"]))

    @property
    def donor(self) -> ExecutionPath:
        """The path whose tensors are moved."""
        return self.cached if self.direction == "into-recompute" else self.recompute

    @property
    def base(self) -> ExecutionPath:
        """The path they are moved into."""
        return self.recompute if self.direction == "into-recompute" else self.cached

    def reaches(self, lane: PlannedLane, prompt_length: int) -> bool:
        """Whether a lane moves anything at any step of a prompt."""
        steps = range(self.max_new_tokens)
        # A refresh computes every row anew, as recomputing does.
        form = "recompute" if self.base.refresh else self.base.form
        return any(patch.moves(step, prompt_length, form) for patch in lane.patches for step in steps)


@dataclasses.dataclass(frozen=True)
class Advanced:
    """One example, measured.

    Attributes:
        distances: D(donor, base) and then D(donor, lane) for every lane, at every step that ran, by every distance of
            the setting.
        unchanged: Of every lane whether all that it wrote was there already.
        logits: Of donor, base and every lane, where they were asked for.
        forwards: Forwards of the recompute path that ran, resumed ones included.
        blocks: Blocks that ran in them.
    """

    distances: Float64[Tensor, "distance step path"]
    unchanged: list[bool]
    logits: Float[Tensor, "step path vocab"] | None
    forwards: int
    blocks: int


def advance_beside(setting: Setting, lanes: Sequence[PlannedLane], prompt: Sequence[int], other: Sequence[int]) -> Advanced:
    """Runs one example.

    Args:
        setting: How.
        lanes: What is patched.
        prompt: Token ids.
        other: Token ids of another prompt, for the control that takes from it.
    """
    with contextlib.ExitStack() as stack:
        beside = _Beside(setting, lanes, prompt, other, stack)
        ends = end_tokens(setting.adapter, setting.adapter.device) if setting.stop == "end of sequence" else None
        measured, kept = [], []
        for now in lockstep(
            beside.running, setting.max_new_tokens, follows=beside.follows, ends=ends, ended_by=[beside.lead]
        ):
            giving, *rows = (now.logits[at][0] for at in (0, *beside.columns))
            measured.append(_measured(setting, giving, rows))
            if setting.logits == "keep":
                kept.append(torch.stack([row.to(giving) for row in (giving, *rows)]))
    logits = torch.stack(kept) if kept else None
    hooks = [beside.hooks[lane.run] for lane in lanes]
    changed = torch.stack([torch.stack(hook.changed).any() for hook in hooks]).tolist() if hooks else []
    unchanged = [any(hook.moved) and not found for hook, found in zip(hooks, changed, strict=True)]
    return Advanced(torch.stack(measured, 1).cpu(), unchanged, logits, beside.pure.forwards, beside.pure.blocks_run)


class _Beside:
    """What runs beside each other: the path that gives, the one that takes as it is, those of controls, and the patched ones.

    Attributes:
        running: All of them, in that order.
        follows: Whose choice each is fed.
        lead: The cached path.
        columns: The one that takes as it is, and then for every planned lane the one that stands for it.
        pure: The recompute path that is patched.
        hooks: What patches each lane, by its run.
    """

    def __init__(
        self,
        setting: Setting,
        lanes: Sequence[PlannedLane],
        prompt: Sequence[int],
        other: Sequence[int],
        stack: contextlib.ExitStack,
    ) -> None:
        self.setting, self._stack = setting, stack
        self.running: list[Lane] = []
        self.follows: list[int] = []
        self.pure = PureRecompute(setting.adapter, setting.recompute)
        cached, count = setting.base.form == "cached", len(prompt)
        self.lead = 1 if cached else 0
        donor_model, base_model = (setting.adapter.at(dtype_named(path.dtype)) for path in (setting.donor, setting.base))
        selfish, strange = ([lane for lane in lanes if lane.control == name] for name in ("self", "other-prompt"))
        donor = Donor(donor_model, _wanted(donor_model, lanes), count, _gathered(setting, lanes))
        # Of paths along the stream: what they hold, which the path that takes shows.
        sent = [lane for lane in lanes if setting.receivers and not lane.control]
        held = dict.fromkeys(place for lane in sent for place in held_between(lane.patches[0], setting.receivers))
        mirror = Donor(base_model, [*_wanted(base_model, selfish), *held], count)
        stranger = Donor(donor_model, _wanted(donor_model, strange), len(other))
        self._add(self._runner(setting.donor, prompt, donor))
        # Captured so that the lanes whose tokens agree can begin at their first patched block.
        captured = [step for step in range(setting.max_new_tokens) if any(lane.active(step) for lane in lanes)]
        # Of the recompute path's own tensors those of the steps that are patched are needed, which are captured anyway.
        unpatched = PureLane(self.pure, prompt, None, captured, mirror if selfish or held else None)
        base = self._add(self._runner(setting.base, prompt, mirror) if cached else unpatched)
        if strange:
            last = max((step for step in captured if any(lane.active(step) for lane in strange)), default=0)
            self._add(Until(self._runner(setting.donor, other, stranger), last), len(self.running))
        # Lanes that patch the same from the same donor are one run.
        hooks = self.hooks = dict[Any, PatchHook]()
        patched = self._cached if cached else self._recomputed
        senders: list[PatchHook] = []
        for lane in lanes:
            if lane.run not in hooks and setting.receivers and not lane.control:
                sending = Sending(
                    base_model,
                    lane.patches[0],
                    setting.receivers,
                    None,
                    lambda site, layer: (mirror if (site, layer) in held else donor).window(site, layer),
                    count,
                )
                senders.append(sending)
                hooks[lane.run] = sending.receiving
            elif lane.run not in hooks:
                hooks[lane.run] = PatchHook(base_model, lane.patches, _source(lane, donor, mirror, stranger), count)
        for each in patched(prompt, senders):
            self._add(each)
        numbers = dict(zip(hooks, map(self._add, patched(prompt, [*hooks.values()])), strict=True))
        self.columns = [base, *(numbers[lane.run] for lane in lanes)]

    def _recomputed(self, prompt: Sequence[int], hooks: Sequence[PatchHook]) -> list[Lane]:
        self.pure.together(hooks, prompt, self.setting.max_new_tokens, self.setting.batch_size)
        return [PureLane(self.pure, prompt, hook) for hook in hooks]

    def _cached(self, prompt: Sequence[int], hooks: Sequence[PatchHook]) -> Iterator[Lane]:
        setting, path = self.setting, self.setting.base
        # Fed each its own tokens, lanes that leave the text would leave a batch in which their caches are.
        size = setting.batch_size if setting.protocol == "matched" else 1
        for batch in together(setting.adapter, path, hooks, prompt, setting.max_new_tokens, size):
            if len(batch) == 1:
                yield self._runner(path, prompt, batch[0])
            else:
                one = OneBatch(self._runner(path, prompt, PatchesByRow(batch), len(batch)), len(batch))
                yield from map(one.row, range(len(batch)))

    def _runner(self, path: ExecutionPath, tokens: Sequence[int], hook: PathHook, rows: int = 1) -> Runner:
        adapter = self.setting.adapter
        prompt = torch.tensor([list(tokens)] * rows, device=adapter.device)
        return self._stack.enter_context(Runner(adapter, path, prompt, self.setting.max_new_tokens, [hook]))

    def _add(self, lane: Lane, follows: int | None = None) -> int:
        """The number of a lane, which is fed as the protocol says where no other is named that it follows."""
        number = len(self.running)
        self.running.append(lane)
        protocol = self.lead if self.setting.protocol == "matched" else number
        self.follows.append(protocol if follows is None else follows)
        return number


def _by_function(name: str, function: Callable[[Tensor], Any], donor: Tensor, other: Tensor) -> Tensor:
    """How far a function of logits ``[batch, position, vocab]`` is from the donor's, row by row."""

    def of(row: Tensor) -> Tensor:
        return one_number(name, function, row[None, None])

    return torch.stack([(of(row) - of(against)).abs() for against, row in zip(donor, other, strict=True)])


def one_number(name: str, function: Callable[[Tensor], Any], logits: Float[Tensor, "batch position vocab"]) -> Tensor:
    """What a user's metric gives of logits, in float64.

    Raises:
        InputError: It is not one number.
    """
    given = function(logits)
    try:
        one = torch.as_tensor(given)
        was = f"the shape {tuple(one.shape)}" if one.numel() != 1 or one.is_complex() else ""
    except (TypeError, ValueError, RuntimeError):
        was = f"a {type(given).__name__}"
    # Of logits that are not finite the number need not be, and what is to be done is another thing.
    if not was and not one.isfinite() and logits.isfinite().all():
        was = str(float(one))
    if was:
        raise InputError(
            f"the metric {name} gave {was} for logits of shape {tuple(logits.shape)}: expected a function that gives one finite "
            "number, such as the mean over the batch."
        )
    return one.double().reshape(())


def name_of(function: Any) -> str:
    """What a user's function is called in tables."""
    name = str(getattr(function, "__name__", type(function).__name__)).replace("<lambda>", "function")
    return f"own {name}" if name in (*DISTANCES, LOGIT_DIFFERENCE) else name


def check_finite(distances: Float64[Tensor, "*any"], what: str) -> None:
    """Raises NonFiniteError where a distance is not a number: there is then no share of it to recover."""
    if not bool(distances.isfinite().all()):
        raise NonFiniteError(
            f"{what}: NaN or Inf appeared in the logits: use a dtype with a wider range, such as dtype='bfloat16' or "
            "'float32'; compare() says where it appears first."
        )


def not_the_same(prompts: Sequence[Sequence[int]], example: int, vocabulary: int) -> list[int]:
    """Another prompt than this example's: the next one that differs, or its own tokens in another order, or others."""
    prompt = list(prompts[example])
    shifted = [(token + 1) % vocabulary for token in prompt]
    following = (prompts[(example + offset) % len(prompts)] for offset in range(1, len(prompts)))
    candidates = [*map(list, following), prompt[::-1], shifted]
    return next(candidate for candidate in candidates if candidate != prompt)


def _measured(setting: Setting, donor: Tensor, rows: Sequence[Tensor]) -> Float64[Tensor, "distance path"]:
    # Lanes that stand on equal tokens hand over one remembered tensor, which is measured once.
    different = {row.data_ptr(): row.to(donor.device) for row in rows}
    stacked = torch.stack(list(different.values()))
    found = torch.stack(
        [setting.distance_of(name)(donor.expand_as(stacked), stacked).double() for name in setting.distances]
    )
    index = {key: number for number, key in enumerate(different)}
    return found[:, [index[row.data_ptr()] for row in rows]]


def _source(lane: PlannedLane, donor: Donor, mirror: Donor, stranger: Donor) -> Window:
    if lane.control == "self":
        return mirror.window
    if lane.control == "other-prompt":
        return lambda site, layer: stranger.window_aligned_to(donor.end, site, layer)
    return donor.window


def _wanted(adapter: Adapter, lanes: Sequence[PlannedLane]) -> list[Site]:
    return [
        (site, layer)
        for lane in lanes
        for patch in lane.patches
        for site in stored_sites(adapter, patch.site)
        for layer in chosen_layers(adapter, patch.layers)
    ]


def _gathered(setting: Setting, lanes: Sequence[PlannedLane]) -> set[str]:
    """Sites of which a cached donor must keep the rows of every step, since earlier positions are moved too."""
    if setting.donor.form != "cached":
        return set()
    moved = {patch.site for lane in lanes for patch in lane.patches if patch.positions != "newest"}
    return {site for site in moved if layout_of(site).gathers}
