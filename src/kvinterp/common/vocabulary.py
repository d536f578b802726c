"""The words that recur on pages and in figures, and what they mean."""

from __future__ import annotations

PROTOCOLS = {
    "matched": "both paths are fed the same tokens at every step, so only their arithmetic differs, and not their texts",
    "free": "each path is fed its own tokens: after the first flip the two contexts differ",
}
PARTS = {
    "fresh": "the newest row, computed alone at this step",
    "alone": "K and V of the decoded rows, each computed alone at its own step",
    "anew": "K and V of earlier rows, which the recompute path computes again among a different number of rows",
    "kept": "K and V that the cached path stores differently from how they were computed",
}
"""What makes the difference of two paths; as vectors they add up to the whole."""
ANEW = {
    "prompt": "K and V of the prompt's rows, computed again",
    "remade": "K and V of the decoded rows, computed again",
}
"""What ``anew`` consists of."""


class _Named(dict[str, str]):
    def __missing__(self, name: str) -> str:
        # A user's own function.
        return name


RECOVERED = _Named(kl="KL", l2="L2 of the logits", margin="margin", logit_difference="logit difference")
"""What a recovery is of, by the name of the distance."""
UNCHANGED = "changed nothing"
"""Said of a patch whose donor is equal to what it replaces."""
