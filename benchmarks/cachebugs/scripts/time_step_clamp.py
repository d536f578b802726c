"""Nemotron-H: the time step is clamped in a prefill and not in a decode step.

Found by kvinterp: docs/upstream/time_step_clamp.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import NemotronHConfig, NemotronHForCausalLM
from transformers.models.nemotron_h import modeling_nemotron_h as module


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {
        "vocab_size": 99,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    sizes |= {
        "mamba_num_heads": 8,
        "mamba_head_dim": 8,
        "ssm_state_size": 8,
        "n_groups": 2,
        "chunk_size": 16,
        "head_dim": 8,
    }
    torch.manual_seed(0)
    layers = {"layers_block_type": ["mamba", "attention", "mamba"], "initializer_range": 0.3, "time_step_min": 0.1}
    model = NemotronHForCausalLM(NemotronHConfig(**sizes, **layers)).eval()
    own, least = module.mamba2_selective_state_update, 0.1

    def mended(state: Tensor, x: Tensor, dt: Tensor, *args: Any, dt_bias: Any = None, **more: Any) -> Tensor:
        step = nn.functional.softplus(dt if dt_bias is None else dt + dt_bias).clamp(min=least)
        more |= {"dt_bias": None, "dt_softplus": False}
        return own(state, x, step, *args, **more)

    if not fault:
        module.mamba2_selective_state_update = mended
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
