"""The words that options accept, as types: an editor offers them, and a test compares each with the
table that decides.

An option that also accepts a text form or a list with commas has the type ``Word | str``. Values
are checked where they are used, whatever the type says.
"""

from __future__ import annotations

import inspect
from typing import Literal

Kind = Literal["native", "transformer_lens", "hooked", "bridge"]
Dtype = Literal["float16", "bfloat16", "float32", "float64"]
SHORT = {"fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "fp64": "float64"}
"""Other names of dtypes that are taken wherever a dtype is."""
Attention = Literal["sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention"]
Protocol = Literal["matched", "free"]
Strategy = Literal["greedy", "top_k", "top_p"]
Stop = Literal["end of sequence", "length"]
Progress = Literal["bar", "none"]
Existing = Literal["error", "overwrite", "use"]
CacheErrors = Literal["aggregated", "whole"]
Positions = Literal["newest", "all"]
TextPositions = Literal["all", "prompt", "generated"]
Kept = Literal["keep", "discard"]
Site = Literal[
    "embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "result", "post",
    "attn_scores", "pattern", "cache_k", "cache_k_pre", "cache_v", "router", "kv", "resid",
]  # fmt: skip
PatchSite = Literal[
    "embed", "resid_pre", "resid_mid", "resid_post", "attn_out", "mlp_out", "q", "k", "v", "z", "result", "post", "pattern",
    "router", "cache_k", "cache_v", "kv",
]  # fmt: skip
Over = Literal["single", "cumulative", "cumulative-from", "heads", "kv-heads", "blocks"]
Direction = Literal["into-recompute", "into-cached"]
Distance = Literal["kl", "l2", "margin", "logit_difference"]
Controls = Literal["all", "quick", "none"]
ExperimentName = Literal[
    "attention", "audit", "behaviour", "chain", "compare", "compare-traces", "decompose", "equivalent-noise", "flip-law",
    "kernels", "kv-error", "layer-drift", "localisation", "mitigate", "paper", "patch", "root-cause", "susceptibility",
    "turns", "which-run",
]  # fmt: skip


def unwrapped(text: str) -> str:
    """A docstring as paragraphs of one line each: where its lines were cut is no reader's business."""
    paragraphs = inspect.cleandoc(text).split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs)


def dtype_word(dtype: object) -> str:
    """The name in full that is meant, of a dtype or its name: ``float16`` for ``torch.float16`` and
    for ``fp16``.
    """
    name = str(dtype).removeprefix("torch.")
    return SHORT.get(name, name)
