"""The hooks that show the tensor of a site, at the module that its tap (:mod:`kvinterp.models.taps`)
names, and the modes that look inside a module.

Every hook is registered through torch and has a handle, so that removing the handles leaves a model
as it was.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from kvinterp.models.derived import SDPA, derived_attention, sdpa_call
from kvinterp.models.taps import Tap


class Functions(TorchFunctionMode):
    """A mode in which ``replace`` is called in place of each torch function; it returns
    NotImplemented to run the function.
    """

    def __init__(self, replace: Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]) -> None:
        super().__init__()
        self.replace = replace

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = self.replace(func, args, kwargs)
        return func(*args, **kwargs) if result is NotImplemented else result


LAST, BEHIND = 1, 2
"""Ranks of hooks that run after all others of a module: LAST for those that only look, BEHIND for
the end of a pass.
"""


def own_hook(
    module: nn.Module,
    hook: Callable[..., Any],
    side: str,
    *,
    first: bool = False,
    always_call: bool = False,
    rank: int = 0,
) -> RemovableHandle:
    """Registers a hook of kvinterp's, which runs for this module and no copy of it, and which
    Dynamo does not trace.

    A deep copy of a module has the hooks of the original. A hook that a copy calls removes itself
    from the copy and does nothing else.

    Args:
        module: The module.
        hook: Called as torch calls hooks that take keyword arguments.
        side: ``"input"`` or ``"output"``.
        first: Whether it runs before the hooks that are there already.
        always_call: Whether it also runs after an exception.
        rank: 0, LAST or BEHIND, by which :func:`sort_hooks` orders hooks.
    """

    def run_hook(caller: nn.Module, *arguments: Any) -> Any:
        if caller is not module:
            _remove_hook(caller, registered)
            return None
        return hook(caller, *arguments)

    # Without Dynamo there is nothing to keep from tracing, and importing it takes seconds.
    registered: Any = (
        torch.compiler.disable(run_hook) if "torch._dynamo" in sys.modules else run_hook
    )
    registered.rank = rank
    if side == "input":
        return module.register_forward_pre_hook(registered, prepend=first, with_kwargs=True)
    return module.register_forward_hook(
        registered, prepend=first, with_kwargs=True, always_call=always_call
    )


def sort_hooks(module: nn.Module) -> None:
    """Sorts a module's hooks by rank: a user's hook that was added later runs before those of
    kvinterp that only look.
    """
    for hooks in (module._forward_hooks, module._forward_pre_hooks):
        if len(hooks) < 2:
            continue
        ranks = {key: getattr(hook, "rank", 0) for key, hook in hooks.items()}
        ordered = sorted(ranks, key=lambda key: ranks[key])
        if ordered != list(ranks):
            hooks.update({key: hooks.pop(key) for key in ordered})


def stream_hook(change: Callable[[Tensor], Tensor | None]) -> Callable[..., Any]:
    """Makes a pre-hook that replaces the residual stream, a module's first argument, by what
    ``change`` returns.
    """

    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any] | None:
        name = "" if args else _stream_name(kwargs)
        new = change(kwargs[name] if name else args[0])
        if new is None:
            return None
        return (args, {**kwargs, name: new}) if name else ((new, *args[1:]), kwargs)

    return hook


def _stream_name(kwargs: dict[str, Any]) -> str:
    """The name of the argument that is the residual stream, where a module is called with named
    arguments only.
    """
    floats = (
        name
        for name, value in kwargs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    )
    return "hidden_states" if "hidden_states" in kwargs else next(floats, "hidden_states")


def first_of(output: Any) -> Any:
    """Returns the first value of a module's output: blocks return a tuple (the old OpenAI GPT's a
    list) or a tensor alone.
    """
    return output[0] if isinstance(output, tuple | list) and output else output


def put_first(output: Any, new: Any) -> Any:
    """Returns a module's output with another tensor in the place of :func:`first_of`; None for
    None.
    """
    return (new, *output[1:]) if new is not None and isinstance(output, tuple | list) else new


def tap_hooks(
    tap: Tap,
    site: str,
    emit: Callable[[Tensor], Tensor | None],
    rows: Callable[[], str] = lambda: "all",
    rank: int = 0,
) -> list[Any]:
    """Hooks a tap's module: ``emit`` is called with the raw tensor, and what it returns is put in
    the tensor's place.

    Args:
        tap: Where the site is.
        site: Its name.
        emit: Called with the raw tensor.
        rows: For derived sites: returns which query positions to compute, ``"all"``, the
            ``"newest"`` alone, or ``"none"``.
        rank: As in :func:`own_hook`.
    """
    if tap.side == "softmax":
        return _mode_hooks(tap.module, lambda _: _softmax_mode(site, emit), rank)
    if tap.side == "fused":
        mode = _sdpa_mode(site, tap.heads or 0, emit, rows)
        if _uses_interface(tap.module):
            return [_attention_hook(tap.module, mode)]
        return _mode_hooks(tap.module, lambda _: mode, rank)
    if tap.side == "heads":
        return _head_hooks(tap, emit, rows)
    if tap.side == "router":
        return _mode_hooks(
            tap.module,
            lambda stream: _router_mode(tap.experts, stream.shape[:-1], emit),
            rank,
        )
    if tap.side == "input":
        return [own_hook(tap.module, stream_hook(emit), "input", rank=rank)]

    def after(_: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        raw, stream = first_of(output), args[0] if args else None
        if isinstance(stream, Tensor) and raw.dim() == 2 and stream.dim() == 3:
            # Experts may return one row a token; ``emit`` receives ``[batch, position, width]`` all
            # the same.
            new = emit(raw.unflatten(0, stream.shape[:2]))
            new = None if new is None else new.flatten(0, 1)
        else:
            new = emit(raw)
        return put_first(output, new)

    return [own_hook(tap.module, after, "output", rank=rank)]


def in_order(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of a torch function, with a named ``input`` moved to its place, the
    first.
    """
    if "input" not in kwargs:
        return args, kwargs
    return (kwargs["input"], *args), {
        name: value for name, value in kwargs.items() if name != "input"
    }


def _softmax_mode(site: str, emit: Callable[[Tensor], Tensor | None]) -> Functions:
    """Makes a mode that emits the input or the output of the softmax that runs inside one attention
    module.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
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

    return Functions(run)


def _sdpa_mode(
    site: str, heads: int, emit: Callable[[Tensor], Tensor | None], rows: Callable[[], str]
) -> Functions:
    """Makes a mode that derives a site from the arguments of the SDPA inside one attention module,
    and changes none of them.
    """

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        queries = rows() if func is SDPA else "none"
        if queries != "none":
            query, key, _, mask, is_causal, scale, _ = sdpa_call(*args, **kwargs)
            kv_heads, group = query.shape[1:3]
            if kv_heads != heads and kv_heads * group == heads:
                # A single token's query heads were packed as rows of the KV head that they share:
                # transformers does so where its cache is masked,
                # ``[batch, kv_head, query_head_of_it, dim]``.
                if mask is not None and mask.dim() == 4 and mask.shape[1:3] == (kv_heads, group):
                    mask = rearrange(mask, "batch kv_head group key -> batch (kv_head group) 1 key")
                query = rearrange(query, "batch kv_head group dim -> batch (kv_head group) 1 dim")
            emit(derived_attention(site, query, key, mask, is_causal, scale, queries))
        return NotImplemented

    return Functions(run)


# Routers: where a mixture of experts chooses ------------------------------------------------------

# Each architecture returns the router's result in a tuple of its own and makes weights of it in its
# own way (softmax before or after the choice, sigmoid with a bias, groups). All of them compute a
# product with as many columns as there are experts. So the hook listens to that call.


def _router_mode(
    experts: int, rows: torch.Size, emit: Callable[[Tensor], Tensor | None]
) -> Functions:
    """Makes a mode that emits the router's logits, once inside one MLP of ``rows``,
    ``[batch, position]``.
    """
    emitted = False

    def run(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal emitted
        if func is not nn.functional.linear:
            return NotImplemented
        output = func(*args, **kwargs)
        # One row a token.
        if emitted or output.shape != (rows.numel(), experts):
            return output
        emitted = True
        new = emit(output.reshape(*rows, -1))
        return output if new is None else new.reshape(output.shape)

    return Functions(run)


# Modes: what is entered around a module, or around its attention function alone -------------------

_MODES: dict[int, list[Functions]] = {}
"""The modes to enter around a module's attention function, by the module's id."""
_RUNNING: set[int] = set()
"""The ids of the modules whose attention function runs within their modes now."""


def _uses_interface(module: nn.Module) -> bool:
    """Whether a module gets its SDPA from transformers' attention interface, which its own file
    leaves as it is.
    """
    forward = inspect.unwrap(type(module).forward)
    interface = getattr(forward, "__globals__", {}).get("ALL_ATTENTION_FUNCTIONS")
    names = getattr(getattr(forward, "__code__", None), "co_names", ())
    return (
        interface is not None
        and "ALL_ATTENTION_FUNCTIONS" in names
        and interface["sdpa"] is type(interface)()["sdpa"]
    )


def _attention_hook(module: nn.Module, mode: Functions) -> Any:
    """Enters a mode around a module's attention function alone, which calls few torch functions;
    returns a handle.
    """
    from transformers import AttentionInterface

    if not _MODES:
        AttentionInterface.register(
            "sdpa", functools.partial(_attend_in_modes, AttentionInterface()["sdpa"])
        )
    _MODES.setdefault(id(module), []).append(mode)

    def remove() -> None:
        _MODES[id(module)].remove(mode)
        if not _MODES[id(module)]:
            del _MODES[id(module)]
        now = AttentionInterface()["sdpa"]
        # A user may have registered another one meanwhile.
        if not _MODES and getattr(now, "func", None) is _attend_in_modes:
            AttentionInterface.register("sdpa", now.args[0])

    return types.SimpleNamespace(remove=remove)


def _attend_in_modes(
    attention: Callable[..., Any], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    """Runs an attention function within the modes of the module that calls it."""
    modes = _MODES.get(id(module), ())
    # A function that a user registered meanwhile may call this one from within itself.
    if not modes or id(module) in _RUNNING:
        return attention(module, *args, **kwargs)
    with contextlib.ExitStack() as stack:
        _RUNNING.add(id(module))
        stack.callback(_RUNNING.discard, id(module))
        for mode in modes:
            stack.enter_context(mode)
        return attention(module, *args, **kwargs)


@contextlib.contextmanager
def wrapping_methods(
    modules: Sequence[nn.Module], name: str, wrapper: Callable[..., Any]
) -> Iterator[None]:
    """Wraps a method of several modules for as long as the context lasts.

    Args:
        modules: The modules.
        name: The method.
        wrapper: Called with the number of the module among these, the method itself and the
            arguments of the call.
    """
    # Straight into __dict__: a bridge's modules pass attributes that are set on to what they wrap.
    before = [vars(module).get(name) for module in modules]
    try:
        for number, module in enumerate(modules):
            own = getattr(module, name)
            # Whoever asks for its signature, as generate() does, is told the method's.
            vars(module)[name] = functools.update_wrapper(
                functools.partial(wrapper, number, own), own
            )
        yield
    finally:
        for module, method in zip(modules, before, strict=True):
            if method is None:
                vars(module).pop(name, None)
            else:
                vars(module)[name] = method


def _mode_hooks(
    module: nn.Module,
    make_mode: Callable[[Any], contextlib.AbstractContextManager[Any]],
    rank: int = 0,
) -> list[Any]:
    """Enters a mode around one module, inside which alone scores and pattern, or a router's choice,
    can be seen.
    """
    open_modes: list[contextlib.AbstractContextManager[Any]] = []

    def close() -> None:
        if open_modes:
            open_modes.pop().__exit__(None, None, None)

    def enter(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        mode = make_mode(args[0] if args else kwargs.get(_stream_name(kwargs)))
        mode.__enter__()
        open_modes.append(mode)

    def leave(*_: Any) -> None:
        close()

    around = (
        own_hook(module, enter, "input", rank=rank),
        own_hook(module, leave, "output", always_call=True, rank=rank),
    )
    return [*around, Closing(close)]


def _head_hooks(
    tap: Tap, emit: Callable[[Tensor], Tensor | None], rows: Callable[[], str]
) -> list[Any]:
    """Emits what each head adds to the sum of an output projection, computed beside it; a change is
    added to the sum.
    """
    outputs: list[Tensor] = []
    source = tap.z

    @contextlib.contextmanager
    def catching_z(z: nn.Module) -> Iterator[None]:
        # The hook is added anew in every forward, so that it runs after every other hook on z.
        outputs.clear()
        handle = own_hook(z, lambda _, __, ___, output: outputs.append(output), "output")
        try:
            yield
        finally:
            handle.remove()

    def after(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        if (queries := rows()) == "none":
            return None
        z = outputs.pop() if source is not None else args[0] if args else kwargs["input"]
        z = (
            z
            if z.dim() == 4
            else rearrange(
                z, "batch position (head dim) -> batch position head dim", head=tap.heads
            )
        )
        weight = module.W_O if hasattr(module, "W_O") else module.weight
        if not hasattr(module, "W_O") and type(module).__name__ != "Conv1D":
            weight = weight.T
        # What is only looked at does not run in a path's kernels.
        with (
            torch._C.DisableTorchFunction(),
            _disable_current_modes(),
            torch.autocast(z.device.type, enabled=False),
        ):
            # TransformerLens's W_O has the heads apart already.
            by_head = weight.reshape(z.shape[2], z.shape[3], -1).to(z)
            heads = torch.einsum("bphd,hdm->bphm", z[:, -1:] if queries == "newest" else z, by_head)
        new = emit(heads)
        return None if new is None else put_first(output, first_of(output) + (new - heads).sum(2))

    around = [] if source is None else _mode_hooks(tap.module, lambda _: catching_z(source))
    return [*around, own_hook(tap.module, after, "output")]


class Closing:
    """A handle that closes what an interruption left open: torch calls hooks after an error, not
    after a KeyboardInterrupt.
    """

    def __init__(self, close: Callable[[], None]) -> None:
        self.remove = close


# Removing hooks and setting them aside ------------------------------------------------------------


def remove_own_hooks(model: nn.Module) -> None:
    """Removes kvinterp's hooks from a copy of a model that was made while something was
    recorded.
    """
    for module in model.modules():
        for hook in (*module._forward_hooks.values(), *module._forward_pre_hooks.values()):
            if _is_own(hook):
                _remove_hook(module, hook)


def _is_own(hook: Callable[..., Any]) -> bool:
    return getattr(hook, "__module__", "").startswith("kvinterp.")


def _remove_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    for name in ("_forward_hooks", "_forward_pre_hooks"):
        hooks = module.__dict__[name]
        for key in [key for key, registered in hooks.items() if registered is hook]:
            for kind in (name, f"{name}_with_kwargs", f"{name}_always_called"):
                module.__dict__.get(kind, {}).pop(key, None)


@contextlib.contextmanager
def hooks_suspended(model: nn.Module, users: str = "suspended") -> Iterator[None]:
    """Suspends all forward hooks while the context lasts, or all but the user's (``"kept"``); hooks
    added inside stay.
    """
    saved = [
        (m, name, m.__dict__[name])
        for m in model.modules()
        for name in ("_forward_hooks", "_forward_pre_hooks")
    ]
    # The modes around attention functions are no hooks of torch's.
    modes = {
        id(module): _MODES.pop(id(module)) for module in model.modules() if id(module) in _MODES
    }
    try:
        for module, name, hooks in saved:
            module.__dict__[name] = type(hooks)(
                (key, hook) for key, hook in hooks.items() if users == "kept" and not _is_own(hook)
            )
        yield
    finally:
        for module, name, hooks in saved:
            hooks.update(module.__dict__[name])
            module.__dict__[name] = hooks
        _MODES.update(modes)
