"""One precision measured: free-running and given equal inputs, with the machine's kernels or with a
fixed order of additions.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.auditing.blocks import BlockHooks, BlockModel, Reference
from kvinterp.auditing.ladder import (
    EMBEDDING,
    LOCAL,
    NORMED,
    STEPS,
    Plan,
    PrecisionRun,
    band,
    dtype_name,
)
from kvinterp.auditing.values import (
    difference,
    first_nonfinite,
    first_wrong,
    logit_grid,
    row_errors,
)
from kvinterp.models import Adapter
from kvinterp.paths.kernels import Kernels, Native

Part = tuple[int, str, int]
"""A block's layer (-1: embedding, the number of blocks: head), ``input``, ``output`` or
:data:`NORMED`, and how often it had run before."""

Rows = dict[Part, Tensor]

Piece = tuple[int, int, Rows]
"""Where tokens that are fed at once begin and end, and their rows."""

Row = dict[str, Any]
"""A row of a table."""


def measure_precision(
    adapter: Adapter,
    plan: Plan,
    kernels: Kernels | None = None,
    against: str = "prefix",
) -> PrecisionRun:
    """Runs one precision.

    Args:
        adapter: The model in the precision's dtype.
        plan: What to run.
        kernels: The kernel mode; default: the machine's own.
        against: ``"prefix"`` recomputes the prefix of every step, so that both sides look at as
            many keys. ``"whole"`` takes the row out of one forward of all tokens; right where a
            row's bits do not depend on the rows after it, which the null of each length's last step
            shows. The long decode stands beside that one forward wherever the nulls show that no
            more than rounding moves a row that is among more rows.
    """
    started = time.perf_counter()
    kernels = kernels or Native()
    name = dtype_name(adapter.dtype) + ("" if isinstance(kernels, Native) else f", {kernels}")
    run, hooks = (
        PrecisionRun(name, adapter.dtype, plan=plan),
        BlockHooks(BlockModel(adapter, kernels)),
    )
    measured = _Measurement(run, hooks, against)
    with adapter.own_state([]), hooks.attached():
        for number in range(len(plan.prompts)):
            measured.prompt(number)
    for table, rows in measured.rows.items():
        setattr(run, table, pd.DataFrame(rows, columns=list(STEPS if table == "steps" else LOCAL)))
    run.seconds = time.perf_counter() - started
    return run


class _Measurement:
    """What one precision shows, filled in prompt by prompt."""

    def __init__(self, run: PrecisionRun, hooks: BlockHooks, against: str) -> None:
        self.run, self.hooks, self.against, self.plan = run, hooks, against, run.plan
        self.rows: dict[str, list[Row]] = {"steps": [], "local": [], "sweep": [], "chunks": []}
        self.again: dict[tuple[int, str], Rows] = {}

    def prompt(self, number: int) -> None:
        """Every case of one prompt."""
        plan, run = self.plan, self.run
        reference = self.hooks.refer_to(plan.tokens(number, self.hooks.model.device))
        self.again = {}
        if not bool(reference.logits.isfinite().all()):
            self._not_finite(None)
            return
        run.largest_logit = max(run.largest_logit, reference.logits.abs().max().item())
        run.grid = logit_grid(reference.logits) if number == 0 or run.grid else ""
        for prefill in plan.lengths(number):
            self._prefill(number, prefill)
        if run.nonfinite:
            return
        if plan.chunk is not None and self._takes_chunks(plan.chunk):
            for piece in itertools.islice(self._fed(plan.chunks(plan.chunk)), 1, None):
                self._keep("chunks", number, plan.chunk, self._errors(*piece))
        if plan.sweep is not None and not number:
            most = band(run.dtype, self.hooks.model.adapter.facts.width)
            within = all(row["null"] <= most for row in self.rows["local"])
            against = "whole" if within else self.against
            for piece in itertools.islice(
                self._fed([0, *range(plan.sweep, plan.length + 1)]), 1, None
            ):
                self._keep("sweep", number, plan.sweep, self._errors(*piece, plan.length, against))

    def _prefill(self, number: int, prefill: int) -> None:
        """One prompt length: free-running, given equal inputs token by token, and the rows of the
        prompt itself.
        """
        run, stop = self.run, prefill + self.plan.steps
        ends = [0, *range(prefill, stop + 1)]
        # Whether every block was given and returned the reference's rows, to the bit, all along.
        freely, equal = list[Piece](), True
        for piece in self._fed(ends, "no"):
            freely.append(piece)
            equal = equal and self._is_reference(*piece[:2])
        free, layers, top = self._free(freely[1:], prefill)
        if any(math.isnan(row["max_abs"]) for row in free):
            self._not_finite(prefill)
            return
        self._keep("steps", number, prefill, free)
        # The last of several cases that has something to show.
        if run.top.empty or bool(top["difference"].any()) or not bool(run.top["difference"].any()):
            run.layers, run.top = layers, top
        # Given the reference's rows a model that has them already would compute the same once more.
        for piece in freely if equal else self._fed(ends):
            self._keep(
                "local" if piece[0] else "chunks", number, prefill, self._errors(*piece, stop)
            )

    def _not_finite(self, prefill: int | None) -> None:
        tokens = self.hooks.reference.tokens
        self.run.nonfinite = self.run.nonfinite or first_nonfinite(
            self.hooks.model, tokens, prefill
        )

    def _keep(self, table: str, prompt: int, prefill: int, rows: Iterable[Row]) -> None:
        self.rows[table] += [{"prompt": prompt, "prefill": prefill, **row} for row in rows]

    # Rows of every part ---------------------------------------------------------------------------

    def _fed(self, ends: Sequence[int], equal_inputs: str = "yes") -> Iterator[Piece]:
        """What lies between these ends, piece after piece on one cache."""
        cache = None
        for start, stop in itertools.pairwise(ends):
            logits, cache = self.hooks.feed(start, stop, cache, equal_inputs)
            yield start, stop, self._rows(self.hooks, logits[0], stop - start)

    def _rows(
        self, source: BlockHooks | Reference, logits: Tensor, count: int, stop: int | None = None
    ) -> Rows:
        """The newest rows of what every part was given and returned, in that order, and of the
        logits, ``[row, width]``. They stand behind the last block, whether or not it ran: a model
        may skip one, as Mllama does its cross-attention without an image.

        Args:
            source: The hooks after a forward, or a reference.
            logits: ``[position, vocabulary]`` of the same.
            count: How many.
            stop: As if the tokens ended there.
        """
        rows: Rows = {}
        for (layer, nth), tensor in source.inputs.items():
            rows[(layer, "input", nth) if rows else (EMBEDDING, "output", 0)] = tensor
            if (layer, nth) in source.outputs:
                rows[layer, "output", nth] = source.outputs[layer, nth]
        head = len(self.hooks.model.blocks)
        if source.normed is not None:
            rows[head, NORMED, 0] = source.normed
        rows[head, "output", 0] = logits
        newest = {part: tensor[..., :stop, :][..., -count:, :] for part, tensor in rows.items()}
        return {part: tensor.movedim(-2, 0).flatten(1).clone() for part, tensor in newest.items()}

    def _whole(self, stop: int, count: int = 1) -> Rows:
        """The newest rows of the reference, as if its tokens ended at ``stop``."""
        return self._rows(self.hooks.reference, self.hooks.reference.logits, count, stop)

    def _prefix(self, stop: int, equal_inputs: str = "yes", count: int = 1) -> Rows:
        """The newest rows of a prefix recomputed, once where it can be; the reference is that of
        all its tokens.
        """
        if stop == self.plan.length:
            return self._whole(stop, count)
        made = stop, equal_inputs
        if made not in self.again or len(next(iter(self.again[made].values()))) < count:
            # Every row of a prompt of its own is asked for, too.
            rows = stop if stop in self.plan.prefills and equal_inputs == "yes" else count
            self.again[made] = self._rows(
                self.hooks, self.hooks.recompute(stop, equal_inputs)[0], rows
            )
        return {part: rows[-count:] for part, rows in self.again[made].items()}

    def _is_reference(self, start: int, stop: int) -> bool:
        hooks, reference = self.hooks, self.hooks.reference
        return all(
            call in mine
            and torch.equal(
                *(t.contiguous().view(torch.uint8) for t in (mine[call], rows[..., start:stop, :]))
            )
            for mine, theirs in (
                (hooks.inputs, reference.inputs),
                (hooks.outputs, reference.outputs),
            )
            for call, rows in theirs.items()
        )

    def _takes_chunks(self, start: int) -> bool:
        """Whether the model takes several tokens on a cache that is not empty; recurrent ones as a
        rule do not.
        """
        _, cache = self.hooks.feed(0, start)
        if any(
            self.hooks.model.states(cache, layer) for layer in range(len(self.hooks.model.blocks))
        ):
            return False
        try:
            self.hooks.feed(start, start + 2, cache)
        # A model that refuses says so with whatever error its arithmetic meets first.
        except Exception:
            return False
        return True

    # What differs ---------------------------------------------------------------------------------

    def _errors(
        self, start: int, stop: int, mine: Rows, last: int = 0, against: str = ""
    ) -> Iterator[Row]:
        """Every part's error given equal inputs, in the rows of tokens fed at once: one, a prompt,
        or more on its cache.

        Args:
            start, stop: Where the tokens begin and end.
            mine: What feeding them gave.
            last: Where they end for the last time: there the prefix is recomputed in any case, as
                the null control.
            against: As in :func:`measure_precision`. A prefix has as many rows as the cache then holds, so that
                a prompt is compared among the same number of rows.
        """
        count, against = stop - start, against or self.against
        whole = self._whole(stop, count)
        prefix = self._prefix(stop, count=count) if against == "prefix" or stop == last else None
        theirs = whole if prefix is None or against == "whole" else prefix
        for part, again in theirs.items():
            if part[1] == NORMED:
                continue  # The head's error has the final norm's in it.
            errors = (
                row_errors(mine[part], again)
                if part in mine
                else again.new_full((count,), math.inf)
            )
            first = first_wrong(errors) if bool(errors.max() > 0) else count - 1
            where = {
                "start": start,
                "stop": stop,
                "position": start + first,
                "layer": part[0],
                "part": part[1],
            }
            apart = (
                math.nan if prefix is None or count > 1 else difference(whole[part], prefix[part])
            )
            yield {**where, "error": float(errors.max()), "null": apart}

    def _free(
        self, fed: Iterable[Piece], prefill: int
    ) -> tuple[list[Row], pd.DataFrame, pd.DataFrame]:
        """A row a step of the free-running logits, and the layers and the largest logits of one
        that has something to show.
        """
        steps, layers, top = [], pd.DataFrame(), pd.DataFrame()
        head, prefix = (len(self.hooks.model.blocks), "output", 0), self.against == "prefix"
        for position, stop, mine in fed:
            theirs = self._prefix(stop, "no") if prefix else self._whole(stop)
            a, b = mine[head][0], theirs[head][0]
            sizes, kl = _sizes(a, b), float(metrics.kl_divergence(b, a))
            null = (
                _sizes(b, self.hooks.reference.logits[position])["max_abs"] if prefix else math.nan
            )
            steps.append({"position": position, **sizes, "kl": kl, "null_max_abs": null})
            # The last step that differs has something to show; among equal ones any is as good.
            if sizes["max_abs"] > 0 or position == prefill or not bool(top["difference"].any()):
                where = {"prefill": prefill, "position": position}
                outputs = [part for part in sorted(theirs) if part[1] != "input"]
                table = pd.DataFrame(
                    [
                        {"layer": part[0], "part": part[1], **_sizes(mine[part], theirs[part])}
                        for part in outputs
                    ]
                )
                worst, at = (a.double() - b.double()).abs().topk(min(5, len(a)))
                columns = {
                    "index": at,
                    "recompute": b.double()[at],
                    "cached": a.double()[at],
                    "difference": worst,
                }
                shown = pd.DataFrame({name: tensor.tolist() for name, tensor in columns.items()})
                if (adapter := self.hooks.model.adapter).tokenizer is not None:
                    shown["token"] = [adapter.decode([index]) for index in shown["index"]]
                layers, top = table.assign(**where), shown.assign(**where)
        return steps, layers, top


def _sizes(a: Tensor, b: Tensor) -> dict[str, float]:
    gap = (a.double() - b.double()).abs()
    return {
        "max_abs": gap.max().item(),
        "mean_abs": gap.mean().item(),
        "relative": difference(a, b),
    }
