"""The precision ladder as an SVG: differences against unit roundoff."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvinterp.auditing.ladder import Rung

__all__ = ["ladder_plot"]

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 480, 290, 70, 60, 16
_LOW, _HIGH = -18, 2
"""Powers of ten the vertical axis spans; what is exactly 0 is drawn on the line under it."""


def ladder_plot(rungs: Sequence[Rung]) -> str:
    """Differences against unit roundoff on logarithmic axes; rounding lies along the diagonal."""
    native = sorted((r for r in rungs if r.name == str(r.dtype).removeprefix("torch.")), key=lambda r: -r.unit)
    if not native:
        return ""
    places = {r.name: _LEFT + 45 + i * (_WIDTH - _LEFT - 90) / max(len(native) - 1, 1) for i, r in enumerate(native)}
    found = {r.name: r.summary() for r in native}
    series: list[tuple[str, str, Callable[[str], float | None]]] = [
        ("free", "logits, free-running (relative)", lambda n: found[n]["relative_logit"]),
        ("local", "largest block error given equal inputs (relative)", lambda n: found[n]["block_error"]),
    ]
    parts = [_axis(places), _line("null", [(places[r.name], _height(r.unit)) for r in native], "4 4")]
    for name, _, value in series:
        points = [(places[r.name], _height(v)) for r in native if (v := value(r.name)) is not None]
        parts.append(_line(name, points, ""))
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="var(--{name})"/>' for x, y in points]
    keys = [("null", "one unit roundoff"), *((name, label) for name, label, _ in series)]
    for index, (name, label) in enumerate(keys):
        y = _HEIGHT + 14 + 18 * index
        parts.append(f'<rect x="{_LEFT}" y="{y - 9}" width="12" height="10" fill="var(--{name})"/>')
        parts.append(f'<text x="{_LEFT + 18}" y="{y}">{html.escape(label)}</text>')
    total = _HEIGHT + 20 + 18 * len(keys)
    return f'<svg viewBox="0 0 {_WIDTH} {total}" role="img" aria-label="The precision ladder">{"".join(parts)}</svg>'


def _height(value: float) -> float:
    bottom = _HEIGHT - _BOTTOM
    if not value > 0:
        return bottom + 18
    power = min(max(math.log10(value) if math.isfinite(value) else _HIGH, _LOW), _HIGH)
    return bottom - (power - _LOW) / (_HIGH - _LOW) * (bottom - _TOP)


def _axis(places: dict[str, float]) -> str:
    marks = []
    for power in range(_LOW, _HIGH + 1, 4):
        y = _height(10.0**power)
        marks.append(f'<line class="axis" x1="{_LEFT}" x2="{_WIDTH - 10}" y1="{y:.1f}" y2="{y:.1f}"/>')
        marks.append(f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">1e{power}</text>')
    zero = _height(0.0)
    marks.append(f'<text x="{_LEFT - 8}" y="{zero + 4:.1f}" text-anchor="end">exactly 0</text>')
    names = (
        f'<text x="{x:.1f}" y="{_HEIGHT - 14}" text-anchor="middle">{html.escape(n)}</text>' for n, x in places.items()
    )
    return "".join([*marks, *names])


def _line(name: str, points: Iterable[tuple[float, float]], dashes: str) -> str:
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
    dash = f' stroke-dasharray="{dashes}"' if dashes else ""
    return f'<polyline points="{path}" fill="none" stroke="var(--{name})" stroke-width="2"{dash}/>'
