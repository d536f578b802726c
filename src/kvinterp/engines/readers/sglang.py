"""SGLang's ``/generate``: ``meta_info``, whose log-probs are after temperature unless the batch is
greedy or SGLANG_RETURN_ORIGINAL_LOGPROB=1.

Source: sglang/srt/managers/tokenizer_manager.py and layers/sampler.py (0.5.23).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvinterp.engines.readers.base import Reader, Token, part
from kvinterp.errors import InputError, shown
from kvinterp.recording.engine_path import EnginePath, path_of, token_ids


class Sglang(Reader):
    """An answer whose ``meta_info`` has ``output_token_logprobs``."""

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether it has ``meta_info`` with log-probs."""
        meta = record.get("meta_info")
        return isinstance(meta, Mapping) and "output_token_logprobs" in meta

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields one path, with the prompt of the request if the log-probs do not begin with its
        first token.
        """
        request = part(record, "request", dict, where, {})
        before, after = (_side(record["meta_info"], side, where) for side in ("input", "output"))
        ids = request.get("input_ids")
        prompt = (
            tuple(t for t, _, _ in before)
            if ids is None
            else token_ids(ids, f"{where}: the prompt")
        )
        if not prompt or len(before) > len(prompt):
            raise InputError(
                f"{where} has the log-probs of {len(before)} prompt tokens, and the request {len(prompt)}: ask with "
                "logprob_start_len=0, or keep the request's input_ids beside the answer."
            )
        if before and tuple(t for t, _, _ in before) != prompt[-len(before) :]:
            raise InputError(
                f"{where} has log-probs of other prompt tokens than the request's input_ids: keep the request of this answer."
            )
        head: list[Any] = [(None, [])] * (len(prompt) - len(before)) + [
            (v, pairs) for _, v, pairs in before
        ]
        sampling = part(request, "sampling_params", dict, where, {})
        declared = {
            name: sampling[name] for name in ("temperature", "top_p", "top_k") if name in sampling
        }
        yield path_of(where, prompt, after, head, **declared)


def _side(
    meta: Mapping[str, Any], side: str, where: str
) -> list[tuple[int, Any, list[tuple[int, Any]]]]:
    rows = part(meta, f"{side}_token_logprobs", list, where, [])
    tops = part(meta, f"{side}_top_logprobs", list, where, []) or [None] * len(rows)
    if len(tops) != len(rows):
        raise InputError(
            f"{where} has {len(rows)} {side} log-probs and {len(tops)} lists beside them: ask again."
        )
    for top in tops:
        if top is not None and not isinstance(top, list):
            raise InputError(
                f"{where} has {shown(top)} beside a log-prob: expected a list, or null; ask again."
            )
    return [
        (*_entry(row, where), [_entry(e, where) for e in top or []])
        for row, top in zip(rows, tops, strict=True)
    ]


def _entry(row: Any, where: str) -> tuple[int, Any]:
    if not isinstance(row, list) or len(row) < 2:
        raise InputError(
            f"{where} has {shown(row)} for a log-prob: expected [log-prob, token id, text]; ask again."
        )
    return token_ids([row[1]], f"{where}: a token")[0], row[0]
