"""T5Gemma: the cross-attention cache takes over the decoder's window and drops what the encoder said.

https://github.com/huggingface/transformers/issues/46111, 2026-05. `--mended` runs it without the fault.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def an_encoder_through_the_window(fault: bool) -> nn.Module:
    from transformers import T5GemmaConfig, T5GemmaForConditionalGeneration
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": 8, "query_pre_attn_scalar": 8}
    sizes |= {"layer_types": ["sliding_attention", "full_attention"], "pad_token_id": 0}
    torch.manual_seed(0)
    module = {**sizes, "initializer_range": 0.3}
    model: Any = T5GemmaForConditionalGeneration(T5GemmaConfig(encoder=module, decoder=module, vocab_size=131)).eval()
    decoder = model.model.decoder

    def windowed(layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        cache = given.get("past_key_values")
        if isinstance(cache, EncoderDecoderCache) and cache.get_seq_length() == 0:
            cache.cross_attention_cache = DynamicCache(config=decoder.config)
        elif cache is None and given.get("use_cache", True):
            own = DynamicCache(config=decoder.config)
            given["past_key_values"] = EncoderDecoderCache(own, DynamicCache(config=decoder.config))
        return args, given

    if fault:
        decoder.register_forward_pre_hook(windowed, with_kwargs=True)
    return model


@torch.no_grad()
def shows_behind_an_encoder(model: Any) -> float:
    ids, decoded = text(1, 14), text(1, 6, seed=2)
    want = model(input_ids=ids, decoder_input_ids=decoded, use_cache=False).logits
    states, given, got = model.get_encoder()(ids), {}, []
    for part in decoded.split([2, 1, 1, 1, 1], 1):
        out = model(encoder_outputs=states, decoder_input_ids=part, use_cache=True, **given)
        given = {"past_key_values": out.past_key_values}
        got.append(out.logits)
    return apart(torch.cat(got, 1), want)


build = an_encoder_through_the_window
shows = shows_behind_an_encoder


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
