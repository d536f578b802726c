"""The likely cause of what is wrong, or what to do about it: the lines of a verdict that begin with
``hint:``.
"""

from __future__ import annotations

from collections.abc import Sequence

from kvinterp.auditing.checks import NUMBERS, Check
from kvinterp.auditing.judging import Judged
from kvinterp.auditing.ladder import PrecisionRun

HINT = "hint: "
"""What begins the line that names the likely cause, or what to do."""

HINTS = {
    "Q": "Q alone is wrong: the new token's position, or RoPE",
    "Q and K": "Q and K are wrong: the new token's position, or RoPE",
    "attention mask": "other keys are seen than should be: the window, the padding, or the mask's length",
    "attention scores": "the scale, the soft cap, or a bias of the attention scores",
    "attention output": "the attention itself: its scale, its soft cap, its kernel",
    "V": "what the cache keeps or gives back for V",
    "embedding": "what enters the first block: the position, or a scale of the embedding",
    "residual sum": "what is added up between the block's modules",
    "block input": "what stands between the two blocks",
    "logits": "what stands after the last block: a norm, the head, a cap of the logits",
    "recurrent state": "a state that is stale, or updated otherwise in a cached step",
    "convolution state": "a state that is stale, or shifted otherwise in a cached step",
    "expert choice": "the router chooses other experts in a cached step, though the scores do not differ by enough for that",
    "router scores": "the router computes otherwise in a cached step",
}
"""The likely cause by the first tensor that differs."""


def likely_cause(judged: Judged, own: PrecisionRun, checks: Sequence[Check]) -> list[str]:
    """The likely cause of what is wrong, in a line or none.

    Args:
        judged: The block that is wrong.
        own: What the model's own precision showed, which knows where the prompt ends.
        checks: What else was exercised.
    """
    finding = judged.finding
    likely = (
        HINTS["Q and K"]
        if finding.tensor == "Q" and "K" in judged.beside
        else HINTS.get(finding.tensor)
    )
    if any(check.name == "decode step" and check.hint == NUMBERS for check in checks):
        likely = NUMBERS
    elif finding.tensor == "K":
        every = own.every_error
        new = finding.position >= (int(every["prefill"].min()) if len(every) else 0)
        likely = (
            "new keys as they are written" if new else "old keys: a stale, lost or shifted cache"
        )
    return [f"{HINT}{likely}"] if likely else []


def overflow_remedy(own: PrecisionRun) -> str:
    """What to do where the model's own precision holds NaN or Inf, in a line."""
    where = own.nonfinite
    remedy = "the recomputation itself is not finite in this precision"
    if where.get("weights"):
        remedy = (
            f"the weights themselves hold NaN or Inf ({where['weights']}): load another checkpoint"
        )
    elif where["path"] == "cached":
        remedy = "the recomputation is finite there: look at what the cache gives back, and at rows that see no key"
    elif own.name == "float16":
        remedy = "a dtype with a wider range (bfloat16, float32) may hold it"
    return f"{HINT}{remedy}"
