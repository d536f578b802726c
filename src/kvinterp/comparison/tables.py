"""Measures on the device how far apart two paths are at each step, by every metric, and gathers
tidy tables.

A step of a small model has few numbers, so that measuring it alone costs more in Python than in the
processor. Steps therefore wait until a block of them is worth a call and are measured together.
Every metric gives one number for each vector of the last dimension, so a block's numbers equal
those of its steps to the bit; a test checks this.
"""

from __future__ import annotations

import dataclasses
import itertools
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
from kvinterp.models.attaching import HookPoint
from kvinterp.models.sites import CACHE_POSITIONS, VECTOR_SITES

_CACHED = {"cache_k": "K", "cache_k_pre": "K before RoPE", "cache_v": "V"}
"""The names of the cache sites in the tables."""

BLOCK = 2**17
"""How many numbers of both paths are worth a call on a CPU; other devices take 32 times as many.

As float64 they take a megabyte, which a core's cache holds between operations. Where a block can be
split, a call gets at most twice as many.
"""
ALONE = 2**15
"""A vector of this many numbers is measured alone: torch sums a single long vector with several
threads, but several vectors with one thread each.
"""

Pair = tuple[Tensor, Tensor]
"""The tensors of both paths; their dtypes may differ."""


@dataclasses.dataclass(frozen=True)
class _Piece:
    """A copy of the tensors of one kind at one step.

    Attributes:
        step: The step.
        labels: The labels of the dimensions of ``pair`` without the last one, and for K and V
            without the positions.
        pair: The tensors of both paths, ``[*dimensions, last]``.
        span: For K and V where the positions are and how each row of the batch counts.
    """

    step: int
    labels: dict[str, Any]
    pair: Pair
    span: Span | None = None

    @property
    def group(self) -> tuple[Any, ...]:
        """The key of pieces that can be measured together: everything but the number of
        positions.
        """
        shape: tuple[int, ...] = self.pair[0].shape
        step = self.step if self.alone else -1
        shape = shape if self.span is None else (*shape[:-2], shape[-1])
        return self.labels, shape, *(tensor.dtype for tensor in self.pair), step

    @property
    def alone(self) -> bool:
        """Whether it is measured without other steps."""
        return self.pair[0].shape[-1] >= ALONE or (
            self.span is not None and self.span.mask is not None
        )


class Differences:
    """Takes the tensors of both paths step by step and measures how far apart they are.

    Args:
        layers: The layers that are compared.
        heads: Labels of the query heads that are compared.
        kv_heads: Labels of the KV heads.
        cache_errors: As ``keep`` of :class:`kvinterp.comparison.cache_errors.CacheErrors`.
        same_text: Whether both paths hold the same text after a flip too, as in the matched
            protocol.
    """

    def __init__(
        self,
        layers: Sequence[int],
        heads: Sequence[int],
        kv_heads: Sequence[int],
        cache_errors: str = "aggregated",
        same_text: bool = True,
    ) -> None:
        self.heads, self.kv_heads = list(heads), list(kv_heads)
        self.cache = CacheErrors(layers, cache_errors)
        self.rows, self.same_text = AttentionRows(), same_text
        self.tables = {
            fills.table: Table(
                ("step", *fills.dimensions), [metric.column for metric in metrics.OF_KIND[kind]]
            )
            for kind, fills in metrics.KINDS.items()
        } | {"kv": self.cache.whole, "kv_steps": self.cache.steps}
        self._waiting: dict[metrics.Kind, list[_Piece]] = {kind: [] for kind in metrics.KINDS}
        self._numbers = dict.fromkeys(metrics.KINDS, 0)

    @classmethod
    def columns(cls) -> dict[str, tuple[str, ...]]:
        """The columns of each table, by the names they have in a comparison."""
        empty = cls((), (), ())
        columns = {
            name: (*table.dimensions, *table.values, "after_flip")
            for name, table in empty.tables.items()
        }
        return columns | {
            "kv_positions": tuple(empty.cache.positions((), ()).columns),
            "attention_rows": COLUMNS,
        }

    def frames(self, examples: Sequence[int]) -> dict[str, pd.DataFrame]:
        """Measures what still waits and returns the tables by their names in a comparison.

        Args:
            examples: The example number of each row of the batch.
        """
        for kind in metrics.KINDS:
            self._measure(kind)
        frames = {name: table.frame() for name, table in self.tables.items()}
        frames["kv_positions"] = self.cache.positions(examples, self.kv_heads)
        return frames | {"attention_rows": self.rows.frame(examples)}

    def add(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        logits: tuple[Tensor, Tensor],
        tensors: tuple[Mapping[HookPoint, Tensor], Mapping[HookPoint, Tensor]],
        marks: Tensor,
        flips: Tensor | None = None,
    ) -> None:
        """Adds one step of one batch. Only copies of its tensors are kept.

        Args:
            step: The decode step.
            examples: The example number of each row.
            end: Positions in the context at this step; keys are aligned by it.
            logits: ``[batch, vocab]`` of both paths.
            tensors: For each path its tensors at the newest position by site, with a batch
                dimension; if rows of the cache were evicted, also the positions of the rest, as
                site ``CACHE_POSITIONS``.
            marks: For each row 1 after its flip, 0 before it, -1 where its text has ended; stays on
                its device. Sums over K and V, and the rows of attention, are told apart by them now;
                the other tables get ``after_flip``, and lose what comes behind a text's end, in
                :func:`kvinterp.comparison.rows.comparison_of_example`.
            flips: Which rows flip their first token at this step, on the same device; None if
                unknown.
        """
        layers_of: dict[str, list[int]] = {}
        for site, layer in tensors[0]:
            if (site, layer) in tensors[1]:
                layers_of.setdefault(site, []).append(layer)
        streams = []
        labels: dict[str, Sequence[Any]]
        for site in filter(layers_of.get, VECTOR_SITES):
            # Layers may differ in the number and the width of their heads (Gemma 4).
            shapes = {layer: tensors[0][site, layer].shape for layer in layers_of[site]}
            for _, alike in itertools.groupby(shapes, shapes.__getitem__):
                labels = {"site": [site], "layer": (layers := list(alike)), "example": examples}
                a, b = (
                    torch.stack([path[site, layer].flatten(1) for layer in layers])[None]
                    for path in tensors
                )
                streams.append(_Piece(step, labels, (a, b)))
        # The kind of all sites with one vector a position, not of residual streams alone.
        self._wait("residual", streams)
        if "pattern" in layers_of:
            layers = layers_of["pattern"]
            labels = {"layer": layers, "example": examples, "head": self.heads}
            patterns = [[path["pattern", layer] for layer in layers] for path in tensors]
            widest = max(pattern.shape[-1] for path in patterns for pattern in path)
            # The newest key is the last on both paths; keys outside a window had probability 0.
            padded = (
                [
                    torch.nn.functional.pad(pattern, (widest - pattern.shape[-1], 0))
                    for pattern in path
                ]
                for path in patterns
            )
            a, b = map(torch.stack, padded)
            self.rows.add(step, layers, self.heads, end, (a, b), marks, flips)
            self._wait("pattern", [_Piece(step, labels, (a, b))])
        # After the rows of attention, which are chosen among as soon as the KL is known.
        self._wait(
            "logits", [_Piece(step, {"example": examples}, (logits[0].clone(), logits[1].clone()))]
        )
        if self.rows.full:
            self._measure("logits")
        self._wait("kv", [*self._cached(step, examples, end, layers_of, tensors, marks)])

    def _cached(
        self,
        step: int,
        examples: Sequence[int],
        end: int,
        layers_of: Mapping[str, list[int]],
        tensors: tuple[Mapping[HookPoint, Tensor], Mapping[HookPoint, Tensor]],
        marks: Tensor,
    ) -> Iterator[_Piece]:
        # A sliding window may hold fewer positions on one path: the newest ones, so both are cut to
        # the shorter. Layers may differ in the number and the width of their heads too (Gemma 4).
        lined_up = {
            (site, x): [
                _by_position(path[site, x], path.get((CACHE_POSITIONS, x)), end) for path in tensors
            ]
            for site in _CACHED
            for x in layers_of.get(site, ())
        }
        groups: dict[str, dict[tuple[int, int, int], list[int]]] = {}
        for (site, layer), ((a, _), (b, _)) in lined_up.items():
            shape = (min(a.shape[2], b.shape[2]), a.shape[1], a.shape[3])
            groups.setdefault(site, {}).setdefault(shape, []).append(layer)
        first = next(iter(groups.values()), {})
        dtypes = [{pair[side][0].dtype for pair in lined_up.values()} for side in (0, 1)]
        alike = (
            len(first) == 1
            and all(group == first for group in groups.values())
            and max(map(len, dtypes)) == 1
        )
        for together in [list(groups)] if alike else [[site] for site in groups]:
            for (length, heads, _), layers in groups[together[0]].items():
                names = [_CACHED[site] for site in together]
                labels: dict[str, Sequence[Any]] = {
                    "tensor": names,
                    "layer": layers,
                    "example": examples,
                }
                sides = [
                    [lined_up[site, x][side] for site in together for x in layers]
                    for side in (0, 1)
                ]
                size = len(together), len(layers)
                a, b = (_newest([tensor for tensor, _ in side], length, size) for side in sides)
                # A policy evicts in all layers or in none.
                masks = [[mask for _, mask in side if mask is not None] for side in sides]
                held_a, held_b = (_newest(side, length, size) if side else None for side in masks)
                span = Span(end - length, length, marks, (held_a, held_b))
                yield _Piece(step, {**labels, "kv_head": self.kv_heads[:heads]}, (a, b), span)

    def _wait(self, kind: metrics.Kind, pieces: Sequence[_Piece]) -> None:
        """Queues the pieces of a step. Pieces that wait are measured first if the new ones cannot
        be measured with them.
        """
        waiting = self._waiting[kind]
        if waiting and (len(pieces) != 1 or pieces[0].group != waiting[0].group):
            self._measure(kind)
        for piece in pieces:
            waiting.append(piece)
            self._numbers[kind] += 2 * piece.pair[0].numel()
            # Several pieces of one step go into the table one after the other, as steps do.
            if len(pieces) > 1 or piece.alone or self._numbers[kind] >= _most(piece):
                self._measure(kind)

    def _measure(self, kind: metrics.Kind) -> None:
        """Measures the pieces of a kind that wait and adds the numbers to its table."""
        waiting = list(self._waiting[kind])
        self._waiting[kind].clear()
        self._numbers[kind] = 0
        if not waiting:
            return
        steps, labels = [piece.step for piece in waiting], waiting[0].labels
        paths = [*zip(*(piece.pair for piece in waiting), strict=True)]
        if kind == "kv":
            a, b = (path[0] if len(path) == 1 else torch.cat(path, -2) for path in paths)
            errors = _cache_errors(a, b, _most(waiting[0]))
            self.cache.add(
                steps, labels, [piece.span for piece in waiting if piece.span is not None], errors
            )
        else:
            a, b = (path[0][None] if len(path) == 1 else torch.stack(path) for path in paths)
            values = metrics.measured(kind, a, b)
            self.tables[metrics.KINDS[kind].table].add({"step": steps, **labels}, values)
            if kind == "logits":
                self.rows.select(steps, values["kl"], self.same_text)


def _most(piece: _Piece) -> int:
    return BLOCK if piece.pair[0].device.type == "cpu" else 32 * BLOCK


def _cache_errors(a: Tensor, b: Tensor, most: int) -> dict[str, Measure | Flag]:
    """Every metric of K and V, at most so many numbers a call: exceeding a core's cache costs more
    than another call.
    """
    shape, (a, b) = a.shape[:-1], (path.flatten(0, -2) for path in (a, b))
    # A metric of one path alone has no value for equal vectors.
    zeros = {
        metric.column: metric.zero for metric in metrics.OF_KIND["kv"] if metric.zero is not None
    }
    unequal = _unequal_vectors(a, b) if len(zeros) == len(metrics.OF_KIND["kv"]) else None
    if unequal is not None:
        a, b = a.index_select(0, unequal), b.index_select(0, unequal)
    size = max(most // a.shape[-1], 1)
    parts = [
        metrics.measured("kv", *pair) for pair in zip(a.split(size), b.split(size), strict=True)
    ]
    errors = (
        parts[0]
        if len(parts) == 1
        else {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    )
    if unequal is not None:
        errors = {
            name: error.new_full((shape.numel(),), zeros[name]).index_copy_(0, unequal, error)
            for name, error in errors.items()
        }
    return {name: error.reshape(shape) for name, error in errors.items()}


def _unequal_vectors(a: Tensor, b: Tensor) -> Tensor | None:
    """The indices of the vectors that differ in a bit; None if all must be measured.

    Most cached positions are often equal on both paths (58% on a small model, 85% on one of 124 M).
    Finding them takes a tenth of the time of measuring them, and every metric has a known value for
    equal vectors. This does not hold for vectors that are not finite, and on another device than a
    CPU the result would have to be waited for.
    """
    if a.device.type != "cpu" or a.dtype != b.dtype or a.shape[-1] * a.element_size() % 8:
        return None
    if not a.sum(dtype=torch.promote_types(a.dtype, torch.float32)).isfinite():
        return None
    return (a.view(torch.int64) != b.view(torch.int64)).any(-1).nonzero()[:, 0]


def _newest(tensors: Sequence[Tensor], length: int, size: tuple[int, int]) -> Tensor:
    """Stacks the newest ``length`` positions of all tensors:
    ``[tensor, layer, batch, kv_head, position, ...]``.
    """
    return torch.stack(
        [t if t.shape[2] == length else t[:, :, t.shape[2] - length :] for t in tensors]
    ).unflatten(0, size)


def _by_position(
    tensor: Tensor, positions: Tensor | None, end: int
) -> tuple[Tensor, Tensor | None]:
    """Spreads the rows of an evicting cache over all ``end`` positions and says which positions it
    holds.
    """
    if positions is None:
        return tensor, None
    whole = tensor.new_zeros(*tensor.shape[:2], end, tensor.shape[3])
    present = torch.zeros(whole.shape[:3], dtype=torch.bool, device=tensor.device)
    return whole.scatter(2, positions[..., None].expand_as(tensor), tensor), present.scatter(
        2, positions, True
    )
