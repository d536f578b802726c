"""Our own ways to compute a given text: in each precision, and with each cause that an engine's difference may have."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.given_attention import ADDED, llama_cpp
from kvinterp.models import Adapter, dtype_named
from kvinterp.paths.model_cache import own_store
from kvinterp.paths.path import path_named
from kvinterp.policies import Place, policy_named

Change = Callable[[nn.Module, int], "contextlib.AbstractContextManager[bool]"]
"""Changes a model for as long as it is open, given the prompt's length; whether there was something to change."""


@dataclasses.dataclass(frozen=True)
class Way:
    """One of our own ways to compute a text.

    Attributes:
        name: What it is called.
        word: The verdict where it alone reproduces what an engine gave.
        dtype: What it computes in.
        path: The text form of a path whose cache holds keys and values otherwise.
        change: What is wrong with the model.
        spoilt: The policy that is done once to what the cache holds of the prompt.
        fed: ``"whole"``; ``"twice"``, a second time beside itself; or ``"apart"``, what is behind the prompt by itself.
        family: Makes the same kind of cause of another size.
        size: Its own size.
    """

    name: str
    word: str = ""
    dtype: str = "float64"
    path: str = ""
    change: Change | None = None
    spoilt: str = ""
    fed: str = "whole"
    family: Callable[[float], Way] | None = None
    size: float = 1.0


RUNGS = (
    Way("float32", dtype="float32"),
    Way("float32 with a float16 cache", dtype="float32", path="cached[cache=float16,prefill=stored]"),
    Way("float16", dtype="float16"),
    Way("float32 with a bfloat16 cache", dtype="float32", path="cached[cache=bfloat16,prefill=stored]"),
    Way("bfloat16", dtype="bfloat16"),
)

FLOAT16 = "float16 cache"
FLASH_ROW = (
    "values added up in float16, a key after another, as llama.cpp's flash attention of a row does over a float16 cache"
)
FLASH = (
    "values added up in float16 in a prompt of fewer than 64 rows, as llama.cpp's flash attention does over a float16 cache"
)


def candidates() -> list[Way]:
    """The causes that are tried, each in float64, so that nothing but the cause is in them."""
    found = [
        Way(f"{dtype} cache", "policy", path=f"cached[cache={dtype},prefill=stored]") for dtype in ("float16", "bfloat16")
    ]
    for policy in ("q8_0", "q4_0"):
        found.append(Way(f"{policy} cache", "policy", path=f"cached[prefill=stored]+{policy}"))
        found.append(Way(f"{policy} cache, read behind the prompt", "policy", path=f"cached+{policy}"))
        found.append(Way(f"{policy} cache of the prompt alone", "policy", spoilt=policy))
    for cache in ("q8_0", "q4_0"):
        for turned in ("turned", ""):
            name = f"{cache} cache as llama.cpp's, {turned or 'not turned'}"
            found.append(Way(name, "policy", change=llama_cpp(cache, turned)))
    for way in ("", "rounded"):
        name = f"float16 cache as llama.cpp's{', with probabilities in float16' if way else ''}"
        found.append(Way(name, "policy", change=llama_cpp("float16", "", way)))
    found.append(Way(FLASH_ROW, "kernel", change=llama_cpp("float16", "", ADDED)))
    found.append(Way("the reply computed without its prompt, as where positions jump without a mask,", "bug", fed="apart"))
    for shift in (1, -1, 2, 4, 8, 16):
        name = f"positions {shift:+d} behind the prompt"
        found.append(Way(name, "bug", change=_placed(functools.partial(_behind, shift))))
    found.append(Way("positions that begin anew behind the prompt", "bug", change=_placed(_anew)))
    found.append(Way("one position for all tokens", "bug", change=_placed(lambda places, prompt: torch.zeros_like(places))))
    found += [_rope_scale(size) for size in (0.25, 0.5, 0.9, 0.95, 0.98, 0.99, 1.01, 1.02, 1.05, 1.1, 2.0, 4.0)]
    found += [_rope_base(size) for size in (0.01, 0.02, 0.1, 0.5, 0.9, 0.98, 1.02, 1.1, 2.0, 10.0, 50.0, 100.0)]
    found += [
        Way(f"RoPE frequencies in {dtype}", "bug", change=_turned(functools.partial(_of_dtype, dtype)))
        for dtype in ("float16", "bfloat16")
    ]
    found += [_norm_eps(size) for size in (0.01, 0.1, 10.0, 100.0)]
    return found


def _rope_scale(size: float) -> Way:
    change = _turned(functools.partial(_of_scale, size))
    return Way(f"RoPE frequencies times {size:.4g}", "bug", change=change, family=_rope_scale, size=size)


def _rope_base(size: float) -> Way:
    change = _turned(functools.partial(_of_base, size))
    return Way(f"RoPE base times {size:.4g}", "bug", change=change, family=_rope_base, size=size)


def _norm_eps(size: float) -> Way:
    return Way(f"norm eps times {size:.4g}", "bug", change=_eps(size), family=_norm_eps, size=size)


def _of_scale(scale: float, frequencies: Tensor) -> Tensor:
    return frequencies.new_full((), scale)


def _of_dtype(dtype: str, frequencies: Tensor) -> Tensor:
    """What a model that is cast as a whole does to its frequencies too, once it has computed them."""
    return frequencies.to(dtype_named(dtype)).to(frequencies) / frequencies


def _of_base(factor: float, frequencies: Tensor) -> Tensor:
    places = torch.arange(len(frequencies), dtype=torch.float64, device=frequencies.device) / len(frequencies)
    return (factor**-places).to(frequencies)


def _turned(scale: Callable[[Tensor], Tensor]) -> Change:
    @contextlib.contextmanager
    def change(model: nn.Module, prompt: int) -> Iterator[bool]:
        found = _rotary(model)
        try:
            for module, own in found:
                module.inv_freq = own * scale(own)
            yield bool(found)
        finally:
            for module, own in found:
                module.inv_freq = own

    return change


def _rotary(model: nn.Module) -> list[tuple[nn.Module, Tensor]]:
    found = [(module, getattr(module, "inv_freq", None)) for module in model.modules()]
    return [(module, own) for module, own in found if isinstance(own, Tensor)]


def _eps(factor: float) -> Change:
    @contextlib.contextmanager
    def change(model: nn.Module, prompt: int) -> Iterator[bool]:
        found = [
            (module, name, getattr(module, name))
            for module in model.modules() if "norm" in type(module).__name__.lower()
            for name in ("variance_epsilon", "eps") if isinstance(getattr(module, name, None), float)
        ]  # fmt: skip
        try:
            for module, name, own in found:
                setattr(module, name, own * factor)
            yield bool(found)
        finally:
            for module, name, own in found:
                setattr(module, name, own)

    return change


def _rounded(dtype: str) -> Change:
    @contextlib.contextmanager
    def change(model: nn.Module, prompt: int) -> Iterator[bool]:
        own = {name: parameter.data for name, parameter in model.named_parameters()}
        try:
            for parameter in model.parameters():
                parameter.data = parameter.data.to(dtype_named(dtype)).to(parameter.dtype)
            yield True
        finally:
            for name, parameter in model.named_parameters():
                parameter.data = own[name]

    return change


WEIGHTS = {dtype: Way(f"weights in {dtype}", change=_rounded(dtype)) for dtype in ("float16", "bfloat16")}
"""What an engine of a coarser precision does alike, whatever it does otherwise: it rounds the same weights."""


def nulls(rung: Way) -> list[Way]:
    """Other ways to compute the same in a precision, which differ by rounding alone: how far they are from float64 is its null.

    From a cache; beside another row; and, three times, with every module's result rounded once more, for an engine
    adds in another order and rounds in other places.
    """
    ways = [Way(f"{rung.name}, every result rounded once more, {seed}", dtype=rung.dtype, path=rung.path,
                change=_moved(seed)) for seed in range(3)]  # fmt: skip
    if rung.path:
        return ways
    cached = Way(f"{rung.name} from a cache", dtype=rung.dtype, path="cached")
    return [cached, Way(f"{rung.name} beside another row", dtype=rung.dtype, fed="twice"), *ways]


def _moved(seed: int) -> Change:
    """Rounds every result once more, at random: by at most half a unit in the last place, as to the nearest number.

    Where K products are added, by the root of K such units of float32 too: engines add in float32 at least, in an order of their
    own, and roundings of either sign add up to about the root of their number (Higham and Mary 2019, SIAM J. Sci. Comput. 41).
    """

    @contextlib.contextmanager
    def change(model: nn.Module, prompt: int) -> Iterator[bool]:
        generator = torch.Generator().manual_seed(seed)

        def after(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
            made = output[0] if isinstance(output, tuple) else output
            if not isinstance(made, Tensor) or not made.is_floating_point():
                return None
            read = next((a for a in args if isinstance(a, Tensor) and a.is_floating_point()), None)
            terms = 0 if read is None else read.shape[-1]
            unit = torch.finfo(made.dtype).eps / 2 + terms**0.5 * torch.finfo(torch.float32).eps / 2
            random = 2 * torch.rand(made.shape, generator=generator, dtype=torch.float64) - 1
            moved = (made.double() * (1 + unit * random.to(made.device))).to(made.dtype)
            return (moved, *output[1:]) if isinstance(output, tuple) else moved

        with contextlib.ExitStack() as held:
            for module in model.modules():
                if not any(module.children()):
                    held.callback(module.register_forward_hook(after).remove)
            yield True

    return change


def _behind(shift: int, places: Tensor, prompt: int) -> Tensor:
    return torch.where(places >= prompt, places + shift, places)


def _anew(places: Tensor, prompt: int) -> Tensor:
    return torch.where(places >= prompt, places - prompt, places)


def _placed(place: Callable[[Tensor, int], Tensor]) -> Change:
    @contextlib.contextmanager
    def change(model: nn.Module, prompt: int) -> Iterator[bool]:
        def before(
            module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
        ) -> tuple[tuple[Any, ...], dict[str, Any]]:
            args = tuple(moved(a) for a in args)
            return args, {name: moved(value) for name, value in kwargs.items()}

        def moved(value: Any) -> Any:
            whole = isinstance(value, Tensor) and not value.is_floating_point() and value.dim() == 2
            return place(value, prompt) if whole else value

        found = [module for module, _ in _rotary(model)]
        with contextlib.ExitStack() as held:
            for module in found:
                held.callback(module.register_forward_pre_hook(before, with_kwargs=True).remove)
            yield bool(found)

    return change


@torch.no_grad()
def log_probs(adapter: Adapter, ids: Sequence[int], prompt: int, way: Way) -> Tensor | None:
    """``[position, vocabulary]``, in nats and float64: row t is of the token behind position t. None: nothing to change.

    Args:
        adapter: The model.
        ids: The text.
        prompt: How many of them are the prompt.
        way: How it is computed.
    """
    model = adapter.at(dtype_named(way.dtype))
    tokens = torch.tensor([list(ids)], device=model.device)
    inner = 0 < prompt < len(ids)
    with contextlib.nullcontext(True) if way.change is None else way.change(model.model, prompt) as there:
        if not there or (not inner and (way.spoilt or way.fed == "apart")):
            return None
        if way.path:
            path = path_named(way.path)
            begun = prompt if path.prefill == "exact" and inner else len(ids)
            store = own_store(model, path, 1, begun, len(ids) - begun, ())
            pieces = [model.forward(piece, store) for piece in tokens.split([begun, len(ids) - begun], 1) if piece.shape[1]]
            logits = torch.cat(pieces, 1)
        elif way.spoilt:
            if not (model.plain and model.attention_only):
                return None
            cache = model.new_cache()
            policy = policy_named(way.spoilt).start(model.facts)
            head = model.model(tokens[:, :prompt], past_key_values=cache).logits
            for layer, held in enumerate(cache.layers):
                place = Place(layer, 0, prompt, True, prompt=prompt)
                held.keys, held.values = policy.read(*policy.write(held.keys, held.values, place), place)
            logits = torch.cat([head, model.model(tokens[:, prompt:], past_key_values=cache).logits], 1)
        elif way.fed == "apart":
            logits = torch.cat([model.forward(piece) for piece in tokens.split([prompt, len(ids) - prompt], 1)], 1)
        else:
            logits = model.forward(tokens.repeat(2, 1) if way.fed == "twice" else tokens)
    return logits[0].double().log_softmax(-1)
