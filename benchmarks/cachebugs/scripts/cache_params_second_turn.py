"""Mamba: generate() on a filled cache feeds the whole text again.

Found by kvinterp: docs/upstream/generate_on_cache_params.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MambaConfig, MambaForCausalLM


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "state_size": 8}
    model = MambaForCausalLM(MambaConfig(**sizes, initializer_range=0.3)).eval()
    model.held = 0  # Tokens that went through it, which the cache does not count.
    own = MambaForCausalLM._prefill

    @functools.wraps(own)
    def mended(self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **more: Any) -> Any:
        whole = getattr(generation_config, "_mask_length", -1) == input_ids.shape[1]
        if model_kwargs.get("cache_params") is not None and whole:
            input_ids = input_ids[:, self.held :]
        return own(self, input_ids, generation_config, model_kwargs, **more)

    if not fault:
        MambaForCausalLM._prefill = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(1))
    cache, model.held = model(ids[:, :11], use_cache=True).cache_params, 11
    how = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    out = model.generate(ids, cache_params=cache, attention_mask=torch.ones_like(ids), **how)
    return apart(out.logits[0], model(ids, use_cache=False).logits[:, -1])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
