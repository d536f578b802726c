"""What every exercise of an audit runs on: a model fed in any way, compared with itself without a cache, and judged.

An error is judged against what the very same comparison shows without a cache: rows in a batch against alone, padded
against unpadded, and a recomputation whose blocks' outputs were moved by as much as their rounding may move them. What is
beyond that is run again with its other possible causes taken away (casts to fewer bits inside the model, one unlucky
prompt), and is a failure only if it stays.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvinterp.auditing.blocks import BlockModel, Fed, moving, prompts_for
from kvinterp.auditing.causes import WithoutCasts
from kvinterp.auditing.crashes import OURS, REFUSES, whose
from kvinterp.auditing.ladder import part_named, unit_roundoff
from kvinterp.auditing.values import apart, by_position
from kvinterp.auditing.watch import Watch, watching
from kvinterp.errors import KvinterpError, out_of_memory
from kvinterp.models import Adapter
from kvinterp.models.checkpoint import reason
from kvinterp.paths.calls.base import NOTHING, Masking
from kvinterp.paths.kernels import Kernels

NARROW = (torch.float16, torch.bfloat16)
"""The dtypes in which rounding is not far below what a bug does."""


class Seen(NamedTuple):
    """One forward with a block watched.

    Attributes:
        cached: Whether it fed a cache.
        shape: Rows of the batch and tokens fed.
        total: Positions after it.
        watch: What was seen in the block.
    """

    cached: bool
    shape: torch.Size
    total: int
    watch: Watch


class Subject(BlockModel):
    """A model that is exercised: its forwards are counted, and a block of it can be looked at.

    Args:
        adapter: The model, already in its dtype.
        kernels: The kernel mode; default: the machine's own.
        positions: As for :class:`BlockModel`.
        unit: The unit roundoff of what computes; default: that of the model's dtype.

    Attributes:
        forwards: How many forwards it ran.
        stands_in: A block whose output is given in the place of the logits, or None.
        watched: A block that is watched in every forward, or None; ``seen`` holds what was seen, in order.
    """

    def __init__(
        self, adapter: Adapter, kernels: Kernels | None = None, positions: str = "own", unit: float | None = None
    ) -> None:
        super().__init__(adapter, kernels, positions)
        self.kernels = kernels
        self.unit = unit_roundoff(adapter.dtype) if unit is None else unit
        self.forwards = 0
        self.stands_in: int | None = None
        self.watched: int | None = None
        self.seen: list[Seen] = []

    def otherwise(self, **more: Any) -> Subject:
        """Another one of the same model, with some arguments changed."""
        given = {"kernels": self.kernels, "positions": self.positions, "unit": self.unit}
        return Subject(self.adapter, **{**given, **more})

    def forward(
        self, tokens: Tensor, cache: Any = None, start: int = 0, masking: Masking = NOTHING, cached: str = "yes"
    ) -> tuple[Tensor, Any]:
        """As :meth:`BlockModel.forward`, counted and looked at."""
        self.forwards += 1
        made: list[Tensor] = []
        watches = [] if self.watched is None else [Watch(self, self.watched, tokens.shape[1])]
        looked = [] if self.stands_in is None else [self.blocks[self.stands_in]]
        with moving(looked, lambda _, output: made.append(output.clone())), watching(watches):
            logits, cache = super().forward(tokens, cache, start, masking, cached)
        if cached == "yes" and logits.shape[:2] != tokens.shape:
            fed, came = (" rows of ".join(map(str, shape)) for shape in (tokens.shape, logits.shape[:2]))
            raise WrongError(f"a forward of {fed} tokens on the cache gives logits of {came}.")
        self.seen += [Seen(cached == "yes", tokens.shape, tokens.shape[1] + start, watch) for watch in watches]
        return (made[0] if made else logits), cache

    def recompute(self, tokens: Tensor, masking: Masking = NOTHING) -> Tensor:
        """As :meth:`BlockModel.recompute`.

        Raises:
            PlainError: It raises.
        """
        try:
            return super().recompute(tokens, masking)
        except Exception as error:
            raise PlainError.of(error, self.model, "without a cache it raises") from error

    def moved(self, tokens: Tensor, masking: Masking = NOTHING) -> Tensor:
        """A recomputation in which what every block returns is moved by as much as its rounding may, at random."""
        size, generator = self.roundoff(tokens.shape[1]), torch.Generator().manual_seed(0)

        def change(_: int, made: Tensor) -> Tensor:
            noise = torch.rand(made.shape, generator=generator, dtype=torch.float64).to(made.device) * 2 - 1
            return (made.double() * (1 + size * noise)).to(made.dtype)

        with moving(self.blocks, change):
            return self.recompute(tokens, masking)

    def roundoff(self, length: int = 1) -> float:
        """How far rounding moves a sum as long as the model is wide, or as the text is long."""
        # Sums are kept in float32 for 16-bit tensors, so that their length does not matter there.
        return self.unit * (1.0 if self.narrow else math.sqrt(max(length, self.adapter.facts.width)))

    @property
    def narrow(self) -> bool:
        """Whether the model is in 16 bits."""
        return self.dtype in NARROW


# What it is judged by ------------------------------------------------------------------------------------------------

PASSED, FAILED, NOT_RUN, UNCLEAR = "passed", "failed", "not run", "cannot tell"
PLAIN, REFUSED = "off without a cache too", "refused"

MULTIPLES = {"wide": (16.0, 256.0), "narrow": (4.0, 16.0)}
"""An error is rounding's up to so many times the null, and beyond doubt from so many times on; less room in 16 bits, where
the null is not far below what a bug does, and what fails must fail with two sets of prompts."""

CASTS = ", with the model's casts to fewer bits left out"
"""What is said of a bench without them."""

PROMPT = 9
"""Tokens of a short prompt."""


@dataclasses.dataclass(frozen=True)
class Check:
    """One thing an audit tried, or did not.

    Attributes:
        name: What was tried.
        status: ``"passed"``, ``"failed"`` (it is off, or crashes), ``"off without a cache too"``, ``"refused"`` by the library,
            ``"not run"`` or ``"cannot tell"``.
        detail: One sentence: what was run and what it showed; or why it was not run and what would run it.
        error: Largest logit error relative to the largest logit, cached against a recomputation of the very same thing.
        null: The same between two recomputations without a cache, of which one may be moved by rounding.
        step: Absolute position (pads counted) at which it first failed.
        hint: The likely cause; of what was not run, the option that runs it.
        forwards: How many forwards of the model it took.
        layer: The first block that is wrong, where it failed and that could be found.
        tensor: The first tensor that attention reads wrongly there.
        module: The module it was seen in.
    """

    name: str
    status: str
    detail: str
    error: float | None = None
    null: float | None = None
    step: int | None = None
    hint: str = ""
    forwards: int = 0
    layer: int | None = None
    tensor: str = ""
    module: str = ""

    def also(self, more: str, **changed: Any) -> Check:
        """The same with more said of it, and with some fields changed."""
        return dataclasses.replace(self, detail=f"{self.detail.rstrip('.')}; {more}.", **changed)

    @property
    def crashed(self) -> bool:
        """Whether the library crashed, with a cache or without one."""
        return self.status in (FAILED, PLAIN) and self.error is None and self.null is None

    @property
    def failure(self) -> str:
        """Of one that failed: what it showed, and where."""
        where = (
            ""
            if self.layer is None
            else f" First wrong: {self.tensor or 'the output'} of {part_named(self.layer, self.tensor)}."
        )
        return f"{self.name} failed: {self.detail}{where}"


def short(context: int, after: int) -> tuple[int, int]:
    """Tokens of a short prompt, and with so many after it; fewer where the model's context is shorter."""
    length = min(PROMPT + after, context)
    return max(length - after, 1), length


class UnclearError(Exception):
    """Raised by an exercise that says nothing of the cache.

    Args:
        why: In a sentence.
        null: The error without a cache, where that is the reason.
        option: What would run it.
    """

    status = UNCLEAR

    def __init__(self, why: str, null: float | None = None, option: str = "") -> None:
        super().__init__(why)
        self.null, self.option = null, option


class NotRunError(UnclearError):
    """Raised by an exercise that is not run on this model."""

    status = NOT_RUN


class OwnError(KvinterpError):
    """An error of kvinterp's, which says nothing of the model."""


class WrongError(UnclearError):
    """Raised by an exercise in which the model gives what cannot be compared at all."""

    status = FAILED


class PlainError(UnclearError):
    """Raised by an exercise in which the model is off, or raises, without a cache too."""

    status = PLAIN

    @classmethod
    def of(cls, error: Exception, model: nn.Module, what: str) -> Exception:
        """What to raise for an error met without a cache; kvinterp's own error as it is."""
        ours = isinstance(error, UnclearError) or whose(error, model)[0] == OURS
        return error if ours else cls(f"{what} {one_line(error)}.")


def one_line(error: BaseException) -> str:
    """An error's kind and what it says, to be quoted."""
    kind, said = type(error).__name__, reason(error).rstrip(". ")
    return said if said.startswith(kind) else f"{kind}: {said}"


class Recomputation(NamedTuple):
    """A recomputation and how far another recomputation of the same is from it.

    Attributes:
        logits: ``[batch, position, vocabulary]``.
        null: The largest relative difference of a recomputation moved by rounding, or of another of the caller's.
    """

    logits: Tensor
    null: float


class Errors(dict[int, float]):
    """Relative error by absolute position, the worst of all that was compared there.

    Attributes:
        null: What the same comparisons show without a cache.
    """

    null = 0.0

    def add(self, mine: Tensor, reference: Recomputation, first: int, begins: int = 0) -> Errors:
        """Compares logits of the positions from ``first`` on with a recomputation whose own first row is at ``begins``."""
        theirs = reference.logits[:, first - begins : first - begins + mine.shape[1]]
        for at, error in by_position(mine, theirs, first).items():
            self[at] = max(error, self.get(at, 0.0))
        self.null = max(self.null, reference.null)
        return self


@dataclasses.dataclass
class Bench:
    """A model made ready for exercises: prompts, how it is to be fed, and what plain decoding shows.

    Attributes:
        runner: Feeds the model.
        pool: Tokens to make prompts of, one list a prompt.
        steps: Tokens fed one by one.
        thorough: Whether costly checks are run.
        name: The check that runs on it.
        plain: The relative error of plain decoding on the model's own cache.
        plain_null: What is rounding's there.
        reach: How far another early token moves the logits: no check can see less than this is large.
        asks: Whether what fails is asked for its cause.
        far: Whether every edge is reached, whatever that costs.
    """

    runner: Subject
    pool: list[list[int]]
    steps: int
    thorough: bool
    name: str = ""
    plain: float = 0.0
    plain_null: float = 0.0
    reach: float = math.inf
    asks: str = "yes"
    far: str = "no"

    @classmethod
    def of(cls, adapter: Adapter, prompts: Sequence[Sequence[int]], steps: int, thorough: bool, far: str = "no") -> Bench:
        """A bench on which plain decoding is right, if there is a way to feed the model in which it is.

        The model's own positions come before given ones, and the model as it is before one without its casts.
        """
        pool = [list(p) for p in prompts if len(p)] or [list(p) for p in prompts_for(adapter, 2, 16)]
        if len(pool) < 2 or pool[0] == pool[1]:
            pool.append([*pool[0][1:], *reversed(pool[0])])
        best: Bench | None = None
        for kernels in (None,) if adapter.dtype in NARROW else (None, WithoutCasts()):
            for positions in ("own", "given"):
                bench = cls(Subject(adapter, kernels, positions), pool, max(steps, 2), thorough, far=far)
                if positions == "given" and "position_ids" not in adapter.takes:
                    continue
                try:
                    bench.measure_plain()
                # A model that cannot be run without its casts, or with positions, is run as it is.
                except Exception:
                    if best is None and kernels is None and positions == "own":
                        raise
                    continue
                if bench.plain_is_right:
                    return bench
                best = bench if best is None or bench.plain < best.plain / bench.beyond else best
        assert best is not None
        return best

    def measure_plain(self) -> None:
        """Decodes as every user does: what that shows, and how far another token moves the logits."""
        prompt, length = self.short()
        tokens = self.tokens(length)
        reference = self.reference(tokens)
        self.plain = apart(self.decoded(tokens, prompt).logits, reference.logits[:, prompt - 1 :])
        self.plain_null = reference.null
        other = tokens.clone()
        other[:, min(1, prompt - 1)] = self.row(1, length)[1 % length]
        if torch.equal(other, tokens):
            other[:, min(1, prompt - 1)] = (tokens[:, 0] + 1) % self.runner.adapter.facts.vocabulary
        moved = self.runner.recompute(other)[:, prompt - 1 :]
        self.reach = apart(moved, reference.logits[:, prompt - 1 :])

    def otherwise(self, kernels: Kernels | None, unit: float | None = None) -> Bench:
        """The same bench on other kernels (the machine's own for None), or where rounding is coarser than the dtype's."""
        new = dataclasses.replace(self, runner=self.runner.otherwise(kernels=kernels, unit=unit))
        new.measure_plain()
        return new

    @property
    def left_out(self) -> str:
        """What was taken away from the model, to be said in every detail."""
        return "" if self.runner.kernels is None else CASTS

    @property
    def excused(self) -> float:
        """How many times the null is rounding's."""
        return MULTIPLES["narrow" if self.runner.narrow else "wide"][0]

    @property
    def beyond(self) -> float:
        """From how many times the null on an error is beyond doubt."""
        return MULTIPLES["narrow" if self.runner.narrow else "wide"][1]

    @property
    def plain_is_right(self) -> bool:
        """Whether plain decoding is within rounding."""
        return self.plain <= self.excused * self.plain_null

    @property
    def context(self) -> int:
        """How many positions the model has."""
        return self.runner.adapter.facts.context

    def short(self, extra: int = 0) -> tuple[int, int]:
        """Tokens of a short prompt, and with as many more and the steps."""
        return short(self.context, self.steps + extra)

    def row(self, which: int, length: int) -> list[int]:
        """Tokens of one prompt; where the given one is too short, random ones follow."""
        given = self.pool[which][:length] if which < len(self.pool) else []
        missing = length - len(given)
        return given + list(prompts_for(self.runner.adapter, which + 1, missing, seed=17)[which]) if missing else given

    def batch(self, *rows: Sequence[int]) -> Tensor:
        """Rows of equal length, on the model's device."""
        return torch.tensor([list(row) for row in rows], device=self.runner.device)

    def tokens(self, length: int) -> Tensor:
        """So many tokens of the first prompt, as a batch of one."""
        return self.batch(self.row(0, length))

    def decoded(
        self,
        tokens: Tensor,
        prompt: int,
        masking: Masking = NOTHING,
        cache: Any = None,
        later: Masking | None = None,
    ) -> Fed:
        """A prompt fed at once and the rest one by one, judged from the prompt's last row on; ``later``: the rest's masking."""
        fed = Fed(self.runner, masking, cache)
        fed.forward(tokens[:, :prompt])
        fed.masking = masking if later is None else later
        fed.feed(tokens[:, prompt:]).first = prompt - 1
        return fed

    def reference(self, tokens: Tensor, masking: Masking = NOTHING, first: int = 0) -> Recomputation:
        """A recomputation, and how far rounding moves it (from the first row on, where the mask is not 0)."""
        logits = self.runner.recompute(tokens, masking)
        moved = self.runner.moved(tokens, masking)
        kept = torch.ones_like(tokens, dtype=torch.bool) if masking.mask is None else masking.mask.bool()
        kept[:, :first] = False
        # The head's own sum comes after the last block, so that moving blocks does not show its rounding.
        return Recomputation(logits, apart(moved[kept], logits[kept]) + self.runner.roundoff())

    def only_plain(self, why: str) -> None:
        """Raises where a transformers model itself can be asked, and this wrapping of it cannot: ``why``."""
        if not self.runner.adapter.plain:
            raise NotRunError(f"a model of kind {self.runner.adapter.kind} {why}; kind='native' of the same model runs it.")

    def judge(
        self,
        fed: Sequence[Fed],
        what: str,
        hint: str | Callable[[Errors], str] = "",
        reference: Recomputation | None = None,
        reach: float | None = None,
    ) -> Check:
        """Judges what was fed beside a recomputation of the very same tokens.

        Args:
            fed: Each with the position from which on its rows are judged.
            what, hint, reach: As for :meth:`settle`.
            reference: The recomputation, where it is one for all and made already.
        """
        errors = Errors()
        for each in fed:
            errors.add(each.logits, reference or self.reference(each.tokens, each.masking, each.first), each.first)
        return self.settle(errors, what, hint, reach)

    def settle(
        self,
        errors: Errors,
        what: str,
        hint: str | Callable[[Errors], str] = "",
        reach: float | None = None,
        plain: float | None = None,
    ) -> Check:
        """Judges one check.

        Args:
            errors: Relative error by absolute position, and without a cache.
            what: What was run, in words.
            hint: The likely cause, or what finds it, given the errors; asked only where it failed.
            reach: How far the logits move where what is checked does not work; the bench's own unless given.
            plain: The error of the same without a cache, where that can be told from the null.
        """
        worst, null = max(errors.values(), default=0.0), errors.null
        reach = self.reach if reach is None else reach
        said = f"{what}: relative logit error {worst:.1e}, {null:.1e} without a cache{self.left_out}"

        def settled(status: str, also: str, first: int | None = None, cause: str = "") -> Check:
            return Check(self.name, status, f"{said}{also}.", worst, null, first, cause)

        # A convolution's output is not moved by a token far back; where a block stands in for the logits, they were.
        if reach <= self.beyond * null and self.runner.stands_in is None:
            return settled(UNCLEAR, f"; what it looks for would move the logits by {reach:.1e} only")
        if worst <= self.excused * null:
            return settled(PASSED, "")
        if not self.plain_is_right and worst <= self.beyond * self.plain:
            return settled(UNCLEAR, f"; plain decoding is off too, by {self.plain:.1e}, so this shows nothing more")
        first = next(at for at, error in sorted(errors.items()) if error > self.excused * null)
        if plain is not None and plain > self.beyond * null and worst <= self.excused * plain:
            also = f"{what}: relative logit error {worst:.1e}, {plain:.1e} without a cache{self.left_out}."
            return Check(self.name, PLAIN, also, worst, null, first)
        if worst <= self.beyond * null:
            return settled(UNCLEAR, "; too much for rounding and too little for a bug", first)
        cause = hint if isinstance(hint, str) and self.asks == "yes" else ""
        # What is wrong with the model may break the search for its cause too.
        with contextlib.suppress(Exception):
            cause = hint(errors) if callable(hint) and self.asks == "yes" else cause
        return settled(FAILED, f", first at position {first}" + (f"; {cause}" if cause else ""), first, cause)


def attempted(bench: Bench, name: str, run: Callable[[Bench], Check]) -> Check:
    """A check under its name; one that was not run, or says nothing, says why."""
    try:
        return run(dataclasses.replace(bench, name=name))
    except Exception as error:
        return met(bench.runner.model, name, error)


def met(model: nn.Module, name: str, error: Exception) -> Check:
    """What an error makes of a check: the library's crash fails, its refusal is listed.

    Raises:
        OwnError: It is kvinterp's own.
    """
    if isinstance(error, OwnError):
        raise error
    if isinstance(error, UnclearError):
        return Check(name, error.status, str(error), None, error.null, hint=error.option)
    ours = isinstance(error, KvinterpError)
    cause = error.__cause__ if ours and error.__cause__ is not None else error
    who, place = whose(cause, model)
    if out_of_memory(cause):
        return Check(name, UNCLEAR, f"it raised {one_line(cause)}.")
    if who == OURS:
        if ours:
            return Check(name, NOT_RUN, f"{str(error).rstrip('.')}.")
        raise OwnError(f"{name}: kvinterp itself raised {one_line(error)} ({place}): please report it.") from error
    said = f"{reason(error).rstrip('.')}." if ours else f"{one_line(error)} ({place})."
    return (
        Check(name, REFUSED, said)
        if who == REFUSES or isinstance(cause, ImportError)
        else Check(name, FAILED, f"it raised {said}")
    )
