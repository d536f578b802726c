"""Bamba: without position_ids cached tokens are numbered from 0.

Found by kvinterp: docs/upstream/bamba_positions.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import BambaConfig, BambaForCausalLM


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_n_groups": 1, "mamba_chunk_size": 16}
    torch.manual_seed(0)
    more = {"num_key_value_heads": 2, "attn_layer_indices": [1], "initializer_range": 0.1}
    model = BambaForCausalLM(BambaConfig(**sizes, **more)).eval()
    inner = type(model.model)
    own = inner.forward

    @functools.wraps(own)
    def mended(self: Any, input_ids: Any = None, past_key_values: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None and past_key_values is not None:
            fed = more["inputs_embeds"] if input_ids is None else input_ids
            position_ids = torch.arange(fed.shape[1])[None] + past_key_values.get_seq_length()
        return own(self, input_ids=input_ids, past_key_values=past_key_values, position_ids=position_ids, **more)

    if not fault:
        inner.forward = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(1))
    cache = model(ids[:, :9], use_cache=True).past_key_values
    got = []
    for part in ids[:, 9:].split(1, 1):
        got.append(model(part, past_key_values=cache, use_cache=True).logits)
    return apart(torch.cat(got, 1), model(ids, use_cache=False).logits[:, 9:])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
