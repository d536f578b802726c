"""A sliding window of 1 keeps the whole past.

Found by kvinterp: docs/upstream/window_of_one.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import MistralConfig, MistralForCausalLM
from transformers.cache_utils import DynamicSlidingWindowLayer as Layer


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = MistralForCausalLM(
        MistralConfig(**sizes, num_key_value_heads=2, sliding_window=1, initializer_range=0.3)
    ).eval()
    own = Layer.update

    def mended(self: Any, *args: Any, **more: Any) -> Any:
        out = own(self, *args, **more)
        if self.sliding_window == 1:
            self.keys, self.values = self.keys[:, :, :0], self.values[:, :, :0]
        return out

    if not fault:
        Layer.update = mended
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
