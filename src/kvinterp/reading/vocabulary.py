"""The words that recur on pages and in figures, and what they mean."""

from __future__ import annotations

from collections.abc import Iterable

from kvinterp.models import KINDS
from kvinterp.reading.numbers import sentence

PROTOCOLS = {
    "matched": "both paths are fed the same tokens at every step: the difference is of how they compute, and not of their texts",
    "free": "each path is fed its own tokens: after the first flip the two contexts differ",
}
PARTS = {
    "fresh": "the newest row, computed alone at this step",
    "alone": "K and V of the decoded rows, each computed alone at its own step",
    "anew": "K and V of earlier rows, which the recompute path makes anew among another number of rows",
    "kept": "K and V that the cached path keeps otherwise than they were written",
}
"""What makes the difference of two paths; as vectors they add up to the whole."""
ANEW = {
    "prompt": "K and V of the prompt's rows made anew",
    "remade": "K and V of the decoded rows made anew",
}
"""What ``anew`` consists of."""


class _Named(dict[str, str]):
    def __missing__(self, name: str) -> str:
        # A user's own function.
        return name


RECOVERED = _Named(kl="KL", l2="L2 of the logits", margin="margin", logit_difference="logit difference")
"""What a recovery is of, by the name of the distance."""
EMBEDDING = -1
"""The layer number that stands for what enters the first block."""
ONE_BY_ONE = "tokens fed one by one"
"""How an audit feeds tokens where it feeds them as decoding does."""

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
