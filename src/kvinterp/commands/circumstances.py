"""What decides the numbers of a run beside its choices: parts made under other circumstances are
not joined.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from kvinterp.models import Adapter
from kvinterp.models.provenance import provenance
from kvinterp.paths import Cached, Recompute, run

_PLACES = ("_name_or_path", "name_or_path", "tokenizer_name")


def circumstances(adapter: Adapter) -> dict[str, Any]:
    """Provenance (versions, device, threads, kernels, weights), and the digests of config, buffers
    and tokenizer.

    Args:
        adapter: The model that runs.
    """
    configs: list[Any] = [
        getattr(module, name, None)
        for module in (adapter.source, adapter.model)
        for name in ("config", "cfg")
    ]
    plain = [config.to_dict() for config in configs if callable(getattr(config, "to_dict", None))]
    buffers = [
        (
            name,
            tuple(buffer.shape),
            buffer.dtype,
            None
            if buffer.is_meta
            else _digest(buffer.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()),
        )
        for name, buffer in sorted(adapter.model.named_buffers())
    ]
    return {
        **provenance(adapter),
        # Where the checkpoint lies does not change what it computes.
        "config": _digest(
            [{k: v for k, v in config.items() if k not in _PLACES} for config in plain]
        ),
        "buffers": _digest(buffers),
        "tokenizer": _tokenizer(adapter.tokenizer),
    }


def tried(adapter: Adapter, paths: Iterable[str]) -> None:
    """Runs a few tokens on each path before anything is begun, so that what a model cannot run is
    said at once.

    Args:
        adapter: The model that will run.
        paths: Text forms, each tried once.

    Raises:
        InputError: A policy does not fit the model.
        UnsupportedError: This kind of model cannot run a path.
        NonFiniteError: A path turns what it computes into NaN or infinity.
    """
    few = [token % adapter.facts.vocabulary for token in (1, 5, 7, 3, 9, 2)]
    for path in dict.fromkeys(paths):
        run(adapter, few, path, max_new_tokens=3, stop="length")


def paths_of(kernels: str) -> tuple[str, str]:
    """The two paths under some kernels."""
    return str(Cached(kernels=kernels)), str(Recompute(kernels=kernels))


def _tokenizer(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    return _digest(
        [
            words,
            getattr(tokenizer, "special_tokens_map", {}),
            getattr(tokenizer, "add_bos_token", None),
        ]
    )


def _digest(value: Any) -> str:
    whole = (
        value
        if isinstance(value, bytes)
        else json.dumps(value, sort_keys=True, default=str).encode()
    )
    return hashlib.sha256(whole).hexdigest()[:16]
