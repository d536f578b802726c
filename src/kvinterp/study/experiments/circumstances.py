"""What decides the numbers of a run beside its choices: parts made under other circumstances are not joined."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import torch

from kvinterp.models import Adapter
from kvinterp.models.provenance import provenance


def circumstances(adapter: Adapter) -> dict[str, Any]:
    """Provenance (versions, device, threads, kernels, weights), and the digests of config, buffers and tokenizer.

    Args:
        adapter: The model that runs.
    """
    sources = (adapter.source, adapter.model)
    configs = [getattr(module, name, None) for module in sources for name in ("config", "cfg")]
    return {
        **provenance(adapter),
        "config": _digest(json.dumps([_plain(config) for config in configs], sort_keys=True, default=str)),
        "buffers": _buffers(adapter.model),
        "tokenizer": _tokenizer(adapter.tokenizer),
    }


def tried(adapter: Adapter, paths: Iterable[str]) -> None:
    """Runs a few tokens on each path before anything is begun, so that what a model cannot run is said at once.

    Args:
        adapter: The model that will run.
        paths: Text forms, each tried once.

    Raises:
        InputError: A policy does not fit the model.
        UnsupportedError: This kind of model cannot run a path.
        NonFiniteError: A path turns what it computes into NaN or infinity.
    """
    from kvinterp.paths import run

    few = [token % adapter.facts.vocabulary for token in (1, 5, 7, 3, 9, 2)]
    for path in dict.fromkeys(paths):
        run(adapter, few, path, max_new_tokens=3, stop="length")


def _plain(config: Any) -> Any:
    to_dict = getattr(config, "to_dict", None)
    # Where the checkpoint lies does not change what it computes.
    places = ("_name_or_path", "name_or_path", "tokenizer_name")
    return {k: v for k, v in to_dict().items() if k not in places} if callable(to_dict) else None


def _buffers(model: torch.nn.Module) -> str:
    digest = hashlib.sha256()
    for name, tensor in sorted(model.named_buffers()):
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if not tensor.is_meta:
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()[:16]


def _tokenizer(tokenizer: Any) -> str | None:
    if tokenizer is None:
        return None
    fast = getattr(tokenizer, "backend_tokenizer", None)
    words = fast.to_str() if fast is not None else sorted(tokenizer.get_vocab().items())
    special = {name: str(value) for name, value in getattr(tokenizer, "special_tokens_map", {}).items()}
    return _digest(json.dumps([words, special, getattr(tokenizer, "add_bos_token", None)], sort_keys=True, default=str))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]
