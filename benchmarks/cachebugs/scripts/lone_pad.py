"""Hybrids: a pad that is a forward's only column reaches the recurrent state.

Found by kvinterp: docs/upstream/lone_pad.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM
from transformers.models.qwen3_next import modeling_qwen3_next as module


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    sizes |= {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
    sizes |= {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"], "initializer_range": 0.3}
    sizes |= {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    }
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**sizes)).eval()

    # A lone column is a pad where the mask says so: the mask of it is made as that of several is.
    def mended(config: Any, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Any = None, **more: Any) -> Any:
        if attention_mask is None or attention_mask.ndim != 2 or torch.all(attention_mask == 1):
            return None
        return attention_mask[:, -inputs_embeds.shape[1] :].contiguous()

    if not fault:
        module.create_recurrent_attention_mask = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(6, 99, (1, 6), generator=torch.Generator().manual_seed(1))
    padded, mask = nn.functional.pad(ids, (3, 0), value=5), torch.tensor([[0] * 3 + [1] * 6])
    how = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(padded, attention_mask=mask, prefill_chunk_size=1, **how)
    return apart(out.logits[0], model(ids, use_cache=False).logits[:, -1])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
