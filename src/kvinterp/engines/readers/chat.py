"""The chat shape, ``choices[i].logprobs.content[j]``: chat answers, and llama.cpp's
``/v1/completions``.

Sources: vllm/entrypoints/openai/chat_completion/protocol.py (0.32.0), llama.cpp
tools/server/server-task.cpp.
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
from kvinterp.recording.engine_path import EnginePath, path_of


class Chat(Reader):
    """An answer whose choices have ``logprobs.content``."""

    def fits(self, record: Mapping[str, Any]) -> bool:
        """Whether the choices have ``logprobs.content``."""
        logprobs = first_choice(record).get("logprobs")
        return isinstance(logprobs, Mapping) and "content" in logprobs

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields one path a choice."""
        for here, choice in choices_of(record, where):
            content = part(part(choice, "logprobs", dict, here, {}), "content", list, here, [])
            rows = rows_of(content, token, here, choice.get("token_ids"))
            yield path_of(here, prompt_of(record, choice, here), rows)


def rows_of(
    content: Any, token: Token, where: str, answer_ids: Any = None
) -> list[tuple[int, Any, list[tuple[int, Any]]]]:
    """Returns for each entry its id, its log-prob and the further pairs of its position."""
    entries = [(part(e, "token", str, where, ""), e) for e in content]
    ids = checked_ids(answer_ids, [id_of(text, token, entry) for text, entry in entries], where)
    rows = []
    for number, (_, entry) in zip(ids, entries, strict=True):
        pairs = [(id_of(p.get("token"), token, p), p.get("logprob"))
                 for p in part(entry, "top_logprobs", list, where, []) if isinstance(p, Mapping)]  # fmt: skip
        rows.append((number, entry.get("logprob"), [pair for pair in pairs if pair[0] != -1]))
    return rows
