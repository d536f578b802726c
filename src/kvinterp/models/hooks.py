"""Where in a module tree a site is found, and the hooks that show it.

Every hook goes through torch's own handles, so that removing them leaves a model as it was.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from kvinterp.errors import UnsupportedError
from kvinterp.models.derived import SDPA, derived_attention, sdpa_arguments


@dataclasses.dataclass(frozen=True)
class Tap:
    """Where in the module tree a site is found, and how its tensor is brought to the common layout.

    Attributes:
        module: The module to hook.
        side: ``"input"`` (first argument), ``"output"``, ``"softmax"`` (scores or pattern inside eager attention),
            ``"fused"`` (the same, derived beside SDPA from what that is given), ``"heads"`` (each head's part of an output
            projection), or ``"routing"`` (a router inside an MLP).
        heads: Number of heads to split the last dimension into, or None where the layout is the common one already; of
            what is derived, the number of query heads.
        span: Start and stop of the last dimension that belongs to this site in a fused projection, or None for all.
        head_major: Whether the tensor arrives as ``[batch, head, position, head_dim]``.
        experts: How many a router chooses among.
        z: Of ``"heads"`` the module that returns what the projection reads, where that is not the module's own input.
    """

    module: nn.Module
    side: str = "output"
    heads: int | None = None
    span: tuple[int, int] | None = None
    head_major: bool = False
    experts: int = 0
    z: nn.Module | None = None

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


class Functions(TorchFunctionMode):
    """Sees torch's functions as they are called; ``replace`` returns NotImplemented to let one through."""

    def __init__(self, replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.replace(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


def routing_tap(mlp: Any, site: str, layer: int, architecture: str) -> Tap:
    """Where a router's site is found; UnsupportedError where the layer has none."""
    return Tap(mlp, "routing", experts=experts_in(mlp, site, layer, architecture))


def heads_tap(z: Tap, architecture: str) -> Tap:
    """Where each head's part of attention's output is made, given where the output projection reads z.

    Raises:
        UnsupportedError: The projection's weight is none that can be parted.
    """
    weight = getattr(z.module, "weight", None)
    if not isinstance(weight, Tensor) or weight.dim() != 2 or not weight.is_floating_point():
        raise UnsupportedError(
            f"site 'result' is not there in {architecture}: the weight of its output projection ({type(z.module).__name__}) is "
            "no plain matrix that can be parted by heads. Record z instead."
        )
    return dataclasses.replace(z, side="heads")


LAST, BEHIND = 1, 2
"""The ranks of hooks that go behind the others of a module: what only looks at the site, and what ends a pass."""


def own_hook(
    module: nn.Module, hook: Callable[..., Any], side: str, *, first: bool = False, always_call: bool = False, rank: int = 0
) -> RemovableHandle:
    """Registers a hook of kvinterp's, which hears this module and no copy of it, and which Dynamo does not trace.

    A deep copy of a module carries the hooks of the original. One that a copy calls takes itself off it, unheard.

    Args:
        module: The module.
        hook: Called as torch calls hooks that take keyword arguments.
        side: ``"input"`` or ``"output"``.
        first: Whether it goes before the hooks that are there.
        always_call: Whether it is called after an exception too.
        rank: 0, LAST or BEHIND: where :func:`sort_hooks` puts it.
    """

    def own(called: nn.Module, *given: Any) -> Any:
        if called is not module:
            _take_off(called, registered)
            return None
        return hook(called, *given)

    # Without Dynamo there is nothing to keep from tracing, and importing it takes seconds.
    registered: Any = torch.compiler.disable(own) if "torch._dynamo" in sys.modules else own
    registered.rank = rank
    if side == "input":
        return module.register_forward_pre_hook(registered, prepend=first, with_kwargs=True)
    return module.register_forward_hook(registered, prepend=first, with_kwargs=True, always_call=always_call)


def sort_hooks(module: nn.Module) -> None:
    """Puts a module's hooks in the order of their ranks; a user's, added since, come before those that only look."""
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        ranks = {key: getattr(hook, "rank", 0) for key, hook in hooks.items()}
        ordered = sorted(ranks, key=lambda key: ranks[key])
        if ordered != list(ranks):
            hooks.update({key: hooks.pop(key) for key in ordered})


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
    rows: Callable[[], str] = lambda: "all",
    rank: int = 0,
) -> list[Any]:
    """Hooks a tap's module: ``emit`` is called with the raw tensor, and what it returns goes in its place.

    Args:
        tap: Where the site is.
        site: Its name.
        emit: Called with the raw tensor.
        rows: Of what is derived, whether ``"all"`` query positions are wanted, the ``"newest"`` alone, or ``"none"``.
        rank: As of :func:`own_hook`.
    """
    if tap.side == "softmax":
        return _mode_hooks(tap.module, lambda _: _softmax(site, emit), rank)
    if tap.side == "fused":
        mode = _fused(site, tap.heads or 0, emit, rows)
        if _asks_interface(tap.module):
            return [_around_attention(tap.module, mode)]
        return _mode_hooks(tap.module, lambda _: mode, rank)
    if tap.side == "heads":
        return _head_hooks(tap, emit, rows)
    if tap.side == "routing":
        return _mode_hooks(tap.module, lambda given: _routing(site, tap.experts, given.shape[:-1], emit), rank)
    if tap.side == "input":
        return [own_hook(tap.module, stream_hook(emit), "input", rank=rank)]

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        raw, given = first_of(output), args[0] if args else None
        if isinstance(given, Tensor) and raw.dim() == 2 and given.dim() == 3:
            # Experts may return one row a token; what hears it gets ``[batch, position, width]`` all the same.
            new = emit(raw.unflatten(0, given.shape[:2]))
            new = None if new is None else new.flatten(0, 1)
        else:
            new = emit(raw)
        return put_first(output, new)

    return [own_hook(tap.module, after, "output", rank=rank)]


def in_order(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of torch, with what it names ``input`` in its place, the first."""
    if "input" not in kwargs:
        return args, kwargs
    return (kwargs["input"], *args), {name: value for name, value in kwargs.items() if name != "input"}


def _softmax(site: str, emit: Callable[[Tensor], Tensor | None]) -> Functions:
    """Shows the input or the output of the softmax that runs inside one attention module."""

    def heard(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func not in (torch.softmax, nn.functional.softmax, Tensor.softmax):
            return NotImplemented
        args, kwargs = in_order(args, kwargs)
        scores = args[0]
        if site == "attn_scores":
            new = emit(scores)
            return func(scores if new is None else new, *args[1:], **kwargs)
        probabilities = func(*args, **kwargs)
        new = emit(probabilities.to(scores.dtype))
        return probabilities if new is None else new.to(probabilities.dtype)

    return Functions(heard)


def _fused(site: str, heads: int, emit: Callable[[Tensor], Tensor | None], rows: Callable[[], str]) -> Functions:
    """Hears what the SDPA that runs inside one attention module is given, and changes nothing of it."""

    def heard(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        wanted = rows() if func is SDPA else "none"
        if wanted != "none":
            query, key, _, mask, is_causal, scale = sdpa_arguments(*args, **kwargs)
            packed, each = query.shape[1:3]
            if packed != heads and packed * each == heads:
                # A single token's query heads were packed as rows of the KV head that they share: transformers does so where its
                # cache is masked, ``[batch, kv_head, query_head_of_it, dim]``.
                if mask is not None and mask.dim() == 4 and mask.shape[1:3] == (packed, each):
                    mask = mask.flatten(1, 2).unsqueeze(2)
                query, key = query.flatten(1, 2).unsqueeze(2), key.repeat_interleave(each, 1)
            emit(derived_attention(site, query, key, mask, is_causal, scale, wanted))
        return NotImplemented

    return Functions(heard)


# Routers: where a mixture of experts chooses ----------------------------------------------------------------------------

# Architectures put the router's result in tuples of their own, and make weights of it in ways of their own (softmax before or
# after the choice, sigmoid with a bias, groups). What all have in common is a product with as many columns as there are
# experts, and a ``topk`` of as many columns behind it, which is the choice. So these two calls are what is heard; logits can be
# put in, a choice only heard.

ROUTERS = ("gate", "router", "W_gate")
"""What the module is called whose rows are the experts."""


def router_of(mlp: Any) -> nn.Module | None:
    """The router in an MLP, or None where it has none: a module with a weight ``[expert, width]``, beside the experts.

    A bridge calls the gate of a gated MLP ``gate`` too, where there are no experts.
    """
    holders = (mlp, getattr(mlp, "original_component", None))
    for holder in holders if any(hasattr(each, "experts") for each in holders) else ():
        for name in ROUTERS:
            found = getattr(holder, name, None)
            if isinstance(found, nn.Module) and getattr(getattr(found, "weight", None), "ndim", 0) == 2:
                return found
    return None


def experts_in(mlp: Any, site: str, layer: int, architecture: str) -> int:
    """How many experts the router of a layer chooses among.

    Raises:
        UnsupportedError: The layer has no router.
    """
    router: Any = router_of(mlp)
    if router is None:
        raise UnsupportedError(
            f"site {site!r} is not there: layer {layer} of {architecture} has no router that chooses experts (no module named "
            f"{' or '.join(ROUTERS[:2])} in its MLP)."
        )
    return router.weight.shape[0]


def _routing(site: str, experts: int, rows: torch.Size, emit: Callable[[Tensor], Tensor | None]) -> Functions:
    """Shows the router's logits, or its choice, once inside one MLP that was given ``rows``, ``[batch, position]``."""
    heard: list[Any] = []

    def put(given: Tensor, shown: Tensor) -> Tensor | None:
        # A row a token: groups of experts are chosen among by tensors of one dimension more.
        if given.shape != (rows.numel(), experts):
            return None
        heard.append(site)
        new = emit(shown.reshape(*rows, -1))
        return None if new is None else new.reshape(shown.shape)

    def hear(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        output, new = func(*args, **kwargs), None
        if not heard and site == "router" and func is nn.functional.linear:
            new = put(output, output)
        elif not heard and site == "experts" and func in (torch.topk, Tensor.topk):
            put(in_order(args, kwargs)[0][0], output.indices)
        return output if new is None else new

    return Functions(hear)


_AROUND: dict[int, list[Functions]] = {}
"""By module, what is entered around its attention function."""
_INSIDE: set[int] = set()


def _asks_interface(module: nn.Module) -> bool:
    """Whether a module asks transformers' interface for its attention function, and its file has no SDPA of its own there."""
    forward = inspect.unwrap(type(module).forward)
    asked = getattr(forward, "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS")
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return asked is not None and "ALL_ATTENTION_FUNCTIONS" in names and asked["sdpa"] is type(asked)()["sdpa"]


def _around_attention(module: nn.Module, mode: Functions) -> Any:
    """Enters a mode around a module's attention function alone, of whose calls of torch SDPA is one of a few; how to undo it."""
    from transformers import AttentionInterface

    if not _AROUND:
        AttentionInterface.register("sdpa", functools.partial(_attention, AttentionInterface()["sdpa"]))
    _AROUND.setdefault(id(module), []).append(mode)

    def undo() -> None:
        _AROUND[id(module)].remove(mode)
        if not _AROUND[id(module)]:
            del _AROUND[id(module)]
        now = AttentionInterface()["sdpa"]
        # A user may have put another there meanwhile.
        if not _AROUND and getattr(now, "func", None) is _attention:
            AttentionInterface.register("sdpa", now.args[0])

    return types.SimpleNamespace(remove=undo)


def _attention(own: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What transformers runs, within the modes of the module that calls it."""
    around = _AROUND.get(id(module), ())
    # A user's function that was put there meanwhile may have kept this one, and call it within another of the same.
    if not around or id(module) in _INSIDE:
        return own(module, *args, **kwargs)
    with contextlib.ExitStack() as modes:
        _INSIDE.add(id(module))
        modes.callback(_INSIDE.discard, id(module))
        for mode in around:
            modes.enter_context(mode)
        return own(module, *args, **kwargs)


@contextlib.contextmanager
def methods_led(modules: Sequence[nn.Module], name: str, led: Callable[..., Any]) -> Iterator[None]:
    """Leads a method of modules through ``led(number, own, ...)`` for as long as the context lasts.

    Args:
        modules: The modules, by whose place among them it is told which one is called.
        name: The method.
        led: Called with the number, the method itself and what the method is called with.
    """
    # Straight into __dict__: a bridge's modules pass attributes that are set on to what they wrap.
    before = [vars(module).get(name) for module in modules]
    try:
        for number, module in enumerate(modules):
            vars(module)[name] = functools.partial(led, number, getattr(module, name))
        yield
    finally:
        for module, own in zip(modules, before, strict=True):
            if own is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = own


def _mode_hooks(
    module: nn.Module,
    made: Callable[[Any], contextlib.AbstractContextManager[Any]],
    rank: int = 0,
) -> list[Any]:
    """Enters a mode around one module, inside which alone scores and pattern, or a router's choice, can be seen."""
    open_modes: list[contextlib.AbstractContextManager[Any]] = []

    def close() -> None:
        if open_modes:
            open_modes.pop().__exit__(None, None, None)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = made(args[0] if args else kwargs.get(_named_stream(kwargs)))
        mode.__enter__()
        open_modes.append(mode)

    def leave(*_: Any) -> None:
        close()

    around = own_hook(module, enter, "input", rank=rank), own_hook(module, leave, "output", always_call=True, rank=rank)
    return [*around, Closing(close)]


def _head_hooks(tap: Tap, emit: Callable[[Tensor], Tensor | None], rows: Callable[[], str]) -> list[Any]:
    """Shows what each head adds to an output projection's sum, made beside it; what is put there is added as it differs."""
    seen: list[Tensor] = []
    source = tap.z

    @contextlib.contextmanager
    def hears_z(z: nn.Module) -> Iterator[None]:
        # Put on anew in every forward, behind whatever else is put on z.
        seen.clear()
        handle = own_hook(z, lambda _, __, ___, output: seen.append(output), "output")
        try:
            yield
        finally:
            handle.remove()

    def after(module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        if (wanted := rows()) == "none":
            return None
        z = seen.pop() if source is not None else args[0] if args else kwargs["input"]
        z = z if z.dim() == 4 else z.unflatten(-1, (tap.heads, -1))
        # What is only looked at is not a path's kernels'.
        with torch._C.DisableTorchFunction(), _disable_current_modes(), torch.autocast(z.device.type, enabled=False):
            heads = torch.einsum("bphd,hdm->bphm", z[:, -1:] if wanted == "newest" else z, _head_weights(module, z))
        new = emit(heads)
        return None if new is None else put_first(output, first_of(output) + (new - heads).sum(2))

    around = [] if source is None else _mode_hooks(tap.module, lambda _: hears_z(source))
    return [*around, own_hook(tap.module, after, "output")]


def _head_weights(module: Any, z: Tensor) -> Tensor:
    """The part of an output projection that reads each head, ``[head, head_dim, width]``."""
    weight = (
        module.W_O if hasattr(module, "W_O") else module.weight if type(module).__name__ == "Conv1D" else module.weight.T
    )
    return weight.reshape(z.shape[2], z.shape[3], -1).to(z)


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
            if _is_own(hook):
                _take_off(module, hook)


def _is_own(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith("kvinterp.")


def _take_off(module: nn.Module, hook: Callable[..., Any]) -> None:
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = module.__dict__[name]
        for key in [key for key, held in hooks.items() if held is hook]:
            for kind in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                module.__dict__.get(kind, {}).pop(key, None)


@contextlib.contextmanager
def hooks_suspended(model: nn.Module, users: str = "suspended") -> Iterator[None]:
    """Runs what is inside without any forward hook, or with those of the user's alone (``"kept"``); new ones stay."""
    kept = [(m, name, m.__dict__[name]) for m in model.modules() for name in ("_forward_hooks", "_forward_pre_hooks")]
    # What is entered around attention functions is no hook of torch's.
    around = {id(module): _AROUND.pop(id(module)) for module in model.modules() if id(module) in _AROUND}
    try:
        for module, name, hooks in kept:
            module.__dict__[name] = type(hooks)(
                (key, hook) for key, hook in hooks.items() if users == "kept" and not _is_own(hook)
            )
        yield
    finally:
        for module, name, hooks in kept:
            hooks.update(module.__dict__[name])
            module.__dict__[name] = hooks
        _AROUND.update(around)
