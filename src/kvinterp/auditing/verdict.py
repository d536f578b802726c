"""The verdict: what the ladder's evidence says, judged at the first tensor that differs given equal inputs."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import torch

from kvinterp.auditing.evidence import ONE_BY_ONE, Evidence
from kvinterp.auditing.inside import CHOICE, Finding
from kvinterp.auditing.ladder import Rung, unit_roundoff

__all__ = ["VERDICTS", "Verdict", "judge"]

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


def judge(seen: Evidence) -> Verdict:
    """Says what the evidence means."""
    return _Judge(seen).verdict()


class _Judge:
    def __init__(self, seen: Evidence) -> None:
        self.seen = seen

    def verdict(self) -> Verdict:
        """The word, the place and the reading."""
        evidence = {name: rung.summary() for name, rung in self.seen.rungs.items()}
        for name, found in self.seen.findings.items():
            evidence[name]["first_tensor"] = {
                **dataclasses.asdict(found),
                "error_in_unit_roundoffs": found.error / self.seen.rungs[name].unit,
                "band": self.seen.band(name),
                "block_beyond_band": name in self.seen.beyond,
                "explained_by_cast_to": self.seen.explained(name, found),
                "gone_with_fixed_order": self.seen.gone.get(name),
                "gone_when_told_positions": self.seen.numbered.get(name),
            }
        own = self.seen.rungs[self.seen.own]
        if own.nonfinite:
            return self._overflow(own, evidence)
        wide = next((r for r in (own, self.seen.rungs.get("float32")) if r is not None and r.grid and r.unit < 1e-5), None)
        if wide is not None:
            reading = (
                f"Every logit is exactly a {wide.grid} number though the model is in {wide.name}: "
                f"from module {self.seen.grid_module or 'unknown'} on, values were rounded to 16 bits."
            )
            return self._verdict("wrong-dtype", None, None, "logits", self.seen.grid_module, evidence, 1.0, reading)
        # A tensor inside a block that is itself within rounding may be far off where it cancels; that is no fault.
        wrong = {n: f for n, f in self.seen.findings.items() if n in self.seen.beyond and f.error > self.seen.band(n)}
        bugs = {n: f for n, f in wrong.items() if not self.seen.explained(n, f) and not self.seen.gone.get(n, False)}
        if bugs:
            return self._bug(bugs, evidence)
        # A fixed order removes what follows from a cast too, where both paths make it: the cast is the reason then. One that
        # only a cached step makes and that a fixed order removes is inside a kernel.
        casts = {n: f for n, f in wrong.items() if (to := self.seen.explained(n, f)) and self._models_own(n, f, to)}
        kernels = {n: f for n, f in wrong.items() if self.seen.gone.get(n, False) and n not in casts}
        if kernels:
            return self._kernel(kernels, evidence)
        if casts:
            return self._cast(casts, evidence)
        if self.seen.onset is not None:
            name, layer, position = self.seen.onset
            here = self.seen.findings.get(name)
            tensor, module = (
                (here.tensor, here.module) if here is not None and here.layer == layer else ("block output", "")
            )
            reading = (
                f"In {name} nothing differs before position {position} and it does from there on, in every prompt, first "
                f"in layer {layer} ({tensor}); with shape-invariant kernels it is gone. A kernel changes its order there."
            )
            return self._verdict("kernel", layer, position, tensor, module, evidence, 1.0, reading)
        return self._benign(evidence)

    def _models_own(self, name: str, found: Finding, lower: str) -> bool:
        return lower in found.both_cast or not self.seen.gone.get(name, False)

    def _verdict(self, word: str, *fields: Any) -> Verdict:
        return Verdict(word, *fields[:-1], f"{self.seen.model}: {word}. {fields[-1]}")  # type: ignore[call-arg]

    def _overflow(self, own: Rung, evidence: dict[str, Any]) -> Verdict:
        where = own.nonfinite
        others = [r.name for r in self.seen.rungs.values() if r.nonfinite and r is not own]
        reading = (
            f"{where['value']} first appears on the {where['path']} path in {where['module'] or 'the logits'} in {own.name}"
            f"{f' at position {where_position}' if (where_position := where['position']) is not None else ''}"
            f"{f'; also in {chr(44).join(others)}' if others else ''}. Use a dtype with a wider range."
        )
        return self._verdict(
            "overflow", where.get("layer"), where["position"], where["value"], where["module"], evidence, 1.0, reading
        )

    def _bug(self, bugs: dict[str, Finding], evidence: dict[str, Any]) -> Verdict:
        # The first layer any rung saw; in it the tensor of the finest, which sees the smallest errors; and of that the first
        # position, which only the rung with the long decode may know.
        first = min(f.layer for f in bugs.values())
        name = min((n for n, f in bugs.items() if f.layer == first), key=lambda n: self.seen.rungs[n].unit)
        same = [f for f in bugs.values() if (f.layer, f.tensor) == (first, bugs[name].tensor)]
        found = min(same, key=lambda f: f.position)
        # A rung whose rounding is coarser than the error could not have seen it, and says nothing.
        able = [n for n in self.seen.native if n in bugs or self._can_see(n, found.error)]
        share = len(bugs) / len(able)
        sizes = ", ".join(f"{n} {f.error:.1e}" for n, f in bugs.items())
        fed = self.seen.fed.get(name, ONE_BY_ONE)
        seen = f"at step {found.step}" if fed == ONE_BY_ONE else f"in {fed}, in the row of position {found.step}"
        reading = (
            f"Given equal inputs, {found.tensor} of layer {found.layer} ({found.module}) is wrong from position "
            f"{found.position} on (seen {seen}); its relative error does not fall with the precision: {sizes}; "
            f"rounding explains {self.seen.band(name):.1e} in {name}."
        )
        if self.seen.numbered.get(name):
            reading += (
                " Told the positions of its tokens, as generate() tells them, the model is right: called without "
                "position_ids it numbers cached tokens wrongly."
            )
        return self._verdict("bug", found.layer, found.position, found.tensor, found.module, evidence, share, reading)

    def _can_see(self, name: str, error: float) -> bool:
        rung = self.seen.rungs[name]
        return not rung.nonfinite and error > 2 * self.seen.band(name)

    def _kernel(self, kernels: dict[str, Finding], evidence: dict[str, Any]) -> Verdict:
        # The rung with the long decode knows the first position; the others only the lengths they were given.
        name = min(kernels, key=lambda n: (kernels[n].position, self.seen.rungs[n].unit))
        found = kernels[name]
        reading = (
            f"Given equal inputs, {found.tensor} of layer {found.layer} ({found.module}) is off by {found.error:.1e} in "
            f"{name}, first at position {found.position}, and within rounding once every kernel has a fixed order: a "
            "kernel is wrong or coarse there, not the model's cache."
        )
        share = len(kernels) / max(len([n for n in self.seen.native if not self.seen.rungs[n].nonfinite]), 1)
        return self._verdict("kernel", found.layer, found.position, found.tensor, found.module, evidence, share, reading)

    def _cast(self, casts: dict[str, Finding], evidence: dict[str, Any]) -> Verdict:
        name = max(casts, key=lambda n: -self.seen.rungs[n].unit)
        found, lower = casts[name], self.seen.explained(name, casts[name])
        module = next((m for m in found.casts.get(lower, ()) if m.startswith(found.module)), found.module)
        checked = [n for n in self.seen.native if self.seen.rungs[n].unit < unit_roundoff(getattr(torch, lower))]
        share = len([n for n in checked if n in casts]) / max(len(checked), 1)
        reading = (
            f"In {name} the difference stops at the level of {lower}: given equal inputs, {found.tensor} of layer "
            f"{found.layer} is off by {found.error:.1e}, which is {found.error / unit_roundoff(getattr(torch, lower)):.2g} "
            f"{lower} unit roundoffs; {module} casts to {lower}."
        )
        return self._verdict("hidden-cast", found.layer, found.position, found.tensor, module, evidence, share, reading)

    def _benign(self, evidence: dict[str, Any]) -> Verdict:
        finite = [self.seen.rungs[n] for n in self.seen.native if not self.seen.rungs[n].nonfinite]
        overflowed = [n for n in self.seen.native if self.seen.rungs[n].nonfinite]
        note = f" In {', '.join(overflowed)} it overflows." if overflowed else ""
        note += "".join(f" In {name} torch cannot run it ({why})." for name, why in self.seen.refused.items())
        note += f" {self.seen.exercised}"
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
        first = self.seen.findings.get(self.seen.own) or self.seen.findings.get(differing[0].name)
        worst = {r.name: r.local["error"].max() / r.unit for r in finite}
        rows = {r.name: r.prompt_rows / r.unit for r in finite}
        # Two checks a rung: each block's own error, and the logits against the null control.
        checks = [c for r in finite for c in (r.local["error"].max() <= self.seen.band(r.name), r.within_null_band)]
        invariant = self.seen.rungs.get(f"{self.seen.own}, batch_invariant")
        same = invariant is not None and (invariant.steps["max_abs"] == 0).all()
        reading = (
            "Given equal inputs, a block is off by at most "
            + ", ".join(
                f"{value:.2g} unit roundoffs in {name} (prompt's rows {rows[name]:.2g})" for name, value in worst.items()
            )
            + ": what rounding explains in each precision."
            + self._choices()
            + self._beside_the_null()
            + (" With shape-invariant kernels both paths are bitwise equal." if same else "")
            + (f" The first tensor that differs is {first.tensor} of layer {first.layer}." if first is not None else "")
            + note
        )
        place = (None, None, "", "") if first is None else (first.layer, first.position, first.tensor, first.module)
        return self._verdict("rounding", *place, evidence, sum(checks) / len(checks), reading)

    def _choices(self) -> str:
        names = [n for n, f in self.seen.findings.items() if f.tensor == CHOICE and n in self.seen.beyond]
        layers = ", ".join(f"{n} (layer {self.seen.findings[n].layer})" for n in names)
        return f" Rounding tips the choice between nearly equal experts in {layers}." if names else ""

    def _beside_the_null(self) -> str:
        found = self.seen.rungs[self.seen.own].summary()
        if not found["null_max_abs_logit"]:
            return ""
        return (
            f" The logits differ by at most {found['max_abs_logit']:.1e} in {self.seen.own}; merely recomputing the same rows "
            f"among more rows (the null control) changes them by {found['null_max_abs_logit']:.1e}."
        )
