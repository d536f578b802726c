"""What another engine gave, as tokens of a model of ours: read, looked at, and beside our own log-probs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.models import Adapter
from kvinterp.recording.given import GivenPath
from kvinterp.recording.readers import read_given


def token_table(adapter: Adapter, paths: Sequence[GivenPath], rows: Sequence[np.ndarray]) -> pd.DataFrame:
    """Every token that was given beside ours, a row each; NaN where one of the two has no log-prob.

    Args:
        adapter: The model, for the tokens' texts.
        paths: What the engine gave.
        rows: Of each path ``[position]``, our log-probs.
    """
    ids = np.concatenate([path.ids for path in paths])
    seen, place = np.unique(ids, return_inverse=True)
    texts, own = np.unique(adapter.pieces(seen.tolist()), return_inverse=True)
    lengths = [len(path.ids) for path in paths]
    names = dict.fromkeys(path.id for path in paths)
    engine, ours = np.concatenate([path.chosen for path in paths]), np.concatenate(rows)
    part = np.concatenate([np.arange(len(path.ids)) >= len(path.prompt) for path in paths]).astype(int)
    return pd.DataFrame({
        "sequence": pd.Categorical(np.repeat([path.id for path in paths], lengths), list(names)),
        "position": np.concatenate([np.arange(length) for length in lengths]),
        "part": pd.Categorical.from_codes(part, ["prompt", "tokens"]),
        "token": ids,
        "text": pd.Categorical.from_codes(own[place], texts),
        "engine": engine,
        "ours": ours,
        "difference": engine - ours,
    } | _trainer(paths, ours))  # fmt: skip


def _trainer(paths: Sequence[GivenPath], ours: np.ndarray) -> dict[str, np.ndarray]:
    """The columns of a second side, where there is one."""
    if all(path.trainer is None for path in paths):
        return {}
    row = np.concatenate([np.full(len(p.ids), np.nan) if p.trainer is None else p.trainer for p in paths])
    return {"trainer": row, "trainer_difference": row - ours}


def read_paths(adapter: Adapter, file: Any, format: str | None = None) -> list[GivenPath]:
    """The paths of a file, with the model's own ids of texts and its own beginning."""
    texts: dict[str, int | None] = {}

    def token(text: str) -> int | None:
        if not texts and adapter.tokenizer is not None:
            for number, piece in enumerate(adapter.pieces(range(adapter.facts.vocabulary))):
                texts[piece] = None if piece in texts else number
        return texts.get(text)

    bos = getattr(adapter.tokenizer, "bos_token_id", None)
    begins = adapter.encode("a")[0] == bos if bos is not None else False
    return read_given(file, format, token, bos if begins else None)


def chosen_of(rows: Tensor, ids: Sequence[int]) -> np.ndarray:
    """``[position]``: the log-prob of each id given those before it; NaN for the first."""
    own = rows[:-1].gather(1, torch.tensor(list(ids[1:]), device=rows.device)[:, None])[:, 0]
    return np.concatenate([[np.nan], own.cpu().numpy()])


def check_paths(adapter: Adapter, paths: Sequence[GivenPath]) -> None:
    """Raises where a text cannot be one of this model's.

    Raises:
        InputError: It has a token outside the vocabulary, or is longer than the context.
    """
    facts = adapter.facts
    for path in paths:
        most = max([*path.ids, *(int(ids.max()) for ids, _ in path.top.values() if len(ids))])
        if most >= facts.vocabulary or min(path.ids) < 0:
            wrong = most if most >= facts.vocabulary else min(path.ids)
            raise InputError(
                f"{path.id} has the token {wrong}, and {facts.name} has {facts.vocabulary:,}: it is of another one; "
                "give the model that the engine ran."
            )
        if len(path.ids) > facts.context:
            raise InputError(
                f"{path.id} has {len(path.ids):,} tokens, and the context of {facts.name} {facts.context:,}: leave it out."
            )
