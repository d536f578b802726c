"""Where a program is wrong: every module heard in its last forwards and in the plain forward, and the first that parts.

The keys and values that a cache gives to be read are heard too, beside those of one forward of the whole text, and the queries
that torch's attention is given. Only columns that hold tokens are compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from kvinterp.models.hooks import first_of
from kvinterp.programs.program import Program
from kvinterp.programs.running import WRONG, Run
from kvinterp.programs.subject import ModelSubject, apart


@dataclasses.dataclass(frozen=True)
class Place:
    """The first tensor that parts.

    Attributes:
        layer: The block; behind the last the number of blocks.
        module: The module's path.
        tensor: ``Q``, ``K``, ``V``, ``input of`` or ``output of`` the module.
        column: The first column of the program at which it parts.
        error: How far, of the tensor's largest number.
    """

    layer: int
    module: str
    tensor: str
    column: int
    error: float


Event = tuple[str, str, Tensor]
"""A module's path, what the tensor is, and the tensor, ``[row, column, ...]``."""


@contextlib.contextmanager
def heard(model: nn.Module, seen: list[list[Event]]) -> Iterator[None]:
    """Appends what every module is given and returns, and what the cache returns; a list a forward of the model."""
    stack: list[str] = []

    def before(module: nn.Module, args: Any, kwargs: Any, name: str) -> None:
        stack.append(name)
        if module is model:
            seen.append([])
        given = args or tuple(kwargs.get(each) for each in ("hidden_states", "x", "input"))
        add(name, "input of", next((t for t in given if isinstance(t, Tensor)), None))

    def after(module: nn.Module, args: Any, out: Any, name: str) -> None:
        if stack:
            stack.pop()
        made = first_of(out) if isinstance(out, tuple | list | Tensor) else None
        add(name, "output of", made if isinstance(made, Tensor) else None)

    def add(name: str, what: str, tensor: Tensor | None) -> None:
        if seen and name and tensor is not None and tensor.is_floating_point() and tensor.dim() >= 2:
            seen[-1].append((name, what, tensor.detach().clone()))

    with contextlib.ExitStack() as hooks:
        for name, module in model.named_modules():
            hooks.enter_context(
                module.register_forward_pre_hook(lambda m, a, k, name=name: before(m, a, k, name), with_kwargs=True)
            )
            hooks.enter_context(module.register_forward_hook(lambda m, a, out, name=name: after(m, a, out, name)))
        hooks.enter_context(_cache_heard(stack, seen))
        hooks.enter_context(_Queries(lambda query: add(stack[-1] if stack else "", "Q", query.transpose(1, 2))))
        yield


class _Queries(TorchFunctionMode):
    """Hears the queries that torch's attention is given, ``[row, head, column, width]``."""

    def __init__(self, hear: Callable[[Tensor], None]) -> None:
        super().__init__()
        self._hear = hear

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.scaled_dot_product_attention:
            query = args[0] if args else kwargs["query"]
            if query.dim() == 4:
                self._hear(query)
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def _cache_heard(stack: list[str], seen: list[list[Event]]) -> Iterator[None]:
    """What a transformers cache gives to be read, as of the module that asks."""
    from transformers.cache_utils import Cache

    own = Cache.update

    def update(cache: Any, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
        # What is given is the tensor that a module made: it stands in the list as that module's.
        made = own(cache, key, value, *args, **kwargs)
        for name, tensor in zip(("K", "V"), made, strict=False):
            if seen and stack and isinstance(tensor, Tensor) and tensor.dim() == 4:
                seen[-1].append((stack[-1], name, tensor.detach().transpose(1, 2).clone()))
        return made

    Cache.update = update  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        Cache.update = own  # type: ignore[method-assign]


def placed(subject: ModelSubject, program: Program) -> Place | None:
    """Runs a wrong program beside the plain forward of each row's own tokens; None where no module parts before the logits."""
    run, seen, marks = Run(subject, program), list[list[Event]](), list[int]()
    took, judge = run.took, run.judge
    state: dict[str, Any] = {}

    def marked(*given: Any) -> None:
        marks.append(len(seen))
        took(*given)

    def judged(logits: Tensor, ids: Tensor, mask: Tensor, *given: Any, **more: Any) -> None:
        state.update(mask=torch.cat([run.mask, mask], 1), texts=[list(text) for text in run.texts])
        judge(logits, ids, mask, *given, **more)

    plain = subject.plain

    def aside(*given: Any) -> Tensor:
        # The reference is no forward of the program.
        before = len(seen)
        try:
            return plain(*given)
        finally:
            del seen[before:]

    # Their own methods run within.
    vars(run).update(took=marked, judge=judged, heard=lambda: state.setdefault("count", len(seen)))
    vars(subject)["plain"] = aside
    try:
        with heard(subject.adapter.source, seen):
            stop = run.run()[0]
    finally:
        del vars(subject)["plain"]
    if stop != WRONG or "mask" not in state or "count" not in state:
        return None
    mine = seen[marks[-1] if marks else 0 : state["count"]]
    return _first(subject, mine, state["mask"], state["texts"])


def _first(subject: ModelSubject, mine: list[list[Event]], mask: Tensor, texts: list[list[int]]) -> Place | None:
    whole = [_alone(subject, text) for text in texts]
    first = next(((name, what) for name, what, _ in mine[0] if what == "output of"), None) if mine else None
    widths = [_width(forward) for forward in mine]
    column = mask.shape[1] - sum(widths)
    if column < 0:
        return None
    blocks = _blocks(subject)
    for forward, width in zip(mine, widths, strict=True):
        part, before = mask[:, column : column + width].bool(), mask[:, :column].sum(1).tolist()
        so_far = mask[:, : column + width].bool()
        times: dict[tuple[str, str], int] = {}
        entered = False
        for name, what, tensor in forward:
            entered = entered or _layer(blocks, name) < len(blocks)
            nth = times[name, what] = times.get((name, what), -1) + 1
            for row, text in enumerate(texts):
                want = whole[row].get((name, what, nth))
                if want is None or row >= tensor.shape[0]:
                    continue
                if what in ("K", "V"):
                    kept = so_far[row][-tensor.shape[1] :] if tensor.shape[1] <= so_far.shape[1] else so_far[row]
                    got = tensor[row][: len(kept)][kept]
                    end = int(so_far[row].sum())
                    theirs = want[0][end - len(got) : end] if want.shape[1] >= end >= len(got) else None
                else:
                    count = int(part[row].sum())
                    if tensor.shape[1] != width or want.shape[1] != len(text) or not count:
                        continue
                    kept, got = part[row], tensor[row][part[row]]
                    theirs = want[0][before[row] : before[row] + count]
                if theirs is None or theirs.shape != got.shape or not len(got):
                    continue
                each = [apart(a, b) for a, b in zip(got, theirs, strict=True)]
                if not max(each) <= subject.limit:
                    if what == "output of" and (name, what) == first:
                        return None  # Other tokens stand in these columns.
                    if not entered:
                        continue  # Positions and masks are seen in what the first block makes of them.
                    at = next(n for n, error in enumerate(each) if not error <= subject.limit)
                    columns = kept.nonzero().flatten().tolist()
                    start = column if what not in ("K", "V") else column + width - len(kept)
                    return Place(
                        _layer(blocks, name),
                        name,
                        what if what in ("Q", "K", "V") else f"{what} {name}",
                        start + columns[at],
                        max(each),
                    )
        column += width
    return None


def _alone(subject: ModelSubject, text: list[int]) -> dict[tuple[str, str, int], Tensor]:
    """What one forward of a row's own tokens computes; with a new cache where K and V are asked for."""
    found: dict[tuple[str, str, int], Tensor] = {}
    if not text:
        return found
    ids = subject.tensor([text])
    for cached in ("yes", "no"):
        seen: list[list[Event]] = []
        with subject.running(), heard(subject.adapter.source, seen):
            subject.feed(ids, None, None, None) if cached == "yes" else subject.plain(ids)
        times: dict[tuple[str, str], int] = {}
        for name, what, tensor in seen[-1] if seen else []:
            nth = times[name, what] = times.get((name, what), -1) + 1
            if (what in ("K", "V")) == (cached == "yes"):
                found[name, what, nth] = tensor
    return found


def _width(forward: list[Event]) -> int:
    """Columns that a forward was fed: those of its first tensor."""
    return next((int(t.shape[1]) for _, what, t in forward if what not in ("K", "V") and t.dim() >= 3), 0)


def _blocks(subject: ModelSubject) -> list[str]:
    """The paths of the blocks, each with a dot at its end."""
    names = {module: path for path, module in subject.adapter.source.named_modules()}
    return [f"{names[block]}." for block in subject.adapter.blocks if block in names]


def _layer(blocks: list[str], name: str) -> int:
    """The block that a module stands in; behind them all their number."""
    return next((layer for layer, block in enumerate(blocks) if f"{name}.".startswith(block)), len(blocks))
