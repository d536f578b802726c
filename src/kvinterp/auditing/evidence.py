"""Gathering the evidence: every rung, and inside the first blocks that a rung shows to be off."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

from kvinterp.auditing.inside import Feed, Finding, WithoutCasts, find
from kvinterp.auditing.ladder import Plan, Rung, band, climb, forced, on_grid, unit_roundoff
from kvinterp.auditing.subject import BlockTaps, Subject
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant, Native

__all__ = ["Auditor", "Evidence"]

EXCUSED = 8 * unit_roundoff(torch.bfloat16)
"""The largest relative error that another order of additions can be the reason of, as coarse as kernels are."""
CONSTANTS = 4
"""The unit roundoffs of a narrower dtype that its constants can be off by, once nothing is cast to it any more."""
ONE_BY_ONE = "tokens fed one by one"
LOOKED_AT = 3
"""How many single tokens before a wrong one are looked into as well: a state goes wrong before what it feeds."""


@dataclasses.dataclass
class Evidence:
    """What an audit saw, before anyone says what it means.

    Attributes:
        model: The model's name.
        own: Name of the rung in the model's own precision.
        terms: The longest sum in the model.
        rungs: What each rung showed, by name.
        findings: The tensor each rung is judged by: the first beyond rounding, else the first that differs.
        beyond: The rungs on which some block is off by more than rounding explains.
        gone: Whether a finding beyond rounding is within it once every kernel has a fixed order.
        numbered: Whether it is within rounding once the model is told its tokens' positions.
        grid_module: The module from which on everything lies on a 16-bit grid, if the logits do.
        onset: The rung, layer and position at which a kernel changes its order, or None.
        fed: How the tokens were fed where a rung's finding was made: one by one, or several at once and how.
        refused: The rungs that torch cannot run this model in, and why.
        exercised: The lengths and positions that were run, in a sentence.
    """

    model: str
    own: str
    terms: int
    rungs: dict[str, Rung] = dataclasses.field(default_factory=dict)
    findings: dict[str, Finding] = dataclasses.field(default_factory=dict)
    beyond: set[str] = dataclasses.field(default_factory=set)
    gone: dict[str, bool] = dataclasses.field(default_factory=dict)
    numbered: dict[str, bool] = dataclasses.field(default_factory=dict)
    grid_module: str = ""
    onset: tuple[str, int, int] | None = None
    fed: dict[str, str] = dataclasses.field(default_factory=dict)
    refused: dict[str, str] = dataclasses.field(default_factory=dict)
    exercised: str = ""

    @property
    def native(self) -> list[str]:
        """The rungs with the machine's own kernels, which are the precisions."""
        return [name for name, rung in self.rungs.items() if isinstance(rung.kernels, Native)]

    def band(self, name: str) -> float:
        """The relative error that rounding explains on a rung."""
        return band(self.rungs[name].dtype, self.terms)

    def explained(self, rung: str, found: Finding) -> str:
        """The narrower dtype that a cast to it explains this error with, or an empty text.

        A cast explains an error of its size that is within the wider dtype's rounding once the cast is left out, or within
        the narrower one's, where constants were computed in it before the model ran.
        """
        wide, left = self.rungs[rung].dtype, found.without_casts or 0.0
        home = found.module.rsplit(".", 1)[0] if found.tensor == found.module else found.module
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            narrower = torch.finfo(dtype).bits < torch.finfo(wide).bits
            seen = any(module.startswith(home) for module in found.casts.get(name, ()))
            fits = found.error <= band(dtype, self.terms) and left <= max(self.band(rung), CONSTANTS * unit_roundoff(dtype))
            if narrower and (found.grid == name or seen) and fits:
                return name
        return ""


class Auditor:
    """Climbs the ladder and looks inside where a rung shows something.

    Args:
        adapter: The model.
        plan: What is run on each rung.
        dtypes: The rungs, by name.
        sweep: ``"yes"`` or ``"no"``: one long decode too.
        progress: Told what runs next.
    """

    def __init__(
        self, adapter: Adapter, plan: Plan, dtypes: dict[str, Any], sweep: str, progress: Callable[[str], None]
    ) -> None:
        self.adapter, self.plan, self.dtypes, self.sweep, self.progress = adapter, plan, dtypes, sweep, progress
        own = str(adapter.dtype).removeprefix("torch.")
        matrices = [p.shape[-1] for p in adapter.model.parameters() if p.dim() == 2]
        self.seen = Evidence(adapter.facts.name, own, max([plan.length, adapter.facts.width, *matrices]))

    def run(self) -> Evidence:
        """Runs every rung."""
        for name, dtype in self.dtypes.items():
            self.progress(name)
            started = time.perf_counter()
            twin = self._in(dtype)
            rung = self._climb(twin, name)
            if rung is None:
                continue
            self.seen.rungs[name] = rung
            self._look_inside(twin, name, rung)
            if name == "float32" or (name == self.seen.own and rung.unit < unit_roundoff(torch.float16)):
                self._look_for_grid(twin, rung)
            rung.seconds = time.perf_counter() - started
            del twin  # Two copies at once would be one too many.
        self._invariant_rung()
        self.seen.exercised = self._exercised()
        return self.seen

    def _exercised(self) -> str:
        plan, rungs = self.plan, self.seen.rungs.values()
        said = (
            f"Exercised: prompts of {', '.join(map(str, plan.prefills))} tokens, each with the next {plan.steps} one by one"
        )
        if any(len(rung.sweep) for rung in rungs):
            said += f"; positions {plan.sweep} to {plan.length - 1} one by one"
        if any((rung.chunks["start"] > 0).any() for rung in rungs):
            said += f"; positions {plan.chunk} to {plan.length - 1} at once on a cache of {plan.chunk}"
        else:
            said += "; never several tokens at once on a cache that is not empty"
        return f"{said}. Nothing is said of what lies beyond."

    def _climb(self, twin: Adapter, name: str) -> Rung | None:
        """One rung, or None where torch cannot run the model in its dtype."""
        finest = name == min(self.dtypes, key=lambda n: unit_roundoff(self.dtypes[n]))
        sweep = "yes" if name in (self.seen.own, "float32") else "first" if finest else "no"
        try:
            return climb(twin, self.plan, sweep=sweep if self.sweep == "yes" else "no")
        except RuntimeError as error:
            if name == self.seen.own or isinstance(error, torch.OutOfMemoryError):
                raise
            self.seen.refused[name] = str(error).strip().splitlines()[0][:120] if str(error).strip() else "RuntimeError"
            return None

    def _in(self, dtype: torch.dtype) -> Adapter:
        """The model in a dtype; a copy that is dropped with its rung, never kept on the adapter."""
        return self.adapter if dtype == self.adapter.dtype and dtype != torch.float64 else self.adapter.cast(dtype)

    # Looking inside the first suspicious block -----------------------------------------------------------------------

    def _look_inside(self, twin: Adapter, name: str, rung: Rung) -> None:
        """Finds the first tensor beyond the band and not explained by a cast; else the first beyond it; else the first
        that differs at all.
        """
        limit = band(rung.dtype, self.seen.terms)
        every = rung.every_error
        beyond = every[every["error"] > limit]
        if beyond.empty:
            # Tokens fed one by one are what a user of a cache waits for: their first difference is the one to name.
            differing = every[(every["error"] > 0) & (every["stop"] == every["start"] + 1)]
            if len(differing):
                row = differing.sort_values(["layer", "position", "prefill"]).iloc[0]
                found = self._find(Subject(twin), row, [int(row["layer"])], 0.0)
                if found:
                    self.seen.findings[name] = next(iter(found.values()))[0]
            return
        cases: list[tuple[Any, list[Finding]]] = []
        for row, layers in _cases(beyond):
            for layer, tensors in sorted(self._beyond(twin, row, layers, limit).items()):
                cases.append((row.copy(), tensors))
                assert tensors[0].layer == layer
        if not cases:
            return
        cases.sort(key=lambda case: case[1][0].layer)
        wrong = [(row, f) for row, tensors in cases if (f := self._unexplained(name, tensors, limit)) is not None]
        # One token at a time before several at once: what is wrong in both is first seen there.
        wrong.sort(key=lambda case: (case[1].layer, case[0]["stop"] - case[0]["start"] > 1, case[1].position))
        row, found_first = wrong[0] if wrong else (cases[0][0], cases[0][1][0])
        self.seen.findings[name] = found_first
        self.seen.beyond.add(name)
        self.seen.fed[name] = _how(row)
        self.seen.gone[name] = self._gone(twin, row, found_first, limit)
        self.seen.numbered[name] = self._numbered(twin, row, found_first, limit)

    def _beyond(self, twin: Adapter, row: Any, layers: Sequence[int], limit: float) -> dict[int, list[Finding]]:
        """The tensors beyond the band in each of these blocks, each with its error once casts are left out."""
        found = self._find(Subject(twin), row, layers, limit)
        if not found:
            # No single tensor inside is beyond the band: the first that differs, with what the block as a whole is off by.
            found = self._find(Subject(twin), row, layers[:1], 0.0)
            return {n: [dataclasses.replace(f[0], error=float(row["error"]))] for n, f in found.items()}
        if not any(f.casts for tensors in found.values() for f in tensors):
            return found
        try:
            again = self._find(Subject(twin, WithoutCasts()), row, sorted(found), 0.0)
        # What computes in two dtypes on purpose does not run in one.
        except (RuntimeError, UnsupportedError):
            return found
        left = {(n, f.tensor, f.module): f.error for n, tensors in reversed(again.items()) for f in reversed(tensors)}
        return {
            n: [dataclasses.replace(f, without_casts=left.get((n, f.tensor, f.module), 0.0)) for f in tensors]
            for n, tensors in found.items()
        }

    def _unexplained(self, name: str, tensors: Sequence[Finding], limit: float) -> Finding | None:
        """The first of one block's tensors that is beyond the band and not the work of a cast, its own or one before it."""
        lower = self.seen.explained(name, tensors[0])
        if not lower:
            return tensors[0] if tensors[0].error > limit else None
        narrow: torch.dtype = getattr(torch, lower)
        reach, rest = 4 * band(narrow, self.seen.terms), max(limit, CONSTANTS * unit_roundoff(narrow))
        for found in tensors[1:]:
            if self.seen.explained(name, found):
                continue
            left = found.without_casts
            if found.error > reach if left is None else left > rest:
                return found
        return None

    def _find(self, subject: Subject, row: Any, layers: Sequence[int], threshold: float) -> dict[int, list[Finding]]:
        taps = BlockTaps(subject)
        prompt = self.plan.prompts[int(row["prompt"])][: self.plan.length]
        feeds = _feeds(*(int(row[name]) for name in ("prefill", "start", "stop", "position")))
        with taps.attached():
            reference = taps.reference(torch.tensor([list(prompt)], device=subject.adapter.device))
            return find(taps, reference, feeds, layers, threshold)

    def _gone(self, twin: Adapter, row: Any, wrong: Finding, limit: float) -> bool:
        """Whether the error is within rounding once every kernel has a fixed order: then it was a kernel's.

        Rounding in another order is no error of any size: one beyond what the coarsest precision rounds is something else.
        """
        if wrong.error > max(EXCUSED, 2 * limit):
            return False
        try:
            return not self._find(Subject(twin, BatchInvariant()), row, [wrong.layer], limit)
        except UnsupportedError:
            return False

    def _numbered(self, twin: Adapter, row: Any, wrong: Finding, limit: float) -> bool:
        """Whether the error is within rounding once the model is told its tokens' positions: then it numbers them wrongly."""
        subject = Subject(twin, positions="given")
        return subject.can_be_told_positions and not self._find(subject, row, [wrong.layer], limit)

    # Other evidence ---------------------------------------------------------------------------------------------------

    def _look_for_grid(self, twin: Adapter, rung: Rung) -> None:
        if not rung.grid or self.seen.grid_module:
            return
        subject, dtype = Subject(twin), getattr(torch, rung.grid)
        seen: list[tuple[str, bool]] = []

        def hook(module: Any, _: Any, output: Any) -> None:
            made = output[0] if isinstance(output, tuple) and output else getattr(output, "logits", output)
            if isinstance(made, torch.Tensor) and made.is_floating_point() and made.numel() > 1:
                seen.append((subject.name_of(module) or type(module).__name__, on_grid(made, dtype)))

        handles = [module.register_forward_hook(hook) for module in twin.source.modules()]
        try:
            subject.recompute(torch.tensor([list(self.plan.prompts[0])], device=twin.device))
        finally:
            for handle in handles:
                handle.remove()
        # From here on every output is on the grid: what went before may have been there by chance (16-bit weights).
        last_off = max((i for i, (_, on) in enumerate(seen) if not on), default=-1)
        self.seen.grid_module = seen[min(last_off + 1, len(seen) - 1)][0] if seen else ""

    def _invariant_rung(self) -> None:
        """The model's own precision again, with shape-invariant kernels, on the shortest and the longest case."""
        native = self.seen.rungs[self.seen.own]
        if native.nonfinite:
            return
        short = sorted({self.plan.prefills[0], self.plan.prefills[-1]})
        plan = dataclasses.replace(
            self.plan, prompts=self.plan.prompts[:1], prefills=tuple(short), steps=min(self.plan.steps, 2)
        )
        self.progress(f"{self.seen.own}, batch_invariant")
        started = time.perf_counter()
        try:
            rung = climb(self.adapter, plan, BatchInvariant())
        except UnsupportedError:
            return
        rung.seconds = time.perf_counter() - started
        self.seen.rungs[rung.name] = rung
        self.seen.onset = self._onset()

    def _onset(self) -> tuple[str, int, int] | None:
        """The rung, layer and position at which a difference appears or jumps in every prompt, gone with fixed kernels."""
        for name in dict.fromkeys((self.seen.own, "float32")):
            rung = self.seen.rungs.get(name)
            if rung is None or rung.sweep.empty:
                continue
            table = rung.sweep[rung.sweep["layer"] >= 0].groupby(["prompt", "position"])["error"].max().unstack("prompt")
            starts = {_jump(table[prompt]) for prompt in table}
            start = starts.pop() if len(starts) == 1 else None
            if start is None:
                continue
            found = rung.sweep[(rung.sweep["position"] == start) & (rung.sweep["error"] > 0)]
            if found.empty:
                continue
            layer = int(found["layer"].min())
            if self._still(rung, start) == 0:
                return name, layer, start
        return None

    def _still(self, rung: Rung, start: int) -> float:
        """The largest error around a position with fixed kernels."""
        twin = self._in(rung.dtype)
        taps = BlockTaps(Subject(twin, BatchInvariant()))
        with taps.attached():
            tokens = torch.tensor([list(self.plan.prompts[0][: self.plan.length])], device=twin.device)
            reference = taps.reference(tokens)
            return max(row["error"] for row in forced(taps, reference, start, min(start + 2, self.plan.length)))


def _feeds(prefill: int, start: int, stop: int, position: int) -> list[Feed]:
    """What is fed to see one row of the tables again: at most the last few of many single tokens are looked at."""
    if stop - start > 1:
        return [*([Feed(0, start)] if start else []), Feed(start, stop, position)]
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
            chosen.setdefault(key, (row, []))[1].append(int(layer))  # type: ignore[call-overload]
    return list(chosen.values())


def _how(row: Any) -> str:
    if row["stop"] - row["start"] == 1:
        return ONE_BY_ONE
    fed = f"{int(row['stop'] - row['start'])} tokens fed at once"
    return f"{fed} on a cache of {int(row['start'])}" if row["start"] else f"a prompt's {fed} that fill the cache"


def _jump(errors: pd.Series) -> int | None:
    """The position from which errors are there that were not before, or eight times larger than any before; or None."""
    values, positions = errors.to_numpy(), errors.index.to_numpy()
    for index in range(8, len(values) - 2):
        before, after = values[:index], values[index:]
        appears = before.max() == 0 and values[index] > 0 and (after > 0).mean() >= 0.9
        jumps = before.max() > 0 and values[index] > 8 * before.max() and pd.Series(after).median() > 8 * before.max()
        if appears or jumps:
            return int(positions[index])
        if before.max() > 0 and not jumps and values[index] > 0 and (before > 0).mean() > 0.5 and index > len(values) // 2:
            return None
    return None
