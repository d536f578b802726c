"""The words of a page, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable

from kvinterp.common.numbers import sentence
from kvinterp.comparison.vocabulary import PROTOCOLS
from kvinterp.models import KINDS

_TERMS = {
    "path": "How next-token logits are computed: from a KV cache, one new token a step, or from the whole prefix again.",
    "step": "Step 0 is the token the prefill decides; step 1 is the first that a cached path computes from one token.",
    "matched": sentence(PROTOCOLS["matched"]),
    "free": sentence(f"{PROTOCOLS['free']}, and KL from there on measures two texts instead of rounding"),
    "KL (nats)": "0 for equal distributions. Small values are about half the probability-weighted variance of the logit "
    "differences: differences a hundred times smaller give a KL ten thousand times smaller.",
    "exactly 0": "Not a small number. Logits, vectors, K and V that differ by exactly 0 are the same to the bit; a KL of "
    "exactly 0 can also be one too small for float64. Figures give zeros a place of their own.",
    "margin": "How many logits the most likely token is ahead of the next. A greedy choice can flip only where the largest "
    "logit difference is at least half of it.",
    "unit in the last place": "The distance from a number to the next one that its dtype can hold.",
}


def glossary(kinds: Iterable[str]) -> dict[str, str]:
    """The words of a report and their meaning, the kinds of model on its page among them."""
    return _TERMS | {kind: sentence(KINDS[kind]) for kind in dict.fromkeys(kinds)}
