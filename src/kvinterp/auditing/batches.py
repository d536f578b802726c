"""Exercises of several rows at once: prompts side by side, left padding, rows reordered, repeated and selected."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from kvinterp.auditing.bench import Bench, Check, Errors, NotRunError, Reference, UnclearError, native_only, one_line
from kvinterp.auditing.blocks import STATES, Masking
from kvinterp.auditing.comparing import apart
from kvinterp.auditing.feeding import Runner, lacking
from kvinterp.models.native import text_config

PADS = (0, 4, 1)
"""Pads of each row of a left-padded batch."""
ROWS = len(PADS)
"""Rows of a batch: what is right for two may be wrong for more, as an exchange of two rows is its own inverse."""


def side_by_side(bench: Bench) -> Check:
    """Three prompts of the same length in one batch, against each alone."""
    runner = bench.runner
    prompt, length = bench.short()
    tokens = runner.tokens(*(bench.row(n, length) for n in range(ROWS)))
    together = bench.reference(tokens)
    alone = torch.cat([runner.recompute(tokens[n : n + 1]) for n in range(ROWS)])
    null = max(together.null, apart(together.logits, alone))
    if null > bench.beyond * together.null and null > bench.reach / bench.beyond:
        said = f"without a cache a batch is off by {null:.1e} from each prompt alone, so nothing can be said of the cache"
        raise UnclearError(f"{said}.", null)
    made, _ = runner.decode(tokens, prompt)

    def hint() -> str:
        mixed = _mixed(tokens, made, lambda other: runner.decode(other, prompt)[0], bench.beyond * null)
        return "a row reads another row's cache" if mixed else ""

    what = (
        f"three prompts of {prompt} tokens side by side, {length - prompt} decode steps, against each alone without a cache"
    )
    return bench.settle(Errors().add(made, Reference(alone, null), prompt - 1), what, hint)


def _mixed(tokens: Tensor, made: Tensor, decode: Callable[[Tensor], Tensor], limit: float) -> bool:
    """Whether other tokens in one row change the logits of another."""
    for row in range(len(tokens)):
        other = tokens.clone()
        other[row] = other[row].roll(1)
        others = [n for n in range(len(tokens)) if n != row]
        if apart(decode(other)[others], made[others]) > limit:
            return True
    return False


# Left padding ------------------------------------------------------------------------------------------------------------


class Padded:
    """Prompts of different lengths, the shorter ones padded on the left as ``generate()`` pads them.

    Args:
        bench: Has the prompts.
        length: Of all rows.
        prompt: The prompt's length, pads counted.

    Attributes:
        tokens: ``[3, length]``.
        mask: 0 where there is a pad.
        positions: Counted without the pads.
        masking: Both.
        pads: How many pads each row has.
        masked: Whether the decode steps are given the mask.

    Raises:
        NotRunError: There is no room for a pad.
    """

    def __init__(self, bench: Bench, length: int, prompt: int) -> None:
        if prompt < 2:
            raise NotRunError(f"a context of {bench.context} positions has no room for a pad.")
        self.runner, self.prompt, self.masked = bench.runner, prompt, True
        self.pads = [min(pads, prompt - 1) for pads in PADS]
        known = getattr(text_config(self.runner.adapter.source), "pad_token_id", None)
        pad = known if isinstance(known, int) and 0 <= known < self.runner.adapter.facts.vocabulary else 0
        self.tokens = self.runner.tokens(*([pad] * p + bench.row(n, length - p) for n, p in enumerate(self.pads)))
        self.mask = torch.ones_like(self.tokens)
        for row, pads in zip(self.mask, self.pads, strict=True):
            row[:pads] = 0
        self.positions = (self.mask.cumsum(-1) - 1).clamp(min=0)
        self.masking = Masking(self.mask, self.positions)

    @property
    def lengths(self) -> str:
        """How long the prompts are, without their pads."""
        first, *more, last = (self.prompt - pads for pads in self.pads)
        return f"{', '.join(map(str, (first, *more)))} and {last}"

    def decode(self, mask: Tensor | None = None, positions: Tensor | None = None, tokens: Tensor | None = None) -> Tensor:
        """Logits from the prompt's last row on; what is given holds for the decode steps only."""
        tokens, prompt = self.tokens if tokens is None else tokens, self.prompt
        logits, cache = self.runner.feed(tokens[:, :prompt], None, 0, self.masking.of(0, prompt))
        seen = (self.mask if mask is None else mask) if self.masked else None
        later = Masking(seen, self.positions if positions is None else positions)
        made, _ = self.runner.singly(tokens, prompt, cache, later)
        return torch.cat([logits[:, -1:], made], 1)

    def cause(self, made: Tensor, limit: float) -> str:
        """What the decode steps do not look at, shown by feeding it otherwise and getting the same bits."""
        if _mixed(self.tokens, made, lambda other: self.decode(tokens=other), limit):
            return "a row reads another row's cache"
        if self.masked and torch.equal(self.decode(mask=torch.ones_like(self.mask)), made):
            return "the attention mask is ignored in decode"
        if not self.masked and apart(self.runner.decode(self.tokens, self.prompt, self.masking)[0], made) > limit:
            return "prepare_inputs_for_generation drops the attention mask in decode"
        counted = torch.arange(self.tokens.shape[1], device=self.tokens.device).expand_as(self.positions)
        mixed = self.positions.clone()
        mixed[:, self.prompt :] = counted[:, self.prompt :]
        # The recomputation in which the decoded tokens alone are numbered with the pads is what such a bug computes.
        wrong = self.runner.recompute(self.tokens, Masking(self.mask, mixed))[:, self.prompt - 1 :]
        deaf = "position_ids" in self.runner.takes and torch.equal(self.decode(positions=mixed), made)
        return "positions ignore the padding" if deaf or apart(made, wrong) <= limit else ""

    def wants_mask(self) -> bool:
        """Whether the model wants the mask in decode; recurrent ones as a rule drop it once the prompt is read."""
        prepare = getattr(self.runner.model, "prepare_inputs_for_generation", None)
        if prepare is None:
            return True
        try:
            made = prepare(
                self.tokens,
                next_sequence_length=1,
                attention_mask=self.mask,
                use_cache=True,
                is_first_iteration=False,
                **{self.runner.cache_name: self.runner.new_cache()},
            )
        # Code of a checkpoint's own may want other arguments: then the mask is given, as the forward's signature says.
        except Exception:
            return True
        return made.get("attention_mask") is not None


def unpadded(runner: Runner, tokens: Tensor, mask: Tensor, positions: Tensor, first: int) -> tuple[Tensor, Tensor]:
    """Logits from position ``first`` on: each row recomputed alone and without its pads, and the batch as if it had none."""
    pads = (mask == 0).sum(-1).tolist()
    alone = [runner.recompute(tokens[n : n + 1, p:])[:, first - p :] for n, p in enumerate(pads)]
    # Ones, not None: without a mask transformers takes positions that begin anew for several texts packed into one row.
    return torch.cat(alone), runner.recompute(tokens, Masking(torch.ones_like(mask), positions))[:, first:]


def no_padding(off: float) -> UnclearError:
    """A check of padding says nothing of the cache where the model does not do padding without one."""
    said = f"without a cache a left-padded batch is off by {off:.1e} from each prompt alone"
    return UnclearError(f"{said}: this model, called with a mask and positions, does not do padding.", off)


def left_padding(bench: Bench) -> Check:
    """A left-padded batch, against its recomputation and each prompt alone."""
    runner = bench.runner
    if runner.kind != "native":
        raise native_only(f"a model of kind {runner.kind} is fed without a mask here")
    if "attention_mask" not in runner.takes:
        raise NotRunError(f"{type(runner.model).__name__} takes no attention_mask, so it cannot be told of padding.")
    prompt, length = bench.short()
    given, first = Padded(bench, length, prompt), prompt - 1
    reference = bench.reference(given.tokens, given.masking)
    theirs, unmasked = unpadded(runner, given.tokens, given.mask, given.positions, first)
    null = max(reference.null, apart(reference.logits[:, first:], theirs))
    reach = apart(unmasked, theirs)
    if null > bench.beyond * reference.null and null > min(reach, bench.reach) / bench.beyond:
        raise no_padding(null)
    given.masked = given.wants_mask()
    made = given.decode()
    errors = Errors().add(made, Reference(theirs, null), first, first).add(made, reference, first)
    what = (
        f"prompts of {given.lengths} tokens in a left-padded batch, {length - prompt} decode steps, "
        "against the padded batch and each prompt alone without a cache"
    )
    return bench.settle(errors, what, lambda: given.cause(made, bench.beyond * null), reach)


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
    runner = bench.runner
    if runner.kind == "hooked":
        raise native_only("a HookedTransformer's cache has no rows to move")
    prompt, length = bench.short(extra=1)
    start = prompt + 1
    before = runner.tokens(*(bench.row(n, start) for n in range(ROWS)))
    # Its inverse is another one, which a cache that moves rows the wrong way would make.
    rows = torch.tensor([2, 0, 1], device=runner.device)
    after = runner.tokens(*(bench.row(ROWS + n, length + 3)[3 + start :] for n in range(ROWS)))
    whole = torch.cat([before[rows], after], 1)
    reference = bench.reference(whole, rows=slice(prompt, None))
    _, cache = runner.decode(before, prompt)
    if why := lacking(cache, method):
        raise NotRunError(why)
    half = next((layer for layer in (cache, *getattr(cache, "layers", [])) if _inherits_half(layer, method)), None)
    if half is not None:
        raise NotRunError(
            f"{method}() of {type(half).__name__}, of this model's cache, moves keys and values only and leaves its states "
            "where they are: it is not to be called on this model."
        )
    try:
        change(cache, rows)
    # A cache that refuses says why.
    except (NotImplementedError, ValueError) as error:
        raise NotRunError(f"this model's cache refuses {method}() ({one_line(error)}).") from error
    mine, _ = runner.singly(whole, start, cache)
    theirs = reference.logits[:, start:]

    def hint() -> str:
        if method != "reorder_cache":
            return f"{method} or batch_select_indices gives other rows than those asked for"
        unmoved, _ = runner.decode(torch.cat([before, after], 1), start)
        kept = apart(mine, unmoved[:, 1:]) <= bench.beyond * reference.null
        return f"{method} leaves the rows where they were" if kept else f"{method} moves some of the cache's tensors only"

    said = what.format(prompt=prompt, steps=whole.shape[1] - start)
    reach = min(apart(theirs, theirs[rows]), bench.reach)
    return bench.settle(Errors().add(mine, reference, start), f"{said}, against recomputation", hint, reach)


def _inherits_half(layer: Any, method: str) -> bool:
    """Whether a layer or cache that keeps states beside keys and values has the method of its keys and values alone."""
    from transformers.cache_utils import Cache, DynamicLayer

    if isinstance(layer, Cache):
        own = {name for name, value in vars(layer).items() if isinstance(value, list) and name != "layers"}
        return bool(own) and getattr(type(layer), method) is getattr(Cache, method)
    keeps_states = any(getattr(layer, name, None) for name in STATES)
    return keeps_states and getattr(type(layer), method) is getattr(DynamicLayer, method, None)
