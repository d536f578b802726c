"""The file of ``llama-perplexity --kl-divergence-base``: 16 bits a log-prob of the whole
vocabulary.

A row is ``log p = scale * q + least``, clamped 16 nats below the largest logit, so that a step is
at most 2.4e-4 nats. The first half of each chunk has no rows. Where llama.cpp put a BOS, the file
still holds the text's own token there.
Source: llama.cpp tools/perplexity/perplexity.cpp, lines 79 to 106 and 460 to 580.
"""

from __future__ import annotations

from collections import Counter

import numpy as np

from kvinterp.errors import InputError
from kvinterp.recording.engine_path import EnginePath

MAGIC = b"_logits_"


def read_kl_base(content: bytes, name: str, bos: int | None) -> list[EnginePath]:
    """Reads the paths of a file, one a chunk.

    Args:
        content: Its bytes.
        name: The name of the file in errors.
        bos: The token that llama.cpp put in place of each chunk's first; None if it put none.

    Raises:
        InputError: The file is cut, or is of another format.
    """
    words = np.frombuffer(content[8:20], "<i4")
    if (
        content[:8] != MAGIC
        or len(words) < 3
        or not (words[0] > 1 and words[1] > 1 and words[2] > 0)
    ):
        raise InputError(
            f"file {name!r} is no --kl-divergence-base file, or is cut: write it again."
        )
    context, vocabulary, chunks = map(int, words)
    rows, width = context - 1 - context // 2, 2 * ((vocabulary + 1) // 2) + 4
    start = 20 + 4 * chunks * context
    if len(content) != start + 2 * chunks * rows * width:
        raise InputError(
            f"file {name!r} has {len(content):,} bytes where {start + 2 * chunks * rows * width:,} were expected: it is cut; "
            "write it again."
        )
    ids = np.frombuffer(content[20:start], "<i4").reshape(chunks, context).copy()
    if (ids < 0).any() or (ids >= vocabulary).any():
        raise InputError(
            f"file {name!r} has a token outside its vocabulary of {vocabulary:,}: write it again."
        )
    if bos is not None:
        ids[:, 0] = bos
    every = np.frombuffer(content[start:], "<u2").reshape(chunks, rows, width)
    scales = np.ascontiguousarray(every[..., :4]).view("<f4")
    paths, ids_of_row = [], np.arange(vocabulary)
    for chunk in range(chunks):
        levels = every[chunk, :, 4 : 4 + vocabulary]
        whole = scales[chunk, :, :1].astype(float) * levels + scales[chunk, :, 1:]
        first = context // 2 + 1
        logprobs = np.full(context, np.nan)
        logprobs[first:] = whole[np.arange(rows), ids[chunk, first:]]
        # A value at the clamp is only known to be at most that.
        clamped = (levels[np.arange(rows), ids[chunk, first:]] == 0) & (scales[chunk, :, 0] > 0)
        logprobs[first:][clamped] = np.nan
        missing = +Counter({"clamped": int(clamped.sum())})
        top = {first + row: (ids_of_row, whole[row]) for row in range(rows)}
        tokens = tuple(map(int, ids[chunk]))
        where = f"file {name!r}, chunk {chunk + 1}"
        paths.append(
            EnginePath(
                where, tokens[:first], tokens[first:], logprobs, top, missing, step=16 / 65535
            )
        )
    return paths
