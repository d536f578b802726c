"""What the attention page shows of a context, and what it says about it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float64
from torch import Tensor

from kvinterp.errors import InputError
from kvinterp.recording import Trace
from kvinterp.views.attention_page import AttentionPage, ShownHead

__all__ = ["View", "page_of", "readable"]


@dataclasses.dataclass(frozen=True)
class View:
    """Which positions are shown, and how many share a cell."""

    start: int
    stop: int
    block: int

    @classmethod
    def of(cls, length: int, positions: tuple[int, int] | None, cells: int, fit: str) -> View:
        """The view that was asked for; see :func:`kvinterp.views.attention.attention_comparison`."""
        if positions is not None:
            whole = len(positions) == 2 and all(isinstance(p, int) for p in positions)
            if not (whole and 0 <= positions[0] < positions[1] <= length):
                raise InputError(
                    f"positions={positions!r} was given: expected (start, stop) with 0 <= start < stop <= {length}, the "
                    "positions at this step."
                )
            return cls(*positions, 1)
        if fit == "pool":
            return cls(0, length, -(-length // cells))
        return cls(max(length - cells, 0), length, 1)

    @property
    def side(self) -> int:
        """How many rows are shown."""
        return -(-(self.stop - self.start) // self.block)

    def of_pattern(self, square: Float64[Tensor, "query key"]) -> Float64[np.ndarray, "side side"]:
        """What is shown of a pattern."""
        cut = square[self.start : self.stop, self.start : self.stop].numpy()
        if self.block == 1:
            return cut
        edges = np.arange(0, len(cut), self.block)
        counts = np.diff([*edges, len(cut)])
        summed: np.ndarray = np.add.reduceat(np.add.reduceat(cut, edges, axis=0), edges, axis=1)
        return summed / counts[:, None]

    def place(self, number: int, prompt: int) -> tuple[str, str]:
        """A row's positions, and whether they are the prompt's, decoded, or both."""
        first = self.start + number * self.block
        last = min(first + self.block, self.stop) - 1
        whose = "prompt" if last < prompt else "decoded" if first >= prompt else "prompt and decoded"
        return (f"position {first}" if first == last else f"positions {first} to {last}"), whose

    def labels(self, names: Sequence[str]) -> tuple[str, ...]:
        """The text of each row."""
        if self.block > 1:
            starts = range(self.start, self.stop, self.block)
            return tuple(f"{s}-{min(s + self.block, self.stop) - 1}: {''.join(names[s : s + self.block])}" for s in starts)
        shown = range(self.start, self.stop)
        return tuple(names[p] if self.start == 0 else f"{p}: {names[p]}" for p in shown)


def readable(token: str) -> str:
    """A token with its blanks visible, because circuitsvis leaves white space out of its labels."""
    return token.replace(" ", "·").replace("\n", "↵").replace("\t", "→") or "(empty)"


def page_of(
    pair: tuple[Trace, Trace], step: int, compared: int, view: View, names: Sequence[str], heads: Sequence[ShownHead]
) -> AttentionPage:
    """The page about some heads of two traces.

    Args:
        pair: The traces.
        step: The decode step.
        compared: How many heads were compared.
        view: Which positions are shown.
        names: Text of every position.
        heads: The heads that are shown.
    """
    prompt, length, (a, b) = len(pair[0].prompt), len(names), (trace.path for trace in pair)
    made = pair[0].provenance
    what = ", ".join(str(made[key]) for key in ("model", "kind", "dtype") if key in made) or "a model"
    sentences = [
        f"{what}. Step {step}: {length} positions, of which {prompt} are the prompt's. KL is of the newest row, "
        f"KL({a} || {b}), before any cropping or pooling.",
        *(
            f"The {side} path, {_rows_of(trace, step, prompt)}."
            for side, trace in zip(("first", "second"), pair, strict=True)
        ),
        (
            "The one head that was compared is shown."
            if compared == 1
            else f"All {compared} heads are shown, the largest KL first."
        )
        if len(heads) == compared
        else f"{len(heads)} of {compared} heads are shown, those with the largest KL.",
    ]
    if any("pattern" in trace.derived for trace in pair):
        sentences.append(
            "Attention ran in a fused kernel (SDPA), which shows no pattern: these are derived beside it, from the queries and "
            "keys that it was given."
        )
    if view.block > 1:
        sentences.append(
            f"Positions are pooled in blocks of {view.block}: attention to a block is summed over its keys and averaged "
            "over its queries, so differences inside a block can cancel. The numbers in brackets count blocks."
        )
    elif view.side < length:
        inside = np.mean([pattern.sum(1).mean() for head in heads for pattern in (head.a, head.b)])
        sentences.append(
            f"Positions {view.start} to {view.stop - 1} are shown; their rows give {inside:.1%} of their attention to keys "
            "that are shown. The numbers in brackets count from the first position shown."
        )
    tokens = view.labels(names)
    places = [view.place(number, prompt) for number in range(len(tokens))]
    if view.stop == length and view.block == 1:
        places[-1] = (places[-1][0], "newest")
    return AttentionPage(
        f"Attention at step {step}: {a} against {b}", tuple(sentences), (a, b), tokens, tuple(places), tuple(heads)
    )


def _rows_of(trace: Trace, step: int, prompt: int) -> str:
    if step == 0 or not trace.path.startswith("cached"):
        return f"{trace.path}: all {prompt + step} rows computed at this step"
    later = f"{prompt} to {prompt + step - 1} from steps 1 to {step}, one a step"
    return f"{trace.path}: rows 0 to {prompt - 1} from the prefill, rows {later}"
