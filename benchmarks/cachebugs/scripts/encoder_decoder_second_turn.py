"""T5: generate() on a filled cache feeds the whole text again.

Found by kvinterp: docs/upstream/encdec_generate_on_cache.md, 2026-11. `--mended` runs it with the lines that mend it.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import T5Config, T5ForConditionalGeneration


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def build(fault: bool) -> nn.Module:
    sizes = {"vocab_size": 99, "d_model": 32, "decoder_start_token_id": 0, "pad_token_id": 0, "initializer_factor": 3.0}
    torch.manual_seed(0)
    model = T5ForConditionalGeneration(T5Config(**sizes, d_kv=8, d_ff=48, num_layers=2, num_heads=4)).eval()
    own = T5ForConditionalGeneration._prefill

    @functools.wraps(own)
    def mended(self: Any, input_ids: Tensor, generation_config: Any, model_kwargs: dict[str, Any], **more: Any) -> Any:
        cache = model_kwargs.get("past_key_values")
        held = 0 if cache is None else int(cache.get_seq_length())
        if model_kwargs.get("decoder_attention_mask") is None and 0 < held < input_ids.shape[1]:
            # The length of the cache says the same as a mask.
            model_kwargs = {**model_kwargs, "decoder_attention_mask": torch.ones_like(input_ids)}
        return own(self, input_ids, generation_config, model_kwargs, **more)

    if not fault:
        T5ForConditionalGeneration._prefill = mended
    return model


@torch.no_grad()
def shows(model: Any) -> float:
    draw = torch.Generator().manual_seed(1)
    source, text = (torch.randint(5, 97, (1, n), generator=draw) for n in (7, 6))
    text[:, 0] = 0
    how = {"max_new_tokens": 1, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    cache = model(input_ids=source, decoder_input_ids=text[:, :-1], use_cache=True).past_key_values
    made = model.generate(source, decoder_input_ids=text, past_key_values=cache, **how)
    return apart(made.logits[0], model(input_ids=source, decoder_input_ids=text, use_cache=False).logits[:, -1])


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
