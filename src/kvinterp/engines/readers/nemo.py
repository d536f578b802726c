"""NeMo-RL's ``train_data_step{N}.jsonl``: generation and trainer side by side, zero where there is
no log-prob.

Source: nemo_rl/algorithms/grpo.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvinterp.engines.readers.base import Reader, Token, part
from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath, log_probs, token_ids


class Nemo(Reader):
    """A line with ``generation_logprobs``."""

    sides = ("generation_logprobs", "prev_logprobs")
    mask = "token_loss_mask"

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether it has token ids and the engine's log-probs."""
        return {"token_ids", self.sides[0]} <= record.keys()

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields one path a line, without log-probs where the mask is 0."""
        length = record.get("input_lengths")
        length = length if type(length) is int and length > 0 else None
        ids = token_ids(record["token_ids"], f"{where}: 'token_ids'")[:length]
        mask = np.array(
            [bool(m) for m in part(record, self.mask, list, where, [1] * len(ids))][: len(ids)],
            bool,
        )
        missing: Counter[str] = Counter()
        values, others = (part(record, name, list, where, [])[: len(ids)] for name in self.sides)
        if not len(mask) == len(ids) == len(values):
            raise InputError(
                f"{where} has {len(ids)} tokens, a mask of {len(mask)} and {len(values)} log-probs: expected as many; mend it."
            )
        engine = log_probs(
            [value if own else None for value, own in zip(values, mask, strict=True)],
            where,
            missing,
        )
        # What the mask leaves out is nothing that the file lacks; a trainer may have numbers there.
        missing["null"] -= int((~mask).sum())
        trainer = log_probs(others, where, missing)
        if len(trainer) == len(mask):
            trainer[~mask & (trainer == 0)] = np.nan
        start = int(mask.argmax()) if mask.any() else len(ids)
        side = trainer if len(trainer) else None
        yield EnginePath(
            where, ids[:start], ids[start:], engine, {}, +missing, side, zeros="doubtful"
        )
