"""A path that was walked elsewhere beside one of ours: the log-probs of the same tokens, one by one."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.data import load_prompts
from kvinterp.errors import InputError
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.inputs import encode
from kvinterp.paths import ExecutionPath, path_named, run
from kvinterp.recording.endpoint import Endpoint, Fetched, is_endpoint
from kvinterp.recording.given import GivenPath
from kvinterp.recording.readers import read_given

ROUNDED = 1e-3
"""So far above 0 a log-prob is 0, rounded."""
TEXTS = "natural:4"
PROMPT, STEPS = 24, 48
"""So many tokens of each prompt are sent to a server, and so many it writes behind it: 388 requests of four prompts."""


def compare_given(
    model: Any, file: str | Path, format: str | None = None, dtype: str = "float64", path: str | ExecutionPath | None = None
) -> pd.DataFrame:
    """Another engine's log-probs beside our own of the same tokens, token by token.

    Args:
        model: The model, as :func:`kvinterp.wrap` takes it.
        file: What the engine wrote, or a server's address, see docs/engines.md.
        format: The format's name; known by the content unless given.
        dtype: What ours are computed in, in one forward.
        path: A path of ours, such as ``"cached"``, which is fed the same tokens a step at a time; its dtype counts then.

    Returns:
        A row for each token that has a log-prob: sequence, position, token, ``engine``, ``ours`` and ``difference`` (engine less
        ours) in nats; ``kl``, KL(engine || ours), where the engine gave the whole vocabulary, and ``kl_is``, which says
        ``"not given"`` where it did not. Along a path the rows are those behind the prompt.

    Raises:
        InputError: The file cannot be read, or its texts cannot be this model's.
    """
    adapter = wrap(model)
    ours = None if path is None else path_named(path)
    paths, rows = read_paths(adapter, file, format), []
    check_paths(adapter, paths)
    if why := positive(np.concatenate([each.chosen for each in paths])):
        raise InputError(f"file {str(file)!r}: {why} Give log-probs.")
    with adapter.alone("kv.compare_given"), adapter.unchanged(), torch.no_grad():
        for each in paths:
            begun, every = _ours(adapter, each, ours, dtype)
            for at in map(int, np.flatnonzero(np.isfinite(each.chosen))):
                if at < begun:
                    continue
                own = every[at - begun]
                ids, values = each.top.get(at, (np.array([], int), np.array([])))
                whole = len(set(ids.tolist())) == adapter.facts.vocabulary
                kl = float((np.exp(values) * (values - own.cpu().numpy()[ids])).sum()) if whole else None
                engine, here = float(each.chosen[at]), float(own[each.ids[at]])
                row = {"sequence": each.id, "position": at, "token": each.ids[at], "engine": engine, "ours": here}
                said = "of the whole vocabulary" if whole else "not given"
                rows.append({**row, "difference": engine - here, "kl": kl, "kl_is": said})
    if not rows:
        raise InputError(
            f"file {str(file)!r} has no log-prob of a token that ours can be beside: expected some; write them."
        )
    return pd.DataFrame(rows)


def _ours(adapter: Adapter, given: GivenPath, path: ExecutionPath | None, dtype: str) -> tuple[int, Tensor]:
    """The first position, and ``[position, vocabulary]`` from there on."""
    if path is None:
        logits = adapter.at(dtype_named(dtype)).forward(torch.tensor([list(given.ids)], device=adapter.device))[0, :-1]
        return 1, logits.double().log_softmax(-1)
    # Where each token came of a request of its own, all are the prompt's: ours begins where log-probs do.
    first = int(np.flatnonzero(np.isfinite(given.chosen[1:]))[0]) + 1 if np.isfinite(given.chosen[1:]).any() else 1
    begun = max(1, min(first, len(given.prompt)) if len(given.tokens) <= 1 else len(given.prompt))
    ids = list(given.ids)
    if begun >= len(ids):
        return begun, torch.empty(0, 0)
    steps = len(ids) - begun
    trace = run(adapter, ids[:begun], path, max_new_tokens=steps, continuation=ids[begun:], logits="keep", stop="length")
    assert trace.logits is not None
    return begun, trace.logits.double().log_softmax(-1)


def positive(values: np.ndarray) -> str | None:
    """What is wrong with log-probs that are above 0, None where none is by more than rounding."""
    above, n = int((values > ROUNDED).sum()), int(np.isfinite(values).sum())
    said = f"{above:,} of {n:,} values are above 0, which no log-prob is: they may be probabilities, or logits."
    return said if above else None


def read_paths(adapter: Adapter, file: Any, format: str | None = None) -> list[GivenPath]:
    """The paths of a file, or of a server with nothing cached, with the model's own ids of texts and its own beginning."""
    texts: dict[str, int | None] = {}

    def token(text: str) -> int | None:
        if not texts and adapter.tokenizer is not None:
            for number, piece in enumerate(adapter.pieces(range(adapter.facts.vocabulary))):
                texts[piece] = None if piece in texts else number
        return texts.get(text)

    file = asked(adapter, str(file)).cold if is_endpoint(file) else file
    bos = getattr(adapter.tokenizer, "bos_token_id", None)
    begins = adapter.encode("a")[0] == bos if bos is not None else False
    return read_given(file, format, token, bos if begins else None)


def asked(
    adapter: Adapter,
    url: str,
    prompts: Any = None,
    keep: str | Path | None = None,
    tell: Callable[[str], None] = lambda said: None,
) -> Fetched:
    """What a server that is said to run this model answers, cold and warm.

    Args:
        adapter: The model.
        url: The server's address.
        prompts: What it goes on from; four texts of ours for None.
        keep: The folder of its answers; one of its own for None.
        tell: Told what is done next.
    """  # fmt: skip
    # Ours are plain text, whatever a chat model is asked otherwise.
    plain = [adapter.encode(each.text) for each in load_prompts(TEXTS)] if prompts is None and adapter.tokenizer else None
    given = plain or (load_prompts(TEXTS if prompts is None else prompts) if isinstance(prompts, str | None) else prompts)
    room = max(2, min(STEPS, adapter.facts.context - PROMPT))
    texts = [list(encode(adapter, each, room))[:PROMPT] for each in given]
    folder = Path(tempfile.mkdtemp(prefix="kvinterp-answers-") if keep is None else keep)
    return Endpoint(url, folder, tell).fetch(texts, room, lambda token: adapter.pieces([token])[0])


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
        if max(path.ids) >= facts.vocabulary:
            raise InputError(
                f"{path.id} has the token {max(path.ids)}, and {facts.name} has {facts.vocabulary:,}: it is of another one; "
                "give the model that the engine ran."
            )
        if len(path.ids) > facts.context:
            raise InputError(
                f"{path.id} has {len(path.ids):,} tokens, and the context of {facts.name} {facts.context:,}: leave it out."
            )
