"""One rung measured: free-running and given equal inputs, with the machine's kernels or with a fixed order of additions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import pandas as pd
from torch import Tensor

from kvinterp import metrics
from kvinterp.auditing.differences import difference, row_errors
from kvinterp.auditing.ladder import EMBEDDING, LOCAL, STEPS, Plan, Rung, dtype_name
from kvinterp.auditing.subject import BlockTaps, Reference, Subject
from kvinterp.auditing.values import first_nonfinite, logit_grid
from kvinterp.models import Adapter
from kvinterp.paths.kernels import Kernels, Native

__all__ = ["Part", "climb", "rows", "whole_rows"]

Part = tuple[int, str, int]
"""A block's layer (-1: embedding, the number of blocks: head), ``input`` or ``output``, and how often it had run before."""


def climb(adapter: Adapter, plan: Plan, kernels: Kernels | None = None, sweep: str = "no", against: str = "prefix") -> Rung:
    """Runs one rung.

    Args:
        adapter: The model in the rung's dtype.
        plan: What to run.
        kernels: The kernel mode; default: the machine's own.
        sweep: ``"yes"`` also decodes each prompt as one long sequence from the plan's short prefill, ``"first"`` only the
            first prompt.
        against: ``"prefix"`` recomputes the prefix of every step, so that both sides look at as many keys. ``"whole"`` takes
            the row out of one forward of all tokens; right where a row's bits do not depend on the rows after it, which the
            null of each length's last step shows.
    """
    started = time.perf_counter()
    climbed = _Climb(adapter, plan, kernels or Native(), sweep, against)
    with climbed.taps.attached():
        for number in range(len(plan.prompts)):
            climbed.prompt(number)
    return climbed.rung(time.perf_counter() - started)


class _Climb:
    """What one rung has shown so far, prompt by prompt."""

    def __init__(self, adapter: Adapter, plan: Plan, kernels: Kernels, sweep: str, against: str) -> None:
        self.adapter, self.plan, self.kernels, self.against = adapter, plan, kernels, against
        self.taps = BlockTaps(Subject(adapter, kernels))
        self.swept = range({"yes": len(plan.prompts), "first": 1}.get(sweep, 0))
        self.tables: dict[str, list[dict[str, Any]]] = {"steps": [], "local": [], "sweep": [], "chunks": []}
        self.layers, self.top = pd.DataFrame(), pd.DataFrame()
        self.nonfinite: dict[str, Any] = {}
        self.grid, self.largest = "", 0.0

    def rung(self, seconds: float) -> Rung:
        """All of it."""
        dtype = dtype_name(self.adapter.dtype)
        name = dtype if isinstance(self.kernels, Native) else f"{dtype}, {self.kernels}"
        columns = {table: list(STEPS if table == "steps" else LOCAL) for table in self.tables}
        tables = {table: pd.DataFrame(rows, columns=columns[table]) for table, rows in self.tables.items()}
        return Rung(
            name,
            self.adapter.dtype,
            self.kernels,
            layers=self.layers,
            top=self.top,
            nonfinite=self.nonfinite,
            grid=self.grid,
            largest_logit=self.largest,
            seconds=seconds,
            plan=self.plan,
            **tables,
        )

    def prompt(self, number: int) -> None:
        """Every case of one prompt."""
        plan, taps = self.plan, self.taps
        tokens = plan.tokens(number, self.adapter.device)
        reference = taps.reference(tokens)
        if not bool(reference.logits.isfinite().all()):
            self.nonfinite = self.nonfinite or first_nonfinite(taps.subject, tokens, None, "recompute")
            return
        self.largest = max(self.largest, reference.logits.abs().max().item())
        self.grid = logit_grid(reference.logits) if number == 0 else self.grid and logit_grid(reference.logits)
        for prefill in plan.prefills:
            self._prefill(number, reference, prefill)
        if plan.chunk is not None and not self.nonfinite and takes_chunks(taps, reference, plan.chunk):
            cache = taps.feed(reference, 0, plan.chunk, None)[1]
            for start, stop in plan.pieces:
                made, cache = at_once(taps, reference, start, stop, self.against, cache)
                self._keep("chunks", number, plan.chunk, made)
        if number in self.swept and plan.sweep is not None and not self.nonfinite:
            self._keep("sweep", number, plan.sweep, forced(taps, reference, plan.sweep, plan.length, self.against))

    def _prefill(self, number: int, reference: Reference, prefill: int) -> None:
        """One prompt length: free-running, given equal inputs token by token, and the rows of the prompt itself."""
        taps, stop, against = self.taps, prefill + self.plan.steps, self.against
        free, (layers, top) = _free(taps, reference, prefill, stop, against)
        if any(math.isnan(row["max_abs"]) for row in free):
            self.nonfinite = self.nonfinite or first_nonfinite(taps.subject, reference.tokens, prefill, "cached")
            return
        self._keep("steps", number, prefill, free)
        # Of several cases the last that has something to show.
        if self.top.empty or bool(top["difference"].any()) or not bool(self.top["difference"].any()):
            self.layers, self.top = layers, top
        checked = "whole" if against == "whole" and number else against
        self._keep("local", number, prefill, forced(taps, reference, prefill, stop, checked, "last"))
        self._keep("chunks", number, prefill, at_once(taps, reference, 0, prefill, against)[0])

    def _keep(self, table: str, prompt: int, prefill: int, rows: Iterable[dict[str, Any]]) -> None:
        self.tables[table] += [{"prompt": prompt, "prefill": prefill, **row} for row in rows]


def rows(taps: BlockTaps, logits: Tensor, count: int | None = None) -> dict[Part, Tensor]:
    """The newest row of what every part was given and returned in the last forward, in that order, and of the logits.

    Args:
        taps: The taps, after a forward.
        logits: What it returned.
        count: So many newest rows instead, ``[row, width]``.
    """
    return _parts(taps.inputs, taps.outputs, logits[0], count, None)


def whole_rows(reference: Reference, stop: int, count: int | None = None) -> dict[Part, Tensor]:
    """The same rows out of a reference, as if its tokens ended at ``stop``."""
    return _parts(reference.inputs, reference.outputs, reference.logits, count, stop)


def _parts(
    inputs: dict[Any, Tensor], outputs: dict[Any, Tensor], logits: Tensor, count: int | None, stop: int | None
) -> dict[Part, Tensor]:
    found: dict[Part, Tensor] = {}
    blocks = 0
    for index, ((layer, nth), tensor) in enumerate(inputs.items()):
        found[(EMBEDDING, "output", 0) if index == 0 else (layer, "input", nth)] = tensor
        if (layer, nth) in outputs:
            found[layer, "output", nth] = outputs[layer, nth]
        blocks = max(blocks, layer + 1)
    found[blocks, "output", 0] = logits
    if stop is not None:
        found = {part: tensor[..., :stop, :] for part, tensor in found.items()}
    if count is None:
        return {part: tensor[..., -1, :].flatten().clone() for part, tensor in found.items()}
    return {part: tensor[..., -count:, :].movedim(-2, 0).flatten(1).clone() for part, tensor in found.items()}


def forced(
    taps: BlockTaps, reference: Reference, prefill: int, stop: int, against: str = "prefix", null: str = "all"
) -> Iterator[dict[str, Any]]:
    """Every part's error given equal inputs, for each token fed one by one after the prefill.

    Args:
        taps: The model's taps, attached.
        reference: The rows every part is given.
        prefill: Tokens fed at once first.
        stop: Where the tokens end.
        against: As in :func:`climb`.
        null: With ``against="whole"``: ``"last"`` also recomputes the prefix of the last step, as the null control.
    """
    for position, mine in _fed_singly(taps, reference, prefill, stop, "yes"):
        whole = whole_rows(reference, position + 1)
        prefix = None
        if against == "prefix" or (null == "last" and position == stop - 1):
            prefix = _again(taps, reference, position + 1, "yes")
        theirs = prefix if prefix is not None and against == "prefix" else whole
        where = {"start": position, "stop": position + 1, "position": position}
        for part, tensor in theirs.items():
            apart = math.nan if prefix is None else difference(whole[part], prefix[part])
            error = difference(mine[part], tensor) if part in mine else math.inf
            yield {**where, "layer": part[0], "part": part[1], "error": error, "null": apart}


def _fed_singly(
    taps: BlockTaps, reference: Reference, prefill: int, stop: int, forced: str
) -> Iterator[tuple[int, dict[Part, Tensor]]]:
    """Each position after the prefill, fed alone, with the newest row of every part."""
    _, cache = taps.feed(reference, 0, prefill, None, forced)
    for position in range(prefill, stop):
        logits, cache = taps.feed(reference, position, position + 1, cache, forced)
        yield position, rows(taps, logits)


def at_once(
    taps: BlockTaps, reference: Reference, start: int, stop: int, against: str = "prefix", cache: Any = None
) -> tuple[list[dict[str, Any]], Any]:
    """Every part's error given equal inputs in the rows of tokens that are fed at once: a prompt, or more on its cache.

    The recomputation has as many rows as the cache then holds, so that a prompt is compared among the same number of rows.

    Returns:
        A row a part, and the cache after these tokens.
    """
    logits, cache = taps.feed(reference, start, stop, cache)
    mine = rows(taps, logits, stop - start)
    if against == "prefix":
        theirs = rows(taps, taps.recompute(reference, stop), stop - start)
    else:
        theirs = whole_rows(reference, stop, stop - start)
    found = []
    for part, again in theirs.items():
        errors = row_errors(mine[part], again)
        first = int((errors >= errors.max() / 10).int().argmax()) if bool(errors.max() > 0) else len(errors) - 1
        where = {"start": start, "stop": stop, "position": stop - len(errors) + first}
        found.append({**where, "layer": part[0], "part": part[1], "error": float(errors.max()), "null": math.nan})
    return found, cache


def _again(taps: BlockTaps, reference: Reference, stop: int, forced: str) -> dict[Part, Tensor]:
    key = (f"forced {forced}", stop)
    if key not in reference.again:
        reference.again[key] = rows(taps, taps.recompute(reference, stop, forced))
    return reference.again[key]


def takes_chunks(taps: BlockTaps, reference: Reference, start: int) -> bool:
    """Whether the model takes several tokens on a cache that is not empty; recurrent ones as a rule do not."""
    _, cache = taps.feed(reference, 0, start, None)
    if any(taps.subject.states(cache, layer) for layer in range(len(taps.subject.blocks))):
        return False
    try:
        taps.feed(reference, start, start + 2, cache)
    # A model that refuses says so with whatever error its arithmetic meets first.
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False
    return True


def _free(
    taps: BlockTaps, reference: Reference, prefill: int, stop: int, against: str
) -> tuple[list[dict[str, Any]], tuple[pd.DataFrame, pd.DataFrame]]:
    """A row a step of the free-running logits, and the layers and the largest logits of one that has something to show."""
    found = []
    detail = (pd.DataFrame(), pd.DataFrame())
    head = len(taps.subject.blocks), "output", 0
    prefix = against == "prefix"
    for position, mine in _fed_singly(taps, reference, prefill, stop, "no"):
        theirs = _again(taps, reference, position + 1, "no") if prefix else whole_rows(reference, position + 1)
        a, b = mine[head], theirs[head]
        gap = (a.double() - b.double()).abs()
        null = (b.double() - reference.logits[position].double()).abs().max().item()
        found.append(
            {
                "position": position,
                "max_abs": gap.max().item(),
                "mean_abs": gap.mean().item(),
                "relative": difference(a, b),
                "kl": float(metrics.compare_logits(b[None], a[None])["kl"]),
                "null_max_abs": null if prefix else math.nan,
            }
        )
        # The last step that differs has something to show; among equal ones any is as good.
        if bool(gap.max() > 0) or position == prefill or not bool(detail[1]["difference"].any()):
            where = {"prefill": prefill, "position": position}
            detail = (_layer_table(mine, theirs).assign(**where), _top_table(a, b).assign(**where))
    return found, detail


def _layer_table(mine: dict[Part, Tensor], theirs: dict[Part, Tensor]) -> pd.DataFrame:
    found = []
    for part in [p for p in sorted(theirs) if p[1] == "output"][1:-1]:  # The ends are the embedding and the logits.
        gap = (mine[part].double() - theirs[part].double()).abs()
        found.append(
            {
                "layer": part[0],
                "max_abs": gap.max().item(),
                "mean_abs": gap.mean().item(),
                "relative": difference(mine[part], theirs[part]),
            }
        )
    return pd.DataFrame(found)


def _top_table(cached: Tensor, recomputed: Tensor) -> pd.DataFrame:
    gap = (cached.double() - recomputed.double()).abs()
    worst = gap.topk(min(5, len(gap)))
    return pd.DataFrame(
        {
            "index": worst.indices.tolist(),
            "recompute": recomputed.double()[worst.indices].tolist(),
            "cached": cached.double()[worst.indices].tolist(),
            "difference": worst.values.tolist(),
        }
    )
