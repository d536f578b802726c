"""Errors of the cached path alone, planted in small random models: an audit of each must fail, and name the place.

Every plant leaves the full forward as it is. A bug's `error` is the largest relative difference of the logits, cached against full,
in the model's own dtype, as plain transformers code measures it (`measure_bugs.py` makes the numbers again): why it is
detectable. Inspired by reports against transformers, llama.cpp, vLLM, mlx-lm and TransformerLens; all are our own.
"""

from __future__ import annotations

from bank import bugs_blocks, bugs_cache, bugs_forms, bugs_paths
from bank.bug import Bug

BUGS: dict[str, Bug] = {bug.name: bug for bug in (*bugs_cache.BUGS, *bugs_blocks.BUGS, *bugs_paths.BUGS, *bugs_forms.BUGS)}

assert len(BUGS) == sum(len(each.BUGS) for each in (bugs_cache, bugs_blocks, bugs_paths, bugs_forms)), (
    "two bugs have one name"
)
