"""Once every row left has pads, new tokens are written over live columns.

https://github.com/jundot/omlx/issues/2172, 2026-07. `--mended` runs it without the fault.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "llama": {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.12,
        "head_dim": 8,
        "attention_dropout": 0.0,
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


def of_pads(pads: int = 4, columns: int = 7, new: int = 3) -> Callable[[Any], float]:
    """A left-padded row with its mask and positions, then single tokens, against the row alone without a cache."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, columns + new)
        want = model(ids, use_cache=False).logits
        padded = torch.cat([torch.full((1, pads), 5), ids], 1)
        mask = torch.cat([torch.zeros(1, pads, dtype=torch.long), torch.ones_like(ids)], 1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        told = "position_ids" in inspect.signature(type(model).forward).parameters
        given, got, done = {}, [], 0
        for part in padded.split([pads + columns] + [1] * new, 1):
            end = done + part.shape[1]
            if told:
                given["position_ids"] = positions[:, done:end]
            out = model(part, attention_mask=mask[:, :end], use_cache=True, **given)
            name = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
            given[name], done = getattr(out, name), end
            got.append(out.logits)
        return apart(torch.cat(got, 1)[:, pads:], want)

    return shows


def appended_at_the_longest_row(fault: bool) -> nn.Module:
    model: Any = small("llama")
    inner = type(model.model)
    own = inner.forward

    def planted(
        self: Any, input_ids: Any = None, attention_mask: Any = None, past_key_values: Any = None, **more: Any
    ) -> Any:
        cache, mask = past_key_values, attention_mask
        if cache is not None and cache.get_seq_length() > 0 and mask is not None and mask.dim() == 2:
            early = int((mask == 0).long().cumprod(1).sum(1).min())
            if early and type(cache.layers[0]).__name__ == "DynamicLayer":
                for layer in cache.layers:
                    layer.keys, layer.values = layer.keys[..., :-early, :], layer.values[..., :-early, :]
                attention_mask = mask[:, : mask.shape[1] - early]
        return own(self, input_ids=input_ids, attention_mask=attention_mask, past_key_values=cache, **more)

    if fault:
        inner.forward = planted
    return model


build = appended_at_the_longest_row
shows = of_pads()


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
