"""Exercises of several rows and of ``generate()``: prompts side by side, left padding, rows reordered, repeated, selected."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.bench import (
    PASSED,
    Bench,
    Check,
    Errors,
    NotRunError,
    PlainError,
    Recomputation,
    Subject,
    UnclearError,
)
from kvinterp.auditing.blocks import Fed
from kvinterp.auditing.heard import Generated, heard
from kvinterp.auditing.lengths import SHORT_WINDOW, listed
from kvinterp.auditing.values import apart
from kvinterp.models.transformers_api import can_generate
from kvinterp.models.transformers_cache import refusal
from kvinterp.paths.calls.base import Masking

PADS = (0, 4, 1)
"""Pads of each row of a left-padded batch."""
ROWS = len(PADS)
"""Rows of a batch: what is right for two may be wrong for more, as an exchange of two rows is its own inverse."""


def side_by_side(bench: Bench) -> Check:
    """Three prompts of the same length in one batch, against each alone."""
    runner = bench.runner
    prompt, length = bench.short()
    tokens = bench.batch(*(bench.row(n, length) for n in range(ROWS)))
    together = bench.reference(tokens)
    alone = torch.cat([runner.recompute(tokens[n : n + 1]) for n in range(ROWS)])
    null = max(together.null, apart(together.logits, alone))
    if null > bench.beyond * together.null and null > bench.reach / bench.beyond:
        said = f"without a cache a batch is off by {null:.1e} from each prompt alone, so nothing can be said of the cache"
        raise PlainError(f"{said}.", null)
    fed = bench.decoded(tokens, prompt)
    what = (
        f"three prompts of {prompt} tokens side by side, {length - prompt} decode steps, against each alone without a cache"
    )
    again = functools.partial(bench.decoded, prompt=prompt)
    return bench.judge([fed], what, lambda _: _mixed(fed, again, bench.beyond * null), Recomputation(alone, null))


def _mixed(fed: Fed, again: Callable[[Tensor], Fed], limit: float) -> str:
    """Whether other tokens in one row, fed in the same way, change the logits of another."""
    for row in range(ROWS):
        other = fed.tokens.clone()
        other[row] = other[row].roll(1)
        others = [n for n in range(ROWS) if n != row]
        if apart(again(other).logits[others], fed.logits[others]) > limit:
            return "a row reads another row's cache"
    return ""


# Left padding ------------------------------------------------------------------------------------------------------------


def _padded(bench: Bench, prompt: int, length: int, pads: Sequence[int] = PADS) -> tuple[Tensor, Masking, str]:
    """Prompts of different lengths, the shorter ones padded on the left as ``generate()`` pads them; and what they are.

    Args:
        bench: Has the prompts.
        prompt: The prompts' length, pads counted.
        length: That of all rows.
        pads: How many each row has. They are ordinary tokens, which a mask hides as well: the row of the embedding that a model
            keeps for pads is often 0, and so adds nothing to a state that is not told of it.

    Raises:
        NotRunError: There is no room for a pad.
    """
    if prompt < 2:
        raise NotRunError(f"a context of {bench.context} positions has no room for a pad.")
    pads = [min(each, prompt - 1) for each in pads]
    tokens = bench.batch(*(bench.row(n + ROWS, p) + bench.row(n, length - p) for n, p in enumerate(pads)))
    places = torch.arange(length, device=tokens.device)
    masking = Masking.counting(torch.stack([places >= each for each in pads]).to(tokens))
    return tokens, masking, f"prompts of {listed([prompt - each for each in pads])} tokens in a left-padded batch"


def _wants_mask(runner: Subject, tokens: Tensor, mask: Tensor | None) -> bool:
    """Whether the model wants the mask in decode; recurrent ones as a rule drop it once the prompt is read."""
    prepare = getattr(runner.model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return True
    given = {"attention_mask": mask, "use_cache": True, runner.adapter.cache_name: runner.adapter.new_cache()}
    try:
        made = prepare(tokens, next_sequence_length=1, is_first_iteration=False, **given)
    # Code of a checkpoint's own may want other arguments: then the mask is given, as the forward's signature says.
    except Exception:
        return True
    return made.get("attention_mask") is not None


def _alone(bench: Bench, tokens: Tensor, masking: Masking, first: int) -> Tensor:
    """Logits of each row recomputed alone and without its pads, from position ``first`` on."""
    assert masking.mask is not None
    pads = (masking.mask == 0).sum(-1).tolist()
    return torch.cat([bench.runner.recompute(tokens[n : n + 1, p:])[:, first - p :] for n, p in enumerate(pads)])


def _check_mask(runner: Subject) -> None:
    if "attention_mask" not in runner.adapter.takes:
        raise NotRunError(f"{type(runner.model).__name__} takes no attention_mask, so it cannot be told of padding.")


def unpadded(
    bench: Bench, tokens: Tensor, masking: Masking, reference: Recomputation, first: int
) -> tuple[Recomputation, float]:
    """Each row recomputed alone and without its pads, from position ``first`` on; and how far its pads, unmasked, move it.

    Raises:
        PlainError: The model does not do padding without a cache, so that its check says nothing of the cache.
    """
    alone = _alone(bench, tokens, masking, first)
    # Ones, not None: without a mask transformers takes positions that begin anew for several texts packed into one row.
    unmasked = bench.runner.recompute(tokens, Masking(torch.ones_like(tokens), masking.positions))[:, first:]
    off, reach = apart(reference.logits[:, first:], alone), apart(unmasked, alone)
    if off > bench.beyond * reference.null and off > min(reach, bench.reach) / bench.beyond:
        said = f"without a cache a left-padded batch is off by {off:.1e} from each prompt alone"
        raise PlainError(f"{said}: this model, called with a mask and positions, does not do padding.", off)
    return Recomputation(alone, max(reference.null, off)), reach


def left_padding(bench: Bench) -> Check:
    """A left-padded batch, against its recomputation and each prompt alone."""
    runner = bench.runner
    _check_mask(runner)
    if not runner.adapter.plain:
        raise NotRunError("it is not given positions here, so left padding is that with the mask alone.")
    batches = [(*bench.short(), PADS)]
    full = min((w + 1 for w in runner.adapter.facts.windows if w and 2 < w <= SHORT_WINDOW), default=bench.context)
    if full + bench.steps <= bench.context:
        # Decoding goes on where a short window is full and pads are still in it.
        batches.append((full, full + bench.steps, (0, full // 2, 1)))
    checks = []
    for batch in batches:
        checks.append(_left_padded(bench, *batch))
        if checks[-1].status != PASSED:
            return checks[-1]
    return dataclasses.replace(checks[-1], detail=" ".join(check.detail for check in checks))


def mask_alone(bench: Bench) -> Check:
    """A left-padded batch with its mask and no positions, as most people call a model, against each prompt alone."""
    runner = bench.runner.otherwise(positions="own")
    _check_mask(runner)
    if runner.adapter.plain and "position_ids" not in runner.adapter.takes:
        raise NotRunError(
            f"{type(runner.model).__name__} takes no position_ids, so left padding is that with the mask alone."
        )
    prompt, length = bench.short()
    bench, first = dataclasses.replace(bench, runner=runner), prompt - 1
    tokens, masking, said = _padded(bench, prompt, length)
    given = masking._replace(positions=None)
    reference = bench.reference(tokens, given)
    alone = _alone(bench, tokens, masking, first)
    plain, null = apart(reference.logits[:, first:], alone), reference.null
    null = max(null, plain) if plain <= bench.beyond * null else null

    def off(masking: Masking) -> Errors:
        wanted = _wants_mask(runner, tokens, masking.mask)
        made = bench.decoded(tokens, prompt, masking, later=masking if wanted else masking._replace(mask=None)).logits
        return Errors().add(made, Recomputation(alone, null), first, first)

    errors, what = off(given), f"{said}, {length - prompt} decode steps, against each prompt alone"
    if runner.adapter.plain and max(errors.values()) > (most := bench.excused * null):
        ways = ("with positions given", max(off(masking).values())), _generates(bench, tokens, masking, prompt)
        right = [f"{'right' if error <= most else 'off'} {way} ({error:.1e})" for way, error in ways]
        what += f": {', '.join(right)}, off"
    what += " with the mask alone"
    # Ones, not None, as in unpadded().
    reach = apart(runner.recompute(tokens, Masking(torch.ones_like(tokens)))[:, first:], alone)
    return bench.settle(errors, what, "positions are not counted from the mask in decode", reach, plain)


def _generates(bench: Bench, tokens: Tensor, masking: Masking, prompt: int) -> tuple[str, float]:
    """What ``generate()`` does with the same padded prompts, and how far off it is."""
    mask: Any = masking.of(0, prompt).mask
    try:
        made = heard(bench, tokens[:, :prompt], mask, "yes")
    # Its own check says why.
    except Exception:
        return "under generate(), which could not be run", math.nan
    gives = "gives" if made.calls[-1].get("position_ids") is not None else "gives no"
    off = apart(made.logits, _alone(bench, made.tokens, made.masking, prompt - 1))
    return f"under generate(), which {gives} positions", off


def _left_padded(bench: Bench, prompt: int, length: int, pads: Sequence[int]) -> Check:
    """One left-padded batch, held against its own null."""
    runner, first = bench.runner, prompt - 1
    tokens, masking, said = _padded(bench, prompt, length, pads)
    reference = bench.reference(tokens, masking)
    alone, reach = unpadded(bench, tokens, masking, reference, first)
    wanted = _wants_mask(runner, tokens, masking.mask)
    again = functools.partial(bench.decoded, prompt=prompt, masking=masking)
    later = masking if wanted else masking._replace(mask=None)
    fed = again(tokens, later=later)
    errors = Errors().add(fed.logits, alone, first, first).add(fed.logits, reference, first)
    # So many positions hold every pad and a token of each row.
    before = min(max(pads), first) + 1
    if before < first:
        parts = Fed(runner, masking)
        parts.forward(tokens[:, :before])
        # A recurrent state is begun anew by several tokens, as the check of chunks says.
        if not runner.recurrent_layers(parts.cache):
            parts.feed(tokens[:, before:], prompt - before).first = before
            errors.add(parts.logits, reference, before)

    def hint(_: Errors) -> str:
        """What the decode steps do not look at, shown by feeding it otherwise and getting the same bits."""
        made, limit = fed.logits, bench.beyond * alone.null
        if mixed := _mixed(fed, functools.partial(again, later=later), limit):
            return mixed
        if wanted and torch.equal(again(tokens, later=masking._replace(mask=torch.ones_like(tokens))).logits, made):
            return "the attention mask is ignored in decode"
        if not wanted and apart(again(tokens).logits, made) > limit:
            return "prepare_inputs_for_generation drops the attention mask in decode"
        positions: Any = masking.positions
        positions = torch.cat([positions[:, :prompt], torch.arange(prompt, length).to(tokens).expand(ROWS, -1)], 1)
        # The recomputation in which the decoded tokens alone are numbered with the pads is what such a bug computes.
        wrong = runner.recompute(tokens, masking._replace(positions=positions))[:, first:]
        deaf = torch.equal(again(tokens, later=later._replace(positions=positions)).logits, made)
        deaf = deaf and "position_ids" in runner.adapter.takes
        return "positions ignore the padding" if deaf or apart(made, wrong) <= limit else ""

    what = (
        f"{said}, at once and in two parts, {length - prompt} decode steps, against the padded batch and each prompt alone "
        "without a cache"
    )
    return bench.settle(errors, what, hint, reach)


# Rows of a cache moved about ---------------------------------------------------------------------------------------------


def beams(bench: Bench) -> Check:
    """A cache whose rows change places, as in beam search."""
    what = (
        "three prompts of {prompt} tokens, a step, rows 2, 0, 1 of the cache taken by reorder_cache, {steps} decode steps"
    )
    return _moved(bench, what, lambda cache, rows: cache.reorder_cache(rows), "reorder_cache")


def repeated_rows(bench: Bench) -> Check:
    """A cache whose rows are repeated, and of which some are then selected, as in contrastive search and sampling."""

    def change(cache: Any, rows: Tensor) -> None:
        cache.batch_repeat_interleave(2)
        # The host's, which select on whatever device a layer's rows are.
        cache.batch_select_indices(2 * rows.cpu() + torch.tensor([0, 1, 0]))

    what = (
        "three prompts of {prompt} tokens, a step, the rows of the cache repeated by batch_repeat_interleave, three selected "
        "by batch_select_indices, {steps} decode steps"
    )
    return _moved(bench, what, change, "batch_repeat_interleave")


def _moved(bench: Bench, what: str, change: Callable[[Any, Tensor], None], method: str) -> Check:
    prompt, length = bench.short(extra=1)
    start = prompt + 1
    before = bench.batch(*(bench.row(n, start) for n in range(ROWS)))
    # Its inverse is another one, which a cache that moves rows the wrong way would make.
    rows = torch.tensor([2, 0, 1], device=bench.runner.device)
    after = bench.batch(*(bench.row(ROWS + n, length + 3)[3 + start :] for n in range(ROWS)))
    reference = bench.reference(torch.cat([before[rows], after], 1), first=prompt)
    fed = bench.decoded(before, prompt)
    if why := refusal(fed.cache, method):
        raise NotRunError(why)
    change(fed.cache, rows)
    fed.holds(before[rows])
    fed.feed(after)

    def hint(_: Errors) -> str:
        if method != "reorder_cache":
            return f"{method} or batch_select_indices gives other rows than those asked for"
        unmoved = bench.decoded(torch.cat([before, after], 1), start).logits[:, 1:]
        kept = apart(fed.logits, unmoved) <= bench.beyond * reference.null
        return f"{method} leaves the rows where they were" if kept else f"{method} moves some of the cache's tensors only"

    theirs = reference.logits[:, start:]
    reach = min(apart(theirs, theirs[rows]), bench.reach)
    said = what.format(prompt=prompt, steps=after.shape[1])
    return bench.judge([fed], f"{said}, against recomputation", hint, reference, reach)


# generate() ------------------------------------------------------------------------------------------------------------


def generate(bench: Bench) -> Check:
    """Greedy generation of one prompt."""
    prompt = bench.short()[0]
    tokens = bench.tokens(prompt)
    return _checked(bench, tokens, torch.ones_like(tokens), f"a prompt of {prompt} tokens")


def generate_padded(bench: Bench) -> Check:
    """Greedy generation of a left-padded batch."""
    prompt = bench.short()[0]
    tokens, masking, what = _padded(bench, prompt, prompt)
    return _checked(bench, tokens, masking.mask, what)


def _checked(bench: Bench, tokens: Tensor, mask: Any, what: str) -> Check:
    runner, first = bench.runner, tokens.shape[1] - 1
    if runner.adapter.plain and not can_generate(runner.model):
        raise NotRunError(f"{type(runner.model).__name__} has no generate() of transformers'.")
    if bench.context < 1 + bench.steps:
        raise NotRunError(f"a context of {bench.context} positions has no room for {bench.steps} new tokens.")
    try:
        made = heard(bench, tokens, mask, "yes")
    except Exception:
        try:
            heard(bench, tokens, mask, "no")
        except Exception as error:
            raise PlainError.of(error, runner.model, f"generate() of {what} raises, without a cache too,") from error
        raise
    if all(call["input_ids"].shape[1] != 1 for call in made.calls[1:]):
        said = f"generate() of {what} feeds the whole prefix at every step, so there was no cached step to compare"
        raise UnclearError(f"{said}.")
    reference, reach = bench.reference(*made.fed, first), bench.reach
    logits, null = reference
    uncached = _uncached(bench, tokens, mask)
    beside = "" if uncached is None else f" (and {uncached:.1e} where it uses no cache)"
    if made.fed[1].mask is not None:
        (_, null), reach = unpadded(bench, *made.fed, reference, first)
    errors = Errors().add(made.logits, Recomputation(logits, null), first)
    said = f"generate() of {what}, {bench.steps} new tokens, against recomputation of the same tokens{beside}"
    return bench.settle(errors, said, lambda _: _cause(bench, made, logits, null), reach, uncached)


def _uncached(bench: Bench, tokens: Tensor, mask: Tensor) -> float | None:
    """How far ``generate()`` without a cache is from a recomputation of its own tokens; None where it cannot be run."""
    try:
        made = heard(bench, tokens, mask, "no")
    except Exception:
        return None
    return apart(made.logits, bench.runner.recompute(*made.fed)[:, tokens.shape[1] - 1 :])


# What is wrong -----------------------------------------------------------------------------------------------------------


def _cause(bench: Bench, made: Generated, theirs: Tensor, null: float) -> str:
    """What ``generate()`` gave the forward that a caller of the forward would not have."""
    told = _told(made, "prepare_inputs_for_generation" if bench.runner.adapter.plain else "generate()")
    if not told:
        return ""
    # The same tokens, fed with what they should have been fed with: what remains is not generate()'s.
    fed, masking = made.fed
    prompt = fed.shape[1] + 1 - bench.steps
    left = apart(bench.decoded(fed, prompt, masking).logits, theirs[:, prompt - 1 :])
    return f"{told}, and the forward is right when it is told so" if left <= bench.excused * null else told


def _told(made: Generated, who: str) -> str:
    mask, positions = made.mask, made.masking.positions
    start = 0
    for call in made.calls:
        tokens, told, hidden = call["input_ids"], call.get("position_ids"), call.get("attention_mask")
        stop = start + tokens.shape[1]
        if not torch.equal(tokens, made.tokens[:, start:stop]):
            return f"{who} feeds other tokens than those at position {start}"
        kept = mask[:, start:stop].bool()
        if told is not None and positions is not None:
            said = told.expand(*told.shape[:-2], *kept.shape)
            wrong = (said != positions[:, start:stop]) & kept
            if bool(wrong.any()):
                row, at = wrong.nonzero()[0].tolist()[-2:]
                right = int(positions[row, start + at])
                given = int(said.reshape(-1, *kept.shape)[0, row, at])
                return f"{who} gives position {given} to the token at position {right}"
        if hidden is not None and hidden.dim() == 2 and not torch.equal(hidden.bool(), mask[:, :stop].bool()):
            return f"{who} gives a wrong attention mask for the token at position {stop - 1}"
        if not call["cached"] and start:
            return "generate() does not pass the cache on"
        start = stop
    return ""
