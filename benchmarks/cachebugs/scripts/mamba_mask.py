"""Mamba: a mask as long as the text makes decoding wrong from the second step on.

Found by kvinterp: docs/upstream/mamba_mask.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM
from transformers.models.mamba.modeling_mamba import MambaMixer as Mixer


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    model = MambaForCausalLM(MambaConfig(**sizes, initializer_range=0.3)).eval()
    own = Mixer.forward

    @functools.wraps(own)
    def mended(
        self: Any, hidden_states: Tensor, cache_params: Any = None, attention_mask: Any = None, **more: Any
    ) -> Tensor:
        mask = None if attention_mask is None else attention_mask[:, -hidden_states.shape[1] :]
        return own(self, hidden_states, cache_params, mask, **more)

    if not fault:
        Mixer.forward = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(1))
    ones, got = torch.ones_like(ids), []
    out = model(ids[:, :9], attention_mask=ones[:, :9], use_cache=True)
    for at in range(9, 12):
        told = {"attention_mask": ones[:, : at + 1], "cache_params": out.cache_params}
        out = model(ids[:, at : at + 1], **told, use_cache=True)
        got.append(out.logits)
    return apart(torch.cat(got, 1), model(ids, use_cache=False).logits[:, 9:])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
