"""The ladder's notions: what is run on each precision, what one precision showed, and how large
rounding is.

Two measurements are made on each rung. *Free-running* is what a user sees: the logits of a cached
step against those of the same prefix recomputed, and as a null control the same row recomputed
among more rows. *Given equal inputs* hands every block the rows that the recomputation handed it,
at this position and at all earlier ones, and what stands between two blocks the rows that the first
returned there, so that each part's error is its own and neither grows nor hides behind the others'.

Both are made twice: with the machine's own kernels, and with one fixed order of additions for every
sum. There a clean part gives the recomputation's very bits, whatever the dtype; what still differs
has another reason than the order of additions.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import torch
from torch import Tensor

SLACK = 32.0
"""The room left for rounding (see band)."""

CHUNKS = 3
"""Chunks fed on a cache that is not empty."""

EMBEDDING = -1
"""The layer number that stands for what enters the first block."""

NORMED = "normed"
"""What the last block returned, after the final norm: the last of transformers'
``hidden_states``.
"""

ONE_BY_ONE = "tokens fed one by one"
"""How tokens are fed where they are fed as decoding does."""

LOCAL = ("prompt", "prefill", "start", "stop", "position", "layer", "part", "error", "null")
"""The columns of what is measured given equal inputs."""

STEPS = ("prompt", "prefill", "position", "max_abs", "mean_abs", "relative", "kl", "null_max_abs")
"""The columns of what is measured free-running."""


def unit_roundoff(dtype: torch.dtype) -> float:
    """Half the distance from 1 to the next number: the largest relative error of rounding once."""
    return torch.finfo(dtype).eps / 2


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``float16``."""
    return str(dtype).removeprefix("torch.")


def band(dtype: torch.dtype, terms: int) -> float:
    """The largest relative error of one block's tensor that its own rounding explains.

    A sum of n terms rounded at random is off by about sqrt(n) unit roundoffs; 32 times that leaves
    room for the few sums that follow each other inside a block and for cancellation. In 16 bits
    sums are kept in float32 and only results are rounded, so there the length does not matter and
    32 unit roundoffs are the band. It excuses nothing: an error within it still has to vanish with
    its cause (see :mod:`kvinterp.auditing.causes`).

    Args:
        dtype: The dtype the block computes in.
        terms: The longest sum in the block.
    """
    if dtype in (torch.float16, torch.bfloat16):
        return SLACK * unit_roundoff(dtype)
    return SLACK * math.sqrt(terms) * unit_roundoff(dtype)


def part_named(layer: int, tensor: str = "", head: int | None = None) -> str:
    """A layer in words: the embedding is no layer, nor the head, which alone makes logits.

    Args:
        layer: Its number.
        tensor: What was seen there, where it is known.
        head: The number that stands for the head, where it is known.
    """
    return (
        "the embedding"
        if layer == EMBEDDING
        else "the head"
        if tensor == "logits" or layer == head
        else f"layer {layer}"
    )


@dataclasses.dataclass(frozen=True)
class Plan:
    """What is run on each rung.

    Attributes:
        prompts: Token ids, each at least as long as the longest prefill and its steps.
        prefills: Prompt lengths after which tokens are fed one by one.
        steps: How many tokens are fed one by one after each prefill.
        sweep: Prefill of the one long decode, of the first prompt, or None.
        chunk: Prefill after which all the rest is fed in :data:`CHUNKS` chunks, or None.
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

    def lengths(self, prompt: int) -> tuple[int, ...]:
        """The prefills of one of the prompts: every one of the first, the shortest and the longest
        of the others.
        """
        return self.prefills if not prompt else self.ends.prefills

    @property
    def ends(self) -> Plan:
        """Its shortest and its longest prefill, of the first prompt alone."""
        ends = tuple(dict.fromkeys((self.prefills[0], self.prefills[-1])))
        return dataclasses.replace(self, prompts=self.prompts[:1], prefills=ends)

    def chunks(self, first: int) -> list[int]:
        """Where chunks end that are fed after a first one. A mask may be wrong from the third on
        only.
        """
        rest = self.length - first
        count = max(min(CHUNKS, rest // 2), 1)
        return [0, *(first + rest * n // count for n in range(count + 1))]

    def tokens(self, prompt: int, device: torch.device) -> Tensor:
        """One of the prompts as far as any case reaches, ``[1, position]``."""
        return torch.tensor([list(self.prompts[prompt][: self.length])], device=device)


def prefix_plan(
    prompts: Sequence[Sequence[int]],
    lengths: Sequence[int],
    steps: int,
    positions: int,
    sweep: str = "no",
) -> Plan:
    """A plan over the given lengths, as far as a context of ``positions`` positions reaches;
    ``sweep="yes"``: with a long decode.
    """
    shortest = min([positions, *(len(prompt) for prompt in prompts)])
    fitting = tuple(sorted({n for n in lengths if n >= 1 and n + steps <= shortest})) or (
        max(shortest - steps, 1),
    )
    steps = min(steps, shortest - fitting[0])
    begin = min(fitting[0], 4) if sweep == "yes" else None
    chunk = fitting[0] if fitting[-1] + steps >= fitting[0] + 2 else None
    return Plan(tuple(map(tuple, prompts)), fitting, steps, begin, chunk)


_EMPTY = functools.partial(pd.DataFrame, columns=list(LOCAL))


@dataclasses.dataclass
class PrecisionRun:
    """What one precision showed.

    Attributes:
        name: Such as ``"float16"`` or ``"float16, batch_invariant"``.
        dtype: The dtype.
        steps: Free-running, a row a step: prompt, prefill, position, max_abs, mean_abs, relative,
            kl (nats), null_max_abs.
        local: Given equal inputs, a row a step, layer and part: prompt, prefill, start, stop,
            position, layer, part (``input``: what the block is given by what stands before it;
            ``output``: what it returns), error, and null (the same row recomputed among more rows).
            The tokens from start to stop were fed at once, after a prefill of so many. Layer -1 is
            the embedding, the number of blocks the head.
        sweep: The same as ``local`` for one long decode.
        chunks: The same for several tokens fed at once, at the first position that is as wrong as
            any: each prompt itself (start 0), and the rest of the longest in chunks on the cache of
                the shortest.
        layers: Free-running, last token of the longest case, a row a layer: layer, part, max_abs,
            mean_abs, relative. Parts are those of ``local``, but the embedding and the blocks are
            there with what they return alone, and between the last block and the head's logits
            stands what is after the final norm (``normed``), where the model tells it.
        top: The five logits that differ most at that token: index, recompute, cached, difference,
            and token, its text where there is a tokenizer.
        nonfinite: Where NaN or Inf first appeared: path, module; empty if nowhere.
        grid: The 16-bit dtype whose grid every logit lies on though the rung is wider, or "".
        largest_logit: The largest magnitude of a recomputed logit.
        seconds: Time it took.
        fixed: The same precision with a fixed order of additions, or None where that cannot be run.
        unfixed: Why it could not be, or "".
        plan: What was run.
    """

    name: str
    dtype: torch.dtype
    steps: pd.DataFrame = dataclasses.field(
        default_factory=functools.partial(pd.DataFrame, columns=list(STEPS))
    )
    local: pd.DataFrame = dataclasses.field(default_factory=_EMPTY)
    sweep: pd.DataFrame = dataclasses.field(default_factory=_EMPTY)
    layers: pd.DataFrame = dataclasses.field(default_factory=pd.DataFrame)
    top: pd.DataFrame = dataclasses.field(default_factory=pd.DataFrame)
    nonfinite: dict[str, Any] = dataclasses.field(default_factory=dict)
    grid: str = ""
    largest_logit: float = 0.0
    chunks: pd.DataFrame = dataclasses.field(default_factory=_EMPTY)
    seconds: float = 0.0
    fixed: PrecisionRun | None = None
    unfixed: str = ""
    plan: Plan = dataclasses.field(default_factory=lambda: Plan((), (1,), 1, None))

    @property
    def unit(self) -> float:
        """The dtype's unit roundoff."""
        return unit_roundoff(self.dtype)

    @property
    def every_error(self) -> pd.DataFrame:
        """All that was measured given equal inputs: ``local``, ``sweep`` and ``chunks`` in one
        table.
        """
        frames = [frame for frame in (self.local, self.sweep, self.chunks) if len(frame)]
        return pd.concat(frames, ignore_index=True) if frames else self.local

    @property
    def among_more(self) -> pd.Series:
        """Which of them are single tokens beside a row that is among more rows than theirs: no null
        was measured there.
        """
        every = self.every_error
        return (every["start"] > 0) & (every["stop"] == every["start"] + 1) & every["null"].isna()

    @property
    def differs(self) -> bool:
        """Whether anything differs by a bit; the long decode says nothing of that, whose rows stand
        beside those of more.
        """
        return bool(
            len(self.differing_steps)
            or (self.local["error"] > 0).any()
            or (self.chunks["error"] > 0).any()
        )

    @property
    def largest_error(self) -> float:
        """The largest error given equal inputs, of any part in any case."""
        return _largest(self.every_error, "error") or 0.0

    @property
    def differing_steps(self) -> pd.DataFrame:
        """The free-running steps whose logits are not bitwise equal."""
        return self.steps[self.steps["max_abs"] > 0]

    def summary(self) -> dict[str, Any]:
        """Plain numbers for the evidence and the JSON."""
        steps, fixed, relative = self.steps, self.fixed, _largest(self.steps, "relative")
        prompts = self.chunks[self.chunks["start"] == 0]
        worst, rows = (
            _largest(self.local, "error"),
            (_largest(prompts, "error") or 0.0) if len(self.chunks) else None,
        )
        checked = _EMPTY() if fixed is None else fixed.every_error

        def in_units(size: float | None) -> float | None:
            return None if size is None else size / self.unit

        return {
            "rung": self.name,
            "unit_roundoff": self.unit,
            "steps": len(steps),
            "bitwise_equal_steps": int((steps["max_abs"] == 0).sum()),
            "max_abs_logit": _largest(steps, "max_abs"),
            "relative_logit": relative,
            "relative_logit_in_unit_roundoffs": in_units(relative),
            "max_kl": _largest(steps, "kl"),
            "null_max_abs_logit": _largest(steps, "null_max_abs"),
            "block_error": worst,
            "block_error_in_unit_roundoffs": in_units(worst),
            "block_error_layer": None
            if worst is None
            else int(self.local["layer"][self.local["error"].idxmax()]),
            "null_block_error": _largest(self.local, "null"),
            "prompt_rows_error": rows,
            "prompt_rows_error_in_unit_roundoffs": in_units(rows),
            "checks": len(self.every_error),
            "fixed_order_checks": len(checked),
            "fixed_order_bitwise_equal": int((checked["error"] == 0).sum()),
            "fixed_order_block_error": None if fixed is None else fixed.largest_error,
            "fixed_order_max_abs_logit": None
            if fixed is None
            else _largest(fixed.steps, "max_abs"),
            "nonfinite": self.nonfinite,
            "largest_logit": self.largest_logit,
            "seconds": self.seconds + (0.0 if fixed is None else fixed.seconds),
        }


def _largest(frame: pd.DataFrame, column: str) -> float | None:
    size = frame[column].max() if len(frame) else float("nan")
    return None if pd.isna(size) else float(size)
