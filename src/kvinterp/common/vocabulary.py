"""Words that recur on pages and in figures, with their meanings."""

from __future__ import annotations

PROTOCOLS = {
    "matched": "both paths are fed the same tokens at every step, so only their arithmetic differs, and not their texts",
    "free": "each path is fed its own tokens: after the first flip the two contexts differ",
}
PATHS = {
    "cached": "the prompt at once, then one token a step from the KV cache",
    "recompute": "the whole prefix at every step",
    "cached+q8_0": "with a policy on K and V, or several: see kvinterp list policies",
    "recompute@float64": "the model in another dtype",
    "cached[chunk=16]": "the prompt in chunks of so many tokens",
    "cached[cache=static]": "another kind of cache",
    "cached[cache_dtype=float32]": "K and V kept in another dtype",
    "cached[kernels=split_k(4,float16)]": "other kernels for some operations: see kvinterp list kernels",
    "cached[prefill=stored]": "attention in the prefill reads what the cache keeps, as in llama.cpp, not what was computed",
    "cached[refresh=16]": "the cache is computed again from the whole prefix every so many steps",
    "cached[smooth=0.5]": "attention reads the average of the cache, with this weight, and a recomputation",
}
"""The forms of a path and its options, by an example each; they go together:
``cached[chunk=16,prefill=stored]+q8_0@float32``.
"""
PARTS = {
    "newest_row": "the newest row, computed alone at this step",
    "decoded_kv": "K and V of the decoded rows, each computed alone at its own step",
    "prefix_kv": "K and V of earlier rows, which the recompute path computes again among a different number of rows",
    "cache_format": "K and V that the cached path stores differently from how they were computed",
}
"""The parts of the difference between two paths; as vectors they add up to the whole."""
PREFIX_KV = {
    "prompt": "K and V of the prompt's rows, computed again",
    "decoded_again": "K and V of the decoded rows, computed again",
}
"""The two parts of ``prefix_kv``."""


class _Named(dict[str, str]):
    def __missing__(self, name: str) -> str:
        # A user's own function.
        return name


RECOVERED = _Named(
    kl="KL", l2="L2 of the logits", margin="margin", logit_difference="logit difference"
)
"""The quantity that a recovery is a share of, by the name of the distance."""
UNCHANGED = "changed nothing"
"""Says that a patch had a donor equal to what it replaced."""
