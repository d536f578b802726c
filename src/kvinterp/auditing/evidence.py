"""Gathering the evidence: every rung, and inside the first blocks that a rung shows to be off."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import pandas as pd
import torch

from kvinterp.auditing.inside import Finding, find
from kvinterp.auditing.ladder import Plan, Rung, band, climb, forced, on_grid, unit_roundoff
from kvinterp.auditing.subject import BlockTaps, Subject
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.kernels import BatchInvariant, Native

__all__ = ["Auditor", "Evidence"]


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

    @property
    def native(self) -> list[str]:
        """The rungs with the machine's own kernels, which are the precisions."""
        return [name for name, rung in self.rungs.items() if isinstance(rung.kernels, Native)]

    def band(self, name: str) -> float:
        """The relative error that rounding explains on a rung."""
        return band(self.rungs[name].dtype, self.terms)

    def explained(self, rung: str, found: Finding) -> str:
        """The narrower dtype that a cast to it explains this error with, or an empty text."""
        wide = self.rungs[rung].dtype
        home = found.module.rsplit(".", 1)[0] if found.tensor == found.module else found.module
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            narrower = torch.finfo(dtype).bits < torch.finfo(wide).bits
            seen = any(module.startswith(home) for module in found.casts.get(name, ()))
            if narrower and (found.grid == name or seen) and found.error <= band(dtype, self.terms):
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
            want_sweep = "yes" if self.sweep == "yes" and name in (self.seen.own, "float32") else "no"
            rung = climb(twin, self.plan, sweep=want_sweep)
            self.seen.rungs[name] = rung
            self._look_inside(twin, name, rung)
            if name == "float32" or (name == self.seen.own and rung.unit < unit_roundoff(torch.float16)):
                self._look_for_grid(twin, rung)
            rung.seconds = time.perf_counter() - started
            del twin  # Two copies at once would be one too many.
        self._invariant_rung()
        return self.seen

    def _in(self, dtype: torch.dtype) -> Adapter:
        """The model in a dtype; a copy that is dropped with its rung, never kept on the adapter."""
        return self.adapter if dtype == self.adapter.dtype and dtype != torch.float64 else self.adapter.cast(dtype)

    # Looking inside the first suspicious block -----------------------------------------------------------------------

    def _look_inside(self, twin: Adapter, name: str, rung: Rung) -> None:
        """Finds the first tensor beyond the band and not explained by a cast; else the first beyond it; else the first
        that differs at all.
        """
        limit = band(rung.dtype, self.seen.terms)
        local = rung.local if not len(rung.sweep) else pd.concat([rung.local, rung.sweep], ignore_index=True)
        beyond = local[local["error"] > limit]
        chosen = beyond if len(beyond) else local[local["error"] > 0]
        if chosen.empty:
            return
        threshold = limit if len(beyond) else 0.0
        layers = sorted({int(layer) for layer in chosen["layer"]}) if len(beyond) else [int(chosen["layer"].min())]
        # The earliest case at the first of these layers: its prompt, its prefill.
        row = chosen[chosen["layer"] == layers[0]].sort_values(["position", "prefill"]).iloc[0]
        found = self._find(Subject(twin), row, layers, threshold)
        if not found and threshold:
            # No single tensor inside is beyond the band: the first that differs, with what the block as a whole is off by.
            found = self._find(Subject(twin), row, layers[:1], 0.0)
            found = {n: [dataclasses.replace(f[0], error=float(row["error"]))] for n, f in found.items()}
        ordered = [found[layer] for layer in sorted(found)]
        if not ordered:
            return
        wrong = next((f for tensors in ordered if (f := self._unexplained(name, tensors, limit)) is not None), None)
        self.seen.findings[name] = ordered[0][0] if wrong is None else wrong
        if threshold:
            self.seen.beyond.add(name)
            self.seen.gone[name] = self._gone(twin, row, self.seen.findings[name], limit)
            self.seen.numbered[name] = self._numbered(twin, row, self.seen.findings[name], limit)

    def _unexplained(self, name: str, tensors: Sequence[Finding], limit: float) -> Finding | None:
        """The first of one block's tensors that is beyond the band and not the work of a cast, its own or one before it."""
        lower = self.seen.explained(name, tensors[0])
        if not lower:
            return tensors[0] if tensors[0].error > limit else None
        reach = 4 * band(getattr(torch, lower), self.seen.terms)
        return next((f for f in tensors[1:] if f.error > reach and not self.seen.explained(name, f)), None)

    def _find(self, subject: Subject, row: Any, layers: Sequence[int], threshold: float) -> dict[int, list[Finding]]:
        taps = BlockTaps(subject)
        prompt = self.plan.prompts[int(row["prompt"])][: self.plan.length]
        prefill = int(row["prefill"])
        with taps.attached():
            reference = taps.reference(torch.tensor([list(prompt)], device=subject.adapter.device))
            return find(taps, reference, prefill, range(prefill, int(row["position"]) + 1), layers, threshold)

    def _gone(self, twin: Adapter, row: Any, wrong: Finding, limit: float) -> bool:
        """Whether the error is within rounding once every kernel has a fixed order: then it was a kernel's."""
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
