"""The verdict: what the ladder's evidence says, judged at the first tensor that differs given equal inputs."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from kvinterp.auditing.inside import Finding, find
from kvinterp.auditing.ladder import Plan, Rung, band, climb, forced, on_grid, prefix_plan, unit_roundoff
from kvinterp.auditing.subject import BlockTaps, Subject, prompts_for
from kvinterp.data import Prompt
from kvinterp.errors import InputError, UnsupportedError, located
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.paths.kernels import BatchInvariant
from kvinterp.provenance import provenance

__all__ = ["LENGTHS", "RUNGS", "VERDICTS", "Audit", "Verdict", "audit"]

VERDICTS = {
    "equal": "nothing differs bitwise",
    "rounding": "the differences scale with the unit roundoff and stay within what rounding explains",
    "kernel": "a difference appears or jumps at a fixed position and is gone with shape-invariant kernels",
    "hidden-cast": "the difference stops falling at a lower precision's level though the model is in a higher one",
    "wrong-dtype": "values lie on a 16-bit grid though 32 bits or more are claimed",
    "bug": "a tensor is wrong by more than rounding, and its error does not scale",
    "overflow": "NaN or Inf",
}
GOOD = ("equal", "rounding", "kernel")
RUNGS = ("bfloat16", "float16", "float32", "float64")
LENGTHS = (5, 63, 64, 65, 96, 97, 128)
"""Prompt lengths on and beside the usual tile, window and chunk sizes."""

LONGEST_EDGE, SMALL = 512, 5_000_000
"""The longest window or chunk that default lengths reach over, and the parameters of a model too small for threads."""


@dataclasses.dataclass(frozen=True)
class Verdict:
    """What an audit found.

    Attributes:
        verdict: One of :data:`VERDICTS`.
        first_layer: The first block whose own output is not explained by rounding (for rounding: that differs at all);
            -1 for the embedding, the number of blocks for the head; None where nothing differs.
        first_position: The absolute position where the tensor is first wrong, or None.
        tensor: The first tensor that differs given equal inputs: K, V, recurrent state, attention mask, a module, ...
        module: The module it belongs to.
        evidence: A dictionary a rung (see :meth:`Rung.summary`), with ``first_tensor`` (see :class:`Finding`) where one
            was looked for: its error there, the band of rounding, and what else explains it.
        confidence: The share of the checks that were made which point to this verdict, 0 to 1.
        reading: A few sentences.
    """

    verdict: str
    first_layer: int | None
    first_position: int | None
    tensor: str
    module: str
    evidence: dict[str, dict[str, Any]]
    confidence: float
    reading: str

    @property
    def exit_code(self) -> int:
        """0 for equal, rounding and kernel, which are no fault of the model's code; 1 for the others."""
        return 0 if self.verdict in GOOD else 1

    def to_json(self) -> str:
        """The same fields as JSON; numbers that JSON lacks (inf, NaN) as text."""
        return json.dumps(_plain(dataclasses.asdict(self)), indent=1, allow_nan=False)

    def __str__(self) -> str:
        return self.reading


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclasses.dataclass
class Audit:
    """Everything an audit measured; ``verdict`` is its conclusion.

    Attributes:
        verdict: The conclusion.
        rungs: What each precision showed.
        plan: What was run.
        about: Provenance.
    """

    verdict: Verdict
    rungs: list[Rung]
    plan: Plan
    about: dict[str, Any]

    def rung(self, name: str) -> Rung | None:
        """One rung by name, or None."""
        return next((r for r in self.rungs if r.name == name), None)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes verdict.json, audit.html and the tables as CSV; returns the folder."""
        from kvinterp.auditing.report import write

        return write(self, Path(folder))


def audit(
    model: Any,
    prompts: Sequence[Any] | None = None,
    *,
    rungs: Sequence[str] = RUNGS,
    lengths: Sequence[int] | None = None,
    steps: int = 3,
    seed: int = 0,
    sweep: str = "yes",
    out: str | os.PathLike[str] | None = None,
    detail: str = "verdict",
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Says whether a model's cached decoding is right, and if not what is wrong and where.

    Args:
        model: A model of any kind or an adapter. A transformers model runs with its own cache.
        prompts: Texts or token ids, each at least as long as the longest length and its steps; two random ones unless said.
        rungs: The precisions to climb.
        lengths: Prompt lengths after which tokens are fed one by one; those the context has room for are used. Unless said
            :data:`LENGTHS` and those on both sides of the model's own window and chunk, as far as these are at most 512.
        steps: How many tokens are fed one by one after each.
        seed: Seeds the random prompts.
        sweep: ``"yes"`` also decodes one long sequence from a short prompt, to find a position at which something changes.
        out: A folder for verdict.json and the page, or None.
        detail: ``"verdict"`` returns the :class:`Verdict`, ``"everything"`` the :class:`Audit`.
        progress: Told what runs next.

    Raises:
        InputError: Something given does not fit.
    """
    adapter = wrap(model)
    if detail not in ("verdict", "everything"):
        raise InputError(f"detail={detail!r} was given: expected 'verdict' or 'everything'.")
    if sweep not in ("yes", "no"):
        raise InputError(f"sweep={sweep!r} was given: expected 'yes' or 'no'.")
    lengths = _own_lengths(adapter) if lengths is None else lengths
    if steps < 1 or not lengths or min(lengths) < 1:
        raise InputError(
            f"lengths={tuple(lengths)!r}, steps={steps!r}: expected lengths and a number of steps of at least 1."
        )
    dtypes = {str(dtype_named(name)).removeprefix("torch."): dtype_named(name) for name in rungs}
    own = str(adapter.dtype).removeprefix("torch.")
    dtypes.setdefault(own, adapter.dtype)
    room = min(adapter.facts.context, max(lengths) + steps)
    tokens = _tokens(adapter, prompts, room, seed)
    plan = prefix_plan(tokens, lengths, steps, room)
    with located(f"audit of {adapter.facts.name}"), _threads(adapter):
        result = _Auditor(adapter, plan, dtypes, sweep, progress or (lambda _: None)).run()
    if out is not None:
        result.save(out)
    return result if detail == "everything" else result.verdict


def _own_lengths(adapter: Adapter) -> tuple[int, ...]:
    config: Any = getattr(adapter.source, "config", None)
    chunks = [getattr(config, name, None) for name in ("chunk_size", "mamba_chunk_size", "attention_chunk_size")]
    edges = {edge for edge in (*adapter.facts.windows, *chunks) if isinstance(edge, int) and 2 < edge <= LONGEST_EDGE}
    return tuple(sorted({*LENGTHS, *(edge + side for edge in edges for side in (-1, 1))}))


@contextlib.contextmanager
def _threads(adapter: Adapter) -> Iterator[None]:
    """One thread for a small model on a CPU: two only wait for each other, ten times as long where others compute too."""
    before = torch.get_num_threads()
    small = adapter.device.type == "cpu" and sum(p.numel() for p in adapter.model.parameters()) < SMALL
    try:
        if small:
            torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(before)


def _tokens(adapter: Adapter, prompts: Sequence[Any] | None, length: int, seed: int) -> list[Sequence[int]]:
    if prompts is None:
        return prompts_for(adapter, 2, length, seed)
    found: list[Sequence[int]] = []
    for prompt in prompts:
        text = prompt.text if isinstance(prompt, Prompt) else prompt
        ids = adapter.encode(text) if isinstance(text, str) else list(text)
        wrong = next((t for t in ids if not isinstance(t, int) or not 0 <= t < adapter.facts.vocabulary), None)
        if wrong is not None or len(ids) < 3:
            what = "it has fewer than 3 tokens" if wrong is None else f"it holds token {wrong!r}"
            raise InputError(
                f"prompt {str(prompt)[:40]!r} cannot be audited: {what}; vocabulary {adapter.facts.vocabulary}."
            )
        found.append(ids)
    if not found:
        raise InputError("the list of prompts is empty: give at least one, or leave it out for random ones.")
    return found


class _Auditor:
    def __init__(
        self, adapter: Adapter, plan: Plan, dtypes: dict[str, Any], sweep: str, progress: Callable[[str], None]
    ) -> None:
        self.adapter, self.plan, self.dtypes, self.sweep, self.progress = adapter, plan, dtypes, sweep, progress
        self.own = str(adapter.dtype).removeprefix("torch.")
        matrices = [p.shape[-1] for p in adapter.model.parameters() if p.dim() == 2]
        self.terms = max([plan.length, adapter.facts.width, *matrices])
        self.rungs: dict[str, Rung] = {}
        self.findings: dict[str, Finding] = {}
        self.sweeps: dict[str, pd.DataFrame] = {}
        self.gone: dict[str, bool] = {}
        self.numbered: dict[str, bool] = {}
        self.grid_module = ""
        self.onset: tuple[str, int, int] | None = None

    def run(self) -> Audit:
        for name, dtype in self.dtypes.items():
            self.progress(name)
            started = time.perf_counter()
            twin = self._in(dtype)
            want_sweep = "yes" if self.sweep == "yes" and name in (self.own, "float32") else "no"
            rung = climb(twin, self.plan, sweep=want_sweep)
            self.rungs[name] = rung
            self._look_inside(twin, name, rung)
            if name == "float32" or (name == self.own and rung.unit < unit_roundoff(torch.float16)):
                self._look_for_grid(twin, rung)
            rung.seconds = time.perf_counter() - started
            del twin  # Two copies at once would be one too many.
        self._invariant_rung()
        verdict = self._judge()
        about = provenance(self.adapter, lengths=list(self.plan.prefills), steps=self.plan.steps)
        return Audit(verdict, list(self.rungs.values()), self.plan, about)

    def _in(self, dtype: torch.dtype) -> Adapter:
        """The model in a dtype; a copy that is dropped with its rung, never kept on the adapter."""
        return self.adapter if dtype == self.adapter.dtype and dtype != torch.float64 else self.adapter.cast(dtype)

    # Looking inside the first suspicious block -----------------------------------------------------------------------

    def _look_inside(self, twin: Adapter, name: str, rung: Rung) -> None:
        """Finds the first tensor beyond the band and not explained by a cast; else the first beyond it; else the first
        that differs at all.
        """
        limit = band(rung.dtype, self.terms)
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
        self.findings[name] = ordered[0][0] if wrong is None else wrong
        if threshold:
            self.gone[name] = self._gone(twin, row, self.findings[name], limit)
            self.numbered[name] = self._numbered(twin, row, self.findings[name], limit)

    def _unexplained(self, name: str, tensors: Sequence[Finding], limit: float) -> Finding | None:
        """The first of one block's tensors that is beyond the band and not the work of a cast, its own or one before it."""
        lower = self._explained(name, tensors[0])
        if not lower:
            return tensors[0] if tensors[0].error > limit else None
        reach = 4 * band(getattr(torch, lower), self.terms)
        return next((f for f in tensors[1:] if f.error > reach and not self._explained(name, f)), None)

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

    def _explained(self, rung: str, found: Finding) -> str:
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

    # Other evidence ---------------------------------------------------------------------------------------------------

    def _look_for_grid(self, twin: Adapter, rung: Rung) -> None:
        if not rung.grid or self.grid_module:
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
        self.grid_module = seen[min(last_off + 1, len(seen) - 1)][0] if seen else ""

    def _invariant_rung(self) -> None:
        """The model's own precision again, with shape-invariant kernels, on the shortest and the longest case."""
        native = self.rungs[self.own]
        if native.nonfinite:
            return
        short = sorted({self.plan.prefills[0], self.plan.prefills[-1]})
        plan = dataclasses.replace(
            self.plan, prompts=self.plan.prompts[:1], prefills=tuple(short), steps=min(self.plan.steps, 2)
        )
        self.progress(f"{self.own}, batch_invariant")
        started = time.perf_counter()
        try:
            rung = climb(self.adapter, plan, BatchInvariant())
        except UnsupportedError:
            return
        rung.seconds = time.perf_counter() - started
        self.rungs[rung.name] = rung
        self.onset = self._onset()

    def _onset(self) -> tuple[str, int, int] | None:
        """The rung, layer and position at which a difference appears or jumps in every prompt, gone with fixed kernels."""
        for name in dict.fromkeys((self.own, "float32")):
            rung = self.rungs.get(name)
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

    # Judging ----------------------------------------------------------------------------------------------------------

    def _judge(self) -> Verdict:
        evidence = {name: rung.summary() for name, rung in self.rungs.items()}
        for name, found in self.findings.items():
            evidence[name]["first_tensor"] = {
                **dataclasses.asdict(found),
                "error_in_unit_roundoffs": found.error / self.rungs[name].unit,
                "band": band(self.rungs[name].dtype, self.terms),
                "explained_by_cast_to": self._explained(name, found),
                "gone_with_fixed_order": self.gone.get(name),
                "gone_when_told_positions": self.numbered.get(name),
            }
        own = self.rungs[self.own]
        if own.nonfinite:
            return self._overflow(own, evidence)
        wide = next((r for r in (own, self.rungs.get("float32")) if r is not None and r.grid and r.unit < 1e-5), None)
        if wide is not None:
            reading = (
                f"Every logit is exactly a {wide.grid} number though the model is in {wide.name}: "
                f"from module {self.grid_module or 'unknown'} on, values were rounded to 16 bits."
            )
            return self._verdict("wrong-dtype", None, None, "logits", self.grid_module, evidence, 1.0, reading)
        wrong = {n: f for n, f in self.findings.items() if f.error > band(self.rungs[n].dtype, self.terms)}
        bugs = {n: f for n, f in wrong.items() if not self._explained(n, f) and not self.gone.get(n, False)}
        if bugs:
            return self._bug(bugs, evidence)
        kernels = {n: f for n, f in wrong.items() if self.gone.get(n, False)}
        if kernels:
            return self._kernel(kernels, evidence)
        casts = {n: f for n, f in wrong.items() if self._explained(n, f) and not self.gone.get(n, False)}
        if casts:
            return self._cast(casts, evidence)
        if self.onset is not None:
            name, layer, position = self.onset
            here = self.findings.get(name)
            tensor, module = (
                (here.tensor, here.module) if here is not None and here.layer == layer else ("block output", "")
            )
            reading = (
                f"In {name} nothing differs before position {position} and it does from there on, in every prompt, first "
                f"in layer {layer} ({tensor}); with shape-invariant kernels it is gone. A kernel changes its order there."
            )
            return self._verdict("kernel", layer, position, tensor, module, evidence, 1.0, reading)
        return self._benign(evidence)

    def _verdict(self, word: str, *fields: Any) -> Verdict:
        return Verdict(word, *fields[:-1], f"{self.adapter.facts.name}: {word}. {fields[-1]}")  # type: ignore[call-arg]

    def _overflow(self, own: Rung, evidence: dict[str, Any]) -> Verdict:
        where = own.nonfinite
        others = [r.name for r in self.rungs.values() if r.nonfinite and r is not own]
        reading = (
            f"{where['value']} first appears on the {where['path']} path in {where['module'] or 'the logits'} in {own.name}"
            f"{f' at position {where_position}' if (where_position := where['position']) is not None else ''}"
            f"{f'; also in {chr(44).join(others)}' if others else ''}. Use a dtype with a wider range."
        )
        return self._verdict(
            "overflow", where.get("layer"), where["position"], where["value"], where["module"], evidence, 1.0, reading
        )

    def _bug(self, bugs: dict[str, Finding], evidence: dict[str, Any]) -> Verdict:
        name = max(bugs, key=lambda n: -self.rungs[n].unit)
        found = bugs[name]
        finite = [n for n in self.dtypes if not self.rungs[n].nonfinite]
        share = len([n for n in finite if n in bugs]) / max(len(finite), 1)
        sizes = ", ".join(f"{n} {f.error:.1e}" for n, f in bugs.items())
        reading = (
            f"Given equal inputs, {found.tensor} of layer {found.layer} ({found.module}) is wrong from position "
            f"{found.position} on (seen at step {found.step}); its relative error does not fall with the precision: {sizes}; "
            f"rounding explains {band(self.rungs[name].dtype, self.terms):.1e} in {name}."
        )
        if self.numbered.get(name):
            reading += (
                " Told the positions of its tokens, as generate() tells them, the model is right: called without "
                "position_ids it numbers cached tokens wrongly."
            )
        return self._verdict("bug", found.layer, found.position, found.tensor, found.module, evidence, share, reading)

    def _kernel(self, kernels: dict[str, Finding], evidence: dict[str, Any]) -> Verdict:
        # The rung with the long decode knows the first position; the others only the lengths they were given.
        name = min(kernels, key=lambda n: (kernels[n].position, self.rungs[n].unit))
        found = kernels[name]
        reading = (
            f"Given equal inputs, {found.tensor} of layer {found.layer} ({found.module}) is off by {found.error:.1e} in "
            f"{name}, first at position {found.position}, and within rounding once every kernel has a fixed order: a "
            "kernel is wrong or coarse there, not the model's cache."
        )
        share = len(kernels) / max(len([n for n in self.dtypes if not self.rungs[n].nonfinite]), 1)
        return self._verdict("kernel", found.layer, found.position, found.tensor, found.module, evidence, share, reading)

    def _cast(self, casts: dict[str, Finding], evidence: dict[str, Any]) -> Verdict:
        name = max(casts, key=lambda n: -self.rungs[n].unit)
        found, lower = casts[name], self._explained(name, casts[name])
        module = next((m for m in found.casts.get(lower, ()) if m.startswith(found.module)), found.module)
        checked = [n for n in self.dtypes if self.rungs[n].unit < unit_roundoff(getattr(torch, lower))]
        share = len([n for n in checked if n in casts]) / max(len(checked), 1)
        reading = (
            f"In {name} the difference stops at the level of {lower}: given equal inputs, {found.tensor} of layer "
            f"{found.layer} is off by {found.error:.1e}, which is {found.error / unit_roundoff(getattr(torch, lower)):.2g} "
            f"{lower} unit roundoffs; {module} casts to {lower}."
        )
        return self._verdict("hidden-cast", found.layer, found.position, found.tensor, module, evidence, share, reading)

    def _benign(self, evidence: dict[str, Any]) -> Verdict:
        finite = [self.rungs[n] for n in self.dtypes if not self.rungs[n].nonfinite]
        overflowed = [n for n in self.dtypes if self.rungs[n].nonfinite]
        note = f" In {', '.join(overflowed)} it overflows." if overflowed else ""
        differing = [r for r in finite if (r.steps["max_abs"] > 0).any() or (r.local["error"] > 0).any()]
        if not differing:
            return self._verdict(
                "equal",
                None,
                None,
                "",
                "",
                evidence,
                1.0,
                f"Every logit of every step is bitwise the same in every precision.{note}",
            )
        first = self.findings.get(self.own) or self.findings.get(differing[0].name)
        worst = {r.name: r.local["error"].max() / r.unit for r in finite}
        # Two checks a rung: each block's own error, and the logits against the null control.
        checks = [c for r in finite for c in (r.local["error"].max() <= band(r.dtype, self.terms), r.within_null_band)]
        invariant = self.rungs.get(f"{self.own}, batch_invariant")
        same = invariant is not None and (invariant.steps["max_abs"] == 0).all()
        reading = (
            "Each block's own error given equal inputs is "
            + ", ".join(f"{value:.2g} unit roundoffs in {name}" for name, value in worst.items())
            + ": it scales with the precision."
            + self._beside_the_null()
            + (" With shape-invariant kernels both paths are bitwise equal." if same else "")
            + (f" The first tensor that differs is {first.tensor} of layer {first.layer}." if first is not None else "")
            + note
        )
        place = (None, None, "", "") if first is None else (first.layer, first.position, first.tensor, first.module)
        return self._verdict("rounding", *place, evidence, sum(checks) / len(checks), reading)

    def _beside_the_null(self) -> str:
        found = self.rungs[self.own].summary()
        if not found["null_max_abs_logit"]:
            return ""
        return (
            f" The logits differ by at most {found['max_abs_logit']:.1e} in {self.own}; merely recomputing the same rows "
            f"among more rows (the null control) changes them by {found['null_max_abs_logit']:.1e}."
        )


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
