"""M2M100: a decode step counts pads that the forward without a cache does not.

Found by kvinterp: docs/upstream/m2m100_pads.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import M2M100Config, M2M100ForConditionalGeneration
from transformers.models.m2m_100.modeling_m2m_100 import M2M100Decoder


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "d_model": 32, "encoder_layers": 1, "decoder_layers": 2, "max_position_embeddings": 64}
    sizes |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48}
    torch.manual_seed(0)
    model = M2M100ForConditionalGeneration(M2M100Config(**sizes, init_std=0.15)).eval()
    own, pads = M2M100Decoder.forward, {"count": 0}

    # The pads that the cache holds are no positions.
    def counted(module: Any, args: Any, given: Any) -> Any:
        return (*args[:2], args[2] - pads["count"]), given

    @functools.wraps(own)
    def mended(self: Any, input_ids: Any = None, attention_mask: Any = None, **more: Any) -> Any:
        # A mask of four axes, as generate() makes it for a static cache, has the causal one in it.
        held = attention_mask is not None and attention_mask.dim() == 2 and more.get("past_key_values") is not None
        before = more["past_key_values"].get_seq_length() if held else 0
        pads["count"] = int((attention_mask[:, :before] == 0).sum()) if held else 0
        return own(self, input_ids=input_ids, attention_mask=attention_mask, **more)

    if not fault:
        M2M100Decoder.forward = mended
        model.model.decoder.embed_positions.register_forward_pre_hook(counted, with_kwargs=True)
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    draw = torch.Generator().manual_seed(1)
    source, text = (torch.randint(9, 97, (1, n), generator=draw) for n in (7, 6))
    want = model(input_ids=source, decoder_input_ids=text, use_cache=False).logits[:, -1]
    ids = nn.functional.pad(text, (3, 0), value=model.config.pad_token_id)
    mask = (ids != model.config.pad_token_id).long()
    first = {"decoder_input_ids": ids[:, :-1], "decoder_attention_mask": mask[:, :-1]}
    cache = model(input_ids=source, **first, use_cache=True).past_key_values
    last = {"decoder_input_ids": ids[:, -1:], "decoder_attention_mask": mask}
    return apart(model(input_ids=source, **last, past_key_values=cache).logits[:, -1], want)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
