"""Gemma 3n: layers that share K and V rotate their queries by an offset that another layer has moved on.

https://github.com/ml-explore/mlx-lm/issues/1396, 2026-06. `--mended` runs it without the fault.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "gemma3n_text": {
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
        "vocab_size_per_layer_input": 131,
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 8,
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


def of_steps(*parts: int) -> Callable[[Any], float]:
    """Feeds one row in such parts on one cache, against one plain forward of the row."""

    @torch.no_grad()
    def shows(model: Any) -> float:
        ids = text(1, sum(parts))
        want, given, got = model(ids, use_cache=False).logits, {}, []
        for part in ids.split(parts, 1):
            out = model(part, use_cache=True, **given)
            name = "cache_params" if getattr(out, "cache_params", None) is not None else "past_key_values"
            given = {name: getattr(out, name)}
            got.append(out.logits)
        return apart(torch.cat(got, 1), want)

    return shows


def shared_layers_read_a_moved_offset(fault: bool) -> nn.Module:
    layers = {"num_hidden_layers": 4, "num_kv_shared_layers": 2, "sliding_window": 64}
    kinds = ["full_attention", "full_attention", "full_attention", "full_attention"]
    model: Any = small("gemma3n_text", **layers, layer_types=kinds, activation_sparsity_pattern=[0.0] * 4)
    inner = model.model

    def moved(layer: nn.Module, args: Any, given: dict[str, Any]) -> Any:
        if given.get("past_key_values") is None:
            return None
        states, positions = args[0] if args else given["hidden_states"], given["position_ids"]
        kind = layer.layer_type
        given["position_embeddings"] = inner.rotary_emb(states, positions + positions.shape[-1], kind)
        return args, given

    if fault:
        for layer in inner.layers:
            if layer.self_attn.is_kv_shared_layer:
                layer.self_attn.register_forward_pre_hook(moved, with_kwargs=True)
    return model


build = shared_layers_read_a_moved_offset
shows = of_steps(9, 1, 1)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
