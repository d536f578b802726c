"""OpenAI's ``/v1/completions``, as vLLM answers it: keys are texts or ``token_id:ID``, -9999 stands
for minus infinity.

Source: vllm/entrypoints/openai/completion/protocol.py and serving.py (0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvinterp.engines.readers.base import (
    Reader,
    Token,
    checked_ids,
    choices_of,
    first_choice,
    id_of,
    part,
    prompt_of,
)
from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath, path_of


class Completions(Reader):
    """An answer whose choices have ``logprobs.token_logprobs``, or ``prompt_logprobs`` alone."""

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether the choices have log-probs by token, not ``content``."""
        choice = first_choice(record)
        logprobs = choice.get("logprobs")
        return (
            "token_logprobs" in logprobs
            if isinstance(logprobs, Mapping)
            else "prompt_logprobs" in choice
        )

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields one path a choice."""
        for here, choice in choices_of(record, where):
            logprobs = part(choice, "logprobs", dict, here, {})
            values, texts = (
                part(logprobs, name, list, here, []) for name in ("token_logprobs", "tokens")
            )
            tops = part(logprobs, "top_logprobs", list, here, []) or [None] * len(values)
            if not len(values) == len(texts) == len(tops):
                raise InputError(
                    f"{here} has {len(values)} log-probs and {len(texts)} tokens: expected as many; ask again."
                )
            prompt = prompt_of(record, choice, here)
            # With echo the tokens begin with the prompt's.
            echo = len(values) > len(prompt) and values[0] is None
            answer_ids = choice.get("token_ids")
            if echo and isinstance(answer_ids, list):
                answer_ids = [*prompt, *answer_ids]
            ids = checked_ids(answer_ids, [id_of(text, token) for text in texts], here)
            rows = [
                (i, v, _pairs(top, token, here))
                for i, v, top in zip(ids, values, tops, strict=True)
            ]
            before = (
                [(v, pairs) for _, v, pairs in rows[: len(prompt)]]
                if echo
                else _prompt_rows(choice, prompt, here)
            )
            yield path_of(here, prompt, rows[len(prompt) :] if echo else rows, before)


def _pairs(top: Any, token: Token, where: str) -> list[tuple[int, Any]]:
    items = part({"top": top}, "top", dict, where, {}).items()
    return [(number, value) for text, value in items if (number := id_of(text, token)) != -1]


def _prompt_rows(
    choice: Mapping[str, Any], prompt: tuple[int, ...], where: str
) -> list[tuple[Any, list[tuple[int, Any]]]] | None:
    """Reads the ``prompt_logprobs`` of vLLM: null, then an object a position, by id."""
    entries = part(choice, "prompt_logprobs", list, where, [])
    if not entries:
        return None
    if len(entries) != len(prompt):
        raise InputError(
            f"{where} has {len(entries)} prompt_logprobs for {len(prompt)} tokens: expected as many; ask again."
        )
    rows: list[tuple[Any, list[tuple[int, Any]]]] = []
    for number, entry in zip(prompt, entries, strict=True):
        pairs = [
            (int(key), part({"at": at}, "at", dict, where).get("logprob"))
            for key, at in part({"entry": entry}, "entry", dict, where, {}).items() if key.isdecimal() and len(key) < 12
        ]  # fmt: skip
        rows.append((dict(pairs).get(number), pairs))
    return rows
