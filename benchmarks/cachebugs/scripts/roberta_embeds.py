"""RoBERTa: embeddings fed to a filled cache are numbered from 0.

Found by kvinterp: docs/upstream/roberta_embeds.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import RobertaConfig, RobertaForCausalLM
from transformers.models.roberta.modeling_roberta import RobertaEmbeddings as Embeddings


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    torch.manual_seed(0)
    model = RobertaForCausalLM(RobertaConfig(**sizes, is_decoder=True, initializer_range=0.2)).eval()
    own = Embeddings.forward

    @functools.wraps(own)
    def mended(self: Any, *args: Any, inputs_embeds: Any = None, past_key_values_length: int = 0, **more: Any) -> Tensor:
        if inputs_embeds is not None and more.get("position_ids") is None:
            first = self.padding_idx + 1 + past_key_values_length
            more["position_ids"] = (first + torch.arange(inputs_embeds.shape[1])).expand(inputs_embeds.shape[:2])
        more |= {"inputs_embeds": inputs_embeds, "past_key_values_length": past_key_values_length}
        return own(self, *args, **more)

    if not fault:
        Embeddings.forward = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    embeds = model.get_input_embeddings()(torch.arange(5, 15)[None])
    cache = model(inputs_embeds=embeds[:, :-1], use_cache=True).past_key_values
    got = model(inputs_embeds=embeds[:, -1:], past_key_values=cache).logits[:, -1]
    return apart(got, model(inputs_embeds=embeds, use_cache=False).logits[:, -1])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
