"""Llama 4: the chunked mask lies one column off once the cache is full.

https://github.com/huggingface/transformers/issues/37414, 2025-04. `--mended` runs it without the fault.
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
    "llama4_text": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.12,
        "num_local_experts": 4,
        "head_dim": 8,
        "attention_dropout": 0.0,
        "vocab_size": 131,
        "num_key_value_heads": 2,
        "num_experts_per_tok": 2,
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


def of_steps(*parts: int) -> Callable[[Any], float]:
    """Feeds one row in such parts on one cache, against one plain forward of the row."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, sum(parts))
        want, given, got = model(ids, use_cache=False).logits, {}, []
        for part in ids.split(parts, 1):
            out = model(part, use_cache=True, **given)
            name = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
            given = {name: getattr(out, name)}
            got.append(out.logits)
        return apart(torch.cat(got, 1), want)

    return shows


def chunk_of_another_offset(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    own = Layer.get_mask_sizes

    def planted(self: Any, length: int) -> tuple[int, int]:
        columns, offset = own(self, length)
        return columns, max(offset - 1, 0)

    if fault:
        Layer.get_mask_sizes = planted
    kinds = ["chunked_attention", "full_attention"]
    return small(
        "llama4_text", attention_chunk_size=8, layer_types=kinds, no_rope_layers=[1, 0], interleave_moe_layer_step=2
    )


build = chunk_of_another_offset
shows = of_steps(5, *[1] * 12)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
