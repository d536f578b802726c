"""Batches of TRL as JSON: the output of a rollout function or ``trl vllm-serve``, or a trainer's
padded batch.

A record is a batch (lists of lists) or one sequence. With several log-probs a token
``logprob_token_ids`` names their tokens; a server's batch has several replies to each prompt, one
after another.
Sources: trl/scripts/vllm_serve.py, trl/generation/vllm_generation.py and
trl/trainer/grpo_trainer.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from kvinterp.engines.readers.base import Reader, Token, part
from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath, log_probs, token_ids


class Trl(Reader):
    """A record with ``prompt_ids``, ``completion_ids`` and ``logprobs``."""

    ids = ("prompt_ids", "completion_ids")
    engine: tuple[str, ...] = ("logprobs", "sampling_per_token_logps")
    trainer = "old_per_token_logps"
    masks: tuple[str, ...] = ("prompt_mask", "completion_mask")
    """The masks of prompt and reply that are 0 at padding."""
    reply_mask = "tool_mask"
    """The mask of the reply's own tokens."""

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether it has ids of prompt and reply, and the engine's log-probs of the reply."""
        return {*self.ids} <= record.keys() and any(
            isinstance(record.get(name), list) for name in self.engine
        )

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields one path a reply, without log-probs where a mask is 0."""
        names = (
            *self.ids,
            *self.engine,
            self.trainer,
            "logprob_token_ids",
            *self.masks,
            self.reply_mask,
        )
        batch = {
            name: part(record, name, list, where) for name in names if record.get(name) is not None
        }
        count = len(batch[self.ids[1]])
        if not isinstance(next(iter(batch[self.ids[0]]), None), list):
            yield self._path(batch, where)
            return
        for name, rows in batch.items():
            repeats = (
                max(count // max(len(rows), 1), 1) if name in (self.ids[0], "prompt_mask") else 1
            )
            if len(rows) * repeats != count or not all(isinstance(row, list) for row in rows):
                raise InputError(
                    f"{where} has {len(rows)} rows of {name!r} for {count} replies: expected a list for each; mend it."
                )
            batch[name] = [row for row in rows for _ in range(repeats)]
        for number in range(count):
            yield self._path(
                {name: rows[number] for name, rows in batch.items()}, f"{where}, row {number + 1}"
            )

    def _path(self, row: Mapping[str, Any], where: str) -> EnginePath:
        prompt, reply = (token_ids(row[name], f"{where}: {name!r}") for name in self.ids)
        mask = [flag for name in self.masks for flag in row.get(name, ())] or [1] * len(
            prompt + reply
        )
        reply_mask = row.get(self.reply_mask, [1] * len(reply))
        unpadded, end = (
            [t for t, flag in zip(prompt, mask, strict=False) if flag],
            sum(map(bool, mask[len(prompt) :])),
        )
        missing: Counter[str] = Counter()
        sides: dict[str, np.ndarray] = {}
        engine = next(name for name in self.engine if name in row)
        for name in (engine, self.trainer):
            if (values := row.get(name)) is not None:
                if not len(values) == len(reply_mask) == len(reply) or len(mask) != len(
                    prompt + reply
                ):
                    raise InputError(
                        f"{where} has {len(values)} {name} for {len(reply)} tokens: expected one for each, mask and all."
                    )
                if isinstance(next(iter(values), None), list):
                    values = _reply_values(values, row.get("logprob_token_ids"), reply, where)
                values = [
                    value if flag else None
                    for value, flag in zip(values[:end], reply_mask, strict=False)
                ]
                sides[name] = np.concatenate(
                    [np.full(len(unpadded), np.nan), log_probs(values, where, missing)]
                )
                # What a mask leaves out is nothing that the file lacks.
                missing["null"] -= sum(not flag for flag in reply_mask[:end])
        trainer = sides.get(self.trainer)
        return EnginePath(
            where,
            tuple(unpadded),
            reply[:end],
            sides[engine],
            {},
            +missing,
            trainer,
            zeros="doubtful",
        )


def _reply_values(values: list[Any], ids: Any, reply: Sequence[int], where: str) -> list[Any]:
    """Selects the log-prob of each token of a reply among those of several tokens."""
    ids = [[token] for token in reply] if ids is None else ids
    try:
        return [
            dict(zip(tokens, row, strict=True)).get(t)
            for t, tokens, row in zip(reply, ids, values, strict=False)
        ]
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{where} has several log-probs a token without the 'logprob_token_ids' that they are of: keep these beside them."
        ) from error
