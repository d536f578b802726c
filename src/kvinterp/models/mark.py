"""Notices that a model was changed in place, by whatever way: its weights, its buffers, its config, its modules' attributes.

Torch counts the changes of a tensor, but not those made through ``.data``, and nobody counts those of a norm's epsilon. So a
mark is taken of all of it. Each tensor's bytes are summed with a weight for every place, so that numbers that change places
change the sum too: what is changed is missed about once in 2**32 times. The weights are read once, as one decode step reads
them.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import itertools
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

Mark = tuple[str, tuple[tuple[Any, ...], ...]]
"""The hash of what is no tensor; and for each tensor its name, where and how it lies, how often torch saw it changed, its sum;
and the user's own hooks."""

_PIECE = 1 << 24
"""Bytes that one thread takes at once; on a device so many are widened at once."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training"}
_NOT_COMPUTED_WITH = frozenset(
    (
        "_name_or_path",
        "name_or_path",
        "model_name",
        "tokenizer_name",
        "_commit_hash",
        "transformers_version",
        "generation_config",
        "warnings_issued",
        "device",
        "seed",
    )
)
"""Where a checkpoint lies and who saved it, and what only generation reads: nothing that a forward computes with."""


def mark_of(model: nn.Module) -> Mark:
    """What changes when the model does."""
    named = (*model.named_parameters(), *model.named_buffers())
    tensors = {name: t.detach() for name, t in named if not t.is_meta and not t.is_quantized}
    found = [
        (name, t.data_ptr(), t.shape, t.stride(), 0 if t.is_inference() else t._version, sums)
        for (name, t), sums in zip(tensors.items(), _sums([*tensors.values()]), strict=True)
    ]
    return settings_of(model), (*found, *_users_hooks(model))


def _users_hooks(model: nn.Module) -> Iterator[tuple[Any, ...]]:
    """The hooks on each module that are not kvinterp's, by the numbers that torch gave them, each of which it gives once."""
    for name, module in model.named_modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            users = tuple(n for n, hook in hooks.items() if not getattr(hook, "__module__", "").startswith("kvinterp."))
            if users:
                yield name, users


def weights_hash(model: nn.Module) -> str:
    """BLAKE2 over the names, shapes, dtypes and bytes of what a checkpoint of the model holds, 16 hex digits."""
    return _hashed(sorted(model.state_dict().items()))


def settings_of(model: nn.Module) -> str:
    """BLAKE2 over what a model computes with besides its checkpoint's tensors, 16 hex digits.

    Its config, the class and the plain attributes of every module, and the buffers that a checkpoint does not hold. The same
    for the same checkpoint in another folder.
    """
    seen: dict[int, int] = {}
    lines = []
    kept: list[tuple[str, Tensor]] = []
    for name, module in model.named_modules():
        lines.append(f"{name}: {_class_of(module)} {_told(_attributes(module), seen)}")
        unsaved = module._non_persistent_buffers_set
        kept += [(f"{name}.{key}", b) for key, b in module._buffers.items() if key in unsaved and b is not None]
    return _hashed(kept, "\n".join(lines))


def _hashed(tensors: list[tuple[str, Tensor]], text: str = "") -> str:
    digest = hashlib.blake2b(text.encode(), digest_size=8)
    for name, tensor in tensors:
        digest.update(f"{name}{tuple(tensor.shape)}{tensor.dtype}".encode())
        if not tensor.is_meta:
            digest.update(tensor.detach().cpu().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


# What is no tensor -----------------------------------------------------------------------------------------------------


def _attributes(module: nn.Module) -> dict[str, Any]:
    own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
    # Of private ones not what a forward leaves behind: a TransformerBridge keeps hooks of its own and what they last saw.
    leaves = type(module).__module__.startswith("transformer_lens.")
    left = [
        k for k, v in own.items() if k.startswith("_") and ("hook" in k or v is None or (leaves and isinstance(v, Tensor)))
    ]
    return {key: value for key, value in own.items() if key not in left}


def _class_of(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _told(value: Any, seen: dict[int, int]) -> str:
    """A value as text that is the same in every process, and differs where what a forward reads of it differs."""
    if value is None or isinstance(
        value, bool | int | float | complex | str | bytes | enum.Enum | torch.dtype | torch.Size
    ):
        return repr(value)
    if isinstance(value, np.ndarray):
        return f"array {value.shape} {value.dtype} {hashlib.blake2b(np.ascontiguousarray(value).tobytes()).hexdigest()}"
    if isinstance(value, Tensor):
        return f"tensor {_hashed([('', value)])}"
    if isinstance(value, Mapping):
        held = {str(key): item for key, item in value.items() if key not in _NOT_COMPUTED_WITH}
        return "{" + ", ".join(f"{key}: {_told(held[key], seen)}" for key in sorted(held)) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_told(item, seen) for item in value) + "]"
    if isinstance(value, set | frozenset):
        return "{" + ", ".join(sorted(_told(item, seen) for item in value)) + "}"
    if isinstance(value, functools.partial):
        return f"partial {_told([value.func, value.args, value.keywords], seen)}"
    if isinstance(value, nn.Module):
        # Those that belong to the model stand under their own names.
        return _class_of(value)
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if id(value) in seen:
        return f"#{seen[id(value)]}"
    if "config" in f"{_class_of(value)}".lower() and hasattr(value, "__dict__"):
        # Every module of a transformers model holds the same one.
        seen[id(value)] = len(seen)
        return f"{_class_of(value)} {_told(vars(value), seen)}"
    return _class_of(value)


# Tensors ---------------------------------------------------------------------------------------------------------------


def _sums(tensors: list[Tensor]) -> list[tuple[int, ...]]:
    """For each tensor the sums of its bytes in the order of memory, one a piece."""
    pieces = [_bytes_of(tensor).split(_PIECE) for tensor in tensors]
    flat = [piece for each in pieces for piece in each]
    threads = torch.get_num_threads()
    if threads == 1:
        sums = list(map(_summed, flat))
    else:
        with ThreadPoolExecutor(threads) as workers:
            sums = list(workers.map(_summed, flat))
    # On a device all are under way before the first is waited for.
    numbers = map(int, sums)
    return [tuple(itertools.islice(numbers, len(each))) for each in pieces]


def _bytes_of(tensor: Tensor) -> Tensor:
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Weights that were laid out anew are contiguous in another order of their dimensions.
    order = sorted(range(bits.dim()), key=lambda dimension: -bits.stride()[dimension])
    return bits.detach().permute(order).contiguous().view(-1).view(torch.uint8)


def _summed(piece: Tensor) -> int | Tensor:
    """The words of 8 bytes, each weighted by its place, added up row by row; the rest is filled up with zeros.

    Of each word the high half is laid over the low one first, since numbers whose highest bits alone differ (their signs)
    would cancel.
    """
    if piece.device.type != "cpu":
        return _summed_on_device(piece)
    weights, rest = _weights(piece.device).numpy(), -len(piece) % 8
    words = (nn.functional.pad(piece, (0, rest)) if rest else piece).numpy().view(np.int64)
    mixed, sums = np.empty_like(weights), []
    # Rows that stay in a processor's cache.
    for row in np.split(words, range(len(weights), len(words), len(weights))):
        part = mixed[: len(row)]
        np.bitwise_xor(np.right_shift(row, 31, out=part), row, out=part)
        sums.append(int(np.dot(part, weights[: len(row)])))
    return hash(tuple(sums))


def _summed_on_device(piece: Tensor) -> Tensor:
    """The same with the rows weighted by their places too; it stays there."""
    weights = _weights(piece.device)
    words = nn.functional.pad(piece, (0, -len(piece) % (8 * len(weights)))).view(torch.int64).view(-1, len(weights))
    rows = (((words >> 31) ^ words) * weights).sum(1)
    return (rows * weights[: len(rows)]).sum()


@functools.cache
def _weights(device: torch.device) -> Tensor:
    """Odd numbers of 64 bits, always the same ones; nobody's random numbers are drawn from."""
    drawn = torch.randint(-(2**63), 2**63 - 1, (1 << 15,), generator=torch.Generator().manual_seed(1))
    return drawn.to(device) | 1
