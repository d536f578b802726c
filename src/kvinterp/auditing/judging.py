"""Judging one precision: each block that differs is looked into, and each possible cause is taken away
to see what remains.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Collection, Sequence
from typing import Any

import pandas as pd
import torch

from kvinterp.auditing.blocks import BlockModel, referenced
from kvinterp.auditing.causes import (
    ErrorCause,
    WithoutCasts,
    beyond_truth,
    coarsest,
    excused,
    float64_constants,
)
from kvinterp.auditing.first_difference import (
    Differing,
    DifferingTensor,
    Feed,
    Sight,
    differing,
    largest,
    look,
)
from kvinterp.auditing.ladder import ONE_BY_ONE, Plan, PrecisionRun, band, unit_roundoff
from kvinterp.auditing.values import difference
from kvinterp.auditing.watch import CHOICE
from kvinterp.errors import UnsupportedError, reason
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant, Kernels, Native

APART = 1e6
"""How many times further than the logits what a block returns has to be off to be another part of
the same sum.
"""
NO_FLOAT64, GONE = "the model cannot be run in float64 here", "gone with a fixed order"
LOOKED_AT = 3
"""How many single tokens before a wrong one are looked into as well: a state goes wrong before what
it feeds.
"""


@dataclasses.dataclass(frozen=True)
class Case:
    """A row of a precision's tables: tokens of a prompt, fed at once from start to stop after a prefill,
    and what is looked at.

    Attributes:
        side: The run whose tables it is of: the machine's own kernels, or a fixed order.
    """

    prompt: int
    prefill: int
    start: int
    stop: int
    position: int
    side: PrecisionRun = dataclasses.field(compare=False)

    @classmethod
    def of(cls, row: Any, side: PrecisionRun) -> Case:
        """Makes the case of a row."""
        return cls(
            **{name: int(row[name]) for name in ("prompt", "prefill", "start", "stop", "position")},
            side=side,
        )

    def feeds(self, plan: Plan) -> list[Feed]:
        """What is fed to see it again: at most the last few of many single tokens are looked at."""
        if self.stop - self.start > 1 or not self.start:
            before = (
                [end for end in plan.chunks(self.prefill) if end < self.stop] if self.start else [0]
            )
            fed = [Feed(*piece) for piece in itertools.pairwise([*before, self.stop])]
            return [*fed[:-1], dataclasses.replace(fed[-1], row=self.position)]
        feeds = Feed.one_by_one(self.prefill, self.stop)
        return [
            dataclasses.replace(f, row=None) if f.start < self.start - LOOKED_AT else f
            for f in feeds
        ]

    @property
    def fed(self) -> str:
        """How the tokens were fed, in words."""
        if self.stop - self.start == 1:
            return ONE_BY_ONE
        fed = f"{self.stop - self.start} tokens fed at once"
        return (
            f"{fed} on a cache of {self.start}"
            if self.start
            else f"a prompt's {fed} that fill the cache"
        )


@dataclasses.dataclass
class Judged:
    """One block that differs, and what takes the difference away.

    Attributes:
        finding: Its first tensor that differs, or that nothing takes away.
        cause: What takes the error away; its word is empty where nothing does.
        kernels: How it was seen: ``fixed order``, ``native`` (a fixed order was tried too) or
            ``none fixed``.
        fed: How the tokens were fed: one by one, or several at once and how.
        beside: The names of all tensors that differ with it.
    """

    finding: DifferingTensor
    cause: ErrorCause
    kernels: str
    fed: str
    beside: frozenset[str] = frozenset()


class PrecisionJudge:
    """Looks into the blocks that differ on one precision.

    Args:
        adapter: The model in the precision's dtype.
        run: What it showed.
        terms: The longest sum in the model.
    """

    def __init__(self, adapter: Adapter, run: PrecisionRun, terms: int) -> None:
        self.adapter: Any = adapter
        self.run, self.name, self.dtype = run, run.name, run.dtype
        self.terms, self.limit = terms, band(run.dtype, terms)
        self.found: list[Judged] = []
        self.open: list[tuple[Judged, Sight, Case]] = []

    def judge(self) -> list[Judged]:
        """What was found, in the order of the layers; what needs the model in float64 stays open
        (see :meth:`settle`).
        """
        if self.run.fixed is not None:
            self._fixed(self.run.fixed)
            self._kernels()
        else:
            # Without a fixed order every block that differs is judged beside float64 on the same
            # inputs.
            for case, layers in _cases(
                self.run, self.run.every_error, self.run.among_more * self.limit
            ).items():
                for sight, tensors in self._look(case, None, layers).values():
                    self._explain(case, sight, tensors, None)
        return self._ordered()

    def settle(self, adapter: Adapter | None, clean: Collection[int] | None = None) -> list[Judged]:
        """Judges what stayed open beside the model in float64.

        Args:
            adapter: The model in float64, or None where there is none.
            clean: The layers in which the float64 precision found nothing wrong: an error within
                float32's rounding is gone there. None where there is no such precision; then each case
                is run in float64 here, where rounding must be gone.
        """
        self.adapter = adapter
        for judged, sight, case in self.open:
            kernel = judged.cause.word == "kernel"
            try:
                if adapter is None:
                    raise RuntimeError(NO_FLOAT64)
                wrong, proven = beyond_truth(adapter, sight, self.run.unit)
                if wrong is not None and self._another_form(case, wrong, proven):
                    wrong = None
                if wrong is None and clean is None and not kernel:
                    tried = (
                        self._tried(case, each, [judged.finding.layer])
                        for each in (Native(), WithoutCasts())
                    )
                    left = min(
                        (largest(blocks) for blocks in tried if blocks is not None),
                        default=math.nan,
                    )
                    if math.isnan(left):
                        raise RuntimeError(NO_FLOAT64)
                    if left > band(
                        torch.float64 if self.dtype == torch.float32 else torch.float32, self.terms
                    ):
                        judged.cause = ErrorCause("", left=left, detail="there in float64 too")
                    continue
            except (
                Exception
            ) as error:  # What users put on a model says by any error that it takes no float64.
                if not kernel:
                    judged.cause = self._without_float64(judged.finding, error)
                continue
            gone = self.dtype == torch.float32 and judged.finding.layer in (clean or ())
            if kernel and wrong is None:
                # Where the recomputation is as far from float64, no kernel is coarse: the tensor is
                # hard to compute.
                judged.cause = ErrorCause(
                    "order",
                    detail=f"{GONE}; the recomputation is as far from float64 on the same inputs",
                )
            elif not kernel and wrong is not None and (wrong.error > self.limit or not gone):
                detail = "further from float64 on the same inputs than the recomputation"
                judged.finding, judged.cause = (
                    wrong,
                    ErrorCause("", left=wrong.error, detail=detail),
                )
        self.open = []
        return self._ordered()

    def _without_float64(self, finding: DifferingTensor, error: Exception) -> ErrorCause:
        """What is nearer to the tensor itself than to rounding, on a scale of logarithms, is none;
        all else is unknown.
        """
        if finding.error > self.limit**0.5:
            said = f"further off than the root of what {self.name} rounds ({reason(error)})"
            return ErrorCause("", left=finding.error, detail=said)
        return ErrorCause("unknown", detail=reason(error))

    def _ordered(self) -> list[Judged]:
        self.adapter = None  # So that it is not kept while another copy is made.
        # Within a layer one token at a time before several at once: what is wrong in both is first
        # seen there.
        return sorted(
            self.found, key=lambda j: (j.finding.layer, j.fed != ONE_BY_ONE, j.finding.position)
        )

    # With a fixed order every difference has another reason ---------------------------------------

    def _fixed(self, fixed: PrecisionRun) -> None:
        for case, layers in _cases(fixed, fixed.every_error, 0.0).items():
            found = self._look(case, BatchInvariant(), layers)
            casting = [layer for layer, (sight, _) in found.items() if sight.casts]
            # What computes in two dtypes on purpose does not run in one.
            left = self._tried(case, WithoutCasts("fixed"), casting) if casting else None
            for layer, (sight, tensors) in found.items():
                remaining = None if left is None else left[layer][1] if layer in left else []
                self._explain(case, sight, tensors, remaining)

    def _explain(
        self,
        case: Case,
        sight: Sight,
        tensors: list[DifferingTensor],
        left: list[DifferingTensor] | None,
    ) -> None:
        """One block that differs with a fixed order: a cast's, rounding's, or nobody's."""
        kernels = "fixed order" if case.side is self.run.fixed else "none fixed"
        remaining, first = tensors if left is None else left, tensors[0]
        worst = sight.error(remaining)
        finest = self.dtype == torch.float64
        off = [f for f in remaining if f.error > self.limit and not f.nearly_equal]
        # What the block computes shows that there is an error; what it computes with shows where.
        beyond = off[0] if any(map(sight.is_end, off)) else None
        # What was within rounding before says nothing of a cast by being so after.
        shrunk = worst <= self.limit and (finest or sight.error(tensors) > self.limit)
        if sight.casts and left is not None and (worst == 0 or shrunk):
            cause = _cast(sight, first, worst, "gone with the casts left out")
        elif not finest:
            cause = ErrorCause(
                "rounding",
                left=worst,
                detail="as far from float64 on the same inputs as the recomputation",
            )
        elif beyond is None:
            cause = ErrorCause("rounding", left=worst, detail="of the size that float64 rounds")
        else:
            found = self._tried(
                case, WithoutCasts("fixed"), [sight.layer], float64_constants(self.adapter)
            )
            if found is not None and largest(found) <= self.limit:
                said = "gone with the casts left out and constants computed in float64"
                cause = ErrorCause("cast", "float32", first.module, largest(found), said)
            elif self._same_logits(case, beyond.error):
                cause = ErrorCause(
                    "form",
                    left=beyond.error,
                    detail="held otherwise between blocks: the logits agree",
                )
            else:
                first, cause = beyond, ErrorCause("", left=beyond.error)
        judged = self._add(case, first, tensors, cause, kernels)
        if cause.word == "rounding" and not finest:
            self.open.append((judged, sight, case))

    def _same_logits(
        self, case: Case, error: float, under: Sequence[Kernels] = (Native(), WithoutCasts())
    ) -> bool:
        """Whether the same tokens, nothing handed over, have the same logits though a block is off
        by so much.

        Then what it returns is another part of the same sum, which a later block completes.
        """
        tokens, limit = (
            self.run.plan.tokens(case.prompt, self.adapter.device),
            band(torch.float64, self.terms),
        )
        for kernels in under if case.start else ():
            model, cache, apart_by = BlockModel(self.adapter, kernels), None, 0.0
            with contextlib.suppress(RuntimeError, UnsupportedError):
                reference = model.recompute(tokens)
                for feed in case.feeds(self.run.plan):
                    logits, cache = model.feed(tokens[:, feed.start : feed.stop], cache)
                    apart_by = max(
                        apart_by, difference(logits, reference[:, feed.start : feed.stop])
                    )
                if apart_by <= limit and error > APART * max(
                    apart_by, unit_roundoff(torch.float64)
                ):
                    return True
        return False

    def _another_form(self, case: Case, wrong: DifferingTensor, proven: bool) -> bool:
        """Whether a block computes the same in float64 with that tensor as different: then it is
        held in another form.

        Where what it computes here is proven to be off too, the logits have to agree in float64.
        """
        limit = band(torch.float64, self.terms)
        for kernels in (Native(), WithoutCasts()):
            differing_there = self._tried(case, kernels, [wrong.layer])
            if differing_there is None or wrong.layer not in differing_there:
                continue
            sight, tensors = differing_there[wrong.layer]
            named = [f for f in tensors if (f.tensor, f.module) == (wrong.tensor, wrong.module)]
            same = [f for f in named if f.error >= wrong.error / 2]
            if not proven and not all(map(sight.is_end, same)) and sight.error(tensors) <= limit:
                return True
            if same and self._same_logits(case, same[0].error, [kernels]):
                return True
        return False

    # With the machine's kernels -------------------------------------------------------------------

    def _kernels(self) -> None:
        """What is larger than rounding with the machine's kernels though with a fixed order it is
        not there.
        """
        lower = {j.finding.layer: j.cause.dtype for j in self.found if j.cause.word == "cast"}
        known = {j.finding.layer for j in self.found if j.cause.word != "cast"}
        every = self.run.every_error[~self.run.every_error["layer"].isin(known)]
        limits = every["layer"].map(
            lambda n: band(getattr(torch, lower[n]), self.terms) if n in lower else self.limit
        )
        for case, layers in _cases(self.run, every, limits).items():
            for sight, tensors in self._look(case, None, layers, self.limit).values():
                gone = not largest(self._in_order(case, sight.layer))
                cause = self._kernel(case, sight, tensors, gone)
                judged = self._add(case, tensors[0], tensors, cause, "native")
                if cause.word == "kernel" and self.dtype != torch.float64:
                    self.open.append((judged, sight, case))
        if not self.found:
            self._show_first()

    def _kernel(
        self, case: Case, sight: Sight, tensors: list[DifferingTensor], gone: bool
    ) -> ErrorCause:
        """Why a block differs by more than rounding with the machine's kernels; ``gone``: with a
        fixed order it does not.
        """
        first, error = tensors[0], sight.error(tensors)
        if not gone:
            return ErrorCause("", left=first.error)
        if first.tensor == CHOICE and first.nearly_equal:
            return ErrorCause("choice", detail=GONE)
        if sight.casts:
            left = self._without_casts(case, sight.layer)
            # What only a cached step casts, and a fixed order takes away, is inside its kernel.
            if left <= self.limit and coarsest(sight.casts) in sight.both_cast:
                return _cast(
                    sight, first, left, "gone with the casts left out, and with a fixed order"
                )
        if error > excused(self.dtype, self.limit):
            # What stands before the first block or behind the last is in no block in which casts
            # are watched.
            watched = 0 <= sight.layer < len(self.run.layers)
            could = not watched and error <= excused(torch.float32, band(torch.float32, self.terms))
            left = (
                self._without_casts(case, sight.layer)
                if could and self.dtype == torch.float64
                else math.inf
            )
            if left <= self.limit:
                return ErrorCause(
                    "cast",
                    "float32",
                    first.module,
                    left,
                    "gone with the casts left out, and with a fixed order",
                )
            return ErrorCause(
                "", left=error, detail=f"{GONE}, but more than any order of additions can be off"
            )
        # Float64 has nothing beside it that would tell a coarse kernel from a tensor that is hard
        # to compute.
        return ErrorCause("order" if self.dtype == torch.float64 else "kernel", detail=GONE)

    def _without_casts(self, case: Case, layer: int) -> float:
        """The error that is left in a block without the model's casts; inf where it does not run
        without.
        """
        found = self._tried(case, WithoutCasts(), [layer])
        return math.inf if found is None else largest(found)

    def _show_first(self) -> None:
        """The first tensor that differs with the machine's kernels, which a fixed order takes
        away.
        """
        every = self.run.every_error
        # Tokens fed one by one are what a user of a cache waits for: their first difference is the
        # one to name.
        off = every[
            (every["error"] > 0) & (every["stop"] == every["start"] + 1) & ~self.run.among_more
        ]
        if off.empty:
            return
        row = off.sort_values(["layer", "position", "prefill"]).iloc[0]
        case = Case.of(row, self.run)
        for _, tensors in self._look(case, None, [int(row["layer"])]).values():
            self._add(case, tensors[0], tensors, ErrorCause("order", detail=GONE), "native")

    # Shared ---------------------------------------------------------------------------------------

    def _add(
        self,
        case: Case,
        finding: DifferingTensor,
        beside: Sequence[DifferingTensor],
        cause: ErrorCause,
        kernels: str,
    ) -> Judged:
        self.found.append(
            Judged(finding, cause, kernels, case.fed, frozenset(one.tensor for one in beside))
        )
        return self.found[-1]

    def _in_order(self, case: Case, layer: int) -> Differing:
        """What still differs in a block with a fixed order of additions.

        Given equal inputs that order is needed in this block alone, which costs little. Some blocks
        also read what another one
        keeps (shared keys and values): what is left is looked at again with that order in the whole
        model.
        """
        return self._look(case, BatchInvariant(), [layer], only=[layer]) and self._look(
            case, BatchInvariant(), [layer]
        )

    def _tried(
        self,
        case: Case,
        kernels: Kernels,
        layers: Sequence[int],
        also: contextlib.AbstractContextManager[None] | None = None,
    ) -> Differing | None:
        """What still differs in these blocks with a cause taken away; None where that does not
        run.
        """
        try:
            with also or contextlib.nullcontext():
                return self._look(case, kernels, layers)
        except (RuntimeError, UnsupportedError):
            return None

    def _look(
        self,
        case: Case,
        kernels: Kernels | None,
        layers: Sequence[int],
        threshold: float = 0.0,
        only: Sequence[int] | None = None,
    ) -> Differing:
        """What differs by more where a case is fed again, with these blocks watched."""
        plan = case.side.plan
        with referenced(
            BlockModel(self.adapter, kernels, only), plan.tokens(case.prompt, self.adapter.device)
        ) as hooks:
            return differing(look(hooks, case.feeds(plan), layers), threshold)


def _cast(sight: Sight, first: DifferingTensor, left: float, detail: str) -> ErrorCause:
    """The narrowest cast of a block as the cause, by the module that makes it: the finding's own
    where it does.
    """
    lower = coarsest(sight.casts)
    casting = sight.casts[lower]
    module = next((m for m in casting if m.startswith(first.module)), casting[0])
    return ErrorCause("cast", lower, module, left, detail)


def _cases(
    side: PrecisionRun, every: pd.DataFrame, limits: float | pd.Series
) -> dict[Case, list[int]]:
    """The cases to look into, each with the layers to look at: where a layer is first off, and
    where most.

    An error that a cast explains may stand before one that nothing does.
    """
    chosen: dict[Case, list[int]] = {}
    for layer, rows in every[every["error"] > limits].groupby("layer"):
        alone, fresh = rows["stop"] == rows["start"] + 1, rows["start"] == 0
        for kind in (rows[alone], rows[~alone & fresh], rows[~alone & ~fresh]):
            if len(kind):
                first = kind.sort_values(["position", "prefill"]).iloc[0]
                worst = kind.sort_values(["error", "position"], ascending=[False, True]).iloc[0]
                for row in (first, worst) if worst["error"] > 8 * first["error"] else (first,):
                    chosen.setdefault(Case.of(row, side), []).append(int(layer))
    return {case: list(dict.fromkeys(layers)) for case, layers in chosen.items()}
