"""Where in a module tree a site is found, and the hooks that show it.

Every hook goes through torch's own handles, so that removing them leaves a model as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.models.derived import FusedMode

__all__ = ["Tap", "hooks_suspended", "remove_own_hooks", "tap_hooks"]


@dataclasses.dataclass(frozen=True)
class Tap:
    """Where in the module tree a site is found, and how its tensor is brought to the common layout.

    Attributes:
        module: The module to hook.
        side: ``"input"`` (first argument), ``"output"``, ``"softmax"`` (scores or pattern inside eager attention), or
            ``"fused"`` (the same, derived beside SDPA from what that is given).
        heads: Number of heads to split the last dimension into, or None where the layout is the common one already; of
            what is derived, the number of query heads.
        span: Start and stop of the last dimension that belongs to this site in a fused projection, or None for all.
        head_major: Whether the tensor arrives as ``[batch, head, position, head_dim]``.
    """

    module: nn.Module
    side: str = "output"
    heads: int | None = None
    span: tuple[int, int] | None = None
    head_major: bool = False

    def get(self, raw: Tensor) -> Tensor:
        """The site's tensor in the common layout, as a view."""
        if self.span is not None:
            raw = raw[..., self.span[0] : self.span[1]]
        if self.heads is not None and raw.dim() == 3:
            raw = raw.unflatten(-1, (self.heads, -1))
        return raw.transpose(1, 2) if self.head_major else raw

    def put(self, raw: Tensor, new: Tensor) -> Tensor:
        """A copy of ``raw`` in which the site's tensor is ``new``."""
        if self.head_major:
            new = new.transpose(1, 2)
        if self.heads is not None and raw.dim() == 3:
            new = new.flatten(-2)
        if self.span is None:
            return new
        replaced = raw.clone()
        replaced[..., self.span[0] : self.span[1]] = new
        return replaced


def _all_rows() -> str:
    return "all"


def tap_hooks(
    tap: Tap, site: str, emit: Callable[[Tensor], Tensor | None], rows: Callable[[], str] = _all_rows
) -> list[Any]:
    """Hooks a tap's module: ``emit`` is called with the raw tensor, and what it returns goes in its place.

    Args:
        tap: Where the site is.
        site: Its name.
        emit: What hears it.
        rows: Of what is derived, whether ``"all"`` query positions are wanted, the ``"newest"`` alone, or ``"none"``.
    """
    if tap.side == "softmax":
        return _mode_hooks(tap.module, lambda: _SoftmaxMode(site, emit))
    if tap.side == "fused":
        return _mode_hooks(tap.module, lambda: FusedMode(site, tap.heads or 0, emit, rows))
    if tap.side == "input":

        def before(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
            if args:
                new = emit(args[0])
                return None if new is None else ((new, *args[1:]), kwargs)
            new = emit(kwargs["hidden_states"])
            return None if new is None else (args, {**kwargs, "hidden_states": new})

        return [tap.module.register_forward_pre_hook(before, with_kwargs=True)]

    def after(_: nn.Module, args: Any, output: Any) -> Any:
        # A list where the old OpenAI GPT's blocks return what others return as a tuple.
        raw = output[0] if isinstance(output, tuple | list) else output
        given = args[0] if args else None
        if isinstance(given, Tensor) and raw.dim() == 2 and given.dim() == 3:
            # Experts may return one row a token; what hears it gets ``[batch, position, width]`` all the same.
            new = emit(raw.unflatten(0, given.shape[:2]))
            new = None if new is None else new.flatten(0, 1)
        else:
            new = emit(raw)
        return None if new is None else (new, *output[1:]) if isinstance(output, tuple | list) else new

    return [tap.module.register_forward_hook(after)]


class _SoftmaxMode(torch.overrides.TorchFunctionMode):
    """Shows the input or the output of the softmax that runs inside one attention module."""

    def __init__(self, site: str, emit: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.site, self.emit = site, emit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.softmax, torch.nn.functional.softmax, Tensor.softmax):
            return func(*args, **kwargs)
        scores = args[0]
        if self.site == "attn_scores":
            new = self.emit(scores)
            return func(scores if new is None else new, *args[1:], **kwargs)
        probabilities = func(*args, **kwargs)
        new = self.emit(probabilities.to(scores.dtype))
        return probabilities if new is None else new.to(probabilities.dtype)


def _mode_hooks(module: nn.Module, made: Callable[[], torch.overrides.TorchFunctionMode]) -> list[Any]:
    """Enters a mode around one attention module, inside which alone scores and pattern can be seen."""
    open_modes: list[torch.overrides.TorchFunctionMode] = []

    def enter(_: nn.Module, __: Any) -> None:
        mode = made()
        mode.__enter__()
        open_modes.append(mode)

    def leave(_: nn.Module | None, __: Any, ___: Any) -> None:
        if open_modes:
            open_modes.pop().__exit__(None, None, None)

    return [
        module.register_forward_pre_hook(enter),
        module.register_forward_hook(leave, always_call=True),
        _Closing(leave),
    ]


class _Closing:
    """Leaves what an interruption left open: torch calls hooks after errors, but not after a KeyboardInterrupt."""

    def __init__(self, leave: Callable[[nn.Module | None, Any, Any], None]) -> None:
        self._leave = leave

    def remove(self) -> None:
        """Called where the hooks themselves are removed."""
        self._leave(None, None, None)


def remove_own_hooks(model: nn.Module) -> None:
    """Takes kvinterp's hooks off a copy of a model that was made while something was recorded."""
    for module in model.modules():
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [k for k, hook in hooks.items() if getattr(hook, "__module__", "").startswith("kvinterp.")]:
                del hooks[key]


@contextlib.contextmanager
def hooks_suspended(model: nn.Module) -> Iterator[None]:
    """Runs what is inside without any forward hook of anyone's; those that it adds and leaves stay."""
    kept = [(m, name, m.__dict__[name]) for m in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    try:
        for module, name, hooks in kept:
            module.__dict__[name] = type(hooks)()
        yield
    finally:
        for module, name, hooks in kept:
            hooks.update(module.__dict__[name])
            module.__dict__[name] = hooks
