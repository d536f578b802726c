"""With an assistant a window has more keys than its mask.

https://github.com/huggingface/transformers/issues/48280, 2026-08. `--mended` runs it without the fault.
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


def window_forgotten_while_recording(fault: bool) -> nn.Module:
    from transformers.cache_utils import DynamicSlidingWindowLayer as Layer

    own = Layer.update

    def planted(self: Any, *args: Any, **more: Any) -> Any:
        out = own(self, *args, **more)
        return (self.keys, self.values) if self.record_past else out

    if fault:
        Layer.update = planted
    return small("mistral", sliding_window=8)


@torch.no_grad()
def shows_on_a_cache_that_records(model: Any) -> float:
    from transformers import DynamicCache

    cache, ids, got = DynamicCache(config=model.config), text(1, 14), []
    for layer in cache.layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()
    try:
        for part in ids.split([6] + [1] * 8, 1):
            got.append(model(part, past_key_values=cache, use_cache=True).logits)
    except RuntimeError:
        return 1.0
    return apart(torch.cat(got, 1), model(ids, use_cache=False).logits)


build = window_forgotten_while_recording
shows = shows_on_a_cache_that_records


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
