"""Exercises of ``generate()``: what it feeds the forward, and its logits, against a recomputation of the same tokens."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.batches import Padded, no_padding, unpadded
from kvinterp.auditing.bench import Bench, Check, Errors, NotRunError, Reference, UnclearError, native_only, one_line
from kvinterp.auditing.blocks import Masking
from kvinterp.auditing.comparing import apart
from kvinterp.models.transformers_cache import CACHES


@dataclasses.dataclass
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
    """One ``generate()``.

    Attributes:
        tokens: ``[batch, length]``, the prompt's and the new ones.
        logits: Of each new token, ``[batch, new, vocabulary]``.
        calls: What the forward was given.
        mask: 0 where there is a pad, for all tokens.
        positions: Counted without the pads.
    """

    tokens: Tensor
    logits: Tensor
    calls: list[Call]
    mask: Tensor
    positions: Tensor

    @property
    def fed(self) -> tuple[Tensor, Masking]:
        """What the model was to be fed: all tokens but the last, with their mask where there are pads, and positions."""
        mask = self.mask[:, :-1] if bool((self.mask == 0).any()) else None
        return self.tokens[:, :-1], Masking(mask, self.positions[:, :-1])


def generate(bench: Bench) -> Check:
    """Greedy generation of one prompt."""
    prompt = bench.short()[0]
    tokens = bench.runner.tokens(bench.row(0, prompt))
    return _checked(bench, tokens, torch.ones_like(tokens), f"a prompt of {prompt} tokens")


def generate_padded(bench: Bench) -> Check:
    """Greedy generation of a left-padded batch."""
    _check_native(bench)
    prompt = bench.short()[0]
    given = Padded(bench, prompt, prompt)
    what = f"prompts of {given.lengths} tokens in a left-padded batch"
    return _checked(bench, given.tokens, given.mask, what)


def _check_native(bench: Bench) -> None:
    if bench.runner.kind != "native":
        raise native_only(f"generate() of a {type(bench.runner.model).__name__} gives no logits")


def _checked(bench: Bench, tokens: Tensor, mask: Tensor, what: str) -> Check:
    _check_native(bench)
    runner, first = bench.runner, tokens.shape[1] - 1
    if not hasattr(runner.model, "generate") or not runner.model.can_generate():
        raise NotRunError(f"{type(runner.model).__name__} has no generate() of transformers'.")
    if bench.context < 1 + bench.steps:
        raise NotRunError(f"a context of {bench.context} positions has no room for {bench.steps} new tokens.")
    try:
        made = _run(bench, tokens, mask, use_cache=True)
    # What a model's own generate() does not support, it says with whatever error it meets first.
    except Exception as error:
        raise UnclearError(f"generate() of {what} raised {one_line(error)}.") from error
    if all(call.tokens.shape[1] != 1 for call in made.calls[1:]):
        said = f"generate() of {what} feeds the whole prefix at every step, so there was no cached step to compare"
        raise UnclearError(f"{said}.")
    logits, null = bench.reference(*made.fed, slice(first, None))
    uncached = _uncached(bench, tokens, mask)
    beside = "" if uncached is None else f" (and {uncached:.1e} with use_cache=False)"
    reach = bench.reach
    fed, (masks, _) = made.fed
    if masks is not None:
        alone, unmasked = unpadded(runner, fed, masks, made.positions[:, :-1], first)
        reach, off = apart(unmasked, logits[:, first:]), apart(logits[:, first:], alone)
        if off > bench.beyond * null and off > reach / bench.beyond:
            raise no_padding(off)
        null = max(null, off)
    errors = Errors().add(made.logits, Reference(logits, null), first)
    said = f"generate() of {what}, {bench.steps} new tokens, against recomputation of the same tokens{beside}"
    return bench.settle(errors, said, lambda: _cause(bench, made, logits, null, uncached), reach)


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
    with runner.running(), _spied(runner.model, calls):
        out = runner.model.generate(tokens, attention_mask=mask, generation_config=chosen)
    runner.forwards += len(calls)
    made = [call.logits for call in calls if call.logits is not None]
    if len(made) != bench.steps:
        raise ValueError(f"{len(made)} forwards were heard for {bench.steps} new tokens")
    whole = torch.cat([mask, torch.ones_like(out.sequences[:, tokens.shape[1] :])], 1)
    return Generated(out.sequences, torch.stack(made, 1), calls, whole, (whole.cumsum(-1) - 1).clamp(min=0))


@contextlib.contextmanager
def _spied(model: nn.Module, calls: list[Call]) -> Iterator[None]:
    def heard(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        tokens = kwargs.get("input_ids", args[0] if args else None)
        if isinstance(tokens, Tensor):
            places, mask = kwargs.get("position_ids"), kwargs.get("attention_mask")
            places = places.clone() if isinstance(places, Tensor) else None
            mask = mask.clone() if isinstance(mask, Tensor) and mask.dim() == 2 else None
            cached = any(kwargs.get(name) is not None for name in CACHES)
            calls.append(Call(tokens.clone(), places, mask, cached))

    def answered(_: nn.Module, __: Any, out: Any) -> None:
        calls[-1].logits = out.logits[:, -1].clone()

    with model.register_forward_pre_hook(heard, with_kwargs=True), model.register_forward_hook(answered):
        yield


def _uncached(bench: Bench, tokens: Tensor, mask: Tensor) -> float | None:
    """How far ``generate(use_cache=False)`` is from a recomputation of its own tokens; None where it cannot be run."""
    try:
        made = _run(bench, tokens, mask, use_cache=False)
    except Exception:
        return None
    return apart(made.logits, bench.runner.recompute(*made.fed)[:, tokens.shape[1] - 1 :])


# What is wrong -----------------------------------------------------------------------------------------------------------


def _cause(bench: Bench, made: Generated, theirs: Tensor, null: float, uncached: float | None) -> str:
    """What ``generate()`` gave the forward that a caller of the forward would not have."""
    told = _told(made)
    if not told:
        also = uncached is not None and uncached > bench.beyond * null
        return "generate() gives other logits than the forward, without a cache too" if also else ""
    # The same tokens, fed with what they should have been fed with: what remains is not generate()'s.
    prompt = made.tokens.shape[1] - bench.steps
    fed, masking = made.fed
    left = apart(bench.runner.decode(fed, prompt, masking)[0], theirs[:, prompt - 1 :])
    return f"{told}, and the forward is right when it is told so" if left <= bench.excused * null else told


def _told(made: Generated) -> str:
    mask, positions = made.mask, made.positions
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
