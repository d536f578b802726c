"""Notices that a model was changed in place, by whatever way: its weights, its buffers, its config, its modules' attributes.

Torch counts the changes of a tensor, but not those made through ``.data``, and nobody counts those of a norm's epsilon. So a
mark is taken of all of it. Each tensor's bits are summed with a weight of its own for every place, so that numbers that
change places change the sum too. Of each 8 bytes the high half is laid over the low one first, since numbers whose highest bits
alone differ (their signs) would cancel: what is changed is missed about once in 2**32 times. The weights are read once, as one
decode step reads them.
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

_WORDS, _PIECE = 1 << 15, 1 << 20
"""Words of 8 bytes that share the weights, small enough for a processor's cache; and those that one thread takes at once."""

_ODD, _ALL = 0x9E37_79B9_7F4A_7C15, (1 << 64) - 1
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
    tensors = [(name, t.detach()) for name, t in named if not t.is_meta and not t.is_quantized]
    found = tuple(
        (
            name,
            tensor.data_ptr(),
            tuple(tensor.shape),
            tensor.stride(),
            0 if tensor.is_inference() else tensor._version,
            total,
        )
        for (name, tensor), total in zip(tensors, _sums([tensor for _, tensor in tensors]), strict=True)
    )
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
        return f"tensor {tuple(value.shape)} {value.dtype} {_sums([value])[0]}"
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


def _sums(tensors: list[Tensor]) -> list[int]:
    """For each tensor the sum of its bits in the order of memory, each weighted by its place, modulo 2**64."""
    pieces = [(index, piece) for index, tensor in enumerate(tensors) for piece in _pieces(tensor)]
    words, threads = [piece for _, piece in pieces], torch.get_num_threads()
    if threads == 1 or len(words) == 1:
        summed = list(map(_summed, words))
    else:
        with ThreadPoolExecutor(threads) as workers:
            summed = list(workers.map(_summed, words))
    totals = [tensor.numel() for tensor in tensors]
    for (index, _), sums in zip(pieces, _read(summed), strict=True):
        totals[index] = _folded(totals[index], functools.reduce(_folded, sums, 0))
    return totals


def _folded(total: int, part: int) -> int:
    return (total * _ODD + part) & _ALL


def _read(summed: list[Tensor | list[int]]) -> Iterator[list[int]]:
    """The sums as numbers; a device is waited for once, and not once a tensor of the model."""
    away = [each for each in summed if isinstance(each, Tensor)]
    devices = dict.fromkeys(each.device for each in away)
    read = {device: iter(torch.cat([each for each in away if each.device == device]).tolist()) for device in devices}
    for each in summed:
        yield [*itertools.islice(read[each.device], len(each))] if isinstance(each, Tensor) else each


def _pieces(tensor: Tensor) -> Iterator[Tensor | np.ndarray]:
    """The tensor's bytes as words of 8, as many as one thread takes at once; the last one is filled up with zeros."""
    bits = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    # Weights that were laid out anew are contiguous in another order of their dimensions.
    strides = bits.stride()
    flat = bits.detach().permute(sorted(range(bits.dim()), key=lambda dim: -strides[dim])).contiguous().view(-1)
    flat = flat.view(torch.uint8)
    whole = flat.numel() // 8 * 8
    last = nn.functional.pad(flat[whole:], (0, (whole - flat.numel()) % 8))
    for part in (flat[:whole], last):
        if not part.numel():
            continue
        if part.device.type == "cpu":
            words = part.numpy().view(np.int64)
            yield from (words[start : start + _PIECE] for start in range(0, len(words), _PIECE))
        else:
            yield (part if part.data_ptr() % 8 == 0 else part.clone()).view(torch.int64)


def _summed(words: Tensor | np.ndarray) -> Tensor | list[int]:
    """Sums of the words, each with its high half laid over its low one, weighted by its place, one for so many words.

    On a device they stay there.
    """
    if isinstance(words, Tensor):
        return _summed_on_device(words)
    weights, folded = _weights(), np.empty(_WORDS, np.int64)
    sums = []
    for start in range(0, len(words), _WORDS):
        piece = words[start : start + _WORDS]
        mixed = folded[: len(piece)]
        np.bitwise_xor(np.right_shift(piece, 31, out=mixed), piece, out=mixed)
        sums.append(int(np.dot(mixed, weights[: len(piece)])))
    return sums


def _summed_on_device(words: Tensor) -> Tensor:
    weights = _weights_on(words.device)
    # 16 MB at once: as many rows of words, each weighted and summed alone.
    parts = (nn.functional.pad(part, (0, -part.numel() % _WORDS)).view(-1, _WORDS) for part in words.split(64 * _WORDS))
    return torch.cat([(((rows >> 31) ^ rows) * weights).sum(1) for rows in parts])


@functools.cache
def _weights_on(device: torch.device) -> Tensor:
    return torch.from_numpy(_weights()).to(device)


@functools.cache
def _weights() -> np.ndarray:
    """Odd numbers of 64 bits, always the same ones; nobody's random numbers are drawn from."""
    drawn = np.random.Generator(np.random.Philox(key=1)).integers(-(2**63), 2**63, _WORDS, dtype=np.int64)
    return drawn | 1
