"""RoBERTa: pads in front are counted in decode, and not without a cache.

Found by kvinterp: docs/upstream/roberta_pads.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForCausalLM


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = RobertaForCausalLM(RobertaConfig(**sizes, is_decoder=True, initializer_range=0.2)).eval()
    own = RobertaForCausalLM.forward

    @functools.wraps(own)
    def mended(self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **more: Any) -> Any:
        if position_ids is None and attention_mask is not None and input_ids is not None:
            places = attention_mask.cumsum(1) * attention_mask + self.config.pad_token_id
            position_ids = places[:, -input_ids.shape[1] :]
        return own(self, input_ids, attention_mask, position_ids=position_ids, **more)

    if not fault:
        RobertaForCausalLM.forward = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    ids = torch.randint(3, 99, (1, 12), generator=torch.Generator().manual_seed(1))
    padded, mask = nn.functional.pad(ids, (4, 0), value=1), torch.tensor([[0] * 4 + [1] * 12])
    cache = model(padded[:, :-1], attention_mask=mask[:, :-1], use_cache=True).past_key_values
    got = model(padded[:, -1:], attention_mask=mask, past_key_values=cache, use_cache=True).logits[:, -1]
    return apart(got, model(ids, use_cache=False).logits[:, -1])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
