"""The ladder: cached against recompute in several precisions, once as decoding runs and once block by block.

Two measurements are made on each rung. *Free-running* is what a user sees: the logits of a cached step against those of the
same prefix recomputed, and as a null control the same row recomputed among more rows. *Given equal inputs* hands every block the
rows that the recomputation handed it, at this position and at all earlier ones, so that each block's error is its own and
neither grows nor hides behind the others'.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from kvinterp import metrics
from kvinterp.auditing.subject import BlockTaps, Reference, Subject
from kvinterp.models import Adapter
from kvinterp.paths.kernels import Kernels, Native

__all__ = ["Plan", "Rung", "band", "climb", "difference", "unit_roundoff"]

EMBEDDING, SLACK = -1, 32.0
"""The layer number that stands for what enters the first block, and the room left for rounding (see band)."""

LOCAL = ("prompt", "prefill", "start", "stop", "position", "layer", "error")
"""The columns of what is measured given equal inputs."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the largest relative error of rounding once."""
    return torch.finfo(dtype).eps / 2


def band(dtype: torch.dtype, terms: int) -> float:
    """The largest relative error of one block's tensor that its own rounding explains.

    A sum of n terms rounded at random is off by about sqrt(n) unit roundoffs; 32 times that leaves room for the few sums
    that follow each other inside a block and for cancellation. In 16 bits sums are kept in float32 and only results are
    rounded, so there the length does not matter and 32 unit roundoffs are the band.

    Args:
        dtype: The dtype the block computes in.
        terms: The longest sum in the block.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return SLACK * unit_roundoff(dtype)
    return SLACK * math.sqrt(terms) * unit_roundoff(dtype)


def difference(a: Tensor, b: Tensor) -> float:
    """Largest difference over the largest magnitude of the reference ``b``; inf where only one of them is finite."""
    if torch.equal(a, b):
        return 0.0
    x, y = a.double(), b.double()
    worst = (x - y).abs().max().item()
    if math.isnan(worst):
        return math.inf
    return worst / max(y.abs().max().item(), torch.finfo(torch.float32).tiny)


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run on each rung.

    Attributes:
        prompts: Token ids, each at least as long as the longest prefill and its steps.
        prefills: Prompt lengths after which tokens are fed one by one.
        steps: How many tokens are fed one by one after each prefill.
        sweep: Prefill of the one long decode that looks for a position at which something changes, or None.
        chunk: Prefill after which all the rest is fed at once, or None.
    """

    prompts: tuple[tuple[int, ...], ...]
    prefills: tuple[int, ...]
    steps: int
    sweep: int | None
    chunk: int | None = None

    @property
    def length(self) -> int:
        """Positions the longest case reaches."""
        return max(self.prefills) + self.steps


@dataclasses.dataclass
class Rung:
    """What one precision showed.

    Attributes:
        name: Such as ``"float16"`` or ``"float16, batch_invariant"``.
        dtype: The dtype.
        kernels: The kernel mode.
        steps: Free-running, a row a step: prompt, prefill, position, max_abs, mean_abs, relative, kl (nats), null_max_abs.
        local: Given equal inputs, a row a step and layer: prompt, prefill, start, stop, position, layer, error. The tokens
            from start to stop were fed at once, after a prefill of so many.
        sweep: The same as ``local`` for one long decode.
        chunks: The same for several tokens fed at once, at the first position that is as wrong as any: each prompt itself
            (start 0), and the rest of the longest on the cache of the shortest.
        layers: Free-running, last token of the longest case, a row a layer: max_abs, mean_abs, relative.
        top: The five logits that differ most at that token: index, recompute, cached, difference.
        nonfinite: Where NaN or Inf first appeared: path, module; empty if nowhere.
        grid: The 16-bit dtype whose grid every logit lies on though the rung is wider, or "".
        largest_logit: The largest magnitude of a recomputed logit.
        seconds: Time it took.
    """

    name: str
    dtype: torch.dtype
    kernels: Kernels
    steps: pd.DataFrame
    local: pd.DataFrame
    sweep: pd.DataFrame
    layers: pd.DataFrame
    top: pd.DataFrame
    nonfinite: dict[str, Any]
    grid: str
    largest_logit: float
    chunks: pd.DataFrame = dataclasses.field(default_factory=lambda: pd.DataFrame(columns=list(LOCAL)))
    seconds: float = 0.0

    @property
    def unit(self) -> float:
        """The dtype's unit roundoff."""
        return unit_roundoff(self.dtype)

    @property
    def prompt_rows(self) -> float:
        """The largest error of a block in the rows of a prompt, given equal inputs."""
        return _largest(self.chunks[self.chunks["start"] == 0], "error") or 0.0

    @property
    def every_error(self) -> pd.DataFrame:
        """All that was measured given equal inputs: ``local``, ``sweep`` and ``chunks`` in one table."""
        frames = [frame for frame in (self.local, self.sweep, self.chunks) if len(frame)]
        return pd.concat(frames, ignore_index=True) if frames else self.local

    @property
    def null_band(self) -> float:
        """The logit difference that is nothing: four times the null control's, and never less than 32 unit roundoffs."""
        null = _largest(self.steps, "null_max_abs") or 0.0
        return max(4 * null, SLACK * self.unit * self.largest_logit)

    @property
    def within_null_band(self) -> bool:
        """Whether no step's logits differ by more than that."""
        return (_largest(self.steps, "max_abs") or 0.0) <= self.null_band

    def worst_by_layer(self) -> pd.Series:
        """The largest error of each layer given equal inputs."""
        return self.local.groupby("layer")["error"].max() if len(self.local) else pd.Series(dtype=float)

    def summary(self) -> dict[str, Any]:
        """Plain numbers for the evidence and the JSON."""
        steps, local = self.steps, self.local
        worst = None if local.empty else local.loc[local["error"].idxmax()]
        return {
            "rung": self.name,
            "unit_roundoff": self.unit,
            "steps": len(steps),
            "bitwise_equal_steps": int((steps["max_abs"] == 0).sum()),
            "max_abs_logit": _largest(steps, "max_abs"),
            "relative_logit": _largest(steps, "relative"),
            "relative_logit_in_unit_roundoffs": _scaled(_largest(steps, "relative"), self.unit),
            "max_kl": _largest(steps, "kl"),
            "null_max_abs_logit": _largest(steps, "null_max_abs"),
            "null_band": self.null_band,
            "within_null_band": self.within_null_band,
            "block_error": None if worst is None else float(worst["error"]),
            "block_error_in_unit_roundoffs": None if worst is None else float(worst["error"]) / self.unit,
            "prompt_rows_error": self.prompt_rows,
            "prompt_rows_error_in_unit_roundoffs": self.prompt_rows / self.unit,
            "block_error_layer": None if worst is None else int(worst["layer"]),
            "nonfinite": self.nonfinite,
            "largest_logit": self.largest_logit,
            "seconds": self.seconds,
        }


def _largest(frame: pd.DataFrame, column: str) -> float | None:
    return float(frame[column].max()) if len(frame) else None


def _scaled(value: float | None, unit: float) -> float | None:
    return None if value is None else value / unit


def climb(adapter: Adapter, plan: Plan, kernels: Kernels | None = None, sweep: str = "no") -> Rung:
    """Runs one rung.

    Args:
        adapter: The model in the rung's dtype.
        plan: What to run.
        kernels: The kernel mode; the machine's own unless said.
        sweep: ``"yes"`` also decodes each prompt as one long sequence from the plan's short prefill, ``"first"`` only the
            first prompt.
    """
    kernels = kernels or Native()
    subject = Subject(adapter, kernels)
    dtype = str(adapter.dtype).removeprefix("torch.")
    name = dtype if isinstance(kernels, Native) else f"{dtype}, {kernels}"
    taps = BlockTaps(subject)
    steps, local, swept = [], [], []
    chunks: list[dict[str, Any]] = []
    layers, top, grid, largest = pd.DataFrame(), pd.DataFrame(), "", 0.0
    nonfinite: dict[str, Any] = {}
    with taps.attached():
        for number, prompt in enumerate(plan.prompts):
            tokens = torch.tensor([list(prompt[: plan.length])], device=adapter.device)
            reference = taps.reference(tokens)
            if not bool(reference.logits.isfinite().all()):
                nonfinite = nonfinite or _first_nonfinite(subject, tokens, None, "recompute")
                continue
            largest = max(largest, reference.logits.abs().max().item())
            grid = _grid(reference.logits) if number == 0 else grid and _grid(reference.logits)
            for prefill in plan.prefills:
                rows, detail = _free(taps, reference, prefill, plan.steps)
                if any(math.isnan(row["max_abs"]) for row in rows):
                    nonfinite = nonfinite or _first_nonfinite(subject, tokens, prefill, "cached")
                    continue
                about = {"prompt": number, "prefill": prefill}
                steps += [about | row for row in rows]
                layers, top = detail
                local += [about | row for row in forced(taps, reference, prefill, prefill + plan.steps)]
                chunks += [about | row for row in at_once(taps, reference, 0, prefill)]
            if plan.chunk is not None and not nonfinite and _takes_chunks(taps, reference, plan.chunk):
                about = {"prompt": number, "prefill": plan.chunk}
                chunks += [about | row for row in at_once(taps, reference, plan.chunk, plan.length)]
            if (sweep == "yes" or (sweep == "first" and number == 0)) and plan.sweep is not None and not nonfinite:
                about = {"prompt": number, "prefill": plan.sweep}
                swept += [about | row for row in forced(taps, reference, plan.sweep, plan.length)]
    frames = (
        pd.DataFrame(steps, columns=["prompt", "prefill", "position", *_STEP_COLUMNS]),
        pd.DataFrame(local, columns=list(LOCAL)),
        pd.DataFrame(swept, columns=list(LOCAL)),
    )
    chunked = pd.DataFrame(chunks, columns=list(LOCAL))
    return Rung(name, adapter.dtype, kernels, *frames, layers, top, nonfinite, grid, largest, chunked)


_STEP_COLUMNS = ("max_abs", "mean_abs", "relative", "kl", "null_max_abs")


def forced(taps: BlockTaps, reference: Reference, prefill: int, stop: int) -> Iterator[dict[str, Any]]:
    """Every block's error given equal inputs, for each token fed one by one after the prefill.

    The recomputation of the same prefix is given the same inputs, so both look at as many keys.
    """
    _, cache = taps.feed(reference, 0, prefill, None)
    for position in range(prefill, stop):
        logits, cache = taps.feed(reference, position, position + 1, cache)
        cached = _rows(taps, logits)
        key = ("given", position + 1)
        if key not in reference.again:
            reference.again[key] = _rows(taps, taps.recompute(reference, position + 1))
        for layer, again in reference.again[key].items():
            where = {"start": position, "stop": position + 1, "position": position}
            yield {**where, "layer": layer, "error": difference(cached[layer], again)}


def at_once(taps: BlockTaps, reference: Reference, start: int, stop: int) -> Iterator[dict[str, Any]]:
    """Every block's error given equal inputs in the rows of tokens that are fed at once: a prompt, or more on its cache.

    The recomputation has as many rows as the cache then holds, so that a prompt is compared among the same number of rows.
    """
    cache = taps.feed(reference, 0, start, None)[1] if start else None
    mine = _rows(taps, taps.feed(reference, start, stop, cache)[0], stop - start)
    for layer, again in _rows(taps, taps.recompute(reference, stop), stop - start).items():
        errors = _row_errors(mine[layer], again)
        first = int((errors >= errors.max() / 10).int().argmax()) if bool(errors.max() > 0) else len(errors) - 1
        where = {"start": start, "stop": stop, "position": stop - len(errors) + first}
        yield {**where, "layer": layer, "error": float(errors.max())}


def _row_errors(mine: Tensor, again: Tensor) -> Tensor:
    """As :func:`difference`, row by row, over the rows both have."""
    count = min(len(mine), len(again))
    a, b = (t[len(t) - count :].double().flatten(1) for t in (mine, again))
    worst = (a - b).abs().amax(-1).masked_fill((a == b).all(-1), 0.0)
    return (worst / b.abs().amax(-1).clamp(min=torch.finfo(torch.float32).tiny)).nan_to_num(math.inf, posinf=math.inf)


def _takes_chunks(taps: BlockTaps, reference: Reference, start: int) -> bool:
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


def _rows(taps: BlockTaps, logits: Tensor, count: int | None = None) -> dict[int, Tensor]:
    """The newest row of the first block's input, of every block's output and of the logits, in that order.

    Given a count, so many newest rows, ``[row, width]``.
    """
    given = {EMBEDDING: taps.inputs[0], **{n: taps.outputs[n] for n in range(len(taps.subject.blocks))}}
    given[len(given) - 1] = logits
    if count is None:
        return {layer: tensor[..., -1, :].flatten().clone() for layer, tensor in given.items()}
    return {layer: tensor[..., -count:, :].movedim(-2, 0).flatten(1).clone() for layer, tensor in given.items()}


def _free(
    taps: BlockTaps, reference: Reference, prefill: int, steps: int
) -> tuple[list[dict[str, Any]], tuple[pd.DataFrame, pd.DataFrame]]:
    tokens, subject, rows = reference.tokens, taps.subject, []
    detail = (pd.DataFrame(), pd.DataFrame())
    _, cache = subject.feed(tokens[:, :prefill])
    for position in range(prefill, prefill + steps):
        cached, cache = subject.feed(tokens[:, position : position + 1], cache, position)
        mine = _rows(taps, cached)
        key = ("free", position + 1)
        if key not in reference.again:
            reference.again[key] = _rows(taps, subject.recompute(tokens[:, : position + 1]))
        theirs = reference.again[key]
        a, b = (side[len(subject.blocks)] for side in (mine, theirs))
        gap = (a.double() - b.double()).abs()
        rows.append(
            {
                "position": position,
                "max_abs": gap.max().item(),
                "mean_abs": gap.mean().item(),
                "relative": difference(a, b),
                "kl": float(metrics.compare_logits(b[None], a[None])["kl"]),
                "null_max_abs": (b.double() - reference.logits[position].double()).abs().max().item(),
            }
        )
        if position == prefill + steps - 1:
            detail = (_layer_table(mine, theirs), _top_table(a, b))
    return rows, detail


def _layer_table(mine: dict[int, Tensor], theirs: dict[int, Tensor]) -> pd.DataFrame:
    rows = []
    for layer in sorted(mine)[1:-1]:  # The ends are the embedding and the logits.
        gap = (mine[layer].double() - theirs[layer].double()).abs()
        rows.append(
            {
                "layer": layer,
                "max_abs": gap.max().item(),
                "mean_abs": gap.mean().item(),
                "relative": difference(mine[layer], theirs[layer]),
            }
        )
    return pd.DataFrame(rows)


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


def on_grid(values: Tensor, dtype: torch.dtype) -> bool:
    """Whether every number is exactly one of a narrower dtype's."""
    return torch.finfo(values.dtype).bits > torch.finfo(dtype).bits and torch.equal(
        values.to(dtype).to(values.dtype), values
    )


def _grid(logits: Tensor) -> str:
    """The 16-bit dtype that holds every logit exactly, though they claim more bits; bfloat16 first, whose grid is coarser.

    Logits that are all zero lie on every grid and say nothing.
    """
    if not bool(logits.any()):
        return ""
    found = [d for d in (torch.bfloat16, torch.float16) if on_grid(logits, d)]
    return str(found[0]).removeprefix("torch.") if found else ""


def _first_nonfinite(subject: Subject, tokens: Tensor, prefill: int | None, path: str) -> dict[str, Any]:
    """The first module whose output holds NaN or Inf, on a second run of the same tokens with every module hooked."""
    found: dict[str, Any] = {}
    where = {"position": None}

    def hook(module: Any, _: Any, output: Any) -> None:
        made = output[0] if isinstance(output, tuple) else output
        made = getattr(made, "logits", made)
        if not found and isinstance(made, Tensor) and made.is_floating_point() and not bool(made.isfinite().all()):
            what = "NaN" if bool(made.isnan().any()) else "Inf"
            rows = (~made.isfinite()).flatten(2).any(-1)[0] if made.dim() >= 3 and made.shape[0] == 1 else None
            row = int(rows.int().argmax()) if rows is not None else None
            position = where["position"] if where["position"] is not None else row
            found.update(path=path, module=subject.name_of(module), value=what, position=position)

    handles = [module.register_forward_hook(hook) for module in subject.adapter.source.modules()]
    try:
        if prefill is None:
            subject.recompute(tokens)
        else:
            _, cache = subject.feed(tokens[:, :prefill])
            for position in range(prefill, tokens.shape[1]):
                where["position"] = position  # type: ignore[assignment]
                if not found:
                    _, cache = subject.feed(tokens[:, position : position + 1], cache, position)
    finally:
        for handle in handles:
            handle.remove()
    blocks = {subject.name_of(block): layer for layer, block in enumerate(subject.blocks)}
    name = found.get("module", "")
    found["layer"] = next((layer for block, layer in blocks.items() if name == block or name.startswith(block + ".")), None)
    return {"path": path, "module": "", "value": "NaN or Inf", "position": None} | found


def prefix_plan(prompts: Sequence[Sequence[int]], lengths: Sequence[int], steps: int, room: int) -> Plan:
    """A plan over the given lengths, as far as a context of ``room`` positions reaches."""
    shortest = min([room, *(len(prompt) for prompt in prompts)])
    fitting = tuple(sorted({n for n in lengths if n >= 1 and n + steps <= shortest})) or (max(shortest - steps, 1),)
    steps = min(steps, shortest - fitting[0])
    plan = Plan(tuple(map(tuple, prompts)), fitting, steps, min(fitting[0], 4))
    return dataclasses.replace(plan, chunk=fitting[0] if plan.length >= fitting[0] + 2 else None)
