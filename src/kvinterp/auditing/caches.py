"""Exercises of other caches than the one that grows, and of taking tokens back: StaticCache, crop, quantised caches."""

from __future__ import annotations

import functools
from typing import Any

import torch

from kvinterp.auditing.bench import (
    PROMPT,
    Bench,
    Check,
    Errors,
    NotRunError,
    UnclearError,
    attempted,
    native_only,
    one_line,
)
from kvinterp.auditing.comparing import apart
from kvinterp.auditing.feeding import lacking
from kvinterp.models.caches import BACKENDS, installed
from kvinterp.models.native import text_config

ROOM = 5
"""Slots of a static cache that stay empty, so that a mask that forgets them is seen."""

SHORT_WINDOW = 128


def static(bench: Bench) -> Check:
    """A preallocated cache, filled to a few slots before its end; over the edge of short windows too."""
    from transformers import StaticCache

    runner = bench.runner
    if runner.kind != "native":
        raise native_only(f"a model of kind {runner.kind} makes its own cache")
    if not getattr(runner.model, "_can_compile_fullgraph", False):
        why = f"{type(runner.model).__name__} does not say that it supports it (_can_compile_fullgraph)"
        raise NotRunError(f"{why}, and generate() refuses it.")

    def decoded(tokens: torch.Tensor, prompt: int, room: int) -> torch.Tensor:
        cache = StaticCache(config=text_config(runner.model), max_cache_len=tokens.shape[1] + room)
        return runner.decode(tokens, prompt, cache=cache)[0]

    try:
        StaticCache(config=text_config(runner.model), max_cache_len=PROMPT)
    except (KeyError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        raise NotRunError(f"transformers makes no StaticCache for this model ({one_line(error)}).") from error
    errors, prompts = Errors(), _prompts(bench)
    for prompt in prompts:
        tokens = runner.tokens(bench.row(0, prompt + bench.steps))
        reference = bench.reference(tokens, rows=slice(prompt - 1, None))
        errors.add(decoded(tokens, prompt, ROOM), reference, prompt - 1)

    def hint() -> str:
        tokens = runner.tokens(bench.row(0, prompts[0] + bench.steps))
        a, b = (decoded(tokens, prompts[0], room) for room in (ROOM, 2 * ROOM))
        empty = apart(a, b) > bench.beyond * errors.null
        return "empty slots are read" if empty else "slots are written or read at the wrong place"

    what = (
        f"prompts of {_listed(prompts)} tokens, {bench.steps} decode steps each, {ROOM} slots of the cache left empty, against "
        "recomputation"
    )
    return bench.settle(errors, what, hint)


def _prompts(bench: Bench) -> list[int]:
    """A short prompt, and those from which decoding crosses the edge of a short window."""
    short = bench.short()[0]
    edges = {w - 1 for w in bench.runner.adapter.facts.windows if w and 2 < w <= SHORT_WINDOW}
    return sorted({short, *(edge for edge in edges if edge + bench.steps <= bench.context)})


def _listed(numbers: list[int]) -> str:
    return ", ".join(map(str, numbers))


# Taking tokens back --------------------------------------------------------------------------------------------------------


def crop(bench: Bench) -> Check:
    """Tokens are decoded, taken back, and others decoded in their place, as assisted decoding does."""
    runner, drafted = bench.runner, bench.steps
    if runner.kind == "hooked":
        raise native_only("a HookedTransformer's cache cannot be cropped")
    errors, prompts = Errors(), _prompts(bench)
    for prompt in prompts:
        tokens = runner.tokens(bench.row(0, prompt + drafted))
        # One drafted token is kept, as where an assistant guessed one right.
        others = runner.tokens(bench.row(1, prompt + 2 * drafted)[-drafted:])
        whole = torch.cat([tokens[:, : prompt + 1], others], 1)[:, : bench.context]
        cache = runner.new_cache()
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        _, held = runner.decode(tokens, prompt, cache=cache)
        _check_croppable(held)
        try:
            held.crop(-(drafted - 1))
        # A cache that refuses says why.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            raise NotRunError(f"this model's cache refuses crop() ({one_line(error)}).") from error
        # Caches that record the past are cut to their size after every forward by whoever records.
        made, _ = runner.singly(whole, prompt + 1, held, then=lambda cache: cache.crop(0))
        errors.add(made, bench.reference(whole, rows=slice(prompt + 1, None)), prompt + 1)
    what = (
        f"prompts of {_listed(prompts)} tokens, {drafted} decode steps, {drafted - 1} of them taken back by crop() and "
        "others fed in their place, against recomputation"
    )
    return bench.settle(errors, what, "crop() leaves keys, values or a length behind")


def _check_croppable(cache: Any) -> None:
    if why := lacking(cache, "crop"):
        raise NotRunError(why)
    layers = getattr(cache, "layers", [])
    fixed = next((layer for layer in layers if getattr(layer, "is_croppable", True) is False), None)
    if fixed is not None:
        raise NotRunError(
            f"this model's cache cannot be cropped: is_croppable is False for its {type(fixed).__name__}, a state has no past."
        )


# Quantised ---------------------------------------------------------------------------------------------------------------


def quantised(bench: Bench) -> list[Check]:
    """Quantised caches: whether they run, and whether the prompt's own logits are exact, as their definition says."""
    if bench.runner.kind != "native":
        raise native_only(f"a model of kind {bench.runner.kind} makes its own cache")
    if not bench.thorough:
        raise NotRunError("it is run by a thorough audit only.")
    return [
        attempted(bench, f"{bench.name} ({each})", functools.partial(_quantised, backend=each))
        for each in ("fp8", "quanto", "hqq")
    ]


def _quantised(bench: Bench, backend: str) -> Check:
    from transformers import QuantizedCache

    module, package = BACKENDS[backend]
    if not installed(module):
        raise NotRunError(f"it needs the package {package}, which is not installed.")
    runner = bench.runner
    try:
        cache = QuantizedCache(backend, text_config(runner.model))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        raise NotRunError(f"transformers makes no such cache for this model ({one_line(error)}).") from error
    prompt = max(min(64, bench.context - bench.steps), 1)
    tokens = runner.tokens(bench.row(0, prompt + bench.steps))
    reference = bench.reference(tokens)
    try:
        first, cache = runner.feed(tokens[:, :prompt], cache)
        later, _ = runner.singly(tokens, prompt, cache)
    # A backend's kernels do not run on every device and dtype.
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        said = f"a prompt of {prompt} tokens and {bench.steps} decode steps raised {one_line(error)}."
        raise UnclearError(said) from error
    errors = Errors().add(first, reference, 0)
    lost = apart(later, reference.logits[:, prompt:])
    what = (
        f"a prompt of {prompt} tokens, whose own logits are to be exact; the {bench.steps} decode steps after it are off by "
        f"{lost:.1e}, which is the format's"
    )
    if bool(later.isfinite().all()) or not bool(reference.logits.isfinite().all()):
        return bench.settle(errors, what, "the first forward reads quantised keys and values already")
    errors[prompt] = lost
    return bench.settle(errors, what, "NaN or Inf come out of the quantised keys and values")
