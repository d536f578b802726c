"""Our own ways to compute a text: in each precision, and with each cause that an engine's
difference may have.

A new cause is a row of :func:`causes`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.engines import routers
from kvinterp.engines.llama_cpp import ADDED, llama_cpp
from kvinterp.engines.prefixes import Prefix, edits
from kvinterp.models import Adapter, dtype_named
from kvinterp.models.transformers_cache import text_config
from kvinterp.recording.engine_path import EnginePath

Attributes = Callable[[nn.Module], Iterable[tuple[Any, str, Any]]]
"""Which attributes of a model hold something else meanwhile: an object, its attribute's name and
the value.
"""
Hooks = Callable[[nn.Module, int], Iterable[Any]]
"""Attaches hooks to a model, given the prompt's length, and returns their handles."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One of our own ways to compute a text.

    Attributes:
        name: What it is called.
        word: The verdict where it alone reproduces what an engine gave.
        dtype: What it computes in.
        path: The text form of a path whose cache holds keys and values otherwise.
        attributes: What is wrong with the model's attributes.
        hooks: What hooks do to it.
        prefix: The policy that is done once to what the cache holds of the prompt.
        fed: ``"whole"``; ``"twice"``, a second time beside itself; ``"apart"``, what is behind the
            prompt by itself; ``"headless"``, without the first token; or ``"begun"``, with the
            token in front that begins a text.
        shift: So many tokens further on is the log-prob that a token is given.
        resized: Makes the same cause of another size.
        size: Its own size.
        before: Which prompt the engine may have seen in the place of the file's.
        older: A model with other weights, and what it computes: ``"all"``, or ``"prompt"``, the
            rest by ours on its cache.
        further: By how many positions each path of the file is moved, in a model that learned a
            table of them.
        routed: The precision of ours whose chosen experts are replayed.
        tiled: Where each position was asked for alone: the way of prompts of fewer than
            :data:`TILE` rows, that of longer ones.
    """

    name: str
    word: str = ""
    dtype: str = "float64"
    path: str = ""
    attributes: Attributes | None = None
    hooks: Hooks | None = None
    prefix: str = ""
    fed: str = "whole"
    shift: int = 0
    resized: Callable[[float], Way] | None = None
    size: float = 1.0
    before: Prefix | None = None
    older: tuple[Adapter, str] | None = None
    further: Callable[[Sequence[EnginePath], int], int] | None = None
    routed: str = ""
    tiled: tuple[Way, ...] = ()


TILE = 64
"""A prompt of as many rows is computed in tiles by llama.cpp's flash attention, which are added up
in float32.
"""

PRECISIONS = tuple(Way(dtype, dtype=dtype) for dtype in ("float32", "float16", "bfloat16"))
"""The precisions, from fine to coarse."""


FP8 = (
    "fp8(e4m3)",
    "fp8(e5m2)",
    "fp8(e4m3,scale=prefill)",
    "fp8(e5m2,scale=prefill)",
    "fp8(e4m3,scale=prefill,per=head)",
)
"""Caches in 8-bit floating point: with a scale of 1, of the prompt, and of the prompt by head."""


def causes(
    adapter: Adapter,
    first: int | None = None,
    longest: int = 0,
    older: Adapter | None = None,
    near: str = "float32",
) -> list[Way]:
    """What is tried, each in float64, so that nothing but the cause is in it.

    Args:
        adapter: The model.
        first: The first position that is off, which a window, a table or a context may end at.
        longest: The length of the longest text.
        older: The model with weights of an earlier time, if they were given.
        near: The precision that the side is said to compute in.
    """
    float16 = Way("float16 cache", "policy", path="cached[cache=float16,prefill=stored]")
    row = Way(
        "values added up in float16, a key after another, as llama.cpp's flash attention of a row does over a float16 cache",
        "kernel", attributes=llama_cpp("float16", "", ADDED),
    )  # fmt: skip
    below = row.name.replace("a key after another", "in a prompt of fewer than 64 rows").replace(
        " of a row", ""
    )
    # As where positions jump without a mask: transformers takes what follows for another text.
    apart = "the reply computed without its prompt, as where positions jump without a mask,"
    return [
        *(Way(f"shifted by {by:+d}", "misaligned", shift=by) for by in (1, -1, 2, -2, 3, -3)),
        Way("computed without the first token (BOS)", "misaligned", fed="headless"),
        Way("computed with a BOS in front", "misaligned", fed="begun"),
        *(Way(name, "misaligned", before=before) for name, before in edits(adapter).items()),
        float16,
        Way("bfloat16 cache", "policy", path="cached[cache=bfloat16,prefill=stored]"),
        *(
            each
            for bits in ("q8_0", "q4_0")
            for each in (
                Way(f"{bits} cache", "policy", path=f"cached[prefill=stored]+{bits}"),
                Way(f"{bits} cache, read behind the prompt", "policy", path=f"cached+{bits}"),
                Way(f"{bits} cache of the prompt alone", "policy", prefix=bits),
                Way(f"{bits} cache as llama.cpp's, turned", "policy", attributes=llama_cpp(bits, "turned")),
                Way(f"{bits} cache as llama.cpp's, not turned", "policy", attributes=llama_cpp(bits)),
            )
        ),
        *(
            each
            for name in (*FP8, "int8", "int4")
            for each in (
                Way(f"{name} cache", "policy", path=f"cached[prefill=stored]+{name}"),
                Way(f"{name} cache, read behind the prompt", "policy", path=f"cached+{name}"),
                Way(f"{name} cache of the prompt alone", "policy", prefix=name),
            )
        ),
        Way("float16 cache as llama.cpp's", "policy", attributes=llama_cpp("float16")),
        Way("float16 cache as llama.cpp's, with probabilities in float16", "policy",
            attributes=llama_cpp("float16", "", "rounded")),
        row,
        Way(below, "kernel", tiled=(row, float16)),
        Way(apart, "bug", fed="apart"),
        *(
            Way(f"positions {by:+d} behind the prompt", "bug", hooks=_positions(functools.partial(_behind, by)))
            for by in (1, -1, 2, 4, 8, 16)
        ),
        Way("positions that begin anew behind the prompt", "bug", hooks=_positions(lambda at, cut: at - cut * (at >= cut))),
        Way("one position for all tokens", "bug", hooks=_positions(lambda at, cut: at * 0)),
        *map(_rope_scale, (0.25, 0.5, 0.9, 0.95, 0.98, 0.99, 1.01, 1.02, 1.05, 1.1, 2.0, 4.0)),
        *map(_rope_base, (0.01, 0.02, 0.1, 0.5, 0.9, 0.98, 1.02, 1.1, 2.0, 10.0, 50.0, 100.0)),
        *limits(adapter, first, longest),
        *([] if older is None else stale(adapter, older)),
        *(unreset() if _learned(adapter.model) else ()),
        *(routing(near) if routers.routers(adapter.model) else ()),
        # What a model that is cast as a whole does to its frequencies too, once it has computed
        # them.
        *(
            Way(f"RoPE frequencies in {dtype}", "bug", attributes=_rope(functools.partial(_rounded, dtype=dtype)))
            for dtype in ("float16", "bfloat16")
        ),
        *map(_norm_eps, (0.01, 0.1, 10.0, 100.0)),
    ]  # fmt: skip


def again(way: Way) -> Way:
    """A cause with every module's result rounded once more: how far it is from itself."""
    return dataclasses.replace(
        way,
        name=f"{way.name}, every result rounded once more",
        hooks=joined(way.hooks, _round_again(0, 1)),
    )


def halves(way: Way) -> Iterator[Way]:
    """A quantised cache of keys alone, and of values alone; none of another cause."""
    before, plus, policy = way.path.partition("+") if way.path else ("", "", way.prefix)
    if not policy or way.word != "policy":
        return
    for on, what in (("k", "keys"), ("v", "values")):
        half = (
            f"{policy.removesuffix(')')},on={on})" if policy.endswith(")") else f"{policy}(on={on})"
        )
        name = f"{way.name}, of {what} alone"
        changed: dict[str, Any] = (
            {"path": f"{before}{plus}{half}"} if way.path else {"prefix": half}
        )
        yield dataclasses.replace(way, name=name, **changed)


def both(a: Way, b: Way) -> Way | None:
    """Two causes at once; None where both are of one kind, or are read at other tokens."""
    if any(
        getattr(a, name) != getattr(b, name) and _is_set(a, name) and _is_set(b, name)
        for name in _ONE
    ):
        return None
    one = {name: getattr(a if _is_set(a, name) else b, name) for name in _ONE}
    if one["path"] and one["prefix"]:
        return None
    return Way(f"{a.name} with {b.name}", a.word, attributes=joined(a.attributes, b.attributes),
               hooks=joined(a.hooks, b.hooks), **one)  # fmt: skip


_ONE = ("path", "prefix", "fed", "shift", "before", "older", "further", "routed", "tiled")
"""What a way has one of."""


def _is_set(way: Way, name: str) -> bool:
    return bool(getattr(way, name) != getattr(Way(""), name))


def joined(a: Any, b: Any) -> Any:
    """What yields of both; either where the other is None."""
    return (lambda *given: [*a(*given), *b(*given)]) if a and b else a or b


def nulls(precision: Way) -> tuple[list[Way], list[Way]]:
    """Other ways to compute the same in a precision, which differ by rounding alone; and ways with
    one bit fewer.

    From a cache, beside another row, and, twice, with every module's result rounded once more, for
    an engine adds in another order and rounds in other places. What is further off than with every
    result rounded to a bit fewer is no rounding of it.
    """

    def more(bits: int) -> list[Way]:
        name = f"{precision.name}, every result rounded once more" + ", to a bit fewer" * bits
        return [
            dataclasses.replace(
                precision, name=f"{name}, {seed}", hooks=_round_again(seed, 2.0**bits)
            )
            for seed in (0, 1)
        ]

    cached = dataclasses.replace(precision, name=f"{precision.name} from a cache", path="cached")
    beside = dataclasses.replace(
        precision, name=f"{precision.name} beside another row", fed="twice"
    )
    return [cached, beside, *more(0)], more(1)


def stale(adapter: Adapter, older: Adapter) -> Iterator[Way]:
    """Yields what weights of another time do: those of the whole text, or of the prompt's cache,
    the head or the layers alone.

    Without an adapter's weights, "older" are those of the base: an adapter that is missing, merged
    twice, or half.
    """
    yield Way("the older weights for the whole text", "bug", older=(older, "all"))
    yield Way(
        "the older weights for the prompt's cache, these behind it", "bug", older=(older, "prompt")
    )
    yield Way("the older head over these layers", "bug", hooks=_head_of(older))
    yield Way(
        "this head over the older layers",
        "bug",
        attributes=_between(older, 0.0),
        hooks=_head_of(adapter),
    )
    yield from (_step_from(older, size) for size in (0.5, 2.0))


def unreset() -> Iterator[Way]:
    """Yields the positions of packed rows that do not begin anew with each text; rotary ones are
    relative, and do not show it.
    """
    name = "positions that go on from the text{} before it in the file, as where packed rows do not begin them anew"
    yield Way(name.format(""), "bug", further=lambda paths, n: len(paths[n - 1].ids) * (n % 2))
    yield Way(
        name.format("s"), "bug", further=lambda paths, n: sum(len(path.ids) for path in paths[:n])
    )


def moved(way: Way, by: int) -> Way:
    """A way whose positions are so many further on."""
    return dataclasses.replace(
        way, further=None, hooks=joined(way.hooks, _positions(lambda at, cut: at + by))
    )


def routing(near: str) -> Iterator[Way]:
    """Yields what routers of experts do otherwise: their choice in 16 bits, one expert more or
    fewer, other weights.
    """
    names = [precision.name for precision in PRECISIONS]
    for dtype in ("bfloat16", "float16"):
        word = "kernel" if names.index(dtype) <= names.index(near) else "wrong-dtype"
        yield Way(f"the router in {dtype}", word, hooks=routers.in_precision(dtype))
        yield Way(f"the experts that our own {dtype} chooses", word, routed=dtype)
    name = "the chosen experts' weights divided by their sum or not, other than the config says"
    yield Way(name, "bug", hooks=routers.UNNORMALISED)
    yield Way("one expert more for each token", "bug", attributes=routers.counted(1))
    yield Way("one expert fewer for each token", "bug", attributes=routers.counted(-1))


def limits(adapter: Adapter, first: int | None, longest: int) -> Iterator[Way]:
    """Yields what ends at a position: a window, the model's own or another, a table of positions, a
    context that is shifted.

    Args:
        adapter: The model.
        first: The first position that is off, if there is one.
        longest: The length of the longest text.
    """
    windows = sorted({window for window in adapter.facts.windows if window})
    sizes = {2**power for power in range(4, 16)}
    sizes |= (
        {size + by for size in ([first] if first else []) for by in range(-3, 2)}
        if first
        else set()
    )
    near = {size + by for size in windows for by in (-1, 1)} | {
        size * by for size in windows for by in (2,)
    }
    near |= {size // 2 for size in windows}
    if windows:
        yield Way("the sliding window ignored", "bug", hooks=_masked(lambda q, k: k < 0, "sliding"))
    for size in sorted(size for size in near | sizes if 1 < size < longest and size not in windows):
        own = "a sliding window of {} in the place of {}".format(
            size, " and ".join(map(str, windows))
        )
        name = own if windows else f"a sliding window of {size}, which the model has not"
        yield Way(
            name,
            "bug",
            hooks=_masked(functools.partial(_outside, size), "sliding" if windows else "all"),
        )
        clamp = functools.partial(_clamped, size)
        yield Way(
            f"positions that end at {size - 1}, as of a RoPE table of {size}",
            "bug",
            hooks=_positions(clamp),
        )
        yield Way(f"a context of {size} whose older half is dropped when it is full", "bug",
                  hooks=_masked(functools.partial(_dropped, size), "all"))  # fmt: skip


# What is changed ----------------------------------------------------------------------------------


def _rounded(tensor: Tensor, dtype: str) -> Tensor:
    return tensor.to(dtype_named(dtype)).to(tensor.dtype)


def _weights(model: nn.Module, dtype: str) -> Iterator[tuple[Any, str, Any]]:
    for parameter in model.parameters():
        yield parameter, "data", _rounded(parameter.data, dtype)


WEIGHTS = {dtype: Way(f"weights in {dtype}", attributes=functools.partial(_weights, dtype=dtype))
           for dtype in ("float16", "bfloat16")}  # fmt: skip
"""What an engine of a coarser precision does alike, whatever it does otherwise: it rounds the same
weights.
"""


def _rotary(model: nn.Module) -> list[Any]:
    return [
        module
        for module in model.modules()
        if isinstance(getattr(module, "inv_freq", None), Tensor)
    ]


def _rope(turn: Callable[[Tensor], Tensor]) -> Attributes:
    return lambda model: [(module, "inv_freq", turn(module.inv_freq)) for module in _rotary(model)]


def _rope_scale(size: float) -> Way:
    change = _rope(lambda own: own * size)
    return Way(
        f"RoPE frequencies times {size:.4g}",
        "bug",
        attributes=change,
        resized=_rope_scale,
        size=size,
    )


def _rope_base(size: float) -> Way:
    def turn(own: Tensor) -> Tensor:
        exponents = torch.arange(len(own), dtype=torch.float64, device=own.device) / len(own)
        return own * (size**-exponents).to(own)

    return Way(
        f"RoPE base times {size:.4g}", "bug", attributes=_rope(turn), resized=_rope_base, size=size
    )


def _norm_eps(size: float) -> Way:
    def change(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
        for module in model.modules():
            for name in (
                ("variance_epsilon", "eps") if "norm" in type(module).__name__.lower() else ()
            ):
                if isinstance(own := getattr(module, name, None), float):
                    yield module, name, own * size

    return Way(f"norm eps times {size:.4g}", "bug", attributes=change, resized=_norm_eps, size=size)


def _behind(by: int, at: Tensor, cut: int) -> Tensor:
    """Positions that are so many off behind the prompt."""
    return at + by * (at >= cut)


def _head_of(older: Adapter) -> Hooks:
    """Gives the logits of another model's head."""

    def attach(model: nn.Module, prompt: int) -> Iterator[Any]:
        own, other = (each.get_output_embeddings() for each in (model, older.model))  # type: ignore[operator]

        def after(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            bias = None if other.bias is None else other.bias.to(output)
            return nn.functional.linear(args[0], other.weight.to(output), bias)

        yield own.register_forward_hook(after)

    return attach


def _between(older: Adapter, size: float) -> Attributes:
    """Weights that are so many times as far from the older ones as the model's own are."""

    def change(model: nn.Module) -> Iterator[tuple[Any, str, Any]]:
        before = dict(older.model.named_parameters())
        for name, parameter in model.named_parameters():
            start = before[name].data.to(parameter.data)
            yield parameter, "data", start + size * (parameter.data - start)

    return change


def _step_from(older: Adapter, size: float) -> Way:
    """The step from the older weights to these, or an adapter's change, more or less than once."""
    return Way(
        f"{size:.3g} times the step from the older weights to these (an adapter that is added twice, or scaled)", "bug",
        attributes=_between(older, size), resized=functools.partial(_step_from, older), size=size,
    )  # fmt: skip


def _clamped(size: int, at: Tensor, cut: int) -> Tensor:
    return at.clamp(max=size - 1)


def _outside(size: int, query: Tensor, key: Tensor) -> Tensor:
    """Which keys a window of so many positions hides."""
    return query - key >= size


def _dropped(size: int, query: Tensor, key: Tensor) -> Tensor:
    """Which keys are gone where half of a full context is dropped each time, as llama.cpp's context
    shift does.
    """
    half = size // 2
    shifts = (query - size).div(half, rounding_mode="floor") + 1
    return key < shifts.clamp(min=0) * half


def _masked(hides: Callable[[Tensor, Tensor], Tensor], which: str) -> Hooks:
    """Gives attention another mask, of the layers with a sliding window or of all: causal, and
    hiding some keys.
    """

    def attach(model: nn.Module, prompt: int) -> Iterator[Any]:
        types = getattr(text_config(model), "layer_types", None) or ()

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            states = kwargs.get("hidden_states", args[0] if args else None)
            assert states is not None
            at = torch.arange(states.shape[1], device=states.device)
            query, key = at[:, None], at[None]
            hidden = (key > query) | hides(query, key)
            mask = torch.zeros_like(hidden, dtype=states.dtype).masked_fill(
                hidden, torch.finfo(states.dtype).min
            )
            return args, {**kwargs, "attention_mask": mask.expand(len(states), 1, *mask.shape)}

        for module in model.modules():
            layer = getattr(module, "layer_idx", None)
            if not isinstance(layer, int) or not type(module).__name__.endswith("Attention"):
                continue
            if (
                which == "all"
                or (layer < len(types) and types[layer] == "sliding_attention")
                or (not types and getattr(module, "sliding_window", None))
            ):
                yield module.register_forward_pre_hook(before, with_kwargs=True)

    return attach


def _positions(move: Callable[[Tensor, int], Tensor]) -> Hooks:
    """Gives the rotary embedding other positions."""

    def attach(model: nn.Module, prompt: int) -> Iterator[Any]:
        def moved(value: Any) -> Any:
            whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dim() == 2
            return move(value, prompt) if whole else value

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            return tuple(map(moved, args)), {name: moved(value) for name, value in kwargs.items()}

        for module in (*_rotary(model), *_learned(model)):
            yield module.register_forward_pre_hook(before, with_kwargs=True)

    return attach


def _learned(model: nn.Module) -> list[nn.Module]:
    """The tables of positions that are learned, which take positions as they are."""
    names = ("wpe", "position_embeddings", "embed_positions")
    return [
        each
        for name, each in model.named_modules()
        if name.endswith(names) and type(each) is nn.Embedding
    ]


def _round_again(seed: int, units: float) -> Hooks:
    """Rounds every result once more, at random: by at most half of so many units in the last place,
    as to the nearest number.

    Where K products are added, by the root of K such units of float32 too: engines add in float32
    at least, in an order of their own, and roundings of either sign add up to about the root of
    their number (Higham and Mary 2019, SIAM J. Sci. Comput. 41).
    """

    def attach(model: nn.Module, prompt: int) -> Iterator[Any]:
        generator = torch.Generator().manual_seed(seed)

        def after(module: nn.Module, args: Any, output: Any) -> Any:
            first = output[0] if isinstance(output, tuple) else output
            if not isinstance(first, Tensor) or not first.is_floating_point():
                return None
            read = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
            terms = 0 if read is None else read.shape[-1]
            unit = (
                units
                * (torch.finfo(first.dtype).eps + terms**0.5 * torch.finfo(torch.float32).eps)
                / 2
            )
            random = torch.empty(first.shape, dtype=torch.float64)
            random = random.uniform_(-unit, unit, generator=generator).to(first.device)
            moved = torch.addcmul(first.double(), first.double(), random).to(first.dtype)
            return (moved, *output[1:]) if isinstance(output, tuple) else moved

        for module in model.modules():
            if not any(module.children()):
                yield module.register_forward_hook(after)

    return attach
