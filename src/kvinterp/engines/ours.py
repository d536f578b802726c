"""Our own log-probs of the texts that an engine was given, along each way that is asked for,
computed once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np
import torch

from kvinterp.engines.log_probs import logits_of, own_row
from kvinterp.engines.ways import Way, moved
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter
from kvinterp.recording.engine_path import EnginePath

TRUTH = Way("float64")
Row = np.ndarray
"""``[token]``, log-probs in nats; NaN where there is none."""


@dataclasses.dataclass
class Ours:
    """Our own log-probs of the same texts, along each way that was asked for, computed once."""

    adapter: Adapter
    paths: Sequence[EnginePath]
    tell: Callable[[str], None]
    known: dict[tuple[str, float, str, int], Row | None] = dataclasses.field(default_factory=dict)

    def row(self, way: Way, number: int) -> Row | None:
        """``[position]``, the log-probs of one path; None where this model has no such way."""
        key = (way.name, way.size, way.dtype, number)
        if key not in self.known:
            self.tell(f"{way.name}, sequence {number + 1} of {len(self.paths)}")
            path = self.paths[number]
            if way.further is not None:
                self.known[key] = self._moved(path, way, way.further(self.paths, number))
            elif way.before is None:
                self.known[key] = own_row(self.adapter, path.ids, len(path.prompt), way)
            elif (prompt := way.before(self.paths, number)) is None:
                self.known[key] = self.row(Way(way.dtype, dtype=way.dtype), number)
            else:
                self.known[key] = self._behind(prompt, path, way)
        return self.known[key]

    def _moved(self, path: EnginePath, way: Way, by: int) -> Row | None:
        """``[position]``, the log-probs of a path whose positions are so many further on; None
        where the table ends before.
        """
        if by + len(path.ids) > self.adapter.facts.context:
            return None
        return own_row(self.adapter, path.ids, len(path.prompt), moved(way, by))

    def _behind(self, prompt: tuple[int, ...], path: EnginePath, way: Way) -> Row | None:
        """``[position]``, the log-probs of a path's ids behind another prompt; NaN for those of a
        prompt that is another one.
        """
        if len(prompt) + len(path.tokens) > self.adapter.facts.context:
            return None
        row = own_row(
            self.adapter,
            (*prompt, *path.tokens),
            len(prompt),
            dataclasses.replace(way, before=None),
        )
        if row is None:
            return None
        row = row[len(prompt) - len(path.prompt) :].copy() if len(prompt) >= len(path.prompt) else np.r_[
            np.full(len(path.prompt) - len(prompt), np.nan), row
        ]  # fmt: skip
        if prompt[len(prompt) - len(path.prompt) :] != path.prompt:
            row[: len(path.prompt)] = np.nan
        return row

    def logits(self, way: Way, number: int) -> torch.Tensor | None:
        """``[position, vocabulary]`` logits of one path; None where this model has no such way."""
        path = self.paths[number]
        if way.before is not None or way.further is not None:
            return None
        try:
            return logits_of(self.adapter, path.ids, len(path.prompt), way)
        except (InputError, UnsupportedError):
            return None
