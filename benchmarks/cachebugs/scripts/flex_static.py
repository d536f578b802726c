"""Flex attention on a static cache: a decode step sees columns that are not filled yet.

Found by kvinterp: docs/upstream/flex_static.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.cache_utils import Cache


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, initializer_range=0.15)).eval()
    own = Cache.get_query_offset

    # update() adds to the tensor that is handed out, before the mask is evaluated.
    def mended(self: Any, layer_idx: int = 0) -> Any:
        offset = own(self, layer_idx)
        return offset.clone() if isinstance(offset, Tensor) else offset

    if not fault:
        Cache.get_query_offset = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(3, 97, (1, 8), generator=torch.Generator().manual_seed(1))
    want = model(ids, use_cache=False).logits
    before = model.config._attn_implementation
    model.set_attn_implementation("flex_attention")
    cache = StaticCache(config=model.config, max_cache_len=16)
    got = [model(part, past_key_values=cache).logits for part in ids.split([4, 1, 1, 1, 1], 1)]
    model.set_attn_implementation(before)
    return apart(torch.cat(got, 1), want)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
