"""One block watched during one forward: what attention reads, what every module is given and
returns, what is cast.

What attention reads (queries, keys, values, mask and scores) is caught where it is handed to torch,
so that it does not matter how the model caches it. Keys and values are kept at every position,
everything else at the row that is looked at.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.blocks import BlockModel
from kvinterp.auditing.ladder import dtype_name
from kvinterp.auditing.values import narrower
from kvinterp.models.attention_calls import Fused, Recogniser, Scores, Values
from kvinterp.models.hooks import Functions, in_order
from kvinterp.paths.kernels.base import Operations

_TOPK = torch.topk, Tensor.topk
_CASTS = torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default
CHOICE, RESIDUAL = "expert choice", "residual sum"


@dataclasses.dataclass(frozen=True)
class Event:
    """One tensor seen inside a block, one row of it or, for keys and values, every position.

    Attributes:
        name: ``K``, ``V``, ``Q``, ``attention mask``, ``attention scores``, ``attention output``,
            ``residual sum``, a module's path for what it returns, or ``input of`` and its path.
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
    """Watches one block during one forward.

    Args:
        model: The model.
        layer: The block; the number of blocks for what stands behind the last one, of which casts
            alone are noted.
        rows: Positions fed.
        back: The row that is looked at, counted from the end.

    Attributes:
        events: What was seen, in order.
        casts: The dtypes narrower than the model's own that were cast to, each with the modules
            that did.
    """

    def __init__(self, model: BlockModel, layer: int, rows: int, back: int) -> None:
        self.model, self.block = model, next(iter(model.blocks[layer : layer + 1]), None)
        self.rows, self.back = rows, back
        self.events: list[Event] = []
        self.casts: dict[str, tuple[str, ...]] = {}
        self._stack: list[nn.Module] = []
        self._listening = contextlib.ExitStack()
        self._attention = Recogniser()
        self._modules = [] if self.block is None else [*self.block.modules()]
        self._children = set() if self.block is None else set(self.block.children())
        # Inside fused experts rows are sorted by expert, so that the last one is not the newest
        # token's.
        fused = [m for m in self._modules if any(p.dim() == 3 for p in m.parameters(recurse=False))]
        self._sorted = {inner for outer in fused for inner in outer.modules() if inner is not outer}

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """Hooks the block and every module in it for as long as the context lasts, whatever ends
        it.
        """

        def leave(*_: Any) -> None:
            self._listening.close()

        with contextlib.ExitStack() as hooks:
            # torch calls no hook where a KeyboardInterrupt passes through, so it may still be
            # listening.
            hooks.callback(self._listening.close)
            if self.block is None:
                hooks.enter_context(self.model.blocks[-1].register_forward_hook(self._enter))
                hooks.enter_context(self.model.model.register_forward_hook(leave, always_call=True))
            for module in self._modules:
                before, after = (
                    (self._enter, leave) if module is self.block else (self._in, self._out)
                )
                hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
                hooks.enter_context(module.register_forward_hook(after, always_call=True))
            yield

    def _enter(self, *_: Any) -> None:
        self._listening.close()
        if self.block is not None:
            self._stack = [self.block]
            self._listening.enter_context(Functions(self._called))
        self._listening.enter_context(Operations(self._dispatched))

    def _in(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._stack.append(module)
        given = next(
            (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None
        )
        # What a block hands to one of its own modules was added up or scaled between two of them.
        self._row(
            module,
            given,
            RESIDUAL if module in self._children else f"input of {self.model.name_of(module)}",
        )

    def _out(self, module: nn.Module, _: Any, output: Any) -> None:
        if self._stack and self._stack[-1] is module:
            self._stack.pop()
        self._row(
            module,
            output[0] if isinstance(output, tuple) and output else output,
            self.model.name_of(module),
        )

    def _row(self, module: nn.Module, tensor: Any, label: str) -> None:
        if (
            not isinstance(tensor, Tensor)
            or not tensor.is_floating_point()
            or module in self._sorted
        ):
            return
        row = _one_row(tensor, self.rows, self.back)
        if row is not None:
            self.events.append(Event(label, self.model.name_of(module), row.detach().clone()))

    @property
    def inner(self) -> str:
        """The path of the module that runs."""
        end = self.model.end_name("output") if self.block is None else ""
        return self.model.name_of(self._stack[-1]) if self._stack else end

    def first(self, module: str, *names: str) -> Tensor | None:
        """The first tensor of one of these names that was seen in a module."""
        return next(
            (
                event.tensor
                for event in self.events
                if event.module == module and event.name in names
            ),
            None,
        )

    def add(self, name: str, tensor: Tensor) -> None:
        """Keeps a tensor under a name."""
        self.events.append(Event(name, self.inner, tensor.detach().clone()))

    def choice(self, scores: Tensor, indices: Tensor) -> None:
        """Keeps which experts were chosen, and from which scores."""
        scored, taken = (_one_row(t, self.rows, self.back) for t in (scores, indices))
        if scored is not None and taken is not None:
            chosen = frozenset(taken.flatten().tolist())
            # Only a single row of scores can be checked; a router in several stages may leave out
            # experts that score higher.
            best = scored.dim() != 1 or bool(
                scored[list(chosen)].min() >= scored.topk(len(chosen)).values[-1]
            )
            self.events.append(Event(CHOICE, self.inner, scored.detach().clone(), chosen, best))

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Keeps what attention reads, of each call of torch; returns its result."""
        result = func(*args, **kwargs)
        part = self._attention.recognise(func, args, kwargs, result)
        if isinstance(part, Fused):
            query, key, mask = part.query, part.key, part.mask
            self.add("Q", query[..., self.back, :])
            self.add("K", key)
            self.add("V", part.value)
            if mask is None and self.back < -1 and part.options.get("is_causal", False):
                mask = torch.ones(
                    query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device
                ).tril()[None, None]
            if mask is not None:
                mask = mask.expand(*mask.shape[:-2], query.shape[-2], mask.shape[-1])
                self.add("attention mask", mask[..., self.back, :])
            self.add("attention output", part.result[..., self.back, :])
        elif isinstance(part, Scores):
            self.add("Q", part.product.a[..., self.back, :])
            self.add("K", part.product.b.transpose(-1, -2))
            self.add("attention scores", part.scaled[..., self.back, :])
        elif isinstance(part, Values):
            self.add("V", part.values)
            self.add("attention output", part.result[..., self.back, :])
        elif func in _TOPK:
            self.choice(in_order(args, kwargs)[0][0], result[1])
        return result

    def _dispatched(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Notes casts of floating-point tensors, of each operation of torch; returns its result."""
        result = func(*args, **kwargs)
        if func in _CASTS:
            source = args[func is torch.ops.aten.copy_.default]
            floats = (
                source.is_floating_point() and result.is_floating_point() and result.numel() > 1
            )
            if (
                floats
                and narrower(result.dtype, source.dtype)
                and narrower(result.dtype, self.model.dtype)
            ):
                name = dtype_name(result.dtype)
                self.casts[name] = tuple(dict.fromkeys((*self.casts.get(name, ()), self.inner)))
        return result


def _one_row(tensor: Tensor, rows: int, back: int) -> Tensor | None:
    if tensor.dim() >= 3 and tensor.shape[0] == 1 and tensor.shape[1] == rows:
        return tensor[0, back]
    return tensor[back] if tensor.dim() >= 2 and tensor.shape[0] == rows else None


@contextlib.contextmanager
def watching(watches: Iterable[Watch]) -> Iterator[None]:
    """Listens for as long as the context lasts."""
    with contextlib.ExitStack() as stack:
        for watch in watches:
            stack.enter_context(watch.attached())
        yield
