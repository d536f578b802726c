"""Exercises of one row: chunks, windows, prompts about a kernel's chunk size, StaticCache, crop, quantised caches."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping, Sequence

import torch

from kvinterp.auditing.bench import (
    PROMPT,
    Bench,
    Check,
    Errors,
    NotRunError,
    UnclearError,
    attempted,
    one_line,
)
from kvinterp.auditing.blocks import Fed
from kvinterp.auditing.heard import heard
from kvinterp.auditing.values import apart, by_position
from kvinterp.errors import UnsupportedError
from kvinterp.models.caches import Quantized, Static
from kvinterp.models.transformers_cache import refusal
from kvinterp.paths.calls.base import Masking

CHUNK_NAMES = ("chunk_size", "mamba_chunk_size", "attention_chunk_size")
UNEVEN = (5, 1, 9, 2, 13, 3)
FILL = 512

POSITIONS, LAST = 4096, 512
"""Positions that a check runs at the most, sixteen times as many when thorough; the same of a context's end."""
REACH = "--reach"
SWITCHING = ("dynamic", "longrope", "yarn")
"""Kinds of RoPE whose frequencies are other ones beyond some length."""

PRODUCTS = {"cpu": 2e10, "cuda": 5e13}
"""Multiplications and additions of one forward at the most, a few seconds' worth; twenty times as many when thorough."""


def _too_much(bench: Bench, length: int, most: int = POSITIONS) -> str:
    """Why so many positions are not run, or an empty text."""
    if bench.far == "yes":
        return ""
    facts = bench.runner.adapter.facts
    limit = most * (16 if bench.thorough else 1)
    if length > limit:
        return f"{length} positions are more than the {limit} that are run"
    parameters = sum(p.numel() for p in bench.runner.model.parameters())
    products = length * parameters + 2 * facts.layers * facts.width * length**2
    spent = PRODUCTS.get(bench.runner.device.type, PRODUCTS["cpu"]) * (20 if bench.thorough else 1)
    if products > spent:
        return f"a forward of {length} positions takes {products:.0e} products, more than the {spent:.0e} that are spent"
    return ""


# Several chunks ----------------------------------------------------------------------------------------------------------


def chunks(bench: Bench) -> Check:
    """A prompt fed in several chunks, each on the cache of those before."""
    runner = bench.runner
    cuts = {"7": [7] * 5, "16": [16] * 4, listed(UNEVEN): list(UNEVEN)}
    # Of no size that a fixed list would leave out: drawn anew for other prompts.
    drawn = random.Random(str(bench.row(0, PROMPT))).choices(range(1, 13), k=6)
    cuts[f"{listed(drawn)} (drawn)"] = drawn
    fitting = {said: sizes for said, sizes in cuts.items() if sum(sizes) <= bench.context}
    if not fitting:
        raise NotRunError(f"a context of {bench.context} positions has no room for several chunks.")
    tokens = bench.tokens(max(sum(sizes) for sizes in fitting.values()))
    reference = bench.reference(tokens)
    fed, wrong = [], []
    for sizes in fitting.values():
        fed.append(Fed(runner).feed(tokens[:, : sum(sizes)], *sizes))
        errors = by_position(fed[-1].logits, reference.logits[:, : sum(sizes)], 0)
        first = next((at for at, error in errors.items() if error > bench.excused * reference.null), None)
        if first is not None:
            wrong.append(next((n, len(sizes)) for n, end in enumerate(itertools.accumulate(sizes), 1) if first < end))
            if wrong[-1][0] == 2 and runner.adapter.plain and runner.recurrent_layers(fed[-1].cache):
                raise NotRunError(
                    "this model keeps a recurrent state and begins it anew when it is fed several tokens on it: its prompts "
                    "are to be fed at once, or one token at a time."
                )
    hint = "the mask or the positions of chunk {} of {} are wrong".format(*wrong[0]) if wrong else ""
    what = f"prompts fed in chunks of {'; of '.join(fitting)} tokens, every row against recomputation"
    return bench.judge(fed, what, hint, reference)


def listed(sizes: Sequence[int]) -> str:
    """Numbers in words."""
    return f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"


def one_token(bench: Bench) -> Check:
    """A prompt of a single token, which some models take for a decode step."""
    if bench.context <= bench.steps:
        raise NotRunError(f"a context of {bench.context} positions has no room for a token and {bench.steps} decode steps.")
    fed = bench.decoded(bench.tokens(1 + bench.steps), 1)
    return bench.judge([fed], f"a prompt of one token, {bench.steps} decode steps, against recomputation")


def told(bench: Bench) -> Check:
    """A mask of ones and the positions, given beside the tokens as some servers give them, and nothing as others do."""
    runner = bench.runner
    if not {"attention_mask", "position_ids"} & runner.adapter.takes:
        raise NotRunError(f"{type(runner.model).__name__} takes neither an attention_mask nor position_ids.")
    prompt, length = bench.short()
    tokens = bench.tokens(length)
    places = torch.arange(length, device=runner.device)[None]
    errors = Errors()
    for masking in (Masking(torch.ones_like(tokens), places), Masking(torch.ones_like(tokens))):
        errors.add(bench.decoded(tokens, prompt, masking).logits, bench.reference(tokens, masking), prompt - 1)
    what = f"a prompt of {prompt} tokens, {length - prompt} decode steps, with a mask of ones and positions, then the mask alone"
    return bench.settle(errors, f"{what}, against recomputation with the same")


# Windows -----------------------------------------------------------------------------------------------------------------


def window(bench: Bench) -> list[Check]:
    """Decoding over the edge of each of the model's windows, and on from where it is long full."""
    windows = bench.runner.adapter.facts.windows
    sizes = sorted({w for w in windows if w})
    if not sizes:
        raise NotRunError("no layer of this model has a sliding window or attends in chunks.")
    what = {}
    for size in sizes:
        layers = [str(n) for n, window in enumerate(windows) if window == size]
        shown = ", ".join(layers[:6]) + (" and more" if len(layers) > 6 else "")
        what[size] = f"the window of {size} positions of layer{'s' if len(layers) > 1 else ''} {shown}"
    return _each(bench, _edge, what)


def rope_switch(bench: Bench) -> list[Check]:
    """Decoding over the length beyond which RoPE turns by other frequencies."""
    rope = getattr(bench.runner.adapter.config, "rope_parameters", None) or {}
    found: dict[int, str] = {}
    for part in [rope, *rope.values()]:
        kind = part.get("rope_type") if isinstance(part, Mapping) else None
        if kind in SWITCHING:
            size = part.get("original_max_position_embeddings") or bench.context
            found[size] = f"{size} positions, the original length of {kind} RoPE"
    if not found:
        raise NotRunError(f"this model's config names no RoPE that changes with the length ({', '.join(SWITCHING)}).")
    return _each(bench, _switch, found)


def context_end(bench: Bench) -> Check:
    """Decoding up to the last position that the model has."""
    size = bench.context
    if size >= 2**31:
        raise NotRunError("this model's config names no last position.")
    if why := _too_much(bench, size, LAST):
        raise NotRunError(f"the last of {size} positions is not reached: {why}.", option=REACH)
    tokens = bench.tokens(size)
    before = max(size - bench.steps - 1, 1)
    what = f"{before} tokens and then one by one to the last of {size} positions, against recomputation"
    return bench.judge([bench.decoded(tokens, before)], what)


def _switch(bench: Bench, size: int, said: str) -> Check:
    """Each token beside the recomputation of its own prefix: a longer one turns all its keys by other frequencies."""
    if why := _too_much(bench, size + 2, LAST):
        raise NotRunError(f"{said}: not reached, {why}.", option=REACH)
    before, errors = size - 1, Errors()
    tokens = bench.tokens(size + 2)
    for n, row in enumerate(bench.decoded(tokens, before).logits.unbind(1), before):
        errors.add(row[:, None], bench.reference(tokens[:, :n], first=n - 1), n - 1)
    what = f"{said}: {before} tokens and then one by one to {size + 2}, each against the recomputation of its own prefix"

    def hint(_: Errors) -> str:
        turned = "keys on the cache keep the frequencies that the recomputation gives up"
        made = heard(bench, tokens[:, :before], torch.ones_like(tokens[:, :before]))
        each = made.logits.unbind(1)
        off = max(apart(row, bench.runner.recompute(made.tokens[:, : before + n])[:, -1]) for n, row in enumerate(each))
        return f"{turned} ({'right' if off <= bench.excused * errors.null else f'off by {off:.1e} too'} under generate())"

    return bench.settle(errors, what, hint)


def _each(bench: Bench, run: Callable[..., Check], edges: Mapping[int, str]) -> list[Check]:
    named = {size: bench.name if len(edges) == 1 else f"{bench.name} of {size}" for size in edges}
    return [attempted(bench, name, functools.partial(run, size=size, said=edges[size])) for size, name in named.items()]


def _edge(bench: Bench, size: int, said: str) -> Check:
    runner = bench.runner
    whole = size + bench.steps + 2
    if whole > bench.context:
        why = f"{whole} positions are more than the model's context of {bench.context}, so it is never full there"
        raise NotRunError(f"{said}: not reached, {why}.")
    if why := _too_much(bench, whole):
        raise NotRunError(f"{said}: not reached, {why}.", option=REACH)
    tokens = bench.tokens(whole)
    before, full = max(size - 2, 1), size + 2
    reference = bench.reference(tokens, first=before - 1)
    over = bench.decoded(tokens, before)
    how = f"in chunks of up to {FILL}" if full > FILL else "at once"
    filled = [min(FILL, full - start) for start in range(0, full, FILL)]
    if runner.adapter.plain and runner.recurrent_layers(over.cache):
        how, filled = "at once", [full]
    then = Fed(runner).feed(tokens, *filled)
    then.first = full - 1
    what = (
        f"{said}: {before} tokens and then one by one over this edge to {whole}, and {full} filled {how} and then one by one, "
        "against recomputation"
    )

    def hint(errors: Errors) -> str:
        first = min(at for at, error in errors.items() if error > bench.excused * reference.null)
        return "the cache of a window is wrong once it is full" if first >= size - 1 else ""

    return bench.judge([over, then], what, hint, reference)


# Long prompts ------------------------------------------------------------------------------------------------------------


def long_prompt(bench: Bench) -> Check:
    """Prompts about the chunk sizes in which the model's own kernels work, each with tokens decoded after it."""
    runner = bench.runner
    sizes = {n: v for n in CHUNK_NAMES if isinstance(v := getattr(runner.adapter.config, n, None), int) and v > 2}
    if not sizes:
        raise NotRunError(f"this model's config names no chunk ({', '.join(CHUNK_NAMES)}) that a prompt could reach over.")
    size, said = max(sizes.values()), ", ".join(f"{n}={v}" for n, v in sizes.items())
    prompts = sorted({n for v in sizes.values() for n in (v - 1, v, v + 1, 2 * v + 1)})
    why = _too_much(bench, max(prompts) + bench.steps)
    if why:
        prompts = [n for n in prompts if not _too_much(bench, n + bench.steps)]
        if not prompts or max(prompts) < size:
            raise NotRunError(f"prompts beyond {said} are not run: {why}.", option=REACH)
    tokens = bench.tokens(max(prompts) + bench.steps)
    reference = bench.reference(tokens)
    fed = [bench.decoded(tokens[:, : prompt + bench.steps], prompt) for prompt in prompts]
    shown = ", ".join(map(str, prompts))
    what = f"prompts of {shown} tokens ({said}), {bench.steps} decode steps each, against one recomputation"
    return bench.judge(fed, what, "a prompt's last chunk leaves a wrong state", reference)


# Other caches ----------------------------------------------------------------------------------------------------------


ROOM = 5
"""Slots of a static cache that stay empty, so that a mask that forgets them is seen."""

SHORT_WINDOW = 128


def static(bench: Bench) -> Check:
    """A preallocated cache, filled to a few slots before its end; over the edge of short windows too."""
    runner = bench.runner
    bench.only_plain("makes its own cache")
    if not runner.adapter.takes_static:
        why = f"{type(runner.model).__name__} does not say that it supports it (_can_compile_fullgraph)"
        raise NotRunError(f"{why}, and generate() refuses it.")

    def decoded(prompt: int, room: int) -> Fed:
        cache = Static().make(runner.adapter.config, prompt + bench.steps + room)
        return bench.decoded(bench.tokens(prompt + bench.steps), prompt, cache=cache)

    prompts = _prompts(bench)

    def hint(errors: Errors) -> str:
        a, b = (decoded(prompts[0], room).logits for room in (ROOM, 2 * ROOM))
        empty = apart(a, b) > bench.beyond * errors.null
        return "empty slots are read" if empty else "slots are written or read at the wrong place"

    what = (
        f"prompts of {', '.join(map(str, prompts))} tokens, {bench.steps} decode steps each, {ROOM} slots of the cache left "
        "empty, against recomputation"
    )
    return bench.judge([decoded(prompt, ROOM) for prompt in prompts], what, hint)


def _prompts(bench: Bench) -> list[int]:
    """A short prompt, and those from which decoding crosses the edge of a short window."""
    short = bench.short()[0]
    edges = {w - 1 for w in bench.runner.adapter.facts.windows if w and 2 < w <= SHORT_WINDOW}
    return sorted({short, *(edge for edge in edges if edge + bench.steps <= bench.context)})


# Taking tokens back --------------------------------------------------------------------------------------------------------


def crop(bench: Bench) -> Check:
    """Tokens are decoded, taken back, and others decoded in their place, as assisted decoding does."""
    if getattr(bench.runner.adapter.source, "_is_stateful", False):
        raise NotRunError("transformers offers no assisted decoding for a model that keeps a state (_is_stateful).")
    drafted, made, prompts = bench.steps, [], _prompts(bench)
    for prompt in prompts:
        cache = bench.runner.adapter.new_cache()
        getattr(cache, "activate_past_recording", lambda: None)()
        fed = bench.decoded(bench.tokens(prompt + drafted), prompt, cache=cache)
        if why := refusal(fed.cache, "crop"):
            raise NotRunError(why)
        fed.cache.crop(1 - drafted)
        # One drafted token is kept, as where an assistant guessed one right.
        fed.holds(bench.tokens(prompt + 1))
        for token in bench.row(1, prompt + 2 * drafted)[-drafted:][: bench.context - prompt - 1]:
            fed.forward(bench.batch([token]))
            # Caches that record the past are cut to their size after every forward by whoever records.
            fed.cache.crop(0)
        made.append(fed)
    what = (
        f"prompts of {', '.join(map(str, prompts))} tokens, {drafted} decode steps, {drafted - 1} of them taken back by crop() "
        "and others fed in their place, against recomputation"
    )
    return bench.judge(made, what, "crop() leaves keys, values or a length behind")


# Quantised ---------------------------------------------------------------------------------------------------------------


def quantised(bench: Bench) -> list[Check]:
    """Quantised caches: whether they run, and whether the prompt's own logits are exact, as their definition says."""
    bench.only_plain("makes its own cache")
    if not bench.thorough:
        raise NotRunError("it is run by a thorough audit only.")
    return [
        attempted(bench, f"{bench.name} ({each})", functools.partial(_quantised, backend=each))
        for each in ("fp8", "quanto", "hqq")
    ]


def _quantised(bench: Bench, backend: str) -> Check:
    runner = bench.runner
    try:
        cache = Quantized(8 if backend == "fp8" else 4, backend).make(runner.adapter.config, 0)
    except UnsupportedError as why:
        raise NotRunError(str(why)) from why
    prompt = max(min(64, bench.context - bench.steps), 1)
    tokens = bench.tokens(prompt + bench.steps)
    reference = bench.reference(tokens)
    try:
        made = Fed(runner, cache=cache).feed(tokens, prompt).logits
    # A backend's kernels do not run on every device and dtype.
    except (RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        said = f"a prompt of {prompt} tokens and {bench.steps} decode steps raised {one_line(error)}."
        raise UnclearError(said) from error
    first, later = made[:, :prompt], made[:, prompt:]
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
