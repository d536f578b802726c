"""Inside the blocks: the tensors that differ when a cached step and the recomputation are given equal inputs.

Both runs are watched twice over: what every module of a block is given and returns, and what attention reads. Keys and values
are compared position by position. Casts to a narrower dtype are noted with the module that makes them.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from kvinterp.auditing.comparing import compared, grid, lost_key, seen_differently, swapped_nearly_equal
from kvinterp.auditing.ladder import EMBEDDING
from kvinterp.auditing.subject import BlockTaps, Reference, Subject
from kvinterp.auditing.watch import CHOICE, RESIDUAL, Event, Watch, watching

__all__ = ["BLOCK_INPUT", "Differing", "Feed", "Finding", "Place", "Sight", "differing", "look", "recomputed", "states_of"]

BLOCK_INPUT = "block input"

Place = tuple[int | None, int | None, str, str]
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

    @staticmethod
    def one_by_one(prefill: int, stop: int) -> list[Feed]:
        """A prefill and then a token at a time, each looked at."""
        return [Feed(0, prefill), *(Feed(p, p + 1, p) for p in range(prefill, stop))]


@dataclasses.dataclass(frozen=True)
class Finding:
    """A tensor whose difference is larger than a threshold.

    Attributes:
        layer: The block; -1 for what enters the first one, the number of blocks for the head.
        tensor: What it is.
        module: The module it belongs to.
        position: The first absolute position at which it differs by more than the threshold.
        step: The position of the token being fed when that was seen.
        error: Its relative error there; inf where one side sees what the other does not.
        grid: The narrowest dtype whose grid the cached values lie on, where the recomputed ones do not; "" if none.
        casts: The narrower dtypes the block was seen to cast to, each with the modules that did, in order.
        nearly_equal: For an expert choice: whether rounding can have brought the swapped scores past each other.
    """

    layer: int
    tensor: str
    module: str
    position: int
    step: int
    error: float
    grid: str = ""
    casts: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    nearly_equal: bool = False

    @property
    def place(self) -> Place:
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
        hidden: For each attention: the position of the first key that only one side sees, where one has no mask.
        lost: For each attention: the position of the first key that the cached run no longer has.
        casts: Narrower dtypes cast to on either side.
        both_cast: Those that both sides cast to.
    """

    feed: Feed
    layer: int
    mine: list[Event]
    theirs: list[Event]
    hidden: dict[str, int] = dataclasses.field(default_factory=dict)
    lost: dict[str, int] = dataclasses.field(default_factory=dict)
    casts: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    both_cast: frozenset[str] = frozenset()

    def pairs(self) -> Iterator[tuple[Event, Event | None]]:
        """Each of the cached run's events with the recomputation's of the same name, module and turn."""
        waiting: dict[tuple[str, str], list[Event]] = {}
        for event in self.theirs:
            waiting.setdefault((event.name, event.module), []).append(event)
        for event in self.mine:
            queue = waiting.get((event.name, event.module))
            yield event, queue.pop(0) if queue else None

    def findings(self, threshold: float) -> list[Finding]:
        """The tensors that differ by more, in the order in which they were computed, up to a choice that differs."""
        found: list[Finding] = []
        newest = self.feed.stop - 1
        position = newest if self.feed.row is None else self.feed.row

        def add(event: Event, name: str, where: int, error: float, on: str = "", near: bool = False) -> None:
            found.append(Finding(self.layer, name, event.module, where, position, error, on, self.casts, near))

        for event, other in self.pairs():
            if event.name == "attention output" and event.module in self.hidden:
                add(event, "attention mask", self.hidden[event.module], math.inf)
            if other is None:
                continue
            if event.name == "K" and event.module in self.lost:
                add(event, "K", self.lost[event.module], math.inf)
            where, error, mine, theirs = compared(event, other, position, newest)
            if event.name == CHOICE and (event.chosen, event.best) != (other.chosen, other.best):
                # Scores that rounding alone brings past each other choose other experts: what follows is another function.
                near = swapped_nearly_equal(event, other)
                add(event, CHOICE, where, error if near else math.inf, near=near)
                break
            if error > threshold:
                name = "router scores" if event.name == CHOICE else event.name
                if name == "attention scores" and error == math.inf:
                    name = "attention mask"
                add(event, name, where, error, grid(mine, theirs))
        return found


Differing = dict[int, tuple[Sight, list[Finding]]]
"""What was seen of each block that differs, by layer, and the tensors that do, in the order in which they were computed."""


def differing(sights: Iterable[dict[int, Sight]], threshold: float) -> Differing:
    """For each block the first feed in which a tensor differs by more, and those tensors."""
    found: Differing = {}
    for seen in sights:
        for layer, sight in seen.items():
            if layer not in found and (tensors := sight.findings(threshold)):
                found[layer] = sight, tensors
    return dict(sorted(found.items()))


def look(taps: BlockTaps, reference: Reference, feeds: Sequence[Feed], layers: Sequence[int]) -> Iterator[dict[int, Sight]]:
    """Feeds tokens given equal inputs and yields, for every feed that is looked at, what was seen of each block.

    Args:
        taps: The model's taps, attached.
        reference: The rows every block is given.
        feeds: What is fed, one after the other.
        layers: The blocks to look into; -1 for the embedding, the number of blocks for the head.
    """
    subject = taps.subject
    count = len(subject.blocks)
    inner = [layer for layer in layers if 0 <= layer < count]
    cache = None
    for feed in feeds:
        if feed.row is None:
            _, cache = taps.feed(reference, feed.start, feed.stop, cache)
            continue
        back = feed.row - feed.stop
        mine = {layer: Watch(subject, layer, feed.stop - feed.start, back) for layer in inner}
        with watching(mine.values()):
            logits, cache = taps.feed(reference, feed.start, feed.stop, cache)
        ends = _ends(taps, logits, back)
        # Copied now: the next feed may write into them.
        kept = {layer: states for layer in inner if (states := states_of(subject, cache, mine[layer], layer))}
        theirs, again = recomputed(taps, reference, feed, inner)
        fresh = taps.feed(reference, 0, feed.stop, None)[1] if kept else None
        sights = {}
        for layer in layers:
            if layer in inner:
                watches = mine[layer], theirs[layer]
                sights[layer] = Sight(feed, layer, [*ends[layer][0]], [*again[layer][0]], casts=_both(*watches))
                sights[layer].both_cast = frozenset(mine[layer].casts) & frozenset(theirs[layer].casts)
                _attention(sights[layer], *watches, feed.stop - 1)
                held = states_of(subject, fresh, mine[layer], layer) if layer in kept else []
                sights[layer].mine += [*_in_order(mine[layer].events, kept.get(layer, [])), *ends[layer][1]]
                sights[layer].theirs += [*_in_order(theirs[layer].events, held), *again[layer][1]]
            elif layer in ends:
                sights[layer] = Sight(feed, layer, ends[layer][0], again[layer][0])
        yield sights


def recomputed(
    taps: BlockTaps, reference: Reference, feed: Feed, layers: Sequence[int]
) -> tuple[dict[int, Watch], dict[int, Ends]]:
    """What is seen of the same row where the prefix is recomputed: the blocks' watches, and every part's ends."""
    back = -1 if feed.row is None else feed.row - feed.stop
    watches = {layer: Watch(taps.subject, layer, feed.stop, back) for layer in layers}
    with watching(watches.values()):
        logits = taps.recompute(reference, feed.stop)
    return watches, _ends(taps, logits, back)


Ends = tuple[list[Event], list[Event]]


def _ends(taps: BlockTaps, logits: Tensor, back: int) -> dict[int, Ends]:
    """What each block was given and what it returned, and the model's own ends, at one row."""
    subject = taps.subject
    count = len(subject.blocks)
    found: dict[int, Ends] = {}
    for (layer, nth), tensor in taps.inputs.items():
        if nth:
            continue
        name = subject.name_of(subject.blocks[layer])
        given = tensor[..., back, :].clone()
        if not found:
            found[EMBEDDING] = [Event("embedding", _end_module(subject, EMBEDDING), given)], []
            before = []
        else:
            before = [Event(BLOCK_INPUT, name, given)]
        made = taps.outputs.get((layer, nth))
        found[layer] = before, [] if made is None else [Event(RESIDUAL, name, made[..., back, :].clone())]
    found[count] = [Event("logits", _end_module(subject, count), logits[..., back, :])], []
    return found


def _attention(sight: Sight, mine: Watch, theirs: Watch, newest: int) -> None:
    for event, other in Sight(sight.feed, sight.layer, mine.events, theirs.events).pairs():
        if event.name == "attention output":
            hidden = seen_differently(mine, theirs, event.module, newest)
            if hidden is not None:
                sight.hidden[event.module] = hidden
        if event.name == "K" and other is not None:
            lost = lost_key(event, other, theirs, newest)
            if lost is not None:
                sight.lost[event.module] = lost


def _both(first: Watch, second: Watch) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys([*first.casts, *second.casts])
    return {n: tuple(dict.fromkeys(first.casts.get(n, ()) + second.casts.get(n, ()))) for n in names}


def states_of(subject: Subject, cache: Any, watch: Watch, layer: int) -> list[Event]:
    """A block's recurrent and convolution states in a cache."""
    module = _mixer(watch, subject, layer)
    return [Event(name, module, tensor) for name, tensor in subject.states(cache, layer).items()]


def _in_order(inside: list[Event], states: list[Event]) -> list[Event]:
    """What goes into the module that keeps the states, then the states, then what they feed."""
    if not states:
        return inside
    home, before = states[0].module, 0
    for event in inside:
        entering = event.name == f"input of {home}" or event.name == RESIDUAL or ".in_proj" in event.module
        if event.module.startswith(home) and not entering:
            break
        before += 1
    return [*inside[:before], *states, *inside[before:]]


def _mixer(watch: Watch, subject: Subject, layer: int) -> str:
    """The child of the block that keeps the state: the one whose modules make up most of what ran first."""
    block = subject.name_of(subject.blocks[layer])
    named = [e.module for e in watch.events if e.module.startswith(block + ".")]
    nested = [name[len(block) + 1 :].split(".")[0] for name in named if "." in name[len(block) + 1 :]]
    return f"{block}.{nested[0]}" if nested else block


def _end_module(subject: Subject, layer: int) -> str:
    source: Any = subject.adapter.source
    getter = getattr(source, "get_input_embeddings" if layer == EMBEDDING else "get_output_embeddings", None)
    module = getter() if getter is not None else None
    return subject.name_of(module) if isinstance(module, nn.Module) else ""
