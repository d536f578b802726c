"""Judging one rung: each block that differs is looked into, and each possible cause is taken away to see what remains."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd
import torch

from kvinterp.auditing.causes import (
    EXCUSED,
    Cause,
    FixedWithoutCasts,
    WithoutCasts,
    Witness,
    beyond_truth,
    coarsest,
    seen_again,
    wide_constants,
)
from kvinterp.auditing.first_difference import Differing, Feed, Finding, Sight, differing
from kvinterp.auditing.ladder import Plan, Rung, band
from kvinterp.auditing.subject import Reference, Subject
from kvinterp.auditing.watch import CHOICE
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant, Kernels, Native
from kvinterp.reading.vocabulary import ONE_BY_ONE

__all__ = ["ONE_BY_ONE", "Judged", "RungJudge"]

HARD = "gone with a fixed order; the recomputation is as far from float64 on the same inputs"
FURTHER = "further from float64 on the same inputs than the recomputation"
THERE_TOO = "there in float64 too"
LOOKED_AT = 3
"""How many single tokens before a wrong one are looked into as well: a state goes wrong before what it feeds."""


@dataclasses.dataclass(frozen=True)
class Judged:
    """One block that differs, and what takes the difference away.

    Attributes:
        finding: Its first tensor that differs, or that nothing takes away.
        cause: What takes the error away; its word is empty where nothing does.
        kernels: How it was seen: ``fixed order``, ``native`` (a fixed order was tried too) or ``none fixed``.
        fed: How the tokens were fed: one by one, or several at once and how.
        numbered: Whether it is gone once the model is told its tokens' positions: then it numbers them wrongly.
    """

    finding: Finding
    cause: Cause
    kernels: str
    fed: str
    numbered: bool = False


class RungJudge:
    """Looks into the blocks that differ on one rung.

    Args:
        twin: The model in the rung's dtype.
        rung: What it showed.
        plan: What was run.
        terms: The longest sum in the model.
    """

    def __init__(self, twin: Adapter, rung: Rung, plan: Plan, terms: int) -> None:
        self.twin: Adapter | None = twin
        self.rung, self.plan, self.name, self.dtype = rung, plan, rung.name, rung.dtype
        self.limit = band(rung.dtype, terms)
        self.terms = terms
        self.found: list[Judged] = []
        self.open: list[tuple[int, Witness, Rung, Any]] = []

    def judge(self) -> list[Judged]:
        """What was found, in the order of the layers; what needs the model in float64 stays open (see :meth:`settle`)."""
        if self.rung.fixed is not None:
            self._fixed(self.rung.fixed)
            self._kernels(self.rung.fixed)
        else:
            self._native()
        return self._ordered()

    def release(self) -> None:
        """Lets go of the model, so that it is not kept while another copy is made."""
        self.twin = None

    def settle(self, twin: Adapter | None, clean: Collection[int] | None = None) -> list[Judged]:
        """Judges what stayed open beside the model in float64.

        Args:
            twin: The model in float64, or None where there is none.
            clean: The layers in which the float64 rung found nothing wrong: an error within float32's rounding is gone there.
                None where there is no such rung; then each case is run in float64 here, where rounding must be gone.
        """
        for index, witness, side, row in self.open:
            judged = self.found[index]
            try:
                wrong = None if twin is None else beyond_truth(twin, witness, self.rung.unit)
                if twin is None:
                    raise RuntimeError("the model cannot be run in float64 here")
                if wrong is None and clean is None and judged.cause.word == "rounding":
                    left = self._left_in_float64(twin, side, row, judged.finding.layer)
                    if left > band(torch.float64 if self.dtype == torch.float32 else torch.float32, self.terms):
                        self.found[index] = dataclasses.replace(judged, cause=Cause("", left=left, detail=THERE_TOO))
                        continue
            except RuntimeError as error:
                if judged.cause.word == "kernel":
                    continue
                self.found[index] = dataclasses.replace(judged, cause=Cause("unknown", detail=str(error)))
                continue
            if judged.cause.word == "kernel":
                # Where the recomputation is as far from float64, no kernel is coarse: the tensor is hard to compute.
                if wrong is None:
                    self.found[index] = dataclasses.replace(judged, cause=Cause("order", detail=HARD))
            elif wrong is not None and self.dtype == torch.float32 and judged.finding.layer in (clean or ()):
                if wrong.error > self.limit:
                    cause = Cause("", left=wrong.error, detail=FURTHER)
                    self.found[index] = dataclasses.replace(judged, finding=wrong, cause=cause)
            elif wrong is not None:
                cause = Cause("", left=wrong.error, detail=FURTHER)
                self.found[index] = dataclasses.replace(judged, finding=wrong, cause=cause)
        self.open = []
        return self._ordered()

    def _ordered(self) -> list[Judged]:
        # Within a layer one token at a time before several at once: what is wrong in both is first seen there.
        return sorted(self.found, key=lambda j: (j.finding.layer, j.fed != ONE_BY_ONE, j.finding.position))

    # With a fixed order every difference has another reason ---------------------------------------------------------------

    def _fixed(self, fixed: Rung) -> None:
        every = fixed.every_error
        for row, layers in _cases(every[every["error"] > 0]):
            reference, sights = self._look(fixed, BatchInvariant(), row, layers)
            found = differing(sights, 0.0)
            casting = [layer for layer, (sight, _) in found.items() if sight.casts]
            # What computes in two dtypes on purpose does not run in one.
            left = self._tried(fixed, FixedWithoutCasts(), row, casting) if casting else None
            for layer, (sight, tensors) in found.items():
                remaining = None if left is None else left[layer][1] if layer in left else []
                self._explain(row, layer, sight, tensors, reference, remaining, fixed)

    def _explain(
        self,
        row: Any,
        layer: int,
        sight: Sight,
        tensors: list[Finding],
        reference: Reference,
        left: list[Finding] | None,
        side: Rung,
    ) -> None:
        """One block that differs with a fixed order: a cast's, rounding's, or nobody's."""
        kernels = "fixed order" if side is self.rung.fixed else "none fixed"
        remaining = tensors if left is None else left
        worst = max((f.error for f in remaining), default=0.0)
        finest = self.dtype == torch.float64
        if sight.casts and left is not None and (worst == 0 or (finest and worst <= self.limit)):
            self._add(row, tensors[0], _cast(sight, tensors[0], worst, "gone with the casts left out"), kernels)
        elif not finest:
            said = "as far from float64 on the same inputs as the recomputation"
            numbered = worst > self.limit and self._numbered(row, tensors[0])
            self._add(row, tensors[0], Cause("rounding", left=worst, detail=said), kernels, numbered)
            self.open.append((len(self.found) - 1, Witness(reference, sight), side, row))
        elif all(f.error <= self.limit or f.nearly_equal for f in remaining):
            self._add(row, tensors[0], Cause("rounding", left=worst, detail="of the size that float64 rounds"), kernels)
        else:
            first = next(f for f in remaining if f.error > self.limit and not f.nearly_equal)
            left_over = self._constants_left(side, row, layer)
            if left_over is not None and left_over <= self.limit:
                said = "gone with the casts left out and constants computed in float64"
                self._add(row, tensors[0], Cause("cast", "float32", tensors[0].module, left_over, said), kernels)
            else:
                self._add(row, first, Cause("", left=first.error), kernels)

    def _constants_left(self, side: Rung, row: Any, layer: int) -> float | None:
        """The largest error with casts left out and constants in float64; None where that does not run."""
        assert self.twin is not None
        found = self._tried(side, FixedWithoutCasts(), row, [layer], wide_constants(self.twin))
        return None if found is None else _largest(found)

    def _tried(
        self,
        side: Rung,
        kernels: Kernels,
        row: Any,
        layers: Sequence[int],
        also: contextlib.AbstractContextManager[None] | None = None,
    ) -> Differing | None:
        """What still differs in these blocks with a cause taken away; None where that does not run."""
        try:
            with also or contextlib.nullcontext():
                return differing(self._look(side, kernels, row, layers)[1], 0.0)
        except (RuntimeError, UnsupportedError):
            return None

    def _left_in_float64(self, twin: Adapter, side: Rung, row: Any, layer: int) -> float:
        """What a block's two sides differ by in float64, with or without its own casts, whichever is less.

        Raises:
            RuntimeError: The block runs in float64 in neither way.
        """
        self.twin = twin
        try:
            tried = (self._tried(side, kernels, row, [layer]) for kernels in (Native(), WithoutCasts()))
            left = [_largest(found) for found in tried if found is not None]
        finally:
            self.release()
        if not left:
            raise RuntimeError("the model cannot be run in float64 here")
        return min(left)

    # With the machine's kernels ---------------------------------------------------------------------------------------------

    def _kernels(self, fixed: Rung) -> None:
        """What is larger than rounding with the machine's kernels though with a fixed order it is not there."""
        lower = {j.finding.layer: j.cause.dtype for j in self.found if j.cause.word == "cast"}
        open_layers = {j.finding.layer for j in self.found if j.cause.word != "cast"}
        every = self.rung.every_error
        limits = every["layer"].map(lambda n: band(getattr(torch, lower[n]), self.terms) if n in lower else self.limit)
        beyond = every[(every["error"] > limits) & ~every["layer"].isin(open_layers)]
        where = ["prompt", "prefill", "start", "stop", "layer"]
        same = fixed.every_error if fixed.plan == self.rung.plan else fixed.every_error[:0]
        worst = same.groupby(where)["error"].max().to_dict()
        for row, layers in _cases(beyond):
            reference, sights = self._look(self.rung, None, row, layers)
            for _, (sight, tensors) in differing(sights, self.limit).items():
                first = tensors[0]
                case = (*(int(row[name]) for name in where[:-1]), sight.layer)
                if case in worst:
                    gone = worst[case] == 0
                else:
                    gone = not differing(self._look(self.rung, BatchInvariant(), row, [sight.layer])[1], 0.0)
                if first.tensor == CHOICE and first.nearly_equal and gone:
                    cause = Cause("choice", left=0.0, detail="gone with a fixed order")
                elif gone and sight.casts and (cast := self._cast_of(row, sight, first)) is not None:
                    cause = cast
                elif gone and first.error <= max(EXCUSED, 2 * self.limit):
                    # Float64 has nothing beside it that would tell a coarse kernel from a tensor that is hard to compute.
                    coarse = self.dtype != torch.float64 or first.error > 8 * self.limit
                    cause = Cause("kernel" if coarse else "order", left=0.0, detail="gone with a fixed order")
                else:
                    what = "gone with a fixed order, but more than any order of additions can be off" if gone else ""
                    cause = Cause("", left=first.error, detail=what)
                self._add(row, first, cause, "native")
                if cause.word == "kernel" and self.dtype != torch.float64:
                    self.open.append((len(self.found) - 1, Witness(reference, sight), self.rung, row))
        if not self.found:
            self._show_first()

    def _cast_of(self, row: Any, sight: Sight, first: Finding) -> Cause | None:
        """The cast that makes an error larger than the dtype's own rounding, with the machine's kernels; None if none does."""
        found = self._tried(self.rung, WithoutCasts(), row, [sight.layer])
        left = math.inf if found is None else _largest(found)
        # What only a cached step casts, and a fixed order takes away, is inside its kernel.
        if left > self.limit or coarsest(sight.casts) not in sight.both_cast:
            return None
        return _cast(sight, first, left, "gone with the casts left out, and with a fixed order")

    def _show_first(self) -> None:
        """The first tensor that differs with the machine's kernels, which a fixed order takes away."""
        every = self.rung.every_error
        # Tokens fed one by one are what a user of a cache waits for: their first difference is the one to name.
        off = every[(every["error"] > 0) & (every["stop"] == every["start"] + 1)]
        if off.empty:
            return
        row = off.sort_values(["layer", "position", "prefill"]).iloc[0]
        found = differing(self._look(self.rung, None, row, [int(row["layer"])])[1], 0.0)
        for _, tensors in found.values():
            self._add(row, tensors[0], Cause("order", detail="gone with a fixed order"), "native")

    def _native(self) -> None:
        """Without a fixed order: every block that differs is judged beside float64 on the same inputs."""
        every = self.rung.every_error
        for row, layers in _cases(every[every["error"] > 0]):
            reference, sights = self._look(self.rung, None, row, layers)
            for layer, (sight, tensors) in differing(sights, 0.0).items():
                self._explain(row, layer, sight, tensors, reference, None, self.rung)

    # Shared -------------------------------------------------------------------------------------------------------------

    def _add(self, row: Any, finding: Finding, cause: Cause, kernels: str = "fixed order", numbered: bool = False) -> None:
        numbered = numbered or (not cause.word and self._numbered(row, finding))
        self.found.append(Judged(finding, cause, kernels, _how(row), numbered))

    def _numbered(self, row: Any, wrong: Finding) -> bool:
        """Whether the error is gone once the model is told its tokens' positions."""
        assert self.twin is not None
        if not Subject(self.twin).can_be_told_positions:
            return False
        side, kernels = (self.rung.fixed, BatchInvariant()) if self.rung.fixed is not None else (self.rung, None)
        _, sights = self._look(side, kernels, row, [wrong.layer], "given")
        return _largest(differing(sights, 0.0)) <= self.limit

    def _look(
        self, side: Rung, kernels: Kernels | None, row: Any, layers: Sequence[int], positions: str = "own"
    ) -> tuple[Reference, list[dict[int, Sight]]]:
        """One row of a side's tables seen again, with these blocks watched."""
        assert self.twin is not None
        prompt = side.plan.prompts[int(row["prompt"])][: side.plan.length]
        return seen_again(Subject(self.twin, kernels, positions), prompt, _feeds(row, side.plan), layers)


def _largest(found: Differing) -> float:
    return max((f.error for _, tensors in found.values() for f in tensors), default=0.0)


def _cast(sight: Sight, first: Finding, left: float, detail: str) -> Cause:
    """The narrowest cast of a block as the cause, by the module that makes it: the finding's own where it does."""
    lower = coarsest(sight.casts)
    casting = sight.casts[lower]
    module = next((m for m in casting if m.startswith(first.module)), casting[0])
    return Cause("cast", lower, module, left, detail)


def _feeds(row: Any, plan: Plan) -> list[Feed]:
    """What is fed to see one row of the tables again: at most the last few of many single tokens are looked at."""
    prefill, start, stop, position = (int(row[name]) for name in ("prefill", "start", "stop", "position"))
    if not start:
        return [Feed(0, stop, position)]
    if (start, stop) in plan.pieces and prefill == plan.chunk:
        before = [Feed(*piece) for piece in plan.pieces if piece[1] <= start]
        return [Feed(0, prefill), *before, Feed(start, stop, position)]
    feeds = Feed.one_by_one(prefill, stop)
    return [dataclasses.replace(f, row=None) if f.start < start - LOOKED_AT else f for f in feeds]


def _cases(beyond: pd.DataFrame) -> list[tuple[Any, list[int]]]:
    """The cases to look into, each with the layers to look at: where a layer is first off, and where most.

    An error that a cast explains may stand before one that nothing does.
    """
    chosen: dict[tuple[int, ...], tuple[Any, list[int]]] = {}
    for layer, rows in beyond.groupby("layer"):
        alone = rows[rows["stop"] == rows["start"] + 1]
        together = rows[rows["stop"] > rows["start"] + 1]
        picked = []
        for kind in (alone, together[together["start"] == 0], together[together["start"] > 0]):
            if len(kind):
                first = kind.sort_values(["position", "prefill"]).iloc[0]
                worst = kind.sort_values(["error", "position"], ascending=[False, True]).iloc[0]
                picked += [first] + ([worst] if worst["error"] > 8 * first["error"] else [])
        for row in picked:
            key = tuple(int(row[name]) for name in ("prompt", "prefill", "start", "stop", "position"))
            layers = chosen.setdefault(key, (row, []))[1]
            if layer not in layers:
                layers.append(int(layer))  # type: ignore[call-overload]
    return list(chosen.values())


def _how(row: Any) -> str:
    if row["stop"] - row["start"] == 1:
        return ONE_BY_ONE
    fed = f"{int(row['stop'] - row['start'])} tokens fed at once"
    return f"{fed} on a cache of {int(row['start'])}" if row["start"] else f"a prompt's {fed} that fill the cache"
