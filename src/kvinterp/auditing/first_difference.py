"""Inside the blocks: the tensors that differ when a cached step and the recomputation are given
equal inputs.

Both runs are watched twice over: what every module of a block is given and returns, and what
attention reads. Keys and values are compared position by position. Casts to a narrower dtype are
noted with the module that makes them.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.blocks import BlockHooks, BlockModel, Reference
from kvinterp.auditing.ladder import EMBEDDING
from kvinterp.auditing.values import difference, first_wrong, row_errors
from kvinterp.auditing.watch import CHOICE, RESIDUAL, Event, Watch, watching
from kvinterp.models.attention_calls import visible_keys

BLOCK_INPUT = "block input"

Location = tuple[int | None, int | None, str, str]
"""The layer, the absolute position, the tensor and the module."""


@dataclasses.dataclass(frozen=True)
class Feed:
    """Tokens given to the model at once.

    Attributes:
        start: The first of them.
        stop: Where they end.
        row: The position that is looked at, or None if these are only fed.
    """

    start: int
    stop: int
    row: int | None = None

    @property
    def back(self) -> int:
        """The row that is looked at, counted from the end: the newest where none is."""
        return -1 if self.row is None else self.row - self.stop

    @staticmethod
    def one_by_one(prefill: int, stop: int) -> list[Feed]:
        """A prefill and then a token at a time, each looked at."""
        return [Feed(0, prefill), *(Feed(p, p + 1, p) for p in range(prefill, stop))]


@dataclasses.dataclass(frozen=True)
class DifferingTensor:
    """A tensor whose difference is larger than a threshold.

    Attributes:
        layer: The block; -1 for what enters the first one, the number of blocks for the head.
        tensor: What it is.
        module: The module it belongs to.
        position: The first absolute position at which it differs by more than the threshold.
        step: The position of the token being fed when that was seen.
        error: Its relative error there; inf where one side sees what the other does not.
        nearly_equal: For an expert choice: whether rounding can have brought the swapped scores
            past each other.
    """

    layer: int
    tensor: str
    module: str
    position: int
    step: int
    error: float
    nearly_equal: bool = False

    @property
    def location(self) -> Location:
        """Where it is, as a verdict names it."""
        return self.layer, self.position, self.tensor, self.module


@dataclasses.dataclass
class Sight:
    """What was seen of one block, or of an end, in one feed on both sides.

    Attributes:
        feed: The feed.
        layer: The block, -1 or the number of blocks.
        mine: What happened in the cached run, in order.
        theirs: What happened in the recomputation.
        reference: The rows every block was given, where they were given any.
        hidden: For each attention: the position of the first key that only one side sees, where one
            has no mask.
        lost: For each attention: the position of the first key that the cached run no longer has.
        casts: Narrower dtypes cast to on either side.
        both_cast: Those that both sides cast to.
        ends: Names and modules of what the block was given and what it returned: what it computes,
            in whatever form it holds what it computes with.
    """

    feed: Feed
    layer: int
    mine: list[Event]
    theirs: list[Event]
    reference: Reference | None = None
    hidden: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: dict[str, int] = dataclasses.field(default_factory=dict)
    casts: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    both_cast: frozenset[str] = frozenset()
    ends: frozenset[tuple[str, str]] = frozenset()

    def is_end(self, finding: DifferingTensor) -> bool:
        """Whether it is of what the block computes: another form of keys or of a state is no
        error.
        """
        returned = any(name != BLOCK_INPUT for name, _ in self.ends)
        return (
            not returned
            or finding.tensor == CHOICE
            or (finding.tensor, finding.module) in self.ends
        )

    def error(self, tensors: Iterable[DifferingTensor]) -> float:
        """The largest error of those that are of what the block computes."""
        return max((f.error for f in tensors if self.is_end(f)), default=0.0)

    def note(self, mine: Watch, theirs: Watch) -> None:
        """Notes the casts of both sides, and which keys only one of them has or sees."""
        for name in dict.fromkeys([*mine.casts, *theirs.casts]):
            self.casts[name] = tuple(
                dict.fromkeys(mine.casts.get(name, ()) + theirs.casts.get(name, ()))
            )
        self.both_cast = frozenset(mine.casts) & frozenset(theirs.casts)
        newest = self.feed.stop - 1
        for event, other in paired(mine.events, theirs.events):
            if event.name == "attention output":
                hidden = seen_differently(mine, theirs, event.module, newest)
                if hidden is not None:
                    self.hidden[event.module] = hidden
            if event.name == "K" and other is not None:
                lost = lost_key(event, other, theirs, newest)
                if lost is not None:
                    self.lost[event.module] = lost

    def findings(self, threshold: float) -> list[DifferingTensor]:
        """The tensors that differ by more, in the order in which they were computed, up to a choice
        that differs.
        """
        differing: list[DifferingTensor] = []
        newest = self.feed.stop - 1
        position = newest if self.feed.row is None else self.feed.row

        def add(event: Event, name: str, where: int, error: float, near: bool = False) -> None:
            differing.append(
                DifferingTensor(self.layer, name, event.module, where, position, error, near)
            )

        for event, other in paired(self.mine, self.theirs):
            if event.name == "attention output" and event.module in self.hidden:
                add(event, "attention mask", self.hidden[event.module], math.inf)
            if other is None:
                continue
            if event.name == "K" and event.module in self.lost:
                add(event, "K", self.lost[event.module], math.inf)
            where, error = compared(event, other, position, newest)
            if event.name == CHOICE and (event.chosen, event.best) != (other.chosen, other.best):
                # Scores that rounding alone brings past each other choose other experts: what
                # follows is another function.
                near = swapped_nearly_equal(event, other)
                add(event, CHOICE, where, error if near else math.inf, near=near)
                break
            if error > threshold:
                name = "router scores" if event.name == CHOICE else event.name
                if name == "attention scores" and error == math.inf:
                    name = "attention mask"
                add(event, name, where, error)
        return differing


Differing = dict[int, tuple[Sight, list[DifferingTensor]]]
"""What was seen of each block that differs, by layer, and the tensors that do, in the order in
which they were computed.
"""


def differing(sights: Iterable[dict[int, Sight]], threshold: float) -> Differing:
    """For each block that differs by more in any feed the one in which what it computes differs
    most, and the tensors that do.

    The first of these has the position at which it was seen first.
    """
    several_by_layer: dict[int, list[tuple[Sight, list[DifferingTensor]]]] = {}
    for each in sights:
        for layer, sight in each.items():
            if tensors := sight.findings(threshold):
                several_by_layer.setdefault(layer, []).append((sight, tensors))
    worst: Differing = {}
    for layer, several in sorted(several_by_layer.items()):
        sight, tensors = max(several, key=lambda each: each[0].error(each[1]))
        earlier = several[0][1][0]
        if (earlier.tensor, earlier.module) == (tensors[0].tensor, tensors[0].module):
            tensors[0] = dataclasses.replace(
                tensors[0], position=earlier.position, step=earlier.step
            )
        worst[layer] = sight, tensors
    return worst


def largest(found: Differing) -> float:
    """The largest error of what all those blocks compute."""
    return max((sight.error(tensors) for sight, tensors in found.values()), default=0.0)


def look(
    hooks: BlockHooks, feeds: Sequence[Feed], layers: Sequence[int]
) -> Iterator[dict[int, Sight]]:
    """Feeds tokens given equal inputs and yields, for every feed that is looked at, what was seen
    of each block.

    Args:
        hooks: The model's hooks, attached, with the reference whose rows every block is given.
        feeds: What is fed, one after the other.
        layers: The blocks to look into; -1 for the embedding, the number of blocks for the head.
    """
    model, cache = hooks.model, None
    for feed in feeds:
        if feed.row is None:
            _, cache = hooks.feed(feed.start, feed.stop, cache)
            continue
        mine = {
            layer: Watch(model, layer, feed.stop - feed.start, feed.back)
            for layer in layers
            if layer >= 0
        }
        with watching(mine.values()):
            logits, cache = hooks.feed(feed.start, feed.stop, cache)
        ends = _ends(hooks, logits, feed.back)
        # Copied now: the next feed may write into them.
        states_kept = {layer: _states(model, cache, watch, layer) for layer, watch in mine.items()}
        theirs, again = _recomputed(hooks, feed, mine)
        fresh = hooks.feed(0, feed.stop)[1] if any(states_kept.values()) else None
        sights = {}
        for layer in [layer for layer in layers if layer in ends]:
            sight = sights[layer] = Sight(
                feed, layer, [*ends[layer][0]], [*again[layer][0]], hooks.reference
            )
            sight.ends = frozenset(
                (event.name, event.module) for event in itertools.chain(*ends[layer])
            )
            if layer in mine:
                fresh_states = (
                    _states(model, fresh, mine[layer], layer) if states_kept[layer] else []
                )
                sight.note(mine[layer], theirs[layer])
                sight.mine += [*_in_order(mine[layer].events, states_kept[layer]), *ends[layer][1]]
                sight.theirs += [*_in_order(theirs[layer].events, fresh_states), *again[layer][1]]
        yield sights


def recomputed(hooks: BlockHooks, feed: Feed, layer: int) -> list[Event]:
    """What happens in a block, or at an end, where the prefix of a feed is recomputed; and the
    states that it leaves.
    """
    watches, ends = _recomputed(hooks, feed, [layer] if layer >= 0 else [])
    before, after = ends[layer]
    if not 0 <= layer < len(hooks.model.blocks):
        return [*before, *after]
    states = _states(hooks.model, hooks.feed(0, feed.stop)[1], watches[layer], layer)
    return [*before, *watches[layer].events, *states, *after]


Ends = tuple[list[Event], list[Event]]


def _recomputed(
    hooks: BlockHooks, feed: Feed, layers: Iterable[int]
) -> tuple[dict[int, Watch], dict[int, Ends]]:
    """What is seen of the same row where the prefix is recomputed: the blocks' watches, and every
    part's ends.
    """
    watches = {layer: Watch(hooks.model, layer, feed.stop, feed.back) for layer in layers}
    with watching(watches.values()):
        logits = hooks.recompute(feed.stop)
    return watches, _ends(hooks, logits, feed.back)


def _ends(hooks: BlockHooks, logits: Tensor, back: int) -> dict[int, Ends]:
    """What each block was given and what it returned, and the model's own ends, at one row."""
    model = hooks.model
    ends: dict[int, Ends] = {}
    for (layer, nth), tensor in hooks.inputs.items():
        if nth:
            continue
        name = model.name_of(model.blocks[layer])
        entering, leaving = tensor[..., back, :].clone(), hooks.outputs.get((layer, nth))
        before = [Event(BLOCK_INPUT, name, entering)]
        if not ends:
            ends[EMBEDDING], before = (
                ([Event("embedding", model.end_name("input"), entering)], []),
                [],
            )
        ends[layer] = (
            before,
            [] if leaving is None else [Event(RESIDUAL, name, leaving[..., back, :].clone())],
        )
    ends[len(model.blocks)] = [Event("logits", model.end_name("output"), logits[..., back, :])], []
    return ends


def _states(model: BlockModel, cache: Any, watch: Watch, layer: int) -> list[Event]:
    """A block's recurrent and convolution states in a cache, as of the child of the block that
    keeps them.

    That is the one whose modules make up most of what ran first.
    """
    states = model.states(cache, layer) if layer < len(model.blocks) else {}
    if not states:
        return []
    block = model.name_of(model.blocks[layer])
    named = [
        e.module.removeprefix(f"{block}.") for e in watch.events if e.module.startswith(f"{block}.")
    ]
    nested = [name.split(".")[0] for name in named if "." in name]
    module = f"{block}.{nested[0]}" if nested else block
    return [Event(name, module, tensor) for name, tensor in states.items()]


def _in_order(inside: list[Event], states: list[Event]) -> list[Event]:
    """What goes into the module that keeps the states, then the states, then what they feed."""
    if not states:
        return inside
    home, before = states[0].module, 0
    for event in inside:
        entering = (
            event.name == f"input of {home}" or event.name == RESIDUAL or ".in_proj" in event.module
        )
        if event.module.startswith(home) and not entering:
            break
        before += 1
    return [*inside[:before], *states, *inside[before:]]


# Two runs of one block ----------------------------------------------------------------------------


def paired(events: Iterable[Event], *others: Iterable[Event]) -> Iterator[tuple[Any, ...]]:
    """Each event with the others' of the same name, module and turn; None where they have none."""
    waiting: list[dict[tuple[str, str], list[Event]]] = []
    for side in others:
        waiting.append(collections.defaultdict(list))
        for event in side:
            waiting[-1][event.name, event.module].append(event)
    for event in events:
        queues = [queue[event.name, event.module] for queue in waiting]
        yield event, *(queue.pop(0) if queue else None for queue in queues)


def swapped_nearly_equal(mine: Event, other: Event) -> bool:
    """Whether two choices differ only in experts whose scores the difference of the scores can
    bring past each other.

    Where each side took its highest scores and no score differs by more than d, what was swapped
    lies within 2 d.
    """
    if mine.tensor.shape != other.tensor.shape or mine.tensor.dim() != 1 or mine.best != other.best:
        return False
    most = (mine.tensor.double() - other.tensor.double()).abs().max().item()
    swapped = sorted(mine.chosen ^ other.chosen)
    scores = other.tensor.double()[swapped]
    return (
        len(mine.chosen) == len(other.chosen) and (scores.max() - scores.min()).item() <= 2 * most
    )


def compared(mine: Event, other: Event, position: int, newest: int) -> tuple[int, float]:
    """Absolute position of the first difference, and its relative error.

    Args:
        mine: What the cached run computed.
        other: What the recomputation did.
        position: The row that is looked at.
        newest: The position of the last key.
    """
    a, b = mine.tensor, other.tensor
    if mine.name in ("K", "V"):
        keys = min(a.shape[-2], b.shape[-2])
        a, b = (t[..., t.shape[-2] - keys :, :].flatten(0, -3) for t in (a, b))
        # torch may be given each KV head once, or once for every query head that shares it.
        heads = max(len(a), len(b))
        if heads % min(len(a), len(b)) == 0:
            a, b = (t.repeat_interleave(heads // len(t), 0) for t in (a, b))
        if a.shape != b.shape:
            return position, math.inf
        errors = row_errors(a.transpose(0, 1), b.transpose(0, 1))
        worst = float(errors.max())
        return newest + 1 - keys + first_wrong(errors) if worst else position, worst
    if mine.name in ("attention mask", "attention scores"):
        return _compare_visible(a, b, position, newest)
    return position, difference(a, b) if a.shape == b.shape else 0.0


def _compare_visible(a: Tensor, b: Tensor, position: int, newest: int) -> tuple[int, float]:
    mine, theirs = visible_keys(a), visible_keys(b)
    if (first := _first_apart(mine, theirs, newest)) is not None:
        return max(first, 0), math.inf
    keys = min(len(mine), len(theirs))
    a, b = (t.flatten(0, -2)[:, t.shape[-1] - keys :][:, mine[len(mine) - keys :]] for t in (a, b))
    same = torch.bool not in (a.dtype, b.dtype) and a.shape == b.shape
    return position, difference(a, b) if same else 0.0


def _first_apart(mine: Tensor, theirs: Tensor, newest: int) -> int | None:
    """The position of the first key that only one side sees: aligned at the newest; a key that is
    not there is not seen.
    """
    keys = max(len(mine), len(theirs))
    mine, theirs = (torch.nn.functional.pad(seen, (keys - len(seen), 0)) for seen in (mine, theirs))
    return (
        None
        if torch.equal(mine, theirs)
        else newest + 1 - keys + int((mine != theirs).int().argmax())
    )


def seen_differently(first: Watch, second: Watch, module: str, newest: int) -> int | None:
    """The first key that only one side lets the newest query see, where one side is given no mask:
    its position.
    """
    seen = []
    for watch in (first, second):
        mask, keys = watch.first(module, "attention mask"), watch.first(module, "K")
        if keys is None or watch.first(module, "attention scores") is not None:
            return None
        count = keys.shape[-2]
        seen.append(
            torch.ones(count, dtype=torch.bool)
            if mask is None
            else visible_keys(mask).cpu()[-count:]
        )
    given = [watch.first(module, "attention mask") is not None for watch in (first, second)]
    mine, theirs = seen
    return None if all(given) else _first_apart(mine, theirs, newest)


def lost_key(mine: Event, other: Event, second: Watch, newest: int) -> int | None:
    """The first position whose key a cached step no longer has though the recomputation looks at
    it.
    """
    missing = other.tensor.shape[-2] - mine.tensor.shape[-2]
    if missing <= 0:
        return None
    mask = second.first(mine.module, "attention mask", "attention scores")
    oldest = newest + 1 - other.tensor.shape[-2]
    dropped = _dropped(mine.tensor, other.tensor, missing)
    if mask is None:
        return oldest + dropped
    seen = visible_keys(mask)[:missing]
    return oldest + max(dropped, int(seen.int().argmax())) if bool(seen.any()) else None


def _dropped(mine: Tensor, other: Tensor, missing: int) -> int:
    """The first index whose key is not there: up to it keys are what the recomputation has at the
    same place.
    """
    a, b = (t.flatten(0, -3).double() for t in (mine, other))
    if a.shape[0] != b.shape[0] or a.shape[-1] != b.shape[-1]:
        return 0
    count = a.shape[-2]
    kept, moved = (
        (a - part).abs().amax((0, 2)) for part in (b[:, :count], b[:, missing : missing + count])
    )
    off = kept > moved
    return int(off.int().argmax()) if bool(off.any()) else 0
