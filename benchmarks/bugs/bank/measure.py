"""Plain transformers code, no kvinterp: how far the cached path of a bank's model is from the full forward, in float64.

Run as `python benchmarks/bugs/bank/measure.py [name ...]`; prints one line a model.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

CACHE_NAMES = ("past_key_values", "cache_params", "state")


def relative(found: Tensor, true: Tensor) -> float:
    """Norm of the difference over the norm of `true`, where both are finite; infinite where only one is."""
    finite = torch.isfinite(true)
    if not torch.equal(finite, torch.isfinite(found)):
        return float("inf")
    return float((found[finite].double() - true[finite].double()).norm() / true[finite].double().norm())


def tokens(length: int, seed: int = 0) -> Tensor:
    """Token ids that every model's vocabulary has, of shape (1, length)."""
    return torch.randint(3, 120, (1, length), generator=torch.Generator().manual_seed(1000 * seed + length))


def cached(model: nn.Module, ids: Tensor, *chunks: int) -> Tensor:
    """Logits of every position, the ids being fed in chunks of these sizes onto one cache."""
    cache: dict[str, object] = {}
    logits = []
    for chunk in ids.split(list(chunks), dim=1):
        out = model(chunk, use_cache=True, **cache)
        cache = {name: out[name] for name in CACHE_NAMES if out.get(name) is not None}
        if not cache:
            raise ValueError(f"{type(model).__name__} returned no cache, only {list(out)}")
        logits.append(out.logits)
    return torch.cat(logits, dim=1)


@torch.no_grad()
def steps(model: nn.Module, length: int, count: int = 3) -> float:
    """Largest relative difference of `count` steps after a prompt, each against the full forward of its own prefix."""
    ids = tokens(length + count)
    found = cached(model, ids, length, *[1] * count)
    return max(
        relative(found[:, at], model(ids[:, : at + 1], use_cache=False).logits[:, -1])
        for at in range(length, length + count)
    )


@torch.no_grad()
def batch(model: nn.Module, length: int, count: int = 3) -> float:
    """As :func:`steps`, of two prompts side by side, each against the full forward of its own."""
    ids = torch.cat([tokens(length + count, seed) for seed in (0, 1)])
    found = cached(model, ids, length, *[1] * count)[:, length:]
    alone = torch.cat([model(row[None], use_cache=False).logits[:, length:] for row in ids])
    return relative(found, alone)


@torch.no_grad()
def chunk(model: nn.Module, length: int = 9, count: int = 4) -> float:
    """Relative difference of `count` tokens fed at once after a prompt."""
    ids = tokens(length + count)
    return relative(cached(model, ids, length, count)[:, length:], model(ids, use_cache=False).logits[:, length:])


class NoFloat32(TorchFunctionMode):
    """Turns every cast to float32, and every float32 tensor that is made, into float64: a difference that a cast makes goes."""

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is torch.Tensor.float:
            func = torch.Tensor.double
        args = tuple(torch.float64 if value is torch.float32 else value for value in args)
        kwargs = {name: torch.float64 if value is torch.float32 else value for name, value in (kwargs or {}).items()}
        return func(*args, **kwargs)


def in_float64(model: nn.Module) -> nn.Module:
    """The model in float64; torch's grouped product of experts has no float64, the loop over experts has."""
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("eager")
    return model.double()


def _main(names: list[str]) -> None:
    from bank.clean import CLEAN, KNOWN_TRANSFORMERS_BUGS

    for name, entry in {**CLEAN, **KNOWN_TRANSFORMERS_BUGS}.items():
        if names and name not in names:
            continue
        try:
            model = entry.build()
            count = sum(parameter.numel() for parameter in model.parameters())
            own = steps(model, 9)
            model = in_float64(model)
            print(
                f"{name:28} {count:7} own dtype {own:.0e}; float64: 9 {steps(model, 9):.1e}, 40 {steps(model, 40):.1e}, chunk {chunk(model):.1e}",
                flush=True,
            )
        except Exception as error:
            print(f"{name:28} FAILED {type(error).__name__} {str(error)[-150:]}", flush=True)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    _main(sys.argv[1:])
