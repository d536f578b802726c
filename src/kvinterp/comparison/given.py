"""A path that was walked elsewhere beside one of ours: the log-probs of the same tokens, one by one."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from kvinterp.common.checks import check_choice
from kvinterp.comparison.given_experts import (
    Choices,
    choices_along,
    choices_of,
    fitted,
    misplaced,
    routed_layers,
    routing_rows,
    said,
)
from kvinterp.data import load_prompts
from kvinterp.errors import InputError
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.inputs import encode
from kvinterp.models.sites import ROUTING_SITES
from kvinterp.paths import ExecutionPath, path_named, run
from kvinterp.recording import Trace
from kvinterp.recording.endpoint import Endpoint, Fetched, is_endpoint
from kvinterp.recording.given import GivenPath, positive
from kvinterp.recording.readers import read_given

TEXTS = "natural:4"
PROMPT, STEPS = 24, 48
"""So many tokens of our own prompts are sent to a server, and so many it writes behind any: 388 requests of four prompts."""


def compare_given(
    model: Any,
    file: str | Path,
    format: str | None = None,
    dtype: str = "float64",
    path: str | ExecutionPath | None = None,
    table: str = "given",
) -> pd.DataFrame:
    """Another engine's log-probs beside our own of the same tokens, token by token.

    Args:
        model: The model, as :func:`kvinterp.wrap` takes it.
        file: What the engine wrote, or a server's address, see docs/engines.md.
        format: The format's name; known by the content unless given.
        dtype: What ours are computed in, in one forward.
        path: A path of ours, such as ``"cached"``, which is fed the same tokens a step at a time; its dtype counts then.
        table: ``"given"``, log-probs, or ``"routing"``, the experts that the engine says its routers chose.

    Returns:
        A row for each token that has a log-prob: sequence, position, token, ``engine``, ``ours`` and ``difference`` (engine less
        ours) in nats; ``kl``, KL(engine || ours), where the engine gave the whole vocabulary, and ``kl_is``, which says
        ``"not given"`` where it did not. Along a path the rows are those behind the prompt.

        Of ``"routing"`` a row for each choice that was given: ``changed``, whether it is another set of experts than ours;
        ``difference``, the largest of a router's logit between ours and float64 (of float64 between it and the model's own
        dtype); ``margin_a``, by how much our last expert chosen is ahead of the first left out, and ``margin_b`` the same of the
        engine's choice, in the logits of that other precision: below 0 it is behind.

    Raises:
        InputError: The file cannot be read, or its texts or experts cannot be this model's.
    """
    check_choice("table", table, ("given", "routing"))
    return given_tables(model, file, format, dtype, path, table)[0][table]


def given_tables(
    model: Any,
    file: str | Path,
    format: str | None = None,
    dtype: str = "float64",
    path: str | ExecutionPath | None = None,
    needed: str = "given",
) -> tuple[dict[str, pd.DataFrame], str]:
    """Both tables of :func:`compare_given`, of which one must have rows, and a sentence on experts where the file has any."""
    adapter = wrap(model)
    ours = None if path is None else path_named(path)
    paths, rows, routing = read_paths(adapter, file, format), [], []
    check_paths(adapter, paths)
    sides = [side for each in paths for side in (each.chosen, each.trainer) if side is not None]
    if why := positive(np.concatenate(sides)):
        raise InputError(f"file {str(file)!r}: {why} Give log-probs.")
    dtypes, left, pairs = [dtype if ours is None else ours.dtype or str(adapter.dtype)], Counter[str](), []
    dtypes.append(str(adapter.dtype) if dtypes == ["float64"] else "float64")
    with adapter.unchanged(), torch.no_grad():
        for each in paths:
            begun, every, choices = _ours(adapter, each, ours, dtype)
            if choices is not None:
                given, none = fitted(adapter, each, choices)
                other, _ = choices_of(adapter, each.ids, dtypes[1])
                routing.append(routing_rows(each.id, given, choices, other, routed_layers(adapter)))
                pairs.append((given, choices.experts))
                left += none
            for at in map(int, np.flatnonzero(np.isfinite(each.chosen))):
                if at < begun:
                    continue
                own = every[at - begun]
                ids, values = each.top.get(at, (np.array([], int), np.array([])))
                whole = len(set(ids.tolist())) == adapter.facts.vocabulary
                kl = float((np.exp(values) * (values - own.cpu().numpy()[ids])).sum()) if whole else None
                engine, here = float(each.chosen[at]), float(own[each.ids[at]])
                row = {"sequence": each.id, "position": at, "token": each.ids[at], "engine": engine, "ours": here}
                kl_is = "of the whole vocabulary" if whole else "not given"
                rows.append({**row, "difference": engine - here, "kl": kl, "kl_is": kl_is})
    tables = {"given": pd.DataFrame(rows), "routing": pd.concat(routing, ignore_index=True) if routing else pd.DataFrame()}
    text = said(tables["routing"], left, misplaced(pairs, routed_layers(adapter))) if routing else ""
    if tables[needed].empty:
        what = "log-prob of a token that ours can be beside" if needed == "given" else "choice of experts"
        raise InputError(f"file {str(file)!r} has no {what}: expected some; write them. {text}".strip())
    return tables, text


def _ours(adapter: Adapter, given: GivenPath, path: ExecutionPath | None, dtype: str) -> tuple[int, Tensor, Choices | None]:
    """The first position, ``[position, vocabulary]`` from there on, and our routers' choices where the file has its own."""
    if path is None:
        if given.experts is not None:
            choices, rows = choices_of(adapter, given.ids, dtype)
            return 1, rows[:-1], choices
        logits = adapter.at(dtype_named(dtype)).forward(torch.tensor([list(given.ids)], device=adapter.device))[0, :-1]
        return 1, logits.double().log_softmax(-1), None
    # Where each token came of a request of its own, all are the prompt's: ours begins where log-probs do.
    first = int(np.flatnonzero(np.isfinite(given.chosen[1:]))[0]) + 1 if np.isfinite(given.chosen[1:]).any() else 1
    begun = max(1, min(first, len(given.prompt)) if len(given.tokens) <= 1 else len(given.prompt))
    ids = list(given.ids)
    if begun >= len(ids):
        return begun, torch.empty(0, 0), None
    layers = [] if given.experts is None else routed_layers(adapter)
    sites: dict[str, Any] = {"record": ROUTING_SITES, "layers": layers, "positions": "all"} if layers else {}
    trace = trace_along(adapter, path, ids[:begun], ids[begun:], **sites)
    assert trace.logits is not None
    return begun, trace.logits.double().log_softmax(-1), choices_along(trace, layers) if layers else None


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
    })  # fmt: skip


def trace_along(model: Any, path: str | ExecutionPath, prompt: Sequence[int], tokens: Sequence[int], **sites: Any) -> Trace:
    """One of our paths, fed the tokens of another."""
    fed: dict[str, Any] = {"continuation": list(tokens), "max_new_tokens": len(tokens), "stop": "length"}
    found: Trace = run(model, list(prompt), path, logits="keep", **fed, **sites)
    return found


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
    texts = [list(encode(adapter, each, room))[: PROMPT if prompts is None else None] for each in given]
    folder = Path(tempfile.mkdtemp(prefix="kvinterp-answers-") if keep is None else keep)
    return Endpoint(url, folder, tell).fetch(texts, room, lambda token: adapter.pieces([token])[0])


def chosen_of(rows: Tensor, ids: Sequence[int]) -> np.ndarray:
    """``[position]``: the log-prob of each id given those before it; NaN for the first."""
    own = rows[:-1].gather(1, torch.tensor(list(ids[1:]), device=rows.device)[:, None])[:, 0]
    return np.concatenate([[np.nan], own.cpu().numpy()])


def check_paths(adapter: Adapter, paths: Sequence[GivenPath]) -> None:
    """Raises where a text cannot be one of this model's.

    Raises:
        InputError: It has a token outside the vocabulary, is longer than the context, or has experts where there are no routers.
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
        if path.experts is not None and not routed_layers(adapter):
            raise InputError(f"{path.id} has experts, and {facts.name} has no router: give the model that the engine ran.")
        if len(path.ids) > facts.context:
            raise InputError(
                f"{path.id} has {len(path.ids):,} tokens, and the context of {facts.name} {facts.context:,}: leave it out."
            )
