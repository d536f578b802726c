"""Exercises of other caches than the one that grows, and of taking tokens back: StaticCache, crop, quantised caches."""

from __future__ import annotations

import importlib.util
from typing import Any

import torch

from kvinterp.auditing.bench import PROMPT, UNCLEAR, Bench, Check, native_only, not_run, one_line
from kvinterp.auditing.differences import Errors, apart
from kvinterp.auditing.feeding import lacking
from kvinterp.models.native import text_config

__all__ = ["crop", "quantised", "static"]

ROOM = 5
"""Slots of a static cache that stay empty, so that a mask that forgets them is seen."""

SHORT_WINDOW = 128


def static(bench: Bench) -> Check:
    """A preallocated cache, filled to a few slots before its end; over the edge of short windows too."""
    from transformers import StaticCache

    name, runner = "StaticCache", bench.runner
    if runner.kind != "native":
        return native_only(name, f"a model of kind {runner.kind} makes its own cache")
    if not getattr(runner.model, "_can_compile_fullgraph", False):
        why = f"{type(runner.model).__name__} does not say that it supports it (_can_compile_fullgraph)"
        return not_run(name, f"{why}, and generate() refuses it.")
    try:
        StaticCache(config=text_config(runner.model), max_cache_len=PROMPT)
    except (KeyError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        return not_run(name, f"transformers makes no StaticCache for this model ({one_line(error)}).")
    errors, null, prompts = Errors(), 0.0, _prompts(bench)
    for prompt in prompts:
        tokens = runner.tokens(bench.row(0, prompt + bench.steps))
        reference = bench.reference(tokens, rows=slice(prompt - 1, None))
        cache = StaticCache(config=text_config(runner.model), max_cache_len=tokens.shape[1] + ROOM)
        errors.add(runner.decode(tokens, prompt, cache=cache)[0], reference.logits, prompt - 1)
        null = max(null, reference.null)

    def hint() -> str:
        prompt = prompts[0]
        tokens = runner.tokens(bench.row(0, prompt + bench.steps))
        sizes = (tokens.shape[1] + room for room in (ROOM, 2 * ROOM))
        twice = [StaticCache(config=text_config(runner.model), max_cache_len=size) for size in sizes]
        a, b = (runner.decode(tokens, prompt, cache=cache)[0] for cache in twice)
        return (
            "empty slots are read" if apart(a, b) > bench.beyond * null else "slots are written or read at the wrong place"
        )

    what = (
        f"prompts of {_listed(prompts)} tokens, {bench.steps} decode steps each, {ROOM} slots of the cache left empty, against "
        "recomputation"
    )
    return bench.settle(name, errors, null, what, hint)


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
    name, runner = "crop and go on", bench.runner
    if runner.kind == "hooked":
        return native_only(name, "a HookedTransformer's cache cannot be cropped")
    errors, null, prompts = Errors(), 0.0, _prompts(bench)
    for prompt in prompts:
        drafted = bench.steps
        tokens = runner.tokens(bench.row(0, prompt + drafted))
        # One drafted token is kept, as where an assistant guessed one right.
        others = runner.tokens(bench.row(1, prompt + 2 * drafted)[-drafted:])
        whole = torch.cat([tokens[:, : prompt + 1], others], 1)[:, : bench.context]
        cache = runner.subject.new_cache()
        if hasattr(cache, "activate_past_recording"):
            cache.activate_past_recording()
        _, held = runner.decode(tokens, prompt, cache=cache)
        held = cache if held is None else held
        why = _uncroppable(held)
        if why:
            return not_run(name, why)
        try:
            held.crop(-(drafted - 1))
        # A cache that refuses says why.
        except (RuntimeError, ValueError, NotImplementedError) as error:
            return not_run(name, f"this model's cache refuses crop() ({one_line(error)}).")
        # Caches that record the past are cut to their size after every forward by whoever records.
        made, _ = runner.singly(whole, prompt + 1, held, then=lambda cache: cache.crop(0))
        reference = bench.reference(whole, rows=slice(prompt + 1, None))
        errors.add(torch.stack(made, 1), reference.logits, prompt + 1)
        null = max(null, reference.null)
    what = (
        f"prompts of {_listed(prompts)} tokens, {bench.steps} decode steps, {bench.steps - 1} of them taken back by crop() and "
        "others fed in their place, against recomputation"
    )
    return bench.settle(name, errors, null, what, "crop() leaves keys, values or a length behind")


def _uncroppable(cache: Any) -> str:
    if why := lacking(cache, "crop"):
        return why
    layers = getattr(cache, "layers", [])
    fixed = next((layer for layer in layers if getattr(layer, "is_croppable", True) is False), None)
    if fixed is not None:
        return f"this model's cache cannot be cropped: is_croppable is False for its {type(fixed).__name__}, a state has no past."
    return ""


# Quantised ---------------------------------------------------------------------------------------------------------------

BACKENDS = {"fp8": None, "quanto": "optimum.quanto", "hqq": "hqq"}
PACKAGES = {"quanto": "optimum-quanto", "hqq": "hqq"}


def quantised(bench: Bench) -> list[Check]:
    """Quantised caches: whether they run, and whether the prompt's own logits are exact, as their definition says."""
    name = "quantised cache"
    if bench.runner.kind != "native":
        return [native_only(name, f"a model of kind {bench.runner.kind} makes its own cache")]
    if not bench.thorough:
        return [not_run(name, "it is run by a thorough audit only.")]
    return [_quantised(bench, f"{name} ({backend})", backend, module) for backend, module in BACKENDS.items()]


def _quantised(bench: Bench, name: str, backend: str, module: str | None) -> Check:
    from transformers import QuantizedCache

    if module is not None and not _installed(module):
        return not_run(name, f"it needs the package {PACKAGES[backend]}, which is not installed.")
    runner = bench.runner
    try:
        cache = QuantizedCache(backend, text_config(runner.model))
    except (ValueError, TypeError, KeyError, AttributeError, ImportError) as error:
        return not_run(name, f"transformers makes no such cache for this model ({one_line(error)}).")
    prompt = max(min(64, bench.context - bench.steps), 1)
    tokens = runner.tokens(bench.row(0, prompt + bench.steps))
    reference = bench.reference(tokens)
    try:
        first, cache = runner.feed(tokens[:, :prompt], cache)
        made, _ = runner.singly(tokens, prompt, cache)
    # A backend's kernels do not run on every device and dtype.
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        return Check(name, UNCLEAR, f"a prompt of {prompt} tokens and {bench.steps} decode steps raised {one_line(error)}.")
    errors, later = Errors(), torch.stack(made, 1)
    errors.add(first, reference.logits, 0)
    lost = apart(later, reference.logits[:, prompt:])
    what = (
        f"a prompt of {prompt} tokens, whose own logits are to be exact; the {bench.steps} decode steps after it are off by "
        f"{lost:.1e}, which is the format's"
    )
    if not bool(later.isfinite().all()) and bool(reference.logits.isfinite().all()):
        errors[prompt] = lost
        return bench.settle(name, errors, reference.null, what, "NaN or Inf come out of the quantised keys and values")
    return bench.settle(name, errors, reference.null, what, "the first forward reads quantised keys and values already")


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False
