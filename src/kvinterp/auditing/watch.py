"""One block watched during one forward: what attention reads, what every module is given and returns, what is cast.

What attention reads (queries, keys, values, mask and scores) is caught where it is handed to torch, so that it does not matter
how the model caches it. Keys and values are kept at every position, everything else at the row that is looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from kvinterp.auditing.attention import Fused, Recogniser, Scores, Values
from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.subject import Subject
from kvinterp.auditing.values import narrower

__all__ = ["CHOICE", "RESIDUAL", "Event", "Watch", "watching"]

_TOPK = torch.topk, Tensor.topk
CHOICE, RESIDUAL = "expert choice", "residual sum"


@dataclasses.dataclass(frozen=True)
class Event:
    """One tensor seen inside a block, one row of it or, for keys and values, every position.

    Attributes:
        name: ``K``, ``V``, ``Q``, ``attention mask``, ``attention scores``, ``attention output``, ``residual sum``, a module's
            path for what it returns, or ``input of`` and its path.
        module: The path of the module it was seen in.
        tensor: ``[..., position, head_dim]`` for K and V, else the row that is looked at.
        chosen: For ``expert choice``, whose tensor is the scores: which experts they chose.
        best: For ``expert choice``: whether those are the ones with the highest scores.
    """

    name: str
    module: str
    tensor: Tensor
    chosen: frozenset[int] = frozenset()
    best: bool = True


class Watch:
    """Watches one block during one forward."""

    def __init__(self, subject: Subject, layer: int, rows: int = 1, back: int = -1) -> None:
        self.subject, self.block = subject, subject.blocks[layer]
        self.back = back
        self.events: list[Event] = []
        self.casts: dict[str, tuple[str, ...]] = {}
        self.rows = rows
        self._stack: list[nn.Module] = []
        self._modes: list[Any] = []
        self._attention = Recogniser()
        # Inside fused experts rows are sorted by expert, so that the last one is not the newest token's.
        fused = [m for m in self.block.modules() if any(p.dim() == 3 for p in m.parameters(recurse=False))]
        self._children = set(self.block.children())
        self._sorted = {inner for outer in fused for inner in outer.modules() if inner is not outer}

    def attach(self) -> list[Any]:
        """Hooks the block and every module in it."""
        handles = [
            self.block.register_forward_pre_hook(self._enter),
            self.block.register_forward_hook(self._leave, always_call=True),
        ]
        for module in self.block.modules():
            if module is not self.block:
                handles.append(module.register_forward_pre_hook(self._in, with_kwargs=True))
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

    def _in(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._stack.append(module)
        given = next((value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None)
        if given is None or not given.is_floating_point() or module in self._sorted:
            return
        row = _one_row(given, self.rows, self.back)
        if row is not None:
            name = self.subject.name_of(module)
            # What a block hands to one of its own modules was added up or scaled between two of them.
            label = RESIDUAL if module in self._children else f"input of {name}"
            self.events.append(Event(label, name, row.detach().clone()))

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
        """The path of the module that runs."""
        return self.subject.name_of(self._stack[-1]) if self._stack else ""

    def add(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor under a name."""
        self.events.append(Event(name, self.inner, tensor.detach().clone()))

    def choice(self, scores: Tensor, indices: Tensor) -> None:
        """Keeps which experts were chosen, and from which scores."""
        held, taken = (_one_row(t, self.rows, self.back) for t in (scores, indices))
        if held is not None and taken is not None:
            chosen = frozenset(taken.flatten().tolist())
            # Only a single row of scores can be checked; a router in several stages may leave out experts that score higher.
            best = held.dim() != 1 or bool(held[list(chosen)].min() >= held.topk(len(chosen)).values[-1])
            self.events.append(Event(CHOICE, self.inner, held.detach().clone(), chosen, best))

    def call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
        """Told every call of torch, with its result."""
        found = self._attention.told(func, args, kwargs, result)
        if isinstance(found, Fused):
            query, key, mask = found.query, found.key, found.mask
            self.add("Q", query[..., self.back, :])
            self.add("K", key)
            self.add("V", found.value)
            if mask is None and self.back < -1 and found.options.get("is_causal", False):
                mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()[None, None]
            if mask is not None:
                mask = mask.expand(*mask.shape[:-2], query.shape[-2], mask.shape[-1])
                self.add("attention mask", mask[..., self.back, :])
            self.add("attention output", found.made[..., self.back, :])
        elif isinstance(found, Scores):
            self.add("Q", found.product.a[..., self.back, :])
            self.add("K", found.product.b.transpose(-1, -2))
            self.add("attention scores", found.given[..., self.back, :])
        elif isinstance(found, Values):
            self.add("V", found.values)
            self.add("attention output", found.made[..., self.back, :])
        elif func in _TOPK:
            self.choice(args[0], result[1])


class _Calls(TorchFunctionMode):
    def __init__(self, watch: Watch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.watch.call(func, args, kwargs or {}, result)
        return result


class _Casts(TorchDispatchMode):
    """Notes every cast of a floating-point tensor to a narrower dtype than the model's own."""

    def __init__(self, watch: Watch) -> None:
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
        if narrower(made.dtype, source.dtype) and narrower(made.dtype, self.watch.subject.dtype):
            name = dtype_name(made.dtype)
            known = self.watch.casts.get(name, ())
            if self.watch.inner not in known:
                self.watch.casts[name] = (*known, self.watch.inner)


def _one_row(tensor: Tensor, rows: int, back: int) -> Tensor | None:
    if tensor.dim() >= 3 and tensor.shape[0] == 1 and tensor.shape[1] == rows:
        return tensor[0, back]
    return tensor[back] if tensor.dim() >= 2 and tensor.shape[0] == rows else None


@contextlib.contextmanager
def watching(watches: Iterable[Watch]) -> Iterator[None]:
    """Listens for as long as the context lasts, whatever ends it."""
    with contextlib.ExitStack() as hooks:
        for watch in watches:
            # torch calls no hook where a KeyboardInterrupt passes through, so a watch may still be listening.
            hooks.callback(watch.close)
            for handle in watch.attach():
                hooks.callback(handle.remove)
        yield
