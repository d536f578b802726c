"""Pads in a second chunk or turn reach the recurrent state of a hybrid.

https://github.com/huggingface/transformers/issues/47086, 2026-07. `--mended` runs it without the fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "qwen3_next": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.12,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 8,
        "head_dim": 8,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "attention_dropout": 0.0,
        "vocab_size": 131,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
        "linear_num_key_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
}


def small(kind: str, **config: Any) -> nn.Module:
    """A small random model of a type, in eval mode; its biases and its norms' weights are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES[kind] | config)).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if (
                each.is_floating_point()
                and bool((each == each.reshape(-1)[0]).all())
                and ("norm" in name or "bias" in name)
            ):
                each.add_(0.1 * torch.randn_like(each))
    return model


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def of_chunks(size: int = 2, pads: int = 3, columns: int = 8) -> Callable[[Any], float]:
    """A left-padded prompt prefilled in chunks by generate(), against the row alone without a cache."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, columns)
        padded = torch.cat([torch.full((1, pads), 5), ids], 1)
        mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(ids)], 1)
        more = {"prefill_chunk_size": size, "output_logits": True, "return_dict_in_generate": True}
        made = model.generate(padded, attention_mask=mask, max_new_tokens=1, do_sample=False, **more)
        return apart(made.logits[0], model(ids, use_cache=False).logits[:, -1])

    return shows


def pads_reach_a_state(fault: bool) -> nn.Module:
    from transformers.models.qwen3_next import modeling_qwen3_next as module

    own = module.create_recurrent_attention_mask

    def planted(config: Any, inputs_embeds: Tensor, attention_mask: Any, past_key_values: Any = None, **more: Any) -> Any:
        if past_key_values is not None and past_key_values.get_seq_length() > 0:
            return None
        return own(config, inputs_embeds, attention_mask, past_key_values, **more)

    if fault:
        module.create_recurrent_attention_mask = planted
    return small("qwen3_next", layer_types=["linear_attention", "full_attention"])


build = pads_reach_a_state
shows = of_chunks()


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
