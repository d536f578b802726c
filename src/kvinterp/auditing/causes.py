"""Why a tensor differs, shown by taking the cause away and finding what remains.

An excuse is granted only where the error vanishes with its cause, never because it is small:

- *order*: with one fixed order of additions for every sum, the cached step gives the recomputation's very bits.
- *cast*: with a fixed order, and every cast to a narrower dtype left out, it does; where constants were computed in a
  narrower dtype when the model was made, also with those computed again in float64.
- *choice*: the first thing that differs is which experts are chosen, among scores that the difference of the scores can bring
  past each other; with a fixed order the same ones are chosen.
- *rounding*: the two paths compute the same function in two ways (a recurrence step by step and in chunks). Then both are
  measured against the same block in float64 on the same inputs: the cached step may be no further from it than the
  recomputation is, or, in float32, the error is within float32's rounding and gone in float64. In float64 itself the error
  must be of the size that float64's rounding makes.
- *kernel*: larger than rounding with the machine's kernels, gone with a fixed order, and no coarser than a sum in 16 bits.

What none of these takes away is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from kvinterp.auditing.first_difference import Feed, Finding, Sight, look, recomputed, states_of
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.subject import BlockTaps, Reference, Subject, referenced
from kvinterp.auditing.values import narrower
from kvinterp.auditing.watch import CHOICE, Event
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant, KernelMode, Kernels

__all__ = [
    "EXCUSED",
    "Cause",
    "FixedWithoutCasts",
    "WithoutCasts",
    "Witness",
    "beyond_truth",
    "coarsest",
    "other_attention",
    "seen_again",
    "wide_constants",
]

EXCUSED = 8 * unit_roundoff(torch.bfloat16)
"""The largest relative error that another order of additions can be the reason of, as coarse as kernels are."""
AS_FAR, ONCE = 2.0, 3**-0.5
"""How much further from float64 a cached step may be than the recomputation (root mean square), and the root mean square
error of rounding once, in unit roundoffs."""
WORST, FEW = 4.0, 4.0
"""The same for the worst element, and the unit roundoffs of the largest one that are always allowed."""


@dataclasses.dataclass(frozen=True)
class Cause:
    """What takes an error away.

    Attributes:
        word: ``order``, ``cast``, ``choice``, ``rounding``, ``kernel``; ``unknown`` where it could not be tried; empty where
            nothing takes it away.
        dtype: For a cast, the dtype cast to.
        module: For a cast, the module that casts.
        left: The error that remains without the cause.
        detail: What was tried, in a few words.
    """

    word: str
    dtype: str = ""
    module: str = ""
    left: float = 0.0
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class WithoutCasts(Kernels):
    """The machine's own kernels, and no cast to a narrower dtype than the model's own: its wider values go through."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts casts."""
        return _Mode([], adapter.dtype)


@dataclasses.dataclass(frozen=True)
class FixedWithoutCasts(Kernels):
    """A fixed order of additions, and no cast to a narrower dtype than the model's own."""

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts reductions and casts."""
        return _Mode(BatchInvariant().mode(adapter).interceptors(), adapter.dtype)


class _Mode(KernelMode):
    def __init__(self, before: list[Any], dtype: torch.dtype) -> None:
        super().__init__()
        self.before, self.dtype = before, dtype

    def interceptors(self) -> list[Any]:
        return [*self.before, _Widened(self.dtype)]


class _Widened(TorchDispatchMode):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        to = kwargs.get("dtype")
        # Not casts alone: what is made in a narrower dtype, or summed in one, would bring them back.
        if to is not None and to.is_floating_point and narrower(to, self.dtype):
            kwargs = {**kwargs, "dtype": self.dtype}
        return func(*args, **kwargs)


@contextlib.contextmanager
def wide_constants(twin: Adapter) -> Iterator[None]:
    """The model's buffers as its own code computes them in float64, in the place of float32 ones of the same values.

    Decays and frequencies are computed once, when a model is made, and keep the rounding that they got there.
    """
    source: Any = twin.source
    before = torch.get_default_dtype()
    swapped: list[tuple[Any, str, Tensor]] = []
    try:
        torch.set_default_dtype(torch.float64)
        with torch.random.fork_rng(), torch.device(twin.device):
            fresh = dict(type(source)(source.config).named_modules())
    # A class of the user's own may want other arguments.
    except Exception:
        fresh = {}
    finally:
        torch.set_default_dtype(before)
    try:
        near = 8 * unit_roundoff(torch.float32)
        for name, module in source.named_modules():
            for key, held in list(module.named_buffers(recurse=False)):
                new = getattr(fresh.get(name), key, None)
                if not isinstance(new, Tensor) or new.dtype != torch.float64 or new.shape != held.shape:
                    continue
                if held.is_floating_point() and torch.allclose(new, held.double(), rtol=near, atol=0):
                    swapped.append((module, key, held))
                    setattr(module, key, new)
        yield
    finally:
        for module, key, held in swapped:
            setattr(module, key, held)


def coarsest(casts: dict[str, tuple[str, ...]]) -> str:
    """The narrowest dtype cast to."""
    return max(casts, key=lambda name: torch.finfo(getattr(torch, name)).eps) if casts else ""


@dataclasses.dataclass(frozen=True)
class Witness:
    """What is kept of one block until the model is there in float64: what both sides saw, and what they were given.

    Attributes:
        reference: The rows every block was given.
        sight: What was seen on both sides.
    """

    reference: Reference
    sight: Sight


def beyond_truth(twin: Adapter, witness: Witness, unit: float) -> Finding | None:
    """The first tensor that a cached step has further from float64's than the recomputation has it, or None.

    Args:
        twin: The model in float64.
        witness: What was seen.
        unit: Unit roundoff of the dtype it was seen in.
    """
    sight = witness.sight
    truth = _truth(twin, witness, WithoutCasts()) or _truth(twin, witness, None)
    if truth is None and other_attention(twin):
        # A kernel that takes 16 bits only: the same attention in torch's own operations.
        truth = _truth(twin, witness, WithoutCasts()) or _truth(twin, witness, None)
    if truth is None:
        raise RuntimeError("the model cannot be run in float64 on the same inputs")
    waiting: dict[tuple[str, str], list[Event]] = {}
    for event in truth:
        waiting.setdefault((event.name, event.module), []).append(event)
    found = {(f.tensor, f.module): f for f in reversed(sight.findings(0.0))}
    for event, other in sight.pairs():
        queue = waiting.get((event.name, event.module))
        true = queue.pop(0) if queue else None
        if event.name == CHOICE and other is not None and event.chosen != other.chosen:
            return None if found[CHOICE, event.module].nearly_equal else found[CHOICE, event.module]
        if true is None or other is None or event.name in ("attention mask", CHOICE):
            continue
        finding = found.get((event.name, event.module))
        if finding is None:
            continue
        held = event.name in ("K", "V")
        if finding.error == math.inf or _further(event.tensor, other.tensor, true.tensor, unit, held):
            return finding
    return None


def _further(mine: Tensor, theirs: Tensor, true: Tensor, unit: float, by_position: bool) -> bool:
    if not mine.shape == theirs.shape == true.shape:
        return False
    a, b, t = mine.double(), theirs.double(), true.double()
    if by_position:
        # Of all keys and values only those that differ: one wrong one does not hide among many right ones.
        apart = (a != b).flatten(0, -3).any(-1).any(0)
        a, b, t = a[..., apart, :], b[..., apart, :], t[..., apart, :]
    kept = a.isfinite() & b.isfinite() & t.isfinite()
    # Masked scores hold the most negative number of each dtype, which says nothing.
    kept &= t.abs() < torch.finfo(torch.bfloat16).max / 4
    kept &= (a.abs() < 6e4) & (b.abs() < 6e4) if mine.dtype == torch.float16 else kept
    if not bool(kept.any()):
        return False
    off, other = (a - t)[kept], (b - t)[kept]
    size = t[kept]
    mean = off.square().mean().sqrt() > max(
        AS_FAR * other.square().mean().sqrt(), ONCE * unit * size.square().mean().sqrt()
    )
    worst = off.abs().max() > max(WORST * other.abs().max(), FEW * unit * size.abs().max())
    return bool(mean) or bool(worst)


def other_attention(twin: Adapter) -> bool:
    """Gives a copy of the model attention in torch's own operations; whether it had another kernel before."""
    source: Any = twin.source
    if twin.facts.attention == "eager" or not hasattr(source, "set_attn_implementation"):
        return False
    try:
        source.set_attn_implementation("eager")
    # transformers refuses with errors of several kinds.
    except Exception:
        return False
    return True


def _truth(twin: Adapter, witness: Witness, kernels: Kernels | None) -> list[Event] | None:
    sight, reference = witness.sight, witness.reference.in_dtype(torch.float64)
    taps = BlockTaps(Subject(twin, kernels))
    inner = [sight.layer] if 0 <= sight.layer < len(taps.subject.blocks) else []
    try:
        with taps.attached():
            watches, ends = recomputed(taps, reference, sight.feed, inner)
            before, after = ends[sight.layer]
            if not inner:
                return [*before, *after]
            _, cache = taps.feed(reference, 0, sight.feed.stop, None)
            watch = watches[sight.layer]
            return [*before, *watch.events, *states_of(taps.subject, cache, watch, sight.layer), *after]
    except (RuntimeError, ValueError, TypeError):
        return None


def seen_again(
    subject: Subject, prompt: Sequence[int], feeds: Sequence[Feed], layers: Sequence[int]
) -> tuple[Reference, list[dict[int, Sight]]]:
    """One case fed again with these blocks watched: the reference, and what was seen in every feed that is looked at."""
    with referenced(subject, torch.tensor([list(prompt)], device=subject.adapter.device)) as (taps, reference):
        return reference, list(look(taps, reference, feeds, layers))
