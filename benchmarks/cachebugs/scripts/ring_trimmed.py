"""Reusing a prefix cuts a rotating cache by its logical length: no error, other text.

https://github.com/Blaizzy/mlx-vlm/issues/1715, 2026-07. `--mended` runs it without the fault.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "mistral": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.12,
        "head_dim": 8,
        "attention_dropout": 0.0,
        "sliding_window": 16,
        "vocab_size": 131,
        "num_key_value_heads": 2,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
}


def small(kind: str, **config: Any) -> nn.Module:
    """A small random model of a type, in eval mode; its biases and its norms' weights are random too."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SIZES[kind] | config)).eval()
    with torch.no_grad():
        for name, each in model.named_parameters():
            if (
                each.is_floating_point()
                and bool((each == each.reshape(-1)[0]).all())
                and ("norm" in name or "bias" in name)
            ):
                each.add_(0.1 * torch.randn_like(each))
    return model


def text(rows: int, columns: int, seed: int = 1) -> Tensor:
    """Random tokens, none of them special."""
    return torch.randint(3, 99, (rows, columns), generator=torch.Generator().manual_seed(seed))


def apart(got: Tensor, want: Tensor) -> float:
    """The largest difference, of the largest logit."""
    return float((got - want).abs().max() / want.abs().max())


def ring_cut_as_if_flat(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    own = Layer.crop

    def planted(self: Any, tokens_to_remove: int) -> None:
        if self.cumulative_length < self.sliding_window or tokens_to_remove == 0:
            return own(self, tokens_to_remove)
        left = self.cumulative_length - abs(tokens_to_remove)
        self.keys, self.values = self.keys[..., :left, :], self.values[..., :left, :]
        self.cumulative_length = left
        return None

    if fault:
        Layer.crop = planted
    return small("mistral", sliding_window=8)


def of_partial_crop(columns: int, new: int, back: int, more: int = 2) -> Any:
    """A rollback of some of the last new tokens, and other tokens from there."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        from transformers import DynamicCache

        cache, ids, left = DynamicCache(config=model.config), text(1, columns), columns - back
        model(ids[:, :-new], past_key_values=cache, use_cache=True)
        for layer in cache.layers:
            if hasattr(layer, "activate_past_recording"):
                layer.activate_past_recording()
        model(ids[:, -new:], past_key_values=cache, use_cache=True)
        cache.crop(-back)
        other = text(1, more, seed=2)
        positions = torch.arange(left, left + more)[None]
        got = model(other, past_key_values=cache, position_ids=positions, use_cache=True).logits
        want = model(torch.cat([ids[:, :left], other], 1), use_cache=False).logits[:, -more:]
        return apart(got, want)

    return shows


build = ring_cut_as_if_flat
shows = of_partial_crop(14, 3, 3)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
