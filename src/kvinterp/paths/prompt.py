"""Whether a prompt itself has other logits with a cache than without one, which is asked before
anything is decoded.

Both forwards are a model's own: ``use_cache=False``, and one on the cache that it makes. What
rounding makes of either is
measured: how far it is from the same forward in float64, and from itself run again. Where the two
differ by more, they differ in float64 as well or one of them loses what the other keeps.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from kvinterp.common.words import dtype_word
from kvinterp.errors import KvinterpError
from kvinterp.models import Adapter
from kvinterp.models.hooks import first_of, put_first
from kvinterp.paths.model_cache import own_store
from kvinterp.paths.path import ExecutionPath

FURTHER = 4.0
"""How many times as far from float64 rounding alone may leave one forward as the other."""


@dataclasses.dataclass(frozen=True)
class PromptDifference:
    """How far the logits of a prompt are apart with and without a cache.

    Attributes:
        positions: Tokens of the prompt.
        size: The largest difference of a logit.
        limit: What rounding explains of it.
        in_float64: The same difference in float64; None where the model does not run there.
        off: The forward that is off, ``"without a cache"`` or ``"with a cache"``; empty where that
            cannot be told.
        why: What shows it, or why it cannot be told.
        alone: The forward that stands alone, where both are what they are in float64, so that
            numbers do not tell which is off.
    """

    positions: int
    size: float
    limit: float
    in_float64: float | None
    off: str
    why: str
    alone: str = ""

    @property
    def said(self) -> str:
        """In two sentences."""
        exact = "" if self.in_float64 is None else f", in float64 by {self.in_float64:.2g}"
        which = "Which of the two is off cannot be told"
        if self.off or self.alone:
            which = (
                f"The forward {self.off} is off"
                if self.off
                else f"The forward {self.alone} stands alone"
            )
        return (
            f"The prompt itself, {self.positions} tokens, differs with and without a cache before anything is decoded: by "
            f"{self.size:.2g} in its logits, where rounding explains {self.limit:.2g}{exact}. {which}: {self.why}."
        )


@torch.no_grad()
def prompt_difference(adapter: Adapter, tokens: Tensor) -> PromptDifference | None:
    """Asks whether a prompt has other logits with a cache; None where it has not, but for rounding.

    Args:
        adapter: The model, in its dtype.
        tokens: ``[1, position]``.
    """
    with adapter.left_as_found():
        without, cached = _without(adapter, tokens), _on_cache(adapter, tokens, tokens.shape[1])
        if torch.equal(without, cached) or not bool((without - cached).isfinite().any()):
            return None
        size, spread = _apart(without, cached), _apart(without, _without(adapter, tokens))
        both_in_float64 = (
            _in_float64(adapter, tokens) if adapter.dtype != torch.float64 else (without, cached)
        )
        if both_in_float64 is None or adapter.dtype == torch.float64:
            limit = max(_apart(_moved(adapter, tokens), without), (1 + FURTHER) * spread)
        else:
            off_without, off_cached = (
                _apart(without, both_in_float64[0]),
                _apart(cached, both_in_float64[1]),
            )
            limit = (1 + FURTHER) * max(min(off_without, off_cached), spread)
        if size <= limit:
            return None
        sizes = tokens.shape[1], size, limit
        if both_in_float64 is None:
            return PromptDifference(*sizes, None, "", "the model does not run in float64")
        left = _apart(*both_in_float64)
        if left <= size / 2:
            off = "without a cache" if off_without > off_cached else "with a cache"
            far, near = max(off_without, off_cached), min(off_without, off_cached)
            return PromptDifference(
                *sizes, left, off, f"it is {far:.2g} from float64 of both, the other {near:.2g}"
            )
        return PromptDifference(*sizes, left, "", *_alone(adapter, tokens, without, cached, limit))


def _alone(
    adapter: Adapter, tokens: Tensor, without: Tensor, cached: Tensor, limit: float
) -> tuple[str, str]:
    """What is said of two forwards that are what they are in float64, and which stands alone beside
    tokens fed one by one.

    That one of them is wrong does not follow: code that asks whether a cache is there may be wrong
    in either answer.
    """
    singly = _on_cache(adapter, tokens, 1)
    from_cached, from_without = _apart(singly, cached), _apart(singly, without)
    start = "both are what they are in float64, and fed token by token on the cache the prompt has the logits of the forward"
    if from_cached <= limit < from_without:
        return (
            f"{start} with one (to {from_cached:.2g}); which of the two is meant, numbers do not tell",
            "without a cache",
        )
    if from_without <= limit < from_cached:
        return (
            f"{start} without one (to {from_without:.2g}); which of the two is meant, numbers do not tell",
            "with a cache",
        )
    return (
        "both are what they are in float64, and fed token by token on the cache the prompt has the logits of neither",
        "",
    )


@torch.no_grad()
def rows_null(adapter: Adapter, tokens: Tensor, start: int) -> dict[str, Any] | None:
    """How far two plain forwards are apart at the same positions, one of the whole text and one of
    half of what was decoded.

    Args:
        adapter: The model, in its dtype.
        tokens: ``[1, position]``, the text.
        start: The first position that is compared.

    Returns:
        The largest difference of a logit, the unit in the last place of the largest logit that any
        position's likeliest token has, how many positions were compared, and the dtype; None where
        the text is too short, or something is not finite.
    """
    stop = start + (tokens.shape[1] - start + 1) // 2
    if stop == tokens.shape[1]:
        return None
    whole, half = (
        _forward(adapter, text)[0, start:].double() for text in (tokens, tokens[:, :stop])
    )
    # The likeliest token is asked about, since what a model masks has a logit of any size.
    top, same = whole.amax(-1).abs().max(), whole[: len(half)] == half
    difference = (whole[: len(half)] - half).abs().masked_fill(same, 0.0).max()
    if not bool(top.isfinite() & difference.isfinite()):
        return None
    finfo = torch.finfo(adapter.dtype)
    unit = finfo.eps * 2.0 ** top.clamp(min=finfo.tiny).log2().floor().item()
    return {
        "max_abs_logit": difference.item(),
        "unit": unit,
        "positions": len(half),
        "dtype": dtype_word(adapter.dtype),
    }


def _forward(adapter: Adapter, tokens: Tensor) -> Tensor:
    with adapter.own_state([]):
        return adapter.forward(tokens)


def _without(adapter: Adapter, tokens: Tensor) -> Tensor:
    return _forward(adapter, tokens).double()


def _on_cache(adapter: Adapter, tokens: Tensor, piece: int) -> Tensor:
    """Logits of all positions on a model's own cache, fed so many at a time."""
    with adapter.own_state([]):
        store = own_store(adapter, ExecutionPath(), 1, tokens.shape[1], 0, ())
        return torch.cat(
            [adapter.forward(part, store).double() for part in tokens.split(piece, 1)], 1
        )


def _in_float64(adapter: Adapter, tokens: Tensor) -> tuple[Tensor, Tensor] | None:
    """Both in float64, or None where the model does not run there."""
    try:
        exact = adapter.at(torch.float64)
        return _without(exact, tokens), _on_cache(exact, tokens, tokens.shape[1])
    # Kernels that take 16 bits only, devices without float64, memory.
    except (KvinterpError, RuntimeError, TypeError, ValueError):
        return None


def _moved(adapter: Adapter, tokens: Tensor) -> Tensor:
    """The forward without a cache where what every block returns is moved by as much as its
    rounding may, at random.
    """
    size = torch.finfo(adapter.dtype).eps / 2 * adapter.facts.width**0.5
    generator = torch.Generator().manual_seed(0)

    def change(_: object, __: object, output: object) -> object:
        stream = first_of(output)
        noise = (
            torch.rand(stream.shape, generator=generator, dtype=torch.float64).to(stream.device) * 2
            - 1
        )
        return put_first(output, (stream * (1 + size * noise)).to(stream.dtype))

    handles = [block.register_forward_hook(change) for block in adapter.blocks]
    try:
        return _without(adapter, tokens)
    finally:
        for handle in handles:
            handle.remove()


def _apart(a: Tensor, b: Tensor) -> float:
    """The largest difference of a logit, of those that are finite on both sides."""
    gap = (a - b).abs()
    return float(gap[gap.isfinite()].max())
