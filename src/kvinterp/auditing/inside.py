"""Inside one block: the first tensor that differs when a cached step and the recomputation are given equal inputs.

Both runs are watched twice over: the output of every module in the block, and what attention reads (queries, keys, values,
mask and scores), caught where they are handed to torch, so that it does not matter how the model caches them. Keys and
values are compared position by position. Casts to a narrower dtype are noted with the module that makes them.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvinterp.auditing.ladder import EMBEDDING, difference, on_grid
from kvinterp.auditing.subject import BlockTaps, Reference, Subject
from kvinterp.models import Adapter
from kvinterp.paths.kernels import KernelMode, Kernels

__all__ = ["CHOICE", "Event", "Feed", "Finding", "WithoutCasts", "find"]

_SDPA = torch.nn.functional.scaled_dot_product_attention
_PRODUCTS = {
    torch.matmul: 0,
    Tensor.matmul: 0,
    Tensor.__matmul__: 0,
    torch.bmm: 0,
    Tensor.bmm: 0,
    torch.baddbmm: 1,
    Tensor.baddbmm: 1,
}
_SOFTMAX = (torch.softmax, torch.nn.functional.softmax, Tensor.softmax)
CHOICE = "expert choice"
NARROWER = (torch.bfloat16, torch.float16, torch.float32)


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
class Event:
    """One tensor seen inside a block, one row of it or, for keys and values, every position.

    Attributes:
        name: ``K``, ``V``, ``Q``, ``attention mask``, ``attention scores``, ``attention output``, or a module's path.
        module: The path of the module it was seen in.
        tensor: ``[..., position, head_dim]`` for K and V, else the newest row.
        chosen: For ``expert choice``, whose tensor is the scores: which experts they chose.
    """

    name: str
    module: str
    tensor: Tensor
    chosen: frozenset[int] = frozenset()


@dataclasses.dataclass(frozen=True)
class Finding:
    """The first tensor whose difference is larger than a threshold.

    Attributes:
        layer: The block; -1 for what enters the first one, the number of blocks for the head.
        tensor: What it is.
        module: The module it belongs to.
        position: The first absolute position at which it differs by more than the threshold.
        step: The position of the token being fed when that was seen.
        error: Its relative error there.
        grid: The narrowest dtype whose grid the cached values lie on, where the recomputed ones do not; "" if none.
        casts: The narrower dtypes the block was seen to cast to, each with the modules that did, in order.
        both_cast: Those that both paths cast to.
        without_casts: The error once those casts are left out (see :class:`WithoutCasts`); None where that was not tried
            or does not run.
    """

    layer: int
    tensor: str
    module: str
    position: int
    step: int
    error: float
    grid: str
    casts: dict[str, tuple[str, ...]]
    both_cast: tuple[str, ...] = ()
    without_casts: float | None = None


@dataclasses.dataclass(frozen=True)
class WithoutCasts(Kernels):
    """The machine's own kernels, and no cast to fewer bits than the model's own: its wider values go through instead."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts casts."""
        return _WithoutCastsMode(adapter.dtype)


class _WithoutCastsMode(KernelMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def interceptors(self) -> list[Any]:
        return [_Widened(self.dtype)]


class _Widened(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.bits = dtype, torch.finfo(dtype).bits

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("dtype")
        # Not casts alone: what is made in fewer bits, or summed in fewer, would bring them back.
        if to is not None and to.is_floating_point and torch.finfo(to).bits < self.bits:
            kwargs = {**kwargs, "dtype": self.dtype}
        return func(*args, **kwargs)


class _Watch:
    """Watches one block during one forward."""

    def __init__(self, subject: Subject, layer: int, rows: int = 1, back: int = -1) -> None:
        self.subject, self.block = subject, subject.blocks[layer]
        self.back = back
        self.events: list[Event] = []
        self.casts: dict[str, tuple[str, ...]] = {}
        self.rows = rows
        self._stack: list[nn.Module] = []
        self._modes: list[Any] = []
        self._product: tuple[Tensor, Tensor, Tensor] | None = None
        self._weights: int | None = None
        # Inside fused experts rows are sorted by expert, so that the last one is not the newest token's.
        fused = [m for m in self.block.modules() if any(p.dim() == 3 for p in m.parameters(recurse=False))]
        self._sorted = {inner for outer in fused for inner in outer.modules() if inner is not outer}

    def attach(self) -> list[Any]:
        handles = [
            self.block.register_forward_pre_hook(self._enter),
            self.block.register_forward_hook(self._leave, always_call=True),
        ]
        for module in self.block.modules():
            if module is not self.block:
                handles.append(module.register_forward_pre_hook(lambda m, _: self._stack.append(m)))
                handles.append(module.register_forward_hook(self._out, always_call=True))
        return handles

    def _enter(self, *_: Any) -> None:
        self._stack = [self.block]
        for mode in (_Calls(self), _Casts(self)):
            mode.__enter__()
            self._modes.append(mode)

    def _leave(self, *_: Any) -> None:
        self.close()

    def close(self) -> None:
        """Stops listening to torch; nothing where it does not."""
        while self._modes:
            self._modes.pop().__exit__(None, None, None)

    def _out(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
        made = output[0] if isinstance(output, tuple) and output else output
        if isinstance(made, Tensor) and made.is_floating_point() and module not in self._sorted:
            row = _one_row(made, self.rows, self.back)
            if row is not None:
                name = self.subject.name_of(module)
                self.events.append(Event(name, name, row.detach().clone()))

    @property
    def inner(self) -> str:
        return self.subject.name_of(self._stack[-1]) if self._stack else ""

    def add(self, name: str, tensor: Tensor) -> None:
        self.events.append(Event(name, self.inner, tensor.detach().clone()))

    def choice(self, scores: Tensor, indices: Tensor) -> None:
        rows = [_one_row(t, self.rows, self.back) for t in (scores, indices)]
        if rows[0] is not None and rows[1] is not None:
            chosen = frozenset(rows[1].flatten().tolist())
            self.events.append(Event(CHOICE, self.inner, rows[0].detach().clone(), chosen))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        if func is _SDPA:
            query, key, value, *rest = args
            mask = kwargs.get("attn_mask", rest[0] if rest else None)
            self.add("Q", query[..., self.back, :])
            self.add("K", key)
            self.add("V", value)
            if mask is None and self.back < -1 and kwargs.get("is_causal", False):
                mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()[None, None]
            if mask is not None:
                mask = mask.expand(*mask.shape[:-2], query.shape[-2], mask.shape[-1])
                self.add("attention mask", mask[..., self.back, :])
            self.add("attention output", result[..., self.back, :])
        elif func in (torch.topk, Tensor.topk):
            self.choice(args[0], result[1])
        elif func in _PRODUCTS:
            named = [kwargs[n] for n in ("batch1", "batch2") if n in kwargs]
            a, b = (*args[_PRODUCTS[func] :], *named, None, None)[:2]
            if not isinstance(a, Tensor) or not isinstance(b, Tensor) or a.dim() < 3 or b.dim() < 3:
                return
            if self._weights is not None and a.shape[-1] == self._weights:
                self.add("V", b)
                self.add("attention output", result[..., self.back, :])
                self._weights = self._product = None
            else:
                self._product = (a, b, result)
        elif func in _SOFTMAX and self._product is not None:
            a, b, scores = self._product
            if (
                args[0].shape[:-1] == scores.shape[:-1]
                or args[0].numel() // args[0].shape[-1] == scores.numel() // scores.shape[-1]
            ):
                self.add("Q", a[..., self.back, :])
                self.add("K", b.transpose(-1, -2))
                self.add("attention scores", args[0][..., self.back, :])
                self._weights = scores.shape[-1]


class _Calls(TorchFunctionMode):
    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch.call(func, args, kwargs or {}, result)
        return result


class _Casts(TorchDispatchMode):
    """Notes every cast of a floating-point tensor to fewer bits than the model's own dtype."""

    def __init__(self, watch: _Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default or func is torch.ops.aten.copy_.default:
            source = args[1] if func is torch.ops.aten.copy_.default else args[0]
            self._note(source, result)
        return result

    def _note(self, source: Tensor, made: Tensor) -> None:
        if not (source.is_floating_point() and made.is_floating_point()) or made.numel() <= 1:
            return
        bits = torch.finfo(made.dtype).bits
        if bits < torch.finfo(source.dtype).bits and bits < torch.finfo(self.watch.subject.dtype).bits:
            name = str(made.dtype).removeprefix("torch.")
            known = self.watch.casts.get(name, ())
            if self.watch.inner not in known:
                self.watch.casts[name] = (*known, self.watch.inner)


def _both(first: _Watch, second: _Watch) -> dict[str, tuple[str, ...]]:
    names = dict.fromkeys([*first.casts, *second.casts])
    return {n: tuple(dict.fromkeys(first.casts.get(n, ()) + second.casts.get(n, ()))) for n in names}


def _one_row(tensor: Tensor, rows: int, back: int) -> Tensor | None:
    if tensor.dim() >= 3 and tensor.shape[0] == 1 and tensor.shape[1] == rows:
        return tensor[0, back]
    return tensor[back] if tensor.dim() >= 2 and tensor.shape[0] == rows else None


def find(
    taps: BlockTaps, reference: Reference, feeds: Sequence[Feed], layers: Sequence[int], threshold: float
) -> dict[int, list[Finding]]:
    """Feeds tokens given equal inputs and returns, for each block, the tensors that differ by more.

    Args:
        taps: The model's taps, attached.
        reference: The rows every block is given.
        feeds: What is fed, one after the other.
        layers: The blocks to look into; -1 for the embedding, the number of blocks for the head.
        threshold: Relative error that is still nothing.

    Returns:
        For each block the findings of the first feed that has any, in the order in which they were computed.
    """
    subject = taps.subject
    count = len(subject.blocks)
    found: dict[int, list[Finding]] = {}
    cache = None
    for feed in feeds:
        if feed.row is None:
            _, cache = taps.feed(reference, feed.start, feed.stop, cache)
            continue
        position, back = feed.row, feed.row - feed.stop
        inner = [layer for layer in layers if 0 <= layer < count and layer not in found]
        mine = {layer: _Watch(subject, layer, feed.stop - feed.start, back) for layer in inner}
        theirs = {layer: _Watch(subject, layer, feed.stop, back) for layer in inner}
        with _watching(mine.values()):
            logits, cache = taps.feed(reference, feed.start, feed.stop, cache)
        ends = {EMBEDDING: taps.inputs[0][..., back, :].clone(), count: logits[..., back, :]}
        with _watching(theirs.values()):
            again = taps.recompute(reference, feed.stop)
        kept = {layer: states for layer in inner if (states := subject.states(cache, layer))}
        last = {EMBEDDING: taps.inputs[0][..., back, :].clone(), count: again[..., back, :]}
        fresh = taps.feed(reference, 0, feed.stop, None)[1] if kept else None
        for layer in inner:
            inside = _differing(mine[layer], theirs[layer], feed, layer, threshold)
            if layer in kept:
                wrong = _states(subject, kept[layer], fresh, position, layer, threshold, mine[layer], theirs[layer])
                inside = _in_order(inside, wrong)
            if inside:
                both = tuple(name for name in mine[layer].casts if name in theirs[layer].casts)
                found[layer] = [dataclasses.replace(f, both_cast=both) for f in inside]
        for layer, theirs_there in last.items():
            if layer in layers and layer not in found and difference(ends[layer], theirs_there) > threshold:
                error, grid = difference(ends[layer], theirs_there), _grid(ends[layer], theirs_there)
                name = "embedding" if layer == EMBEDDING else "logits"
                found[layer] = [Finding(layer, name, _end_module(subject, layer), position, position, error, grid, {})]
    return found


@contextlib.contextmanager
def _watching(watches: Iterable[_Watch]) -> Iterator[None]:
    handles: list[Any] = []
    try:
        for watch in watches:
            handles += watch.attach()
        yield
    finally:
        for handle in handles:
            handle.remove()
        # torch calls no hook where a KeyboardInterrupt passes through, so a watch may still be listening.
        for watch in watches:
            watch.close()


def _differing(first: _Watch, second: _Watch, feed: Feed, layer: int, threshold: float) -> list[Finding]:
    found: list[Finding] = []
    position, newest = feed.stop - 1 if feed.row is None else feed.row, feed.stop - 1
    seen: dict[tuple[str, str], list[Event]] = {}
    for event in second.events:
        seen.setdefault((event.name, event.module), []).append(event)
    casts = _both(first, second)
    for event in first.events:
        queue = seen.get((event.name, event.module))
        other = queue.pop(0) if queue else None
        if event.name == "attention output":
            hidden = _seen_differently(first, second, event.module, newest)
            if hidden is not None:
                found.append(Finding(layer, "attention mask", event.module, hidden, position, float("inf"), "", casts))
        if other is None:
            continue
        lost = _lost(event, other, second, newest) if event.name == "K" else None
        if lost is not None:
            found.append(Finding(layer, "K", event.module, lost, position, float("inf"), "", casts))
        where, error, mine, theirs = _compare(event, other, position, newest)
        if event.chosen != other.chosen:
            # Scores that rounding alone brings past each other choose other experts, and what follows is another function.
            found.append(Finding(layer, CHOICE, event.module, where, position, error, "", casts))
            break
        if error > threshold:
            name = event.name
            if name == "attention scores" and error == float("inf"):
                name = "attention mask"
            found.append(Finding(layer, name, event.module, where, position, error, _grid(mine, theirs), casts))
    return found


def _compare(mine: Event, other: Event, position: int, newest: int) -> tuple[int, float, Tensor, Tensor]:
    """Absolute position of the first difference, its relative error, and both tensors there.

    Args:
        mine: What the cached run computed.
        other: What the recomputation did.
        position: The row that is looked at.
        newest: The position of the last key.
    """
    a, b = mine.tensor, other.tensor
    if mine.name in ("K", "V"):
        keys = min(a.shape[-2], b.shape[-2])
        a, b = a[..., a.shape[-2] - keys :, :].flatten(0, -3), b[..., b.shape[-2] - keys :, :].flatten(0, -3)
        # torch may be given each KV head once, or once for every query head that shares it.
        if a.shape[0] != b.shape[0] and max(a.shape[0], b.shape[0]) % min(a.shape[0], b.shape[0]) == 0:
            heads = max(a.shape[0], b.shape[0])
            a, b = (t.repeat_interleave(heads // t.shape[0], 0) for t in (a, b))
        if a.shape != b.shape:
            return position, float("inf"), mine.tensor, other.tensor
        scale = b.double().abs().amax((0, 2))
        errors = (a.double() - b.double()).abs().amax((0, 2)) / scale.clamp(min=torch.finfo(torch.float32).tiny)
        errors = errors.nan_to_num(float("inf"))
        if not bool(errors.max() > 0):
            return position, 0.0, a, b
        # The first position that is as wrong as any, to within a factor of ten: not one that differs by rounding only.
        index = int((errors >= errors.max() / 10).int().argmax())
        return newest + 1 - keys + index, float(errors.max()), a[:, index], b[:, index]
    if mine.name in ("attention mask", "attention scores"):
        return _compare_visible(a, b, position, newest)
    if a.shape != b.shape:
        return position, 0.0, a, b
    return position, difference(a, b), a, b


def _compare_visible(a: Tensor, b: Tensor, position: int, newest: int) -> tuple[int, float, Tensor, Tensor]:
    keys = min(a.shape[-1], b.shape[-1])
    extra = a[..., : a.shape[-1] - keys], b[..., : b.shape[-1] - keys]
    for longer in extra:
        if longer.numel() and bool(_visible(longer).any()):
            return max(newest + 1 - max(a.shape[-1], b.shape[-1]), 0), float("inf"), a, b
    a, b = a[..., a.shape[-1] - keys :].flatten(0, -2), b[..., b.shape[-1] - keys :].flatten(0, -2)
    if a.shape[0] != b.shape[0] and 1 not in (a.shape[0], b.shape[0]):
        return position, 0.0, a, b
    seen_a, seen_b = (_visible(t).any(0) for t in (a, b))
    if not torch.equal(seen_a, seen_b):
        return newest + 1 - keys + int((seen_a != seen_b).int().argmax()), float("inf"), a, b
    if torch.bool in (a.dtype, b.dtype) or a.shape != b.shape:
        return position, 0.0, a, b
    both = seen_a & seen_b
    return position, difference(a[:, both], b[:, both]) if bool(both.any()) else 0.0, a, b


def _visible(mask: Tensor) -> Tensor:
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 4


def _seen_differently(first: _Watch, second: _Watch, module: str, newest: int) -> int | None:
    """The first key that only one side lets the newest query see, where one side is given no mask: its position."""
    seen = []
    for watch in (first, second):
        mask = next((e.tensor for e in watch.events if e.name == "attention mask" and e.module == module), None)
        keys = next((e.tensor.shape[-2] for e in watch.events if e.name == "K" and e.module == module), None)
        if keys is None or any(e.name == "attention scores" and e.module == module for e in watch.events):
            return None
        every = torch.ones(keys, dtype=torch.bool)
        seen.append((mask is None, every if mask is None else _visible(mask).flatten(0, -2).any(0).cpu()[-keys:]))
    if not (seen[0][0] or seen[1][0]):
        return None
    keys = max(len(s) for _, s in seen)
    # Aligned at the newest key; a key that is not there is not seen.
    mine, theirs = (torch.nn.functional.pad(s, (keys - len(s), 0)) for _, s in seen)
    return None if torch.equal(mine, theirs) else newest + 1 - keys + int((mine != theirs).int().argmax())


def _lost(mine: Event, other: Event, second: _Watch, newest: int) -> int | None:
    """The first position whose key a cached step no longer has though the recomputation looks at it."""
    missing = other.tensor.shape[-2] - mine.tensor.shape[-2]
    if missing <= 0:
        return None
    masks = [
        e.tensor for e in second.events if e.module == mine.module and e.name in ("attention mask", "attention scores")
    ]
    oldest = newest + 1 - other.tensor.shape[-2]
    dropped = _dropped(mine.tensor, other.tensor, missing)
    if not masks:
        return oldest + dropped
    seen = _visible(masks[0]).flatten(0, -2).any(0)[:missing]
    return oldest + max(dropped, int(seen.int().argmax())) if bool(seen.any()) else None


def _dropped(mine: Tensor, other: Tensor, missing: int) -> int:
    """The first index whose key is not there: up to it keys are what the recomputation has at the same place."""
    a, b = (t.flatten(0, -3).double() for t in (mine, other))
    if a.shape[0] != b.shape[0] or a.shape[-1] != b.shape[-1]:
        return 0
    count = a.shape[-2]
    kept, moved = ((a - part).abs().amax((0, 2)) for part in (b[:, :count], b[:, missing : missing + count]))
    off = kept > moved
    return int(off.int().argmax()) if bool(off.any()) else 0


def _states(
    subject: Subject,
    kept: dict[str, Tensor],
    fresh: Any,
    position: int,
    layer: int,
    threshold: float,
    first: _Watch,
    second: _Watch,
) -> list[Finding]:
    """Recurrent and convolution states that are not what a fresh prefill of the same tokens leaves behind."""
    theirs = subject.states(fresh, layer)
    module, found = _mixer(first, subject, layer), []
    for name, tensor in kept.items():
        other = theirs.get(name)
        if other is not None and other.shape == tensor.shape and (error := difference(tensor, other)) > threshold:
            grid = _grid(tensor, other)
            found.append(Finding(layer, name, module, position, position, error, grid, _both(first, second)))
    return found


def _in_order(inside: list[Finding], states: list[Finding]) -> list[Finding]:
    """What goes into the module that keeps the states, then the states, then what they feed."""
    if not states:
        return inside
    home, before = states[0].module, 0
    for found in inside:
        entering = found.module.startswith(home) and found.module.rsplit(".", 1)[-1].startswith("in_proj")
        if found.module.startswith(home) and not entering:
            break
        before += 1
    return [*inside[:before], *states, *inside[before:]]


def _mixer(watch: _Watch, subject: Subject, layer: int) -> str:
    """The child of the block that keeps the state: the one whose modules make up most of what ran first."""
    block = subject.name_of(subject.blocks[layer])
    named = [e.module for e in watch.events if e.module.startswith(block + ".")]
    nested = [name[len(block) + 1 :].split(".")[0] for name in named if "." in name[len(block) + 1 :]]
    return f"{block}.{nested[0]}" if nested else block


def _grid(mine: Tensor, theirs: Tensor) -> str:
    """The narrowest dtype whose grid one side lies on and the other does not."""
    if not (mine.is_floating_point() and theirs.is_floating_point()):
        return ""
    for dtype in NARROWER:
        if on_grid(mine, dtype) != on_grid(theirs, dtype):
            return str(dtype).removeprefix("torch.")
    return ""


def _end_module(subject: Subject, layer: int) -> str:
    source: Any = subject.adapter.source
    getter = getattr(source, "get_input_embeddings" if layer == EMBEDDING else "get_output_embeddings", None)
    module = getter() if getter is not None else None
    return subject.name_of(module) if isinstance(module, nn.Module) else ""
