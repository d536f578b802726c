"""Exercises of ``generate()``: what it feeds the forward, and its logits, against a recomputation of the same tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.batches import by_position, padded
from kvinterp.auditing.bench import PROMPT, UNCLEAR, Bench, Check, not_run, one_line
from kvinterp.auditing.feeding import apart
from kvinterp.models.transformers_cache import CACHES

__all__ = ["generate", "generate_padded"]


@dataclasses.dataclass(frozen=True)
class Call:
    """What ``generate()`` gave one forward.

    Attributes:
        tokens: ``[batch, new]``.
        positions: What it said of their positions, or None.
        mask: The mask of two dimensions, or None.
        cache: Whether there was one that held something or was to be filled.
        logits: The newest row that the forward made; what ``generate()`` returns is rounded to float32.
    """

    tokens: Tensor
    positions: Tensor | None
    mask: Tensor | None
    cache: bool
    logits: Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Generated:
    """One ``generate()``: the tokens, ``[batch, length]``, the logits of each new one, and what the forward was given."""

    tokens: Tensor
    logits: Tensor
    calls: list[Call]


def generate(bench: Bench) -> Check:
    """Greedy generation of one prompt."""
    prompt = _prompt(bench)
    tokens = bench.runner.tokens(bench.row(0, prompt))
    return _checked(bench, "generate()", tokens, torch.ones_like(tokens), f"a prompt of {prompt} tokens")


def generate_padded(bench: Bench) -> Check:
    """Greedy generation of a left-padded batch."""
    name = "generate(), left padding"
    prompt = _prompt(bench)
    if bench.runner.kind != "native":
        return _not_native(bench, name)
    if prompt < 2:
        return not_run(name, f"a context of {bench.context} positions has no room for a pad.")
    given = padded(bench, prompt, prompt)
    what = f"prompts of {prompt} and {prompt - given.pads} tokens in a left-padded batch"
    return _checked(bench, name, given.tokens, given.mask, what)


def _not_native(bench: Bench, name: str) -> Check:
    what = type(bench.runner.model).__name__
    return not_run(name, f"generate() of a {what} gives no logits; kind='native' of the same model runs it.")


def _prompt(bench: Bench) -> int:
    return max(min(PROMPT, bench.context - bench.steps), 1)


def _checked(bench: Bench, name: str, tokens: Tensor, mask: Tensor, what: str) -> Check:
    runner = bench.runner
    if runner.kind != "native":
        return _not_native(bench, name)
    if not hasattr(runner.model, "generate") or not runner.model.can_generate():
        return not_run(name, f"{type(runner.model).__name__} has no generate() of transformers'.")
    if bench.context < 1 + bench.steps:
        return not_run(name, f"a context of {bench.context} positions has no room for {bench.steps} new tokens.")
    try:
        made = _run(bench, tokens, mask, use_cache=True)
    # What a model's own generate() does not support, it says with whatever error it meets first.
    except Exception as error:
        return Check(name, UNCLEAR, f"generate() of {what} raised {one_line(error)}.")
    prompt = tokens.shape[1]
    if all(call.tokens.shape[1] != 1 for call in made.calls[1:]):
        said = f"generate() of {what} feeds the whole prefix at every step, so there was no cached step to compare"
        return Check(name, UNCLEAR, f"{said}.")
    whole = torch.cat([mask, torch.ones_like(made.tokens[:, prompt:])], 1)
    positions = (whole.cumsum(-1) - 1).clamp(min=0)
    masks = whole if bool((whole == 0).any()) else None
    theirs = bench.reference(made.tokens[:, :-1], _cut(masks), positions[:, :-1], slice(prompt - 1, None))
    errors = by_position(made.logits, theirs.logits[:, prompt - 1 :], prompt - 1)
    null, beside = theirs.null, ""
    uncached = _uncached(bench, tokens, mask)
    if uncached is not None:
        beside = f" (and {uncached:.1e} with use_cache=False)"

    def hint() -> str:
        return _cause(bench, made, whole, positions, theirs.logits, null, uncached)

    said = f"generate() of {what}, {bench.steps} new tokens, against recomputation of the same tokens{beside}"
    reach = bench.reach
    if masks is not None:
        ones = torch.ones_like(whole)[:, :-1]
        unmasked = runner.recompute(made.tokens[:, :-1], ones, positions[:, :-1])[:, prompt - 1 :]
        reach = apart(unmasked, theirs.logits[:, prompt - 1 :])
        alone = [
            runner.recompute(made.tokens[n : n + 1, pads:-1])[:, prompt - 1 - pads :]
            for n, pads in enumerate((whole == 0).sum(-1).tolist())
        ]
        off = apart(theirs.logits[:, prompt - 1 :], torch.cat(alone))
        if off > bench.beyond * null and off > reach / bench.beyond:
            also = f"without a cache a left-padded batch is off by {off:.1e} from each prompt alone"
            return Check(
                name, UNCLEAR, f"{also}: this model, called with a mask and positions, does not do padding.", None, off
            )
        null = max(null, off)
    return bench.settle(name, errors, null, said, hint, reach=reach)


def _cut(mask: Tensor | None) -> Tensor | None:
    return None if mask is None else mask[:, :-1]


def _run(bench: Bench, tokens: Tensor, mask: Tensor, use_cache: bool) -> Generated:
    """Greedy, as many tokens as there are steps, none of them an end."""
    from transformers import GenerationConfig

    runner = bench.runner
    known = getattr(runner.model.generation_config, "pad_token_id", None)
    chosen = GenerationConfig(
        max_new_tokens=bench.steps,
        min_new_tokens=bench.steps,
        do_sample=False,
        num_beams=1,
        num_return_sequences=1,
        use_cache=use_cache,
        return_dict_in_generate=True,
        disable_compile=True,
        pad_token_id=0 if known is None else known,
    )
    calls: list[Call] = []
    with runner.subject._running(), _spied(runner.model, calls):
        out = runner.model.generate(tokens, attention_mask=mask, generation_config=chosen)
    runner.forwards += len(calls)
    made = [call.logits for call in calls if call.logits is not None]
    if len(made) != bench.steps:
        raise ValueError(f"{len(made)} forwards were heard for {bench.steps} new tokens")
    return Generated(out.sequences, torch.stack(made, 1), calls)


@contextlib.contextmanager
def _spied(model: nn.Module, calls: list[Call]) -> Iterator[None]:
    def heard(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, Tensor):
            places, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
            calls.append(
                Call(
                    tokens.clone(),
                    places.clone() if isinstance(places, Tensor) else None,
                    mask.clone() if isinstance(mask, Tensor) and mask.dim() == 2 else None,
                    any(kwargs.get(name) is not None for name in CACHES),
                )
            )

    def answered(_: nn.Module, __: Any, out: Any) -> None:
        calls[-1] = dataclasses.replace(calls[-1], logits=out.logits[:, -1].clone())

    handles = [model.register_forward_pre_hook(heard, with_kwargs=True), model.register_forward_hook(answered)]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _uncached(bench: Bench, tokens: Tensor, mask: Tensor) -> float | None:
    """How far ``generate(use_cache=False)`` is from a recomputation of its own tokens; None where it cannot be run."""
    try:
        made = _run(bench, tokens, mask, use_cache=False)
    except Exception:
        return None
    whole = torch.cat([mask, torch.ones_like(made.tokens[:, tokens.shape[1] :])], 1)[:, :-1]
    positions = (whole.cumsum(-1) - 1).clamp(min=0)
    masks = whole if bool((whole == 0).any()) else None
    theirs = bench.runner.recompute(made.tokens[:, :-1], masks, positions)
    return apart(made.logits, theirs[:, tokens.shape[1] - 1 :])


# What is wrong -----------------------------------------------------------------------------------------------------------


def _cause(
    bench: Bench, made: Generated, mask: Tensor, positions: Tensor, theirs: Tensor, null: float, uncached: float | None
) -> str:
    """What ``generate()`` gave the forward that a caller of the forward would not have."""
    told = _told(made, mask, positions)
    if not told:
        also = uncached is not None and uncached > bench.beyond * null
        return "generate() gives other logits than the forward, without a cache too" if also else ""
    # The same tokens, fed with what they should have been fed with: what remains is not generate()'s.
    prompt = made.tokens.shape[1] - bench.steps
    masks = mask if bool((mask == 0).any()) else None
    direct, _ = bench.runner.decode(made.tokens[:, :-1], prompt, _cut(masks), positions[:, :-1])
    left = apart(direct, theirs[:, prompt - 1 :])
    return f"{told}, and the forward is right when it is told so" if left <= bench.excused * null else told


def _told(made: Generated, mask: Tensor, positions: Tensor) -> str:
    start = 0
    for call in made.calls:
        stop = start + call.tokens.shape[1]
        if stop > made.tokens.shape[1] or not torch.equal(call.tokens, made.tokens[:, start:stop]):
            return f"prepare_inputs_for_generation feeds other tokens than those at position {start}"
        kept = mask[:, start:stop].bool()
        if call.positions is not None:
            said = call.positions.expand(*call.positions.shape[:-2], *kept.shape)
            wrong = (said != positions[:, start:stop]) & kept
            if bool(wrong.any()):
                row, at = wrong.nonzero()[0].tolist()[-2:]
                right = int(positions[row, start + at])
                given = int(said.reshape(-1, *kept.shape)[0, row, at])
                return f"prepare_inputs_for_generation gives position {given} to the token at position {right}"
        if call.mask is not None and not torch.equal(call.mask.bool(), mask[:, :stop].bool()):
            return f"prepare_inputs_for_generation gives a wrong attention mask for the token at position {stop - 1}"
        if not call.cache and start:
            return "generate() does not pass the cache on"
        start = stop
    return ""
