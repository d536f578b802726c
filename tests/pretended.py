"""A device that is not the CPU, on any machine: its tensors say ``pretend:0`` and are computed by the CPU.

What runs on it is held to what a GPU holds it to. An operation that mixes devices fails, and everything that the host has
to wait for is counted with the line that asked for it: a number that is read (``item``, ``tolist``, a condition), a copy to the
CPU, an operation whose result's size only the device knows (``nonzero``, a boolean index), and copies to the device, which wait as
well. Operations are counted too, views apart, since those start no kernel.

It is made with PyTorch's Python backend for the key PrivateUse1: :class:`Pretended` wraps a tensor of the CPU, and whatever
is called with one, or is asked to make something on the device, comes to :func:`_computed`. Results have the CPU's bits, since it is
the CPU's kernels that are called. There are two of them, ``pretend:0`` and ``pretend:1``.

    with pretended() as device:
        adapter = kv.load_model("zoo:gqa2-mini", device="pretend:0")
        with device.counting() as counts:
            kv.run(adapter, PROMPT)
    print(counts.reads, counts.lines)
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend

__all__ = ["Counts", "Device", "Pretended", "pretended"]

NAME, COUNT = "pretend", 2
TORCH = str(Path(torch.__file__).parent)
ATEN = torch.ops.aten

COPIES = {ATEN._to_copy.default, ATEN.copy_.default, ATEN._copy_from.default}
"""What may have tensors of two devices, for moving them is its purpose."""
INDEXED = {ATEN.index.Tensor, ATEN.index_put_.default, ATEN.index_put.default, ATEN._index_put_impl_.default}
"""Whose indices may be the CPU's, as on CUDA."""
SIZED = {ATEN.nonzero.default, ATEN.masked_select.default, ATEN._unique2.default, ATEN.unique_dim.default, ATEN.bincount.default,
         ATEN.unique_consecutive.default, ATEN.repeat_interleave.Tensor, ATEN.equal.default, ATEN._local_scalar_dense.default}  # fmt: skip
"""Whose result's size, or whose result itself, the host must read from the device."""
SCALARS = {ATEN.where.self, ATEN.masked_fill.Tensor, ATEN.masked_fill_.Tensor, ATEN.fill_.Tensor, ATEN.index_put_.default}
"""Which take a single number of the CPU's beside those that torch itself calls pointwise."""


@dataclasses.dataclass
class Counts:
    """What was asked of the device.

    Attributes:
        operations: Operations that start a kernel there.
        views: Operations that only look at a tensor in another way.
        reads: How often the host read from the device.
        writes: How often the host wrote to it, which waits too.
        read_bytes: How many bytes it read.
        write_bytes: How many bytes it wrote.
        lines: The lines that read, outside torch, and how often: ``file.py:12 operation``.
        written: The lines that wrote.
    """

    operations: int = 0
    views: int = 0
    reads: int = 0
    writes: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    lines: Counter[str] = dataclasses.field(default_factory=Counter)
    written: Counter[str] = dataclasses.field(default_factory=Counter)


class Device:
    """Whether the devices are there, and who counts."""

    def __init__(self) -> None:
        self.on = False
        self.counted: list[Counts] = []

    @contextlib.contextmanager
    def counting(self) -> Iterator[Counts]:
        """Counts what is asked for inside; one within another counts for both."""
        counts = Counts()
        self.counted.append(counts)
        try:
            yield counts
        finally:
            self.counted.remove(counts)

    def operation(self, func: Any) -> None:
        """Counts an operation."""
        for counts in self.counted:
            if func.is_view or func in _VIEWS:
                counts.views += 1
            else:
                counts.operations += 1

    def read(self, what: str, size: int) -> None:
        """Counts a read by the host."""
        line = f"{_line()} {what}" if self.counted else ""
        for counts in self.counted:
            counts.reads += 1
            counts.read_bytes += size
            counts.lines[line] += 1

    def written(self, what: str, size: int) -> None:
        """Counts a copy from the host."""
        line = f"{_line()} {what}" if self.counted else ""
        for counts in self.counted:
            counts.writes += 1
            counts.write_bytes += size
            counts.written[line] += 1


_VIEWS = {ATEN._unsafe_view.default, ATEN.lift_fresh.default, ATEN.alias.default, ATEN.detach.default}


def _line() -> str:
    """The line that asked: the innermost one outside torch and this file."""
    frame = sys._getframe(2)
    while frame.f_back is not None and (frame.f_code.co_filename == __file__ or frame.f_code.co_filename.startswith(TORCH)):
        frame = frame.f_back
    path = Path(frame.f_code.co_filename)
    return f"{path.parent.name}/{path.name}:{frame.f_lineno}"


class Pretended(torch.Tensor):
    """A tensor that says it is on the device; ``held`` is the CPU's that it stands for."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor, device: torch.device) -> Pretended:
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, held.stride(), held.storage_offset(), dtype=held.dtype, device=device, requires_grad=False
        )
        made.held = held
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, *args, **(kwargs or {}))

    # What torch answers from the memory of a tensor, without any operation.

    def tolist(self) -> Any:
        DEVICE.read("tolist", self.held.nbytes)
        return self.held.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        if not force:
            raise TypeError(f"can't convert {self.device} device type tensor to numpy. Use Tensor.cpu() first.")
        return self.cpu().numpy()

    def __array__(self, dtype: Any = None) -> Any:
        return self.numpy()

    def data_ptr(self) -> int:
        return self.held.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.held.untyped_storage()

    @property
    def data(self) -> torch.Tensor:
        return self.detach()

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        torch.Tensor.data.__set__(self, new)  # type: ignore[attr-defined]
        self.held = new.held  # type: ignore[attr-defined]

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            copied = self.detach().clone()
            if isinstance(self, torch.nn.Parameter):
                copied = torch.nn.Parameter(copied, self.requires_grad)
            copied.__dict__ |= {
                k: copy.deepcopy(v, memo) for k, v in self.__dict__.items() if k not in ("held", "_is_param")
            }
            memo[id(self)] = copied
        return memo[id(self)]

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a tensor of the pretended device is not pickled: bring it to the CPU first.")

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"{self.held!r} on {self.device}"


def _named(device: Any) -> torch.device | None:
    """The device an operation is asked to make something on."""
    if device is None:
        return None
    device = torch.device(device)
    if device.type != NAME:
        return device
    index = device.index or 0
    if index >= COUNT:
        raise RuntimeError(f"{NAME} error: invalid device ordinal {index}")
    return torch.device(NAME, index)


def _computed(func: Any, *args: Any, **kwargs: Any) -> Any:
    """An operation of the device: checked, counted, computed by the CPU."""
    if func is ATEN._copy_from.default:
        func, args = ATEN.copy_.default, (args[1], args[0])
    tensors: list[torch.Tensor] = []
    plain_args = [_held(each, tensors) for each in args]
    plain_kwargs = {name: _held(each, tensors) for name, each in kwargs.items()}
    ours = [each for each in tensors if isinstance(each, Pretended)]
    wanted = _named(kwargs.get("device"))
    if len(tensors) > 1 and func not in COPIES:
        _check(func, args, tensors, ours)
    if DEVICE.counted:
        DEVICE.operation(func)
        _count(func, args, wanted)
    device = wanted or (ours[0].device if ours else torch.device(NAME, 0))
    if wanted is not None:
        plain_kwargs["device"] = "cpu"
    if plain_kwargs.get("pin_memory"):
        plain_kwargs["pin_memory"] = False
    made = func(*plain_args, **plain_kwargs)
    if func is ATEN.copy_.default:
        # What is written to is given back, wherever it is.
        return args[0]
    return made if device.type != NAME else _wrapped(made, device, ours)


def _held(given: Any, tensors: list[torch.Tensor]) -> Any:
    """What an operation of the CPU is given instead; every tensor there is goes to ``tensors``."""
    if isinstance(given, torch.Tensor):
        tensors.append(given)
        return given.held if isinstance(given, Pretended) else given
    if isinstance(given, list | tuple):
        return [_held(each, tensors) for each in given]
    return given


def _wrapped(made: Any, device: torch.device, ours: list[Pretended]) -> Any:
    """What the CPU made, on the device; a tensor that was changed in place is itself."""
    if isinstance(made, list | tuple):
        return type(made)(_wrapped(each, device, ours) for each in made)
    if not isinstance(made, torch.Tensor):
        return made
    for known in ours:
        if known.held is made:
            if known.shape != made.shape or known.stride() != made.stride():
                torch.Tensor.data.__set__(known, Pretended(made, device))  # type: ignore[attr-defined]
            return known
    return Pretended(made, device)


def _check(func: Any, args: Any, tensors: list[torch.Tensor], ours: list[Pretended]) -> None:
    """Raises the error of CUDA where an operation is given tensors of several devices."""
    if len(ours) == len(tensors) and len({each.device for each in ours}) == 1:
        return
    indices = {id(each) for each in args[1]} if func in INDEXED else set()
    scalars = torch.Tag.pointwise in func.tags or func in SCALARS
    first = ours[0].device
    for each in tensors:
        number = scalars and not each.dim()
        if each.device == first or (each.device.type == "cpu" and (id(each) in indices or number)):
            continue
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {first} and {each.device}! "
            f"(when calling {func})"
        )


def _count(func: Any, args: Any, wanted: torch.device | None) -> None:
    """Counts what the host must wait for."""
    if func in COPIES:
        if func is ATEN._to_copy.default:
            source, place = args[0], wanted or args[0].device
        else:
            source, place = args[1], args[0].device
        if source.device.type == NAME and place.type == "cpu":
            DEVICE.read("copy", source.nbytes)
        elif source.device.type == "cpu" and place.type == NAME:
            DEVICE.written("copy", source.nbytes)
    elif func in SIZED:
        DEVICE.read(str(func.overloadpacket).removeprefix("aten."), 8)
    elif func in INDEXED:
        for index in args[1]:
            if index is None:
                continue
            if not isinstance(index, Pretended):
                DEVICE.written("index", index.nbytes)
            elif index.dtype in (torch.bool, torch.uint8):
                DEVICE.read("boolean index", 8)


def _attention(
    query: Any, key: Any, value: Any, mask: Any = None, dropout: float = 0.0, causal: bool = False, **more: Any
) -> Any:
    """Attention by the kernel that the CPU would choose, seen by every mode that sees it there."""
    device = [each.held if isinstance(each, Pretended) else each for each in (query, key, value, mask)]
    chosen = torch._fused_sdp_choice(*device, dropout, causal, **more)
    if chosen != SDPBackend.FLASH_ATTENTION.value:
        return ATEN._scaled_dot_product_attention_math(query, key, value, mask, dropout, causal, **more)[0]
    if mask is not None and mask.dtype == torch.bool:
        mask = torch.zeros_like(mask, dtype=query.dtype).masked_fill_(mask.logical_not(), -torch.inf)
    more.pop("enable_gqa", None)
    return ATEN._scaled_dot_product_flash_attention_for_cpu(query, key, value, dropout, causal, attn_mask=mask, **more)[0]


class _Generator(torch.Generator):
    """Random numbers of the device are the CPU's; torch has no way to say so."""

    def __new__(cls, device: Any = "cpu") -> _Generator:
        return super().__new__(cls, "cpu" if torch.device(device).type == NAME else device)


class _Module:
    """What torch asks of ``torch.pretend``."""

    def is_initialized(self) -> bool:
        return True

    def is_available(self) -> bool:
        return DEVICE.on

    def current_device(self) -> int:
        return 0

    def set_device(self, device: Any) -> None:
        pass

    def _is_in_bad_fork(self) -> bool:
        return False

    def manual_seed_all(self, seed: int) -> None:
        pass

    def device_count(self) -> int:
        return COUNT

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.float16, torch.bfloat16]

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)

    def synchronize(self, device: Any = None) -> None:
        pass


class _Hooks(torch._C._acc.PrivateUse1Hooks):
    def is_available(self) -> bool:
        return DEVICE.on

    def has_primary_context(self, index: int) -> bool:
        return DEVICE.on

    def is_built(self) -> bool:
        return True


@functools.cache
def _registered() -> tuple[Any, ...]:
    """Tells torch of the device: once a process, there is no way back."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(NAME, backend_module=_Module(), hook=_Hooks())
    everything = torch.library.Library("_", "IMPL")
    everything.fallback(_computed, "PrivateUse1")
    own = torch.library.Library("aten", "IMPL", "PrivateUse1")
    # Torch calls these while it makes a tensor of numbers, and hides meanwhile that ours are a class of their own.
    for name in ("empty.memory_format", "empty_strided", "_copy_from", "fill_.Scalar"):
        operation, _, overload = name.partition(".")
        own.impl(name, functools.partial(_computed, getattr(getattr(ATEN, operation), overload or "default")))
    # Torch takes attention apart on a device that it does not know.
    above = torch.library.Library("aten", "IMPL", "AutogradPrivateUse1")
    above.impl("scaled_dot_product_attention", _attention)
    return everything, own, above


DEVICE = Device()


@contextlib.contextmanager
def pretended() -> Iterator[Device]:
    """The device is there inside; outside torch says that it has none."""
    _registered()
    generator = torch.Generator
    torch.Generator, DEVICE.on = _Generator, True  # type: ignore[misc]
    try:
        yield DEVICE
    finally:
        torch.Generator, DEVICE.on = generator, False  # type: ignore[misc]
