"""In a batch queries are rotated one forward too far.

https://github.com/ml-explore/mlx-lm/issues/1699, 2026-08. `--mended` runs it without the fault.
"""

from __future__ import annotations

import sys
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


def queries_turned_too_far(fault: bool) -> nn.Module:
    from transformers.models.llama import modeling_llama as module

    model: Any = small("llama")
    own, now = module.apply_rotary_pos_emb, dict[str, Any]()

    def asked(layer: nn.Module, args: Any, given: dict[str, Any]) -> None:
        states, positions = given["hidden_states"], given.get("position_ids")
        batch = given.get("past_key_values") is not None and states.shape[0] > 1 and positions is not None
        now["positions"] = positions + states.shape[1] if batch else None

    def planted(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **more: Any) -> Any:
        turned, keys = own(q, k, cos, sin, *args, **more)
        if now.get("positions") is not None:
            turned, _ = own(q, k, *model.model.rotary_emb(q, now["positions"]), *args, **more)
        return turned, keys

    if fault:
        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(asked, with_kwargs=True)
        module.apply_rotary_pos_emb = planted
    return model


@torch.no_grad()
def shows_in_a_batch(model: Any) -> float:
    ids = text(2, 9)
    cache = model(ids[:, :8], use_cache=True).past_key_values
    got = model(ids[:, 8:], past_key_values=cache, use_cache=True).logits[:, -1]
    return apart(got, torch.cat([model(row[None], use_cache=False).logits[:, -1] for row in ids]))


build = queries_turned_too_far
shows = shows_in_a_batch


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
