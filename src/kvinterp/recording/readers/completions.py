"""OpenAI's ``/v1/completions``, as vLLM answers it: keys are texts or ``token_id:ID``, -9999 stands for minus infinity.

Source: vllm/entrypoints/openai/completion/protocol.py and serving.py (0.32.0).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath, path_of
from kvinterp.recording.readers.base import Reader, Token, id_of, ids_beside, part, prompt_of


class Completions(Reader):
    """An answer whose choices have ``logprobs.token_logprobs``, or ``prompt_logprobs`` alone."""

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Choices with log-probs by token, not with ``content``."""
        choices = record.get("choices")
        if not isinstance(choices, list) or not choices or not isinstance(choices[0], Mapping):
            return False
        found = choices[0].get("logprobs")
        return "token_logprobs" in found if isinstance(found, Mapping) else "prompt_logprobs" in choices[0]

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """One a choice."""
        for number, choice in enumerate(record["choices"]):
            here = where if len(record["choices"]) == 1 else f"{where}, choice {number}"
            held = part(choice, "logprobs", dict, here, {})
            values, texts = (part(held, name, list, here, []) for name in ("token_logprobs", "tokens"))
            tops = part(held, "top_logprobs", list, here, []) or [None] * len(values)
            if not len(values) == len(texts) == len(tops):
                raise InputError(
                    f"{here} has {len(values)} log-probs and {len(texts)} tokens: expected as many; ask again."
                )
            prompt = prompt_of(record, choice, here)
            # With echo the tokens begin with the prompt's.
            echo = len(values) > len(prompt) and values[0] is None
            own = choice.get("token_ids")
            given = list(prompt) + list(own) if echo and isinstance(own, list) else own
            ids = ids_beside(given, [id_of(text, token) for text in texts], here)
            rows = [(i, v, _pairs(top, token, here)) for i, v, top in zip(ids, values, tops, strict=True)]
            before = [(v, pairs) for _, v, pairs in rows[: len(prompt)]] if echo else _before(choice, prompt, here)
            yield path_of(here, prompt, rows[len(prompt) :] if echo else rows, before)


def _pairs(top: Any, token: Token, where: str) -> list[tuple[int, Any]]:
    found = (
        []
        if top is None
        else [(id_of(text, token), value) for text, value in part({"top": top}, "top", dict, where).items()]
    )
    return [pair for pair in found if pair[0] != -1]


def _before(
    choice: Mapping[str, Any], prompt: tuple[int, ...], where: str
) -> list[tuple[Any, list[tuple[int, Any]]]] | None:
    """The ``prompt_logprobs`` of vLLM: null, then an object a position, by id."""
    given = part(choice, "prompt_logprobs", list, where, [])
    if not given:
        return None
    if len(given) != len(prompt):
        raise InputError(f"{where} has {len(given)} prompt_logprobs for {len(prompt)} tokens: expected as many; ask again.")
    found: list[tuple[Any, list[tuple[int, Any]]]] = []
    for own, entry in zip(prompt, given, strict=True):
        pairs = [] if entry is None else [
            (int(key), part({"at": at}, "at", dict, where).get("logprob"))
            for key, at in part({"entry": entry}, "entry", dict, where).items() if key.isdecimal() and len(key) < 12
        ]  # fmt: skip
        found.append((dict(pairs).get(own), pairs))
    return found
