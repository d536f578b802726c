"""llama.cpp's server, ``/completion``: ``completion_probabilities``, before temperature and
samplers.

Prompt log-probs need a request a position there; ``read_engine`` merges such answers.
Source: llama.cpp tools/server/server-task.cpp.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from kvinterp.engines.readers.base import Reader, Token, part, prompt_of
from kvinterp.engines.readers.chat import rows_of
from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath, path_of


class LlamaServer(Reader):
    """An answer with ``completion_probabilities``."""

    fields = ("completion_probabilities",)

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields one path."""
        content = part(record, "completion_probabilities", list, where, [])
        if content and isinstance(content[0], Mapping) and "prob" in content[0]:
            raise InputError(
                f"{where} has probabilities of what the samplers left: ask with post_sampling_probs=false for log-probs."
            )
        yield path_of(where, prompt_of(record, record, where), rows_of(content, token, where))
