"""What another engine gave as arrays, or a run of ours, beside what readers make of its files."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import torch

from kvinterp.errors import InputError
from kvinterp.recording import Trace
from kvinterp.recording.engine_path import EnginePath, value_in


def path_of_trace(trace: Trace) -> EnginePath:
    """Makes an :class:`EnginePath` of a trace that holds log-probs or logits, as readers make one
    of a file.
    """
    if trace.logits is None:
        raise InputError(
            f"{trace!r} holds no logits: run it with logits='keep', make one with kv.Trace.from_arrays, or give a file's name."
        )
    if trace.ids is None:
        # The next token fed, whichever was chosen; nothing follows the last.
        tokens = (*trace.fed, trace.tokens[-1])
        own = (
            trace.logits.double()
            .log_softmax(-1)
            .gather(1, torch.tensor(tokens, device=trace.logits.device)[:, None])
        )
        row = np.concatenate([np.full(len(trace.prompt), np.nan), own[:, 0].cpu().numpy()])
        declared = {name: trace.provenance[name] for name in ("dtype",) if name in trace.provenance}
        return EnginePath(trace.path, trace.prompt, tokens, row, declared=declared)
    rows, cut = trace.logits.numpy(), len(trace.prompt)
    ids = np.broadcast_to(np.asarray(trace.ids), rows.shape)
    top = {
        cut + step: (ids[step][finite], row[finite])
        for step, row in enumerate(rows)
        for finite in [np.isfinite(row)]
    }
    logprobs = [math.nan] * cut + [
        value_in(top[cut + step], token) for step, token in enumerate(trace.tokens)
    ]
    missing = +Counter({"NaN": int(np.isnan(rows).sum())})
    return EnginePath(
        trace.path,
        trace.prompt,
        trace.tokens,
        np.array(logprobs),
        top,
        missing,
        declared=trace.provenance,
    )
