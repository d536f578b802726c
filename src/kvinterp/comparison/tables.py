"""How far apart two paths are at a step, measured on the device by every metric there is and gathered in tidy tables.

A step of a small model has few numbers, and measuring it takes longer in Python than in the processor. So steps are kept
until a block of them is worth a call, and measured together. Every metric gives a number for each vector of
the last dimension, so that a block's numbers are those of its steps to the bit; a test holds them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.common.shapes import Flag, Measure
from kvinterp.comparison.attention_rows import COLUMNS, AttentionRows
from kvinterp.comparison.cache_errors import CacheErrors, Span
from kvinterp.comparison.table import Table
from kvinterp.metrics.routing import routing_of
from kvinterp.models.attaching import Site
from kvinterp.models.sites import RESIDUAL_SITES, ROUTING_SITES, ROWS

_CACHED = {"cache_k": "K", "cache_k_pre": "K before RoPE", "cache_v": "V"}
"""What a cache site is called in the tables."""

BLOCK = 2**17
"""How many numbers of both paths are worth a call on a CPU; other devices take 32 times as many.

As float64 they are a megabyte, which a core's own cache holds from one operation to the next: a call is given twice as many at
most, where they can be parted.
"""
ALONE = 2**15
"""A vector of as many numbers is measured with no other step's: torch adds up a single one with several threads, and several
with one each.
"""

Pair = tuple[Tensor, Tensor]
"""The tensors of both paths; their dtypes may differ."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """What one step showed of one kind, in a copy.

    Attributes:
        step: The step.
        at: The labels of the dimensions of ``pair``, but for the last one, and of K and V the positions before it.
        pair: What both paths showed, ``[*dimensions, last]``.
        span: Of K and V where the positions are, and how each row of the batch counts.
    """

    step: int
    at: dict[str, Any]
    pair: Pair
    span: Span | None = None

    @property
    def like(self) -> tuple[Any, ...]:
        """What is alike in pieces that are measured together: all but the number of positions."""
        shape = self.pair[0].shape
        step = self.step if self.alone else -1
        return self.at, shape if self.span is None else (*shape[:-2], shape[-1]), *(each.dtype for each in self.pair), step

    @property
    def alone(self) -> bool:
        """Whether it waits for no other step."""
        return self.pair[0].shape[-1] >= ALONE or (self.span is not None and self.span.there is not None)


class Differences:
    """Takes what both paths showed at a step and keeps how far apart they were.

    Args:
        layers: The layers that are watched.
        heads: Labels of the query heads that are watched.
        kv_heads: Labels of the KV heads.
        cache_errors: One of :data:`kvinterp.comparison.cache_errors.CACHE_ERRORS`.
        block: Most numbers that wait to be measured together; default: :data:`BLOCK`, by the device.
        same_text: Whether both paths hold the same text after a flip too, as in the matched protocol.
    """

    def __init__(
        self,
        layers: Sequence[int],
        heads: Sequence[int],
        kv_heads: Sequence[int],
        cache_errors: str = "aggregated",
        block: int | None = None,
        same_text: bool = True,
    ) -> None:
        self.heads, self.kv_heads = list(heads), list(kv_heads)
        self.cache, self.block = CacheErrors(layers, cache_errors), block
        self.rows, self.same_text = AttentionRows(), same_text
        self.tables = {
            fills.table: Table(("step", *fills.dimensions), [metric.column for metric in metrics.OF_KIND[kind]])
            for kind, fills in metrics.KINDS.items()
            if kind != "kv"
        } | {"kv": self.cache.every, "kv_steps": self.cache.steps}
        self._waiting: dict[metrics.Kind, list[_Piece]] = {kind: [] for kind in metrics.KINDS}
        self._numbers = dict.fromkeys(metrics.KINDS, 0)

    @classmethod
    def columns(cls) -> dict[str, tuple[str, ...]]:
        """The columns of each table, by the names they have in a comparison."""
        empty = cls((), (), ())
        found = {name: (*table.dimensions, *table.values, "after_flip") for name, table in empty.tables.items()}
        return found | {"kv_positions": tuple(empty.cache.positions((), ()).columns), "attention_rows": COLUMNS}

    def frames(self, examples: Sequence[int]) -> dict[str, pd.DataFrame]:
        """Everything added, by the names the tables have in a comparison.

        Args:
            examples: The example number of each row of the batch.
        """
        for kind in metrics.KINDS:
            self._measure(kind)
        frames = {name: table.frame() for name, table in self.tables.items()}
        more = {"kv_positions": self.cache.positions(examples, self.kv_heads), "attention_rows": self.rows.frame(examples)}
        return frames | more

    def add(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        logits: tuple[Tensor, Tensor],
        seen: tuple[Mapping[Site, Tensor], Mapping[Site, Tensor]],
        marks: Tensor,
        flips: Tensor | None = None,
    ) -> None:
        """Adds one step of one batch; nothing of it is kept but copies.

        Args:
            step: The decode step.
            examples: The example number of each row.
            end: Positions in the context at this step; keys are aligned by it.
            logits: ``[batch, vocab]`` of both paths.
            seen: For each path what it showed at the newest position, sites to tensors with a batch dimension; where rows of
                the cache were let go of also the positions of those that are left, as site ``ROWS``.
            marks: For each row 1 after its flip, 0 before it, -1 where its text has ended; stays on its device.
            flips: Which rows flip their first token at this step, on the same device; None where it is not known.
        """
        layers_of: dict[str, list[int]] = {}
        for site, layer in seen[0]:
            if (site, layer) in seen[1]:
                layers_of.setdefault(site, []).append(layer)
        streams = []
        labels: dict[str, Sequence[Any]]
        for site in filter(layers_of.get, RESIDUAL_SITES):
            layers = layers_of[site]
            labels = {"site": [site], "layer": layers, "example": examples}
            a, b = (torch.stack([path[site, layer] for layer in layers])[None] for path in seen)
            streams.append(_Piece(step, labels, (a, b)))
        self._wait("residual", streams)
        if "pattern" in layers_of:
            layers = layers_of["pattern"]
            labels = {"layer": layers, "example": examples, "head": self.heads}
            rows = [[path["pattern", layer] for layer in layers] for path in seen]
            widest = max(row.shape[-1] for path in rows for row in path)
            a, b = (_stacked(path, widest) for path in rows)
            self.rows.add(step, layers, self.heads, end, (a, b), marks, flips)
            self._wait("pattern", [_Piece(step, labels, (a, b))])
        if set(ROUTING_SITES) <= layers_of.keys():
            layers = layers_of["experts"]
            a, b = (torch.stack([routing_of(*(path[site, x] for site in ROUTING_SITES)) for x in layers]) for path in seen)
            self._wait("routing", [_Piece(step, {"layer": layers, "example": examples}, (a, b))])
        # After the rows of attention, which are chosen among as soon as the KL is known.
        self._wait("logits", [_Piece(step, {"example": examples}, (logits[0].clone(), logits[1].clone()))])
        if self.rows.full:
            self._measure("logits")
        sites = [site for site in _CACHED if site in layers_of]
        self._wait("kv", [*self._cached(step, examples, end, {site: layers_of[site] for site in sites}, seen, marks)])

    def _cached(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        layers_of: Mapping[str, list[int]],
        seen: tuple[Mapping[Site, Tensor], Mapping[Site, Tensor]],
        marks: Tensor,
    ) -> Iterator[_Piece]:
        # A sliding window may hold fewer positions on one path: the newest ones, so both are cut to the shorter. Layers may
        # differ in the number and the width of their heads too (Gemma 4).
        lined_up = {
            (site, x): [_by_position(path[site, x], path.get((ROWS, x)), end) for path in seen]
            for site, layers in layers_of.items()
            for x in layers
        }
        groups: dict[str, dict[tuple[int, int, int], list[int]]] = {}
        for (site, layer), ((a, _), (b, _)) in lined_up.items():
            shape = (min(a.shape[2], b.shape[2]), a.shape[1], a.shape[3])
            groups.setdefault(site, {}).setdefault(shape, []).append(layer)
        first = next(iter(groups.values()), {})
        dtypes = [{pair[side][0].dtype for pair in lined_up.values()} for side in (0, 1)]
        alike = len(first) == 1 and all(group == first for group in groups.values()) and max(map(len, dtypes)) == 1
        for together in [list(groups)] if alike else [[site] for site in groups]:
            for (length, heads, _), layers in groups[together[0]].items():
                names = [_CACHED[site] for site in together]
                labels: dict[str, Sequence[Any]] = {"tensor": names, "layer": layers, "example": examples}
                sides = [[lined_up[site, x][side] for site in together for x in layers] for side in (0, 1)]
                size = len(together), len(layers)
                a, b = (_newest([tensor for tensor, _ in side], length, size) for side in sides)
                # A policy has a say over all layers or none.
                held = [[mask for _, mask in side if mask is not None] for side in sides]
                of_a, of_b = (_newest(masks, length, size) if masks else None for masks in held)
                span = Span(end - length, length, marks, (of_a, of_b))
                yield _Piece(step, {**labels, "kv_head": self.kv_heads[:heads]}, (a, b), span)

    def _wait(self, kind: metrics.Kind, pieces: Sequence[_Piece]) -> None:
        """Puts a step behind those that wait, after measuring them where it cannot be measured with them."""
        waiting = self._waiting[kind]
        if waiting and (len(pieces) != 1 or pieces[0].like != waiting[0].like):
            self._measure(kind)
        for piece in pieces:
            waiting.append(piece)
            self._numbers[kind] += 2 * piece.pair[0].numel()
            # Several pieces of a step go into the table one after the other, as the steps do.
            if len(pieces) > 1 or piece.alone or self._numbers[kind] >= self._most(piece):
                self._measure(kind)

    def _most(self, piece: _Piece) -> int:
        return self.block or (BLOCK if piece.pair[0].device.type == "cpu" else 32 * BLOCK)

    def _measure(self, kind: metrics.Kind) -> None:
        """Measures what waits."""
        waiting = list(self._waiting[kind])
        self._waiting[kind].clear()
        self._numbers[kind] = 0
        if not waiting:
            return
        steps, labels = [piece.step for piece in waiting], waiting[0].at
        paths = [*zip(*(piece.pair for piece in waiting), strict=True)]
        if kind == "kv":
            a, b = (path[0] if len(path) == 1 else torch.cat(path, -2) for path in paths)
            found = _in_parts(a, b, self._most(waiting[0]))
            self.cache.add(steps, labels, [piece.span for piece in waiting if piece.span is not None], found)
        else:
            a, b = (path[0][None] if len(path) == 1 else torch.stack(path) for path in paths)
            found = metrics.measured(kind, a, b)
            self.tables[metrics.KINDS[kind].table].add({"step": steps, **labels}, found)
            if kind == "logits":
                self.rows.measured(steps, found["kl"], self.same_text)


def _in_parts(a: Tensor, b: Tensor, most: int) -> dict[str, Measure | Flag]:
    """Every metric of K and V, so many numbers at a time: more than a core's cache holds is slower than another call."""
    shape, (a, b) = a.shape[:-1], (path.flatten(0, -2) for path in (a, b))
    # A metric of one path alone has no zero.
    zeros = {metric.column: metric.zero for metric in metrics.OF_KIND["kv"] if metric.zero is not None}
    unlike = _unlike(a, b) if len(zeros) == len(metrics.OF_KIND["kv"]) else None
    if unlike is not None:
        a, b = a.index_select(0, unlike), b.index_select(0, unlike)
    size = max(most // a.shape[-1], 1)
    parts = [metrics.measured("kv", *each) for each in zip(a.split(size), b.split(size), strict=True)]
    found = parts[0] if len(parts) == 1 else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    if unlike is not None:
        found = {
            name: measure.new_full((shape.numel(),), zeros[name]).index_copy_(0, unlike, measure)
            for name, measure in found.items()
        }
    return {name: measure.reshape(shape) for name, measure in found.items()}


def _unlike(a: Tensor, b: Tensor) -> Tensor | None:
    """Which vectors differ in a bit; None where all are to be measured.

    Of the positions that a cache holds most are often equal on both paths (58% on a small model, 85% on one of 124 M), and to see
    it takes a tenth of what measuring takes: equal ones have every metric's zero. A vector that is not finite has none, and
    another device than a CPU would have to be waited for.
    """
    if a.device.type != "cpu" or a.dtype != b.dtype or a.shape[-1] * a.element_size() % 8:
        return None
    if not a.sum(dtype=torch.promote_types(a.dtype, torch.float32)).isfinite():
        return None
    return (a.view(torch.int64) != b.view(torch.int64)).any(-1).nonzero()[:, 0]


def _newest(tensors: Sequence[Tensor], length: int, size: tuple[int, int]) -> Tensor:
    """The newest so many positions of several layers of several tensors, ``[tensor, layer, batch, kv_head, position, ...]``."""
    return torch.stack([t if t.shape[2] == length else t[:, :, t.shape[2] - length :] for t in tensors]).unflatten(0, size)


def _by_position(tensor: Tensor, rows: Tensor | None, end: int) -> tuple[Tensor, Tensor | None]:
    """Keys or values with a row for each of ``end`` positions where rows were let go of, and which of them are held."""
    if rows is None:
        return tensor, None
    whole = tensor.new_zeros(*tensor.shape[:2], end, tensor.shape[3])
    held = torch.zeros(whole.shape[:3], dtype=torch.bool, device=tensor.device)
    return whole.scatter(2, rows[..., None].expand_as(tensor), tensor), held.scatter(2, rows, True)


def _stacked(rows: Sequence[Tensor], widest: int) -> Tensor:
    # The newest key is the last on both paths; what a window does not hold got probability 0.
    return torch.stack([torch.nn.functional.pad(row, (widest - row.shape[-1], 0)) for row in rows])
