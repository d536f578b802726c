"""Why a tensor differs, shown by taking the cause away and finding what remains.

An excuse is granted only where the error vanishes with its cause, never because it is small:

- *order*: with one fixed order of additions for every sum, the cached step gives the
  recomputation's very bits.
- *cast*: with a fixed order, and every cast to a narrower dtype left out, it does; where constants
  were computed in a narrower dtype when the model was made, also with those computed again in
  float64.
- *choice*: the first thing that differs is which experts are chosen, among scores that the
  difference of the scores can bring past each other; with a fixed order the same ones are chosen.
- *rounding*: the two paths compute the same function in two ways (a recurrence step by step and in
  chunks). Then both are measured against the same block in float64 on the same inputs: the cached
  step may be no further from it than the recomputation is, or, in float32, the error is within
  float32's rounding and gone in float64. In float64 itself the error must be of the size that
  float64's rounding makes.
- *kernel*: larger than rounding with the machine's kernels, gone with a fixed order, and no coarser
  than a sum in 16 bits.

What none of these takes away is wrong.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.blocks import BlockHooks, BlockModel, Reference
from kvinterp.auditing.first_difference import DifferingTensor, Sight, paired, recomputed
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.values import narrower
from kvinterp.auditing.watch import CHOICE, Event
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant, KernelMode, Kernels
from kvinterp.paths.kernels.base import Operations

COARSE = 8.0
"""How much further off than rounding a coarse kernel may be."""
AS_FAR, ONCE = 2.0, 3**-0.5
"""How much further from float64 a cached step may be than the recomputation (root mean square), and
the root mean square error of rounding once, in unit roundoffs."""
WORST, FEW = 4.0, 4.0
"""The same for the worst element, and the unit roundoffs of the largest one that are always
allowed.
"""


@dataclasses.dataclass(frozen=True)
class ErrorCause:
    """What takes an error away.

    Attributes:
        word: ``order``, ``cast``, ``choice``, ``rounding``, ``kernel``, ``form`` (it computes the
            same, held otherwise); ``unknown`` where it could not be tried; empty where nothing
            takes it away.
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
    """No cast to a narrower dtype than the model's own: its wider values go through.

    Attributes:
        order: ``"native"``: on the machine's own kernels; ``"fixed"``: with a fixed order of
            additions.
    """

    order: str = "native"

    def mode(self, adapter: Adapter) -> KernelMode:
        """Intercepts each cast to a narrower dtype, and leaves it out."""
        before = BatchInvariant().mode(adapter).interceptors() if self.order == "fixed" else []

        def widened(func: Any, args: Any, kwargs: Any) -> Any:
            to = kwargs.get("dtype")
            # Not casts alone: what is made in a narrower dtype, or summed in one, would bring them
            #     back.
            if to is not None and to.is_floating_point and narrower(to, adapter.dtype):
                return func(*args, **{**kwargs, "dtype": adapter.dtype})
            return NotImplemented

        mode = KernelMode()
        vars(mode)["interceptors"] = lambda: [*before, Operations(widened)]
        return mode


@contextlib.contextmanager
def float64_constants(adapter: Adapter) -> Iterator[None]:
    """The model's buffers as its own code computes them in float64, in the place of float32 ones of
    the same values.

    Decays and frequencies are computed once, when a model is made, and keep the rounding that they
    got there.
    """
    source: Any = adapter.source
    before = torch.get_default_dtype()
    swapped: list[tuple[Any, str, Tensor]] = []
    try:
        torch.set_default_dtype(torch.float64)
        with torch.random.fork_rng(), torch.device(adapter.device):
            fresh = dict(type(source)(source.config).named_modules())
    # A class of the user's own may want other arguments.
    except Exception:
        fresh = {}
    finally:
        torch.set_default_dtype(before)
    try:
        near = 8 * unit_roundoff(torch.float32)
        for name, module in source.named_modules():
            for key, constant in list(module.named_buffers(recurse=False)):
                new = getattr(fresh.get(name), key, None)
                if (
                    not isinstance(new, Tensor)
                    or new.dtype != torch.float64
                    or new.shape != constant.shape
                ):
                    continue
                if constant.is_floating_point() and torch.allclose(
                    new, constant.double(), rtol=near, atol=0
                ):
                    swapped.append((module, key, constant))
                    setattr(module, key, new)
        yield
    finally:
        for module, key, constant in swapped:
            setattr(module, key, constant)


def excused(dtype: torch.dtype, limit: float) -> float:
    """The largest relative error that another order of additions can be the reason of, as coarse as
    kernels of a dtype are.

    Args:
        dtype: What the kernel is given.
        limit: What rounding explains there, see :func:`kvinterp.auditing.ladder.band`.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return max(COARSE * unit_roundoff(torch.bfloat16), 2 * limit)
    if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest":
        # Products of float32 numbers that are rounded to ten bits, or to seven, as torch was told.
        return COARSE * unit_roundoff(torch.bfloat16)
    return COARSE * limit


def coarsest(casts: dict[str, tuple[str, ...]]) -> str:
    """The narrowest dtype cast to."""
    return max(casts, key=lambda name: torch.finfo(getattr(torch, name)).eps) if casts else ""


def beyond_truth(
    adapter: Adapter, sight: Sight, unit: float
) -> tuple[DifferingTensor | None, bool]:
    """The first tensor that a cached step has further from float64's than the recomputation has it,
    or None.

    And whether what the block computes is further from it: where it is not, that tensor may be held
    in another form.

    Args:
        adapter: The model in float64.
        sight: What was seen of a block on both sides.
        unit: Unit roundoff of the dtype it was seen in.

    Raises:
        RuntimeError: The model does not run in float64 on the same inputs.
    """
    truth = _truth(adapter, sight)
    if truth is None and other_attention(adapter):
        # A kernel that takes 16 bits only: the same attention in torch's own operations.
        truth = _truth(adapter, sight)
    if truth is None:
        raise RuntimeError("the model cannot be run in float64 on the same inputs")
    findings = {(f.tensor, f.module): f for f in reversed(sight.findings(0.0))}
    first: DifferingTensor | None = None
    for event, other, true in paired(sight.mine, sight.theirs, truth):
        finding = findings.get((event.name, event.module))
        if event.name == CHOICE and other is not None and event.chosen != other.chosen:
            finding = findings[CHOICE, event.module]
            return (first, False) if finding.nearly_equal else (first or finding, True)
        if (
            finding is None
            or true is None
            or other is None
            or event.name in ("attention mask", CHOICE)
        ):
            continue
        by_position = event.name in ("K", "V")
        if finding.error == math.inf or _further(
            event.tensor, other.tensor, true.tensor, unit, by_position
        ):
            first = first or finding
            if sight.is_end(finding):
                return first, True
    return first, False


def _truth(adapter: Adapter, sight: Sight) -> list[Event] | None:
    """What happens on the same inputs in float64, without the model's casts if it runs without;
    None where it does not run.
    """
    assert sight.reference is not None
    for kernels in (WithoutCasts(), None):
        hooks = BlockHooks(BlockModel(adapter, kernels))
        inputs, outputs = (
            {c: t.double() for c, t in side.items()}
            for side in (sight.reference.inputs, sight.reference.outputs)
        )
        hooks.reference = Reference(
            sight.reference.tokens, sight.reference.logits.double(), inputs, outputs
        )
        with contextlib.suppress(RuntimeError, ValueError, TypeError), hooks.attached():
            return recomputed(hooks, sight.feed, sight.layer)
    return None


def _further(mine: Tensor, theirs: Tensor, true: Tensor, unit: float, by_position: bool) -> bool:
    if not mine.shape == theirs.shape == true.shape:
        return False
    a, b, t = mine.double(), theirs.double(), true.double()
    if by_position:
        # Only the keys and values that differ, so that one wrong one does not hide among many
        # right ones.
        apart = (a != b).flatten(0, -3).any(-1).any(0)
        a, b, t = a[..., apart, :], b[..., apart, :], t[..., apart, :]
    finite = a.isfinite() & b.isfinite() & t.isfinite()
    # Masked scores hold the most negative number of each dtype, which says nothing.
    finite &= t.abs() < torch.finfo(torch.bfloat16).max / 4
    finite &= (a.abs() < 6e4) & (b.abs() < 6e4) if mine.dtype == torch.float16 else finite
    if not bool(finite.any()):
        return False
    off, other, size = (part[finite].abs() for part in (a - t, b - t, t))
    mean = _rms(off) > max(AS_FAR * _rms(other), ONCE * unit * _rms(size))
    worst = off.max() > max(WORST * other.max(), FEW * unit * size.max())
    return bool(mean) or bool(worst)


def _rms(values: Tensor) -> Tensor:
    return values.square().mean().sqrt()


def other_attention(adapter: Adapter) -> bool:
    """Gives a copy of the model attention in torch's own operations; whether it had another kernel
    before.
    """
    source: Any = adapter.source
    if adapter.facts.attention == "eager" or not hasattr(source, "set_attn_implementation"):
        return False
    try:
        source.set_attn_implementation("eager")
    # transformers refuses with errors of several kinds.
    except Exception:
        return False
    return True
