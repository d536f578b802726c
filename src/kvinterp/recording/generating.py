"""Runs a model's own ``generate`` and keeps the activations of the run that wrote the text."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from kvinterp.common import words
from kvinterp.common.checks import check_choice, check_whole
from kvinterp.errors import located, unexpected
from kvinterp.models import wrap
from kvinterp.models.inputs import encode, left_padded, listed
from kvinterp.models.threads import own_threads
from kvinterp.recording.around import Recording
from kvinterp.recording.generation import Generation
from kvinterp.recording.windows import EXPECTED, window_of

CONTEXT = "kv.generated"


@torch.no_grad()
def generated(
    model: Any,
    prompts: Any,
    sites: words.Site | str | Sequence[words.Site | str] | Callable[[str], bool] = "resid_post",
    layers: Iterable[int] | int | None = None,
    *,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    positions: words.Positions | str | Sequence[int] = "all",
    max_new_tokens: int = 48,
    logits: words.Kept | str = "discard",
    batch_size: int = 1,
    into: str | os.PathLike[str] | None = None,
    **options: Any,
) -> list[Generation]:
    """Generates texts by the model's own ``generate``, and keeps the activations of that very run
    at every position.

    A forward over the finished text (``run_with_cache``, TransformerLens's
    ``generate(return_cache=True)``)
    is another run, the recomputation: it rounds otherwise, and it is another computation where
    hooks steer or a cache is quantised. :func:`kvinterp.record` does the same around anybody's own
    ``generate``: its recorder's ``texts()``.

    Args:
        model: A HookedTransformer, TransformerBridge, transformers model or adapter.
        prompts: A text, a :class:`Prompt`, or token ids; or a list of these.
        sites: As for :class:`Recorder`: sites, groups, or TransformerLens's hooks.
        layers: Layers to keep (default: all).
        heads: Query heads to keep (default: all).
        kv_heads: KV heads to keep (default: all).
        positions: The positions of each text to keep: ``"all"``, ``"generated"``, ``"last(64)"``,
            ``"every(16)"``, ``"around(4, 13)"`` (at most 4 positions from a token with the id 13;
            several ids may follow), or a list of positions in the text.
        max_new_tokens: Most tokens to generate.
        logits: ``"keep"`` keeps the logits that decided each token; ``"discard"`` does not.
        batch_size: Most prompts in a batch. Prompts of several lengths are padded at the left, and
            their pads taken out afterwards; a HookedTransformer batches prompts of one length only.
        into: A folder in which what was recorded is kept in parts, for texts that do not fit into
            memory; the texts that are returned read from there. Default: in memory.
        **options: What the model's ``generate`` is given besides: ``do_sample=True``,
            ``temperature``, ``cache_implementation``, ``prefill_chunk_size`` (greedy decoding
            unless an option or a ``generation_config`` says otherwise, whatever the model's own config
            says). Sampling draws from torch's own generator: call
            ``torch.manual_seed`` before. With ``num_return_sequences`` a prompt has several texts.

    Returns:
        For each prompt its text and activations.

    Raises:
        InputError: Something given does not exist or does not fit.
        UnsupportedError: The model cannot give a site, has no ``generate``, or searches with beams,
            whose rows are no texts.

    Example:
        >>> (text,) = kv.generated(model, "12 + 30 =", "resid_post,pattern")  # doctest: +SKIP
        >>> text["pattern", 0].shape  # [head, query, key], over the whole text  # doctest: +SKIP
        >>> text.cache()  # TransformerLens's ActivationCache  # doctest: +SKIP
    """
    adapter = wrap(model)
    check_choice("logits", logits, words.Kept)
    max_new_tokens = check_whole("max_new_tokens", max_new_tokens, 1)
    batch_size = check_whole("batch_size", batch_size, 1)
    if window_of(positions) is None:
        raise unexpected("positions", positions, EXPECTED.removeprefix("'newest', "))
    encoded = [
        encode(adapter, item, max_new_tokens) for item in listed(prompts, adapter.tokenizer)[0]
    ]
    texts: list[Generation] = []
    with located(f"model {adapter.facts.name}"), own_threads(adapter), adapter.one_call():
        for at in range(0, len(encoded), batch_size):
            folder = None if into is None else Path(into) / f"batch-{at // batch_size:04d}"
            recorder = Recording(adapter, sites, layers, heads, kv_heads, positions, folder)
            recorder.logits, recorder.context = logits, CONTEXT
            ids, mask = left_padded(adapter, encoded[at : at + batch_size])
            with recorder.listening():
                adapter.generate(ids, mask, {"max_new_tokens": max_new_tokens, **options})
            texts += recorder.texts()
    return texts
