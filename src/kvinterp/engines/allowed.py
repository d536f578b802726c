"""Log-probs that are renormalised over allowed tokens, as under a grammar's mask.

A mask takes away the mass of what is not allowed, so that each allowed token's log-prob rises by
the same amount at a
position: ``log p(v | allowed) = log p(v) - log p(allowed)``. A set that is the same at every
position is tried as it is; of one that changes with the position, as a grammar's does, the amount
is read off the tokens that were given beside the drawn one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kvinterp.engines.numbers import FEWEST, Tokens
from kvinterp.models import Adapter
from kvinterp.recording.engine_path import EnginePath


def renormalised(
    adapter: Adapter, paths: Sequence[EnginePath], tokens: Tokens, logits: Tensor, ids: np.ndarray
) -> dict[str, np.ndarray]:
    """Returns our log-probs, ``[token]``, over each set of allowed tokens that has all that were
    drawn.

    Args:
        adapter: The model.
        paths: The sequences of the file.
        tokens: The judged tokens.
        logits: ``[token, vocabulary]``, ours.
        ids: ``[token]``, what was drawn.
    """
    logprobs, index = logits.log_softmax(-1), torch.from_numpy(ids)[:, None]
    own = logprobs.gather(1, index)[:, 0]
    rows = {
        f"renormalised over {name}": (
            own - logprobs[:, torch.from_numpy(mask)].logsumexp(-1)
        ).numpy()
        for name, mask in sets_of(adapter, paths).items()
        if mask[ids].all() and not mask.all()
    }
    raised = _raised_beside(paths, tokens, logprobs, ids)
    if np.isfinite(raised).sum() >= FEWEST:
        name = "renormalised over allowed tokens, as under a grammar (those given beside the drawn one are raised alike)"
        rows[name] = own.numpy() + raised.clip(min=0)
    return rows


def _raised_beside(
    paths: Sequence[EnginePath], tokens: Tokens, logprobs: Tensor, ids: np.ndarray
) -> np.ndarray:
    """``[token]``: by how much the engine has the tokens beside the drawn one above ours, the
    median; NaN where it gave none.
    """
    raised = np.full(len(ids), np.nan)
    for row, (number, at) in enumerate(zip(tokens.sequence, tokens.position, strict=True)):
        others, values = paths[number].top.get(int(at), (np.array([], int), np.array([])))
        beside = (others != ids[row]) & np.isfinite(values)
        if beside.any():
            raised[row] = np.median(
                values[beside] - logprobs[row, torch.from_numpy(others[beside])].numpy()
            )
    return raised


def sets_of(adapter: Adapter, paths: Sequence[EnginePath]) -> dict[str, np.ndarray]:
    """Sets of tokens that a mask of all positions may allow, by name, ``[vocabulary]``: what the
    file's replies are made of.
    """
    replies, every = (
        sorted({token for path in paths for token in path.tokens}),
        np.arange(adapter.facts.vocabulary),
    )
    seen = np.isin(every, replies)
    sets = {"the tokens that the replies are of": seen}
    if adapter.tokenizer is None:
        return sets
    special = np.isin(every, list(getattr(adapter.tokenizer, "all_special_ids", ())))
    pieces = adapter.pieces(every.tolist())
    letters = {letter for token in replies if not special[token] for letter in pieces[token]}
    spelled = np.array([bool(piece) and letters.issuperset(piece) for piece in pieces])
    sets["tokens of the characters that the replies are of"] = (spelled & ~special) | (
        special & seen
    )
    return sets | {"all tokens but the special ones": ~special}
