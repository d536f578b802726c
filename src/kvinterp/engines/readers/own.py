"""Our own JSONL: ``{"prompt": [IDS], "tokens": [IDS], "logprobs": [NATS or null]}`` a line, which
any engine's answer can become.

Also, optionally: ``prompt_logprobs`` (one a prompt token), ``top`` (for each token of both a list
of ``[id, log-prob]``, or null), ``trainer_logprobs`` (as ``logprobs``), ``declared`` (an object),
``id``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from kvinterp.engines.readers.base import Reader, Token, part
from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath, log_probs, pairs_of, token_ids


class Own(Reader):
    """kvinterp's own form."""

    fields = ("prompt", "tokens", "logprobs")

    def paths(self, record: Mapping[str, Any], where: str, token: Token) -> Iterator[EnginePath]:
        """Yields one path a line."""
        prompt, tokens = (
            token_ids(record[name], f"{where}: {name!r}") for name in ("prompt", "tokens")
        )
        missing: Counter[str] = Counter()
        declared = part(record, "declared", dict, where, {})
        zeros = "doubtful" if declared.get("zero") == "missing" else "certain"

        def given(name: str) -> np.ndarray:
            return log_probs(part(record, name, list, where), where, missing)

        unknown, trainer, logprobs = np.full(len(prompt), np.nan), None, given("logprobs")
        if len(logprobs) != len(tokens):
            raise InputError(
                f"{where} has {len(logprobs)} logprobs for {len(tokens)} tokens: expected one for each, null where none is "
                "known; those of the prompt go to prompt_logprobs."
            )
        before = unknown if record.get("prompt_logprobs") is None else given("prompt_logprobs")
        if record.get("trainer_logprobs") is not None:
            trainer = np.concatenate([unknown, given("trainer_logprobs")])
        tops = part(record, "top", list, where, [])
        if len(tops) > len(prompt) + len(tokens):
            raise InputError(
                f"{where}: 'top' holds more lists than there are tokens: expected one for each; mend it."
            )
        top = {}
        for at, pairs in enumerate(tops):
            if pairs is None:
                continue
            if not isinstance(pairs, list) or any(
                not isinstance(p, list) or len(p) != 2 for p in pairs
            ):
                raise InputError(
                    f"{where}: 'top' must hold a list of [id, log-prob] a token, or null; mend it."
                )
            token_ids([p[0] for p in pairs], f"{where}: 'top'")
            top[at] = pairs_of([(p[0], p[1]) for p in pairs], where, missing)
        name = str(record.get("id", where)).encode(errors="backslashreplace").decode()
        row = np.concatenate([before, logprobs])
        yield EnginePath(name, prompt, tokens, row, top, missing, trainer, declared, zeros=zeros)
