"""One rung measured: free-running and given equal inputs, with the machine's kernels or with a fixed order of additions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.auditing.blocks import BlockHooks, BlockModel, Reference
from kvinterp.auditing.ladder import EMBEDDING, LOCAL, STEPS, Plan, PrecisionRun, band, dtype_name
from kvinterp.auditing.values import difference, first_nonfinite, first_wrong, logit_grid, row_errors
from kvinterp.models import Adapter
from kvinterp.paths.kernels import Kernels, Native

Part = tuple[int, str, int]
"""A block's layer (-1: embedding, the number of blocks: head), ``input`` or ``output``, and how often it had run before."""

Rows = dict[Part, Tensor]

Row = dict[str, Any]
"""A row of a table."""


def climb(
    adapter: Adapter,
    plan: Plan,
    kernels: Kernels | None = None,
    against: str = "prefix",
) -> PrecisionRun:
    """Runs one rung.

    Args:
        adapter: The model in the rung's dtype.
        plan: What to run.
        kernels: The kernel mode; default: the machine's own.
        against: ``"prefix"`` recomputes the prefix of every step, so that both sides look at as many keys. ``"whole"`` takes
            the row out of one forward of all tokens; right where a row's bits do not depend on the rows after it, which the
            null of each length's last step shows. The long decode stands beside that one forward wherever the nulls show that
            no more than rounding moves a row that is among more rows.
    """
    started = time.perf_counter()
    kernels = kernels or Native()
    name = dtype_name(adapter.dtype) + ("" if isinstance(kernels, Native) else f", {kernels}")
    run, hooks = PrecisionRun(name, adapter.dtype, kernels, plan=plan), BlockHooks(BlockModel(adapter, kernels))
    climbed = _Climb(run, hooks, against)
    with adapter.own_state([]), hooks.attached():
        for number in range(len(plan.prompts)):
            climbed.prompt(number)
    for table, rows in climbed.rows.items():
        setattr(run, table, pd.DataFrame(rows, columns=list(STEPS if table == "steps" else LOCAL)))
    run.seconds = time.perf_counter() - started
    return run


class _Climb:
    """What one rung shows, filled in prompt by prompt."""

    def __init__(self, run: PrecisionRun, hooks: BlockHooks, against: str) -> None:
        self.run, self.hooks, self.against, self.plan = run, hooks, against, run.plan
        self.rows: dict[str, list[Row]] = {"steps": [], "local": [], "sweep": [], "chunks": []}

    def prompt(self, number: int) -> None:
        """Every case of one prompt."""
        plan, run, hooks = self.plan, self.run, self.hooks
        reference = hooks.refer_to(plan.tokens(number, hooks.model.device))
        if not bool(reference.logits.isfinite().all()):
            self._not_finite(None)
            return
        run.largest_logit = max(run.largest_logit, reference.logits.abs().max().item())
        run.grid = logit_grid(reference.logits) if number == 0 or run.grid else ""
        for prefill in plan.lengths(number):
            self._prefill(number, prefill)
        if plan.chunk is not None and not run.nonfinite and _takes_chunks(hooks, plan.chunk):
            cache = hooks.feed(0, plan.chunk)[1]
            for start, stop in plan.pieces:
                mine, cache = _fed(hooks, start, stop, cache)
                self._keep("chunks", number, plan.chunk, _at_once(hooks, start, stop, self.against, mine))
        if plan.sweep is not None and not number and not run.nonfinite:
            most = band(run.dtype, hooks.model.adapter.facts.width)
            against = "whole" if all(row["null"] <= most for row in self.rows["local"]) else self.against
            fed = _fed_singly(hooks, plan.sweep, plan.length, hooks.feed(0, plan.sweep)[1])
            self._keep("sweep", number, plan.sweep, _singly(hooks, fed, plan.length, against))

    def _prefill(self, number: int, prefill: int) -> None:
        """One prompt length: free-running, given equal inputs token by token, and the rows of the prompt itself."""
        run, stop = self.run, prefill + self.plan.steps
        mine, cache = _fed(self.hooks, 0, prefill, None, "no")
        # Whether every block was given and returned the reference's rows, to the bit, all along.
        freely, equal = list[tuple[int, Rows]](), _is_reference(self.hooks, 0, prefill)
        for position, rows in _fed_singly(self.hooks, prefill, stop, cache, "no"):
            freely.append((position, rows))
            equal = equal and _is_reference(self.hooks, position, position + 1)
        free, layers, top = _free(self.hooks, freely, prefill, self.against)
        if any(math.isnan(row["max_abs"]) for row in free):
            self._not_finite(prefill)
            return
        self._keep("steps", number, prefill, free)
        # Of several cases the last that has something to show.
        if run.top.empty or bool(top["difference"].any()) or not bool(run.top["difference"].any()):
            run.layers, run.top = layers, top
        # Given the reference's rows a model that has them already would compute the same once more.
        fed: Iterable[tuple[int, Rows]] = freely
        if not equal:
            mine, cache = _fed(self.hooks, 0, prefill)
            fed = _fed_singly(self.hooks, prefill, stop, cache)
        self._keep("local", number, prefill, _singly(self.hooks, fed, stop, self.against))
        self._keep("chunks", number, prefill, _at_once(self.hooks, 0, prefill, self.against, mine))

    def _not_finite(self, prefill: int | None) -> None:
        tokens = self.hooks.reference.tokens
        self.run.nonfinite = self.run.nonfinite or first_nonfinite(self.hooks.model, tokens, prefill)

    def _keep(self, table: str, prompt: int, prefill: int, rows: Iterable[Row]) -> None:
        self.rows[table] += [{"prompt": prompt, "prefill": prefill, **row} for row in rows]


# Rows of every part -----------------------------------------------------------------------------------------------------


def _rows(source: BlockHooks | Reference, logits: Tensor, count: int | None = None, stop: int | None = None) -> Rows:
    """The newest row of what every part was given and returned, in that order, and of the logits.

    Args:
        source: The hooks after a forward, or a reference.
        logits: ``[position, vocabulary]`` of the same.
        count: So many newest rows instead, ``[row, width]``.
        stop: As if the tokens ended there.
    """
    rows: Rows = {}
    for (layer, nth), tensor in source.inputs.items():
        rows[(layer, "input", nth) if rows else (EMBEDDING, "output", 0)] = tensor
        if (layer, nth) in source.outputs:
            rows[layer, "output", nth] = source.outputs[layer, nth]
    rows[max((layer for layer, _ in source.inputs), default=-1) + 1, "output", 0] = logits
    rows = {part: tensor[..., :stop, :] for part, tensor in rows.items()}
    if count is None:
        return {part: tensor[..., -1, :].flatten().clone() for part, tensor in rows.items()}
    return {part: tensor[..., -count:, :].movedim(-2, 0).flatten(1).clone() for part, tensor in rows.items()}


def _whole(hooks: BlockHooks, stop: int, count: int | None = None) -> Rows:
    """The same rows out of the reference, as if its tokens ended at ``stop``."""
    return _rows(hooks.reference, hooks.reference.logits, count, stop)


def _again(hooks: BlockHooks, stop: int, equal_inputs: str) -> Rows:
    """The newest rows of a prefix recomputed, made once; the reference is that of all its tokens."""
    if stop == hooks.reference.tokens.shape[1]:
        return _whole(hooks, stop)
    known = hooks.reference.again
    if (equal_inputs, stop) not in known:
        known[equal_inputs, stop] = _rows(hooks, hooks.recompute(stop, equal_inputs)[0])
    return known[equal_inputs, stop]


def _fed(hooks: BlockHooks, start: int, stop: int, cache: Any = None, equal_inputs: str = "yes") -> tuple[Rows, Any]:
    """The rows of tokens that are fed at once, and the cache after them."""
    logits, cache = hooks.feed(start, stop, cache, equal_inputs)
    return _rows(hooks, logits[0], stop - start), cache


def _fed_singly(
    hooks: BlockHooks, prefill: int, stop: int, cache: Any, equal_inputs: str = "yes"
) -> Iterator[tuple[int, Rows]]:
    """Each position after the prefill, fed alone, with the newest row of every part."""
    for position in range(prefill, stop):
        logits, cache = hooks.feed(position, position + 1, cache, equal_inputs)
        yield position, _rows(hooks, logits[0])


def _is_reference(hooks: BlockHooks, start: int, stop: int) -> bool:
    reference = hooks.reference
    return all(
        call in mine and torch.equal(*(t.contiguous().view(torch.uint8) for t in (mine[call], rows[..., start:stop, :])))
        for mine, theirs in ((hooks.inputs, reference.inputs), (hooks.outputs, reference.outputs))
        for call, rows in theirs.items()
    )


# Given equal inputs -----------------------------------------------------------------------------------------------------


def _singly(hooks: BlockHooks, fed: Iterable[tuple[int, Rows]], stop: int, against: str) -> Iterator[Row]:
    """Every part's error given equal inputs, for each token fed one by one.

    Args:
        hooks: The model's hooks, attached, with their reference.
        fed: What the steps gave, each with its position.
        stop: Where the tokens end: of the last the prefix is recomputed in any case, as the null control.
        against: As in :func:`climb`.
    """
    for position, mine in fed:
        whole = _whole(hooks, position + 1)
        prefix = _again(hooks, position + 1, "yes") if against == "prefix" or position == stop - 1 else None
        where = {"start": position, "stop": position + 1, "position": position}
        for part, tensor in (prefix if prefix is not None and against == "prefix" else whole).items():
            apart = math.nan if prefix is None else difference(whole[part], prefix[part])
            error = difference(mine[part], tensor) if part in mine else math.inf
            yield {**where, "layer": part[0], "part": part[1], "error": error, "null": apart}


def _at_once(hooks: BlockHooks, start: int, stop: int, against: str, mine: Rows) -> list[Row]:
    """Every part's error given equal inputs in the rows of tokens that were fed at once: a prompt, or more on its cache.

    The recomputation has as many rows as the cache then holds, so that a prompt is compared among the same number of rows.
    """
    theirs, table = _whole(hooks, stop, stop - start), []
    if against == "prefix" and stop < hooks.reference.tokens.shape[1]:
        theirs = _rows(hooks, hooks.recompute(stop)[0], stop - start)
        hooks.reference.again.setdefault(("yes", stop), {part: rows[-1].clone() for part, rows in theirs.items()})
    for part, again in theirs.items():
        errors = row_errors(mine[part], again)
        first = first_wrong(errors) if bool(errors.max() > 0) else len(errors) - 1
        where = {"start": start, "stop": stop, "position": stop - len(errors) + first}
        table.append({**where, "layer": part[0], "part": part[1], "error": float(errors.max()), "null": math.nan})
    return table


def _takes_chunks(hooks: BlockHooks, start: int) -> bool:
    """Whether the model takes several tokens on a cache that is not empty; recurrent ones as a rule do not."""
    _, cache = hooks.feed(0, start)
    if any(hooks.model.states(cache, layer) for layer in range(len(hooks.model.blocks))):
        return False
    try:
        hooks.feed(start, start + 2, cache)
    # A model that refuses says so with whatever error its arithmetic meets first.
    except Exception:
        return False
    return True


# Free-running -----------------------------------------------------------------------------------------------------------


def _free(
    hooks: BlockHooks, fed: Iterable[tuple[int, Rows]], prefill: int, against: str
) -> tuple[list[Row], pd.DataFrame, pd.DataFrame]:
    """A row a step of the free-running logits, and the layers and the largest logits of one that has something to show."""
    steps, layers, top = [], pd.DataFrame(), pd.DataFrame()
    head, prefix = (len(hooks.model.blocks), "output", 0), against == "prefix"
    for position, mine in fed:
        theirs = _again(hooks, position + 1, "no") if prefix else _whole(hooks, position + 1)
        a, b = mine[head], theirs[head]
        sizes, kl = _sizes(a, b), float(metrics.kl_divergence(b, a))
        null = _sizes(b, hooks.reference.logits[position])["max_abs"] if prefix else math.nan
        steps.append({"position": position, **sizes, "kl": kl, "null_max_abs": null})
        # The last step that differs has something to show; among equal ones any is as good.
        if sizes["max_abs"] > 0 or position == prefill or not bool(top["difference"].any()):
            where = {"prefill": prefill, "position": position}
            outputs = [part for part in sorted(theirs) if part[1] == "output"][1:-1]  # The ends: embedding and logits.
            table = pd.DataFrame([{"layer": part[0], **_sizes(mine[part], theirs[part])} for part in outputs])
            worst, at = (a.double() - b.double()).abs().topk(min(5, len(a)))
            columns = {"index": at, "recompute": b.double()[at], "cached": a.double()[at], "difference": worst}
            shown = pd.DataFrame({name: tensor.tolist() for name, tensor in columns.items()})
            layers, top = table.assign(**where), shown.assign(**where)
    return steps, layers, top


def _sizes(a: Tensor, b: Tensor) -> dict[str, float]:
    gap = (a.double() - b.double()).abs()
    return {"max_abs": gap.max().item(), "mean_abs": gap.mean().item(), "relative": difference(a, b)}
