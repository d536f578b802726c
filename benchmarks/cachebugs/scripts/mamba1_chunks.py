"""Mamba-1 blocks: several tokens on a filled cache begin from a recurrent state of zero.

Found by kvinterp: docs/upstream/mamba_chunks.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import JambaConfig, JambaForCausalLM
from transformers.models.jamba.modeling_jamba import JambaMambaMixer as Mixer


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "initializer_range": 0.3}
    sizes |= {"intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2, "num_experts": 2}
    torch.manual_seed(0)
    model = JambaForCausalLM(JambaConfig(**sizes, mamba_dt_rank=4, attn_layer_period=2, attn_layer_offset=1)).eval()
    own = Mixer.forward

    @functools.wraps(own)
    def mended(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **more: Any
    ) -> Tensor:
        held = cache_params is not None and cache_params.get_recurrent_state(self.layer_idx) is not None
        if not held or hidden_states.shape[1] == 1:
            return own(self, hidden_states, cache_params, attention_mask, **more)
        # Columns go through the update of one token, which reads the state.
        columns = hidden_states.split(1, 1)
        return torch.cat([own(self, column, cache_params, None, **more) for column in columns], 1)

    if not fault:
        Mixer.forward = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(1))
    cache = model(ids[:, :6], use_cache=True).past_key_values
    got = model(ids[:, 6:], past_key_values=cache, use_cache=True).logits[:, -1]
    return apart(got, model(ids, use_cache=False).logits[:, -1])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
