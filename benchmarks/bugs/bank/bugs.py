"""Errors of the cached path alone, planted in small random models: an audit of each must fail, and name the place.

Every plant leaves the full forward as it is. A bug's `error` is the largest relative difference of the logits, cached against full,
in the model's own dtype, as plain transformers code measures it (`measure_bugs.py` makes the numbers again): why it is
detectable. Inspired by reports against transformers, llama.cpp, vLLM, mlx-lm and TransformerLens; all are our own.
"""

from __future__ import annotations

from bank import bugs_blind, bugs_blocks, bugs_cache, bugs_forms, bugs_paths
from bank.bug import Bug

FILES = (bugs_cache, bugs_blocks, bugs_paths, bugs_forms, bugs_blind)
BUGS: dict[str, Bug] = {bug.name: bug for each in FILES for bug in each.BUGS}

assert len(BUGS) == sum(len(each.BUGS) for each in FILES), "two bugs have one name"
