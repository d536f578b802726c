"""NeMo-RL's ``train_data_step{N}.jsonl``: generation and trainer side by side, zero where there is no log-prob.

Source: nemo_rl/algorithms/grpo.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath, log_probs, token_ids
from kvinterp.recording.readers.base import Reader, Token, part


class Nemo(Reader):
    """A line with ``generation_logprobs``."""

    sides = ("generation_logprobs", "prev_logprobs")
    mask = "token_loss_mask"

    def fits(self, record: Mapping[str, Any]) -> bool:
        """``generation_logprobs``."""
        return {"token_ids", self.sides[0]} <= record.keys()

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """One a line; what the mask leaves out is not given."""
        ids = token_ids(record["token_ids"], f"{where}: 'token_ids'")[: _length(record)]
        mask = np.array([bool(m) for m in part(record, self.mask, list, where, [1] * len(ids))][: len(ids)], bool)
        missing: Counter[str] = Counter()
        engine, trainer = (self._side(record, name, len(ids), where, missing) for name in self.sides)
        if not len(mask) == len(ids) == len(engine):
            raise InputError(
                f"{where} has {len(ids)} tokens, a mask of {len(mask)} and {len(engine)} log-probs: expected as many; mend it."
            )
        engine[~mask] = np.nan
        begun = int(mask.argmax()) if mask.any() else len(ids)
        yield EnginePath(where, ids[:begun], ids[begun:], engine, {}, missing, trainer if len(trainer) else None)

    def _side(self, record: Mapping[str, Any], name: str, count: int, where: str, missing: Counter[str]) -> np.ndarray:
        return log_probs(part(record, name, list, where, [])[:count], where, missing)


def _length(record: Mapping[str, Any]) -> int | None:
    length = record.get("input_lengths")
    return length if type(length) is int and length > 0 else None
