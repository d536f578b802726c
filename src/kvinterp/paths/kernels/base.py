"""What a kernel mode is, and how it gets between a model and torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _pop_mode_temporarily,
)

from kvinterp.common.spec import name_of, text_of
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.models.attaching import HookPoint, Listener


@dataclasses.dataclass(frozen=True)
class Kernels:
    """A kernel mode, as data; :meth:`mode` is the same thing in motion."""

    @property
    def name(self) -> str:
        """What it is called in text forms."""
        return name_of(type(self))

    def mode(self, adapter: Adapter) -> KernelMode:
        """What the runner enters around each forward of this model."""
        raise NotImplementedError

    def compute_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """The dtype activations have in a model whose weights have ``dtype``."""
        return dtype

    def __str__(self) -> str:
        """The text form used on the command line and in tables."""
        return text_of(self)


class KernelMode:
    """A kernel mode while a model runs under it: a context manager that can be entered again for
    every forward.

    Attributes:
        listeners: Hooks that tell it which layer is running; empty where it does not need to know.
        resting: Whether it lets everything through for now; only a mode that asks for it does
            (``batch_invariant``).
    """

    resting = False

    def __init__(self) -> None:
        self.listeners: Mapping[HookPoint, Listener] = {}
        self._open: list[ExitStack] = []

    def interceptors(self) -> list[Any]:
        """The torch modes to enter, outermost first."""
        return []

    def expect(self, operation: str) -> None:
        """Told which of ``split_k.OPERATIONS`` is called next, where it is called alone and no
        model runs around it.
        """

    def __enter__(self) -> KernelMode:
        stack = ExitStack()
        for interceptor in self.interceptors():
            stack.enter_context(interceptor)
        self._open.append(stack)
        return self

    def __exit__(self, *error: Any) -> None:
        self._open.pop().__exit__(*error)


def refuse_opaque_attention(adapter: Adapter, kernels: Kernels) -> None:
    """Raises UnsupportedError where attention is a kernel torch does not see into."""
    if adapter.facts.attention.startswith(("flash_attention", "flex_attention", "paged")):
        raise UnsupportedError(
            f"kernels={kernels} cannot reach inside attention {adapter.facts.attention!r}, a kernel torch only hands "
            "tensors to: load the model with attention='sdpa' or 'eager'."
        )


MATMUL = (torch.matmul, Tensor.matmul, Tensor.__matmul__)


class Operations(TorchDispatchMode):
    """Sees torch's operations underneath its functions; ``replace`` returns NotImplemented to let
    one through.
    """

    def __init__(self, replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.replace = replace

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.replace(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result

    def aside(self) -> AbstractContextManager[Any]:
        """Within it operations do not come here, which costs each more than itself; where it is not
        the innermost they do.

        A replacement of a whole function is made of many operations, and none of them is to be
        replaced again.
        """
        return _pop_mode_temporarily() if _get_current_dispatch_mode() is self else nullcontext()


def drops_out(*args: Any, dropout_p: float = 0.0, **_: Any) -> bool:
    """Whether a call of SDPA leaves out some of the keys at random, which no order of additions can
    stand for.
    """
    return (args[4] if len(args) > 4 else dropout_p) > 0
