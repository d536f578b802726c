"""A cache that drops rows, told apart from positions that are counted from the rows which are left.

A compressed cache changes the logits in two ways: by what it dropped, and where the model asks it
how long the text is and it answers with the rows that it holds. The first is meant; the second puts
the next token beside the first ones, and is a fault. They are told apart by telling the position:
what is left then is what was dropped.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.models.adapter import Adapter
from kvinterp.models.hooks import Functions


@dataclasses.dataclass(frozen=True)
class Counted:
    """Where a token stands that is fed to a cache that dropped rows.

    Attributes:
        fed: The positions that were fed before it, and so where it stands in its text.
        position: Where it was put.
        told: How far its logits are from those of the forward without a cache, of the largest, once
            it is told where it stands.
        moved: How far they are from these where it is not told; None where neither was measured.
    """

    fed: int
    position: int
    told: float | None = None
    moved: float | None = None

    @property
    def said(self) -> str:
        """Which of the two it is."""
        off = "" if self.told is None else f", {self.told:.2g} of the largest logit"
        if self.position == self.fed:
            return f"positions go on (the token after {self.fed} stands at {self.fed}): what differs is what was dropped{off}"
        said = f"positions are counted from the rows that are left: the token after {self.fed} is put at {self.position}"
        if self.told is None or self.moved is None:
            return f"{said}, whatever else was dropped"
        moved = f"which alone moves its logits by {self.moved:.2g} of the largest"
        return f"{said}, {moved}; told where it stands, it is off by what was dropped{off}"


def _apart(got: Tensor, want: Tensor) -> float:
    return float((got.double() - want.double()).abs().max() / (want.double().abs().max() or 1.0))


@torch.no_grad()
def counted(adapter: Adapter, make: Callable[[], Any], tokens: Tensor) -> Counted | None:
    """Feeds all tokens but the last, and then that one with and without its position.

    Args:
        adapter: A transformers model.
        make: Makes the cache, empty.
        tokens: ``[1, position]``.

    Returns:
        None where the cache holds every position, or cannot be asked.
    """
    fed = tokens.shape[1] - 1
    with contextlib.suppress(Exception), adapter.own_state([]):
        _, cache = adapter.call_with_cache(tokens[:, :fed], make(), None, None)
        position, read = int(cache.get_seq_length()), list[int]()
        fed_at = torch.tensor([[fed]], device=tokens.device)
        untold, told = (
            adapter.call_with_cache(
                tokens[:, fed:], _noting(copy.deepcopy(cache), read), None, given
            )[0][0, -1]
            for given in (None, fed_at)
        )
        if read and max(read) <= fed:
            want = adapter.forward(tokens)[0, -1]
            return Counted(fed, position, _apart(told, want), _apart(untold, told))
    return None


def _noting(cache: Any, read: list[int]) -> Any:
    """Adds how many keys a cache gives to be read: what it keeps may have another form."""
    update = cache.update

    def noting(*given: Any, **more: Any) -> Any:
        made = update(*given, **more)
        read.append(int(made[0].shape[-2]))
        return made

    cache.update = noting
    return cache


@contextlib.contextmanager
def numbers_seen(seen: set[int]) -> Iterator[None]:
    """Adds the whole numbers that torch's functions make or index by inside, one number a tensor:
    where a position may stand.
    """

    def called(func: Any, args: Any, kwargs: Any) -> Any:
        result = func(*args, **kwargs)
        if (
            isinstance(result, Tensor)
            and result.dtype in (torch.int64, torch.int32)
            and 0 < result.numel() <= 1
        ):
            seen.add(int(result))
        if func is Tensor.__getitem__:
            index = args[1] if isinstance(args[1], tuple) else (args[1],)
            seen.update(at for part in index if isinstance(at := getattr(part, "start", part), int))
        return result

    with Functions(called):
        yield


def counted_by(step: Callable[[Tensor, Any], tuple[Any, Any]], tokens: Tensor) -> Counted | None:
    """The same of anybody's own step, by the whole numbers that it computes with: the length of the
    text, or of what it kept.

    Args:
        step: Token ids of new positions and a cache to their logits and the cache behind them.
        tokens: ``[1, position]``, the last of which is none of the lengths in question.

    Returns:
        None where its cache holds as many positions as were fed, or no such number was seen.
    """
    fed, seen = tokens.shape[1] - 1, set[int]()
    cache = step(tokens[:, :-1], None)[1]
    sizes = {size for tensor in _tensors(cache) if tensor.dim() >= 3 for size in tensor.shape[1:]}
    if fed in sizes or not sizes:
        return None
    with numbers_seen(seen):
        step(tokens[:, -1:], cache)
    if fed in seen:
        return Counted(fed, fed)
    kept = [number for number in seen if number in sizes and 0 < number < fed]
    return Counted(fed, max(kept)) if kept else None


def _tensors(held: Any, depth: int = 6) -> Iterator[Tensor]:
    if isinstance(held, Tensor):
        yield held
    elif depth:
        inside = (
            held.values()
            if isinstance(held, dict)
            else held
            if isinstance(held, list | tuple)
            else None
        )
        inside = vars(held).values() if inside is None and hasattr(held, "__dict__") else inside
        for value in inside or ():
            yield from _tensors(value, depth - 1)
