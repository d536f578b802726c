"""Exercises of several rows at once: prompts side by side, left padding, rows reordered, repeated and selected."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.bench import UNCLEAR, Bench, Check, native_only, not_run, one_line
from kvinterp.auditing.differences import Errors, apart, by_position
from kvinterp.auditing.feeding import Runner, lacking
from kvinterp.auditing.subject import STATES
from kvinterp.models.native import text_config

__all__ = ["beams", "left_padding", "no_padding", "padded", "repeated_rows", "side_by_side", "unpadded"]

PADS = 4


def side_by_side(bench: Bench) -> Check:
    """Two prompts of the same length in one batch, against each alone."""
    name, runner = "batch", bench.runner
    prompt, length = bench.short()
    tokens = runner.tokens(bench.row(0, length), bench.row(1, length))
    together = bench.reference(tokens)
    alone = torch.cat([runner.recompute(tokens[n : n + 1]) for n in range(2)])
    null = max(together.null, apart(together.logits, alone))
    if null > bench.beyond * together.null and null > bench.reach / bench.beyond:
        said = f"without a cache a batch is off by {null:.1e} from each prompt alone, so nothing can be said of the cache"
        return Check(name, UNCLEAR, f"{said}.", None, null)
    made, _ = runner.decode(tokens, prompt)

    def hint() -> str:
        mixed = _mixed(tokens, made, lambda other: runner.decode(other, prompt)[0], bench.beyond * null)
        return "a row reads another row's cache" if mixed else ""

    errors = by_position(made, alone[:, prompt - 1 :], prompt - 1)
    what = (
        f"two prompts of {prompt} tokens side by side, {length - prompt} decode steps, against each alone without a cache"
    )
    return bench.settle(name, errors, null, what, hint)


def _mixed(tokens: Tensor, made: Tensor, decode: Callable[[Tensor], Tensor], limit: float) -> bool:
    """Whether other tokens in one of two rows change the logits of the other row."""
    for row in range(2):
        other = tokens.clone()
        other[row] = other[row].roll(1)
        if apart(decode(other)[1 - row], made[1 - row]) > limit:
            return True
    return False


# Left padding ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Padded:
    """Two prompts of different lengths, the shorter one padded on the left as ``generate()`` pads it.

    Attributes:
        tokens: ``[2, length]``.
        mask: 0 where there is a pad.
        positions: Counted without the pads.
        prompt: The prompt's length, pads counted.
        pads: How many pads the second row has.
    """

    tokens: Tensor
    mask: Tensor
    positions: Tensor
    prompt: int
    pads: int


def padded(bench: Bench, length: int, prompt: int) -> Padded:
    """Left-padded prompts."""
    pads = min(PADS, prompt - 1)
    known = getattr(text_config(bench.runner.adapter.source), "pad_token_id", None)
    pad = known if isinstance(known, int) and 0 <= known < bench.runner.adapter.facts.vocabulary else 0
    tokens = bench.runner.tokens(bench.row(0, length), [pad] * pads + bench.row(1, length - pads))
    mask = torch.ones_like(tokens)
    mask[1, :pads] = 0
    return Padded(tokens, mask, (mask.cumsum(-1) - 1).clamp(min=0), prompt, pads)


def unpadded(runner: Runner, tokens: Tensor, mask: Tensor, first: int) -> Tensor:
    """Logits from position ``first`` on, each row recomputed alone and without its pads."""
    pads = (mask == 0).sum(-1).tolist()
    return torch.cat([runner.recompute(tokens[n : n + 1, p:])[:, first - p :] for n, p in enumerate(pads)])


def no_padding(name: str, off: float) -> Check:
    """A check of padding that says nothing of the cache, because the model does not do padding without one."""
    said = f"without a cache a left-padded batch is off by {off:.1e} from each prompt alone"
    return Check(name, UNCLEAR, f"{said}: this model, called with a mask and positions, does not do padding.", None, off)


def left_padding(bench: Bench) -> Check:
    """A left-padded batch, against its recomputation and each prompt alone."""
    name, runner = "left padding", bench.runner
    if runner.kind != "native":
        return native_only(name, f"a model of kind {runner.kind} is fed without a mask here")
    if "attention_mask" not in runner.takes:
        return not_run(name, f"{type(runner.model).__name__} takes no attention_mask, so it cannot be told of padding.")
    prompt, length = bench.short()
    if prompt < 2:
        return not_run(name, f"a context of {bench.context} positions has no room for a pad.")
    given = padded(bench, length, prompt)
    reference = bench.reference(given.tokens, given.mask, given.positions)
    theirs = unpadded(runner, given.tokens, given.mask, prompt - 1)
    null = max(reference.null, apart(reference.logits[:, prompt - 1 :], theirs))
    # Ones, not None: without a mask transformers takes positions that begin anew for several texts packed into one row.
    unmasked = runner.recompute(given.tokens, torch.ones_like(given.mask), given.positions)[:, prompt - 1 :]
    reach = apart(unmasked, theirs)
    if null > bench.beyond * reference.null and null > min(reach, bench.reach) / bench.beyond:
        return no_padding(name, null)
    feeder = Feeder(runner, given, _keeps_mask(bench, given))
    made = feeder.decode()
    errors = Errors(by_position(made, theirs, prompt - 1))
    errors.add(made, reference.logits, prompt - 1)
    what = (
        f"two prompts of {prompt} and {prompt - given.pads} tokens in a left-padded batch, {length - prompt} decode steps, "
        "against the padded batch and each prompt alone without a cache"
    )
    return bench.settle(name, errors, null, what, lambda: feeder.cause(made, bench.beyond * null), reach=reach)


@dataclasses.dataclass(frozen=True)
class Feeder:
    """Decodes a padded batch, and finds out what it does not look at.

    Attributes:
        runner: Feeds the model.
        given: The batch.
        masked: Whether the decode steps are given the mask.
    """

    runner: Runner
    given: Padded
    masked: bool

    def decode(self, mask: Tensor | None = None, positions: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Logits from the prompt's last row on; what is given holds for the decode steps only."""
        given, prompt = self.given, self.given.prompt
        tokens = given.tokens if tokens is None else tokens
        logits, cache = self.runner.feed(tokens[:, :prompt], None, given.mask[:, :prompt], given.positions[:, :prompt])
        seen = (given.mask if mask is None else mask) if self.masked else None
        made, _ = self.runner.singly(tokens, prompt, cache, seen, given.positions if positions is None else positions)
        return torch.stack([logits[:, -1], *made], 1)

    def cause(self, made: Tensor, limit: float) -> str:
        """What the decode steps do not look at, shown by feeding it otherwise and getting the same bits."""
        given = self.given
        if _mixed(given.tokens, made, lambda other: self.decode(tokens=other), limit):
            return "a row reads another row's cache"
        if self.masked and torch.equal(self.decode(mask=torch.ones_like(given.mask)), made):
            return "the attention mask is ignored in decode"
        if not self.masked and apart(dataclasses.replace(self, masked=True).decode(), made) > limit:
            return "prepare_inputs_for_generation drops the attention mask in decode"
        counted = torch.arange(given.tokens.shape[1], device=given.tokens.device).expand_as(given.positions)
        mixed = given.positions.clone()
        mixed[:, given.prompt :] = counted[:, given.prompt :]
        # The recomputation in which the decoded tokens alone are numbered with the pads is what such a bug computes.
        wrong = self.runner.recompute(given.tokens, given.mask, mixed)[:, given.prompt - 1 :]
        deaf = "position_ids" in self.runner.takes and torch.equal(self.decode(positions=mixed), made)
        if deaf or apart(made, wrong) <= limit:
            return "positions ignore the padding"
        return ""


def _keeps_mask(bench: Bench, given: Padded) -> bool:
    """Whether the model wants the mask in decode; recurrent ones as a rule drop it once the prompt is read."""
    prepare = getattr(bench.runner.model, "prepare_inputs_for_generation", None)
    if prepare is None:
        return True
    try:
        made = prepare(
            given.tokens,
            next_sequence_length=1,
            attention_mask=given.mask,
            use_cache=True,
            is_first_iteration=False,
            **{bench.runner.subject.cache_name: bench.runner.subject.new_cache()},
        )
    # Code of a checkpoint's own may want other arguments: then the mask is given, as the forward's signature says.
    except Exception:
        return True
    return made.get("attention_mask") is not None


# Rows of a cache moved about ---------------------------------------------------------------------------------------------


def beams(bench: Bench) -> Check:
    """A cache whose rows change places, as in beam search."""
    what = "two prompts of {prompt} tokens, a step, the rows of the cache exchanged by reorder_cache, {steps} decode steps"
    return _moved(bench, "beams reordered", what, lambda cache, rows: cache.reorder_cache(rows), "reorder_cache")


def repeated_rows(bench: Bench) -> Check:
    """A cache whose rows are repeated, and of which some are then selected, as in contrastive search and sampling."""

    def change(cache: Any, rows: Tensor) -> None:
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([2, 1], device=rows.device))

    what = (
        "two prompts of {prompt} tokens, a step, the rows of the cache repeated by batch_repeat_interleave and two selected "
        "by batch_select_indices, {steps} decode steps"
    )
    return _moved(bench, "rows repeated and selected", what, change, "batch_repeat_interleave")


def _moved(bench: Bench, name: str, what: str, change: Callable[[Any, Tensor], None], method: str) -> Check:
    runner = bench.runner
    if runner.kind == "hooked":
        return native_only(name, "a HookedTransformer's cache has no rows to move")
    prompt, length = bench.short(extra=1)
    start = prompt + 1
    before = runner.tokens(bench.row(0, start), bench.row(1, start))
    rows = torch.tensor([1, 0], device=runner.device)
    after = runner.tokens(*(bench.row(n, length + 3)[3 + start :] for n in (2, 3)))
    whole = torch.cat([before[rows], after], 1)
    reference = bench.reference(whole, rows=slice(prompt, None))
    _, cache = runner.decode(before, prompt)
    if why := lacking(cache, method):
        return not_run(name, why)
    layers = getattr(cache, "layers", [])
    half = next((layer for layer in (cache, *layers) if _inherits_half(layer, method)), None)
    if half is not None:
        why = (
            f"{method}() of {type(half).__name__}, of this model's cache, moves keys and values only and leaves its states"
        )
        return not_run(name, f"{why} where they are: it is not to be called on this model.")
    try:
        change(cache, rows)
    # A cache that refuses says why.
    except (NotImplementedError, ValueError) as error:
        return not_run(name, f"this model's cache refuses {method}() ({one_line(error)}).")
    made, _ = runner.singly(whole, start, cache)
    mine, theirs = torch.stack(made, 1), reference.logits[:, start:]

    def hint() -> str:
        unmoved, _ = runner.decode(torch.cat([before, after], 1), start)
        kept = apart(mine, unmoved[:, 1:]) <= bench.beyond * reference.null
        if method == "reorder_cache":
            return (
                f"{method} leaves the rows where they were" if kept else f"{method} moves some of the cache's tensors only"
            )
        return f"{method} or batch_select_indices gives other rows than those asked for"

    errors = by_position(mine, theirs, start)
    steps = what.format(prompt=prompt, steps=whole.shape[1] - start)
    reach = min(apart(theirs, reference.logits[[1, 0], start:]), bench.reach)
    return bench.settle(name, errors, reference.null, f"{steps}, against recomputation", hint, reach)


def _inherits_half(layer: Any, method: str) -> bool:
    """Whether a layer or cache that keeps states beside keys and values has the method of its keys and values alone."""
    from transformers.cache_utils import Cache, DynamicLayer

    if isinstance(layer, Cache):
        own = {name for name, value in vars(layer).items() if isinstance(value, list) and name != "layers"}
        return bool(own) and getattr(type(layer), method) is getattr(Cache, method)
    keeps_states = any(getattr(layer, name, None) for name in STATES)
    return keeps_states and getattr(type(layer), method) is getattr(DynamicLayer, method, None)
