"""DeepSeek-V4: rows of a cache that are repeated leave their compressor's state behind, and the next step raises.

Found by kvinterp: docs/upstream/cache_rows.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache as Layer


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.3}
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(
            "deepseek_v4",
            **sizes,
            q_lora_rank=16,
            n_routed_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=24,
        )
    ).eval()
    if not fault:
        Layer.batch_repeat_interleave = lambda self, n: self.reorder_cache(
            torch.arange(self.keys.shape[0]).repeat_interleave(n)
        )
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(3, 99, (2, 9), generator=torch.Generator().manual_seed(0))
    want = model(ids, use_cache=False).logits[:, -1]
    cache = model(ids[:, :8], use_cache=True).past_key_values
    cache.batch_repeat_interleave(2)
    try:
        got = model(ids[[0, 0, 1, 1], 8:], past_key_values=cache, use_cache=True).logits[:, -1]
    except RuntimeError:
        return 1.0
    return apart(got, want[[0, 0, 1, 1]])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
