"""Qwen3-VL: rope_deltas of another request stay on the model.

https://github.com/huggingface/transformers/issues/44158, 2026-02. `--mended` runs it without the fault.
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


def state_of_another_request(fault: bool) -> nn.Module:
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    sizes = {"vocab_size": 131, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "head_dim": 8}
    rope = {"rope_type": "default", "mrope_section": [2, 1, 1], "rope_theta": 1e4}
    text = {**sizes, "num_hidden_layers": 2, "num_key_value_heads": 2, "rope_parameters": rope}
    vision = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 32,
        "num_heads": 2,
        "patch_size": 4,
        "out_hidden_size": 32,
    }
    vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(Qwen3VLConfig(text_config=text, vision_config=vision)).eval()
    if not fault:
        model.register_forward_pre_hook(lambda module, args: setattr(module.model, "rope_deltas", None))
    return model


@torch.no_grad()
def shows_behind_another_request(model: Any) -> float:
    ids, ones = text(1, 8), torch.ones(1, 8, dtype=torch.long)
    want = model(ids, attention_mask=ones, use_cache=False).logits[:, -1]
    cache = model(ids[:, :7], attention_mask=ones[:, :7], use_cache=True).past_key_values
    model.generate(text(3, 5, seed=2), max_new_tokens=2, do_sample=False, pad_token_id=0)
    try:
        got = model(ids[:, 7:], attention_mask=ones, past_key_values=cache, use_cache=True).logits[:, -1]
    except RuntimeError:
        return 1.0
    return apart(got, want)


build = state_of_another_request
shows = shows_behind_another_request


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
