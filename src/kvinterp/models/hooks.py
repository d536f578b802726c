"""Where in a module tree a site is found, and the hooks that show it.

Every hook goes through torch's own handles, so that removing them leaves a model as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from kvinterp.models.derived import FusedMode
from kvinterp.models.routing import RoutingMode, experts_in


@dataclasses.dataclass(frozen=True)
class Tap:
    """Where in the module tree a site is found, and how its tensor is brought to the common layout.

    Attributes:
        module: The module to hook.
        side: ``"input"`` (first argument), ``"output"``, ``"softmax"`` (scores or pattern inside eager attention),
            ``"fused"`` (the same, derived beside SDPA from what that is given), or ``"routing"`` (a router inside an MLP).
        heads: Number of heads to split the last dimension into, or None where the layout is the common one already; of
            what is derived, the number of query heads.
        span: Start and stop of the last dimension that belongs to this site in a fused projection, or None for all.
        head_major: Whether the tensor arrives as ``[batch, head, position, head_dim]``.
        experts: How many a router chooses among.
    """

    module: nn.Module
    side: str = "output"
    heads: int | None = None
    span: tuple[int, int] | None = None
    head_major: bool = False
    experts: int = 0

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


def routing_tap(mlp: Any, site: str, layer: int, architecture: str) -> Tap:
    """Where a router's site is found; UnsupportedError where the layer has none."""
    return Tap(mlp, "routing", experts=experts_in(mlp, site, layer, architecture))


def own_hook(
    module: nn.Module, hook: Callable[..., Any], side: str, *, first: bool = False, always_call: bool = False
) -> RemovableHandle:
    """Registers a hook of kvinterp's, which hears this module and no copy of it, and which Dynamo does not trace.

    A deep copy of a module carries the hooks of the original. One that a copy calls takes itself off it, unheard.

    Args:
        module: The module.
        hook: Called as torch calls hooks that take keyword arguments.
        side: ``"input"`` or ``"output"``.
        first: Whether it goes before the hooks that are there.
        always_call: Whether it is called after an exception too.
    """

    def own(called: nn.Module, *given: Any) -> Any:
        if called is not module:
            _take_off(called, registered)
            return None
        return hook(called, *given)

    # Without Dynamo there is nothing to keep from tracing, and importing it takes seconds.
    registered = torch.compiler.disable(own) if "torch._dynamo" in sys.modules else own
    if side == "input":
        return module.register_forward_pre_hook(registered, prepend=first, with_kwargs=True)
    return module.register_forward_hook(registered, prepend=first, with_kwargs=True, always_call=always_call)


def stream_hook(change: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """A pre-hook that takes keyword arguments: what ``change`` makes of the first one, the residual stream, goes in its place."""

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        name = "" if args else _named_stream(kwargs)
        new = change(kwargs[name] if name else args[0])
        if new is None:
            return None
        return (args, {**kwargs, name: new}) if name else ((new, *args[1:]), kwargs)

    return hook


def _named_stream(given: dict[str, Any]) -> str:
    """The argument that is the residual stream, where a module is called with names alone."""
    floats = (name for name, value in given.items() if isinstance(value, Tensor) and value.is_floating_point())
    return "hidden_states" if "hidden_states" in given else next(floats, "hidden_states")


def first_of(output: Any) -> Any:
    """What a module returned, where it returned more beside it; a list is what the old OpenAI GPT's blocks return."""
    return output[0] if isinstance(output, tuple | list) and output else output


def put_first(output: Any, new: Any) -> Any:
    """What a module returned, with another tensor in the place of :func:`first_of`; None for None."""
    return (new, *output[1:]) if new is not None and isinstance(output, tuple | list) else new


def tap_hooks(
    tap: Tap,
    site: str,
    emit: Callable[[Tensor], Tensor | None],
    mine: Callable[[], bool] = lambda: True,
    rows: Callable[[], str] = lambda: "all",
) -> list[Any]:
    """Hooks a tap's module: ``emit`` is called with the raw tensor, and what it returns goes in its place.

    Args:
        tap: Where the site is.
        site: Its name.
        emit: Called with the raw tensor.
        mine: Whether the thread that runs the module is the one that hears it.
        rows: Of what is derived, whether ``"all"`` query positions are wanted, the ``"newest"`` alone, or ``"none"``.
    """
    if tap.side == "softmax":
        return _mode_hooks(tap.module, lambda _: _SoftmaxMode(site, emit), mine)
    if tap.side == "fused":
        return _mode_hooks(tap.module, lambda _: FusedMode(site, tap.heads or 0, emit, rows), mine)
    if tap.side == "routing":
        return _mode_hooks(tap.module, lambda given: RoutingMode(site, tap.experts, given, emit), mine)
    if tap.side == "input":
        return [own_hook(tap.module, stream_hook(emit), "input")]

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        raw, given = first_of(output), args[0] if args else None
        if isinstance(given, Tensor) and raw.dim() == 2 and given.dim() == 3:
            # Experts may return one row a token; what hears it gets ``[batch, position, width]`` all the same.
            new = emit(raw.unflatten(0, given.shape[:2]))
            new = None if new is None else new.flatten(0, 1)
        else:
            new = emit(raw)
        return put_first(output, new)

    return [own_hook(tap.module, after, "output")]


def in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of torch, with what it names ``input`` in its place, the first."""
    if "input" not in kwargs:
        return args, kwargs
    return (kwargs["input"], *args), {name: value for name, value in kwargs.items() if name != "input"}


class _SoftmaxMode(torch.overrides.TorchFunctionMode):
    """Shows the input or the output of the softmax that runs inside one attention module."""

    def __init__(self, site: str, emit: Callable[[Tensor], Tensor | None]) -> None:
        super().__init__()
        self.site, self.emit = site, emit

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in (torch.softmax, torch.nn.functional.softmax, Tensor.softmax):
            return func(*args, **kwargs)
        args, kwargs = in_order(args, kwargs)
        scores = args[0]
        if self.site == "attn_scores":
            new = self.emit(scores)
            return func(scores if new is None else new, *args[1:], **kwargs)
        probabilities = func(*args, **kwargs)
        new = self.emit(probabilities.to(scores.dtype))
        return probabilities if new is None else new.to(probabilities.dtype)


def _mode_hooks(
    module: nn.Module, made: Callable[[Any], torch.overrides.TorchFunctionMode], mine: Callable[[], bool]
) -> list[Any]:
    """Enters a mode around one module, inside which alone scores and pattern, or a router's choice, can be seen."""
    open_modes: list[torch.overrides.TorchFunctionMode] = []

    def close() -> None:
        if open_modes:
            open_modes.pop().__exit__(None, None, None)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if mine():
            mode = made(args[0] if args else kwargs.get(_named_stream(kwargs)))
            mode.__enter__()
            open_modes.append(mode)

    def leave(*_: Any) -> None:
        # Torch keeps modes by thread: another one's forward has none open here.
        if mine():
            close()

    return [own_hook(module, enter, "input"), own_hook(module, leave, "output", always_call=True), Closing(close)]


class Closing:
    """Leaves what an interruption left open: torch calls hooks after errors, but not after a KeyboardInterrupt."""

    def __init__(self, close: Callable[[], None]) -> None:
        self._close = close

    def remove(self) -> None:
        """Called where the hooks themselves are removed."""
        self._close()


def remove_own_hooks(model: nn.Module) -> None:
    """Takes kvinterp's hooks off a copy of a model that was made while something was recorded."""
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if getattr(hook, "__module__", "").startswith("kvinterp."):
                _take_off(module, hook)


def _take_off(module: nn.Module, hook: Callable[..., Any]) -> None:
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = module.__dict__[name]
        for key in [key for key, held in hooks.items() if held is hook]:
            for kind in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                module.__dict__.get(kind, {}).pop(key, None)


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
