"""What the attention page says: which rows were computed when, how many heads are shown, and what was left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvinterp.recording import Trace

DERIVED = (
    "Attention ran in a fused kernel (SDPA), which shows no pattern: these are derived beside it, from the queries and "
    "keys that it was given."
)


def what_is_compared(pair: Sequence[Trace], step: int, length: int) -> list[str]:
    """The model, the step, how many positions there are at it, and the rows of each path."""
    prompt, (a, b), made = len(pair[0].prompt), (trace.path for trace in pair), pair[0].provenance
    what = ", ".join(str(made[key]) for key in ("model", "kind", "dtype") if key in made) or "a model"
    return [
        f"{what}. Step {step}: {length} positions, of which {prompt} are the prompt's. KL is of the newest row, "
        f"KL({a} || {b}), before any cropping or pooling.",
        *(
            f"The {side} path, {_rows_of(trace, step, prompt)}."
            for side, trace in zip(("first", "second"), pair, strict=True)
        ),
    ]


def _rows_of(trace: Trace, step: int, prompt: int) -> str:
    if step == 0 or not trace.path.startswith("cached"):
        return f"{trace.path}: all {prompt + step} rows computed at this step"
    later = f"{prompt} to {prompt + step - 1} from steps 1 to {step}, one a step"
    return f"{trace.path}: rows 0 to {prompt - 1} from the prefill, rows {later}"


def heads_shown(shown: int, compared: int) -> str:
    """How many heads are shown of those that were compared."""
    if shown < compared:
        return f"{shown} of {compared} heads are shown, those with the largest KL."
    if compared == 1:
        return "The one head that was compared is shown."
    return f"All {compared} heads are shown, the largest KL first."


def pooled(block: int) -> str:
    """What a cell of several positions stands for."""
    return (
        f"Positions are pooled in blocks of {block}: attention to a block is summed over its keys and averaged "
        "over its queries, so differences inside a block can cancel. The numbers in brackets count blocks."
    )


def cropped(start: int, stop: int, inside: float) -> str:
    """Which positions are shown, and what share of their attention goes to keys that are shown."""
    return (
        f"Positions {start} to {stop - 1} are shown; their rows give {inside:.1%} of their attention to keys "
        "that are shown. The numbers in brackets count from the first position shown."
    )


def nats(value: float) -> str:
    """A KL of two patterns."""
    return "exactly 0 nats" if value == 0 else f"{value:.2e} nats"


def largest_row(kl: float, position: int) -> str:
    """Which row of a head differs most."""
    return f"largest row: {nats(kl)} at position {position}" if kl else "and 0 in every row"


def scale_of(largest: float, differing: int, cells: int) -> str:
    """The scale of a difference; one far below the largest is as good as white, so those that are not 0 are counted."""
    return f"±{largest:.2g}, in {differing} of {cells} cells" if differing else f"0 in all {cells} cells"
