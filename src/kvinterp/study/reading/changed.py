"""What is said of what changed: which steps flip, how close a choice was to another, and what the page can show."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pandas as pd

if TYPE_CHECKING:
    from kvinterp.comparison import Comparison


def flips_of(comparison: Comparison) -> pd.DataFrame:
    """The steps at which the paths chose different tokens on the same text, with ``id``; by example and step."""
    steps = comparison.same_text(comparison.steps)
    flips = steps[steps["flipped"].astype(bool)]
    ids = comparison.examples.set_index("example")["id"]
    return flips.assign(id=flips["example"].map(ids)).sort_values(["example", "step"], ignore_index=True)


def boundary_of(comparison: Comparison) -> tuple[str, str]:
    """What the distance to the decision boundary is under the strategy in use, and its unit."""
    strategy = str(comparison.provenance["strategy"])
    if strategy == "greedy":
        return "how many logits a path's token was ahead of its next best", "logits"
    if strategy.startswith(("top_k", "top_p")):
        said = "how far the number drawn lay from where another token begins, in the cumulative probability of"
        return f"{said} {strategy}", "cumulative probability"
    return "not known under this strategy", ""


def no_boundary(comparison: Comparison) -> str:
    """What it means that a step has no distance."""
    drawn = str(comparison.provenance["strategy"]).startswith(("top_k", "top_p"))
    return "no other token could be drawn" if drawn and "boundary_a" in comparison.steps else "not recorded"


def kept_said(comparison: Comparison, maps: int, rows: int) -> list[str]:
    """What of a comparison the page holds, maps and attention rows of so many steps, and why not more."""
    if not comparison.count("heads") and not comparison.count("layers"):
        return ["No activation was recorded."]
    said, steps = [], len(comparison.steps)
    if not comparison.count("heads"):
        said.append("No attention pattern was recorded.")
    elif "pattern" in comparison.derived:
        said.append("Attention was derived from queries and keys, beside a kernel that shows none.")
    if maps < steps or (rows < steps and comparison.count("heads")):
        said.append(
            f"Of {steps} steps {maps} have their map here and {rows} their attention (dotted): flips and the largest KL first."
        )
    return said


def square_said(comparison: Comparison) -> str:
    """How to see the attention of every query, and not of the newest alone."""
    call = (
        "kv.attention_comparison(both, prompts[{example}], model=model, example={example}, step={step}, layers=[{layer}])"
    )
    if comparison.provenance["protocol"] == "matched":
        return f"Every query's attention, for any step, where both is this comparison (kv.load(FOLDER)): {call}."
    return f"Every query's attention is compared on one text: kv.compare(..., protocol='matched'), then {call}."
