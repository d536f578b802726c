"""Dynamic NTK: after a long text a short one is rotated with the long one's base.

https://github.com/huggingface/transformers/issues/27226, https://github.com/huggingface/transformers/issues/27227, 2023-11. `--mended` runs it without the fault.
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


def frequencies_of_the_longest_request(fault: bool) -> nn.Module:
    model: Any = small("llama")
    rotary, longest = model.model.rotary_emb, 16
    base = rotary.inv_freq.clone()

    def grown(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
        nonlocal longest
        positions = given.get("position_ids", args[1] if len(args) > 1 else None)
        if not fault or positions is None:
            return
        module.longest = max(getattr(module, "longest", longest), int(positions.max()) + 1)
        stretch = module.longest / longest
        powers = torch.arange(len(base)) / len(base)
        module.inv_freq = (base * stretch ** (-powers)).to(module.inv_freq)

    rotary.register_forward_pre_hook(grown, with_kwargs=True)
    return model


@torch.no_grad()
def shows_after_a_longer_request(model: Any) -> float:
    ids = text(1, 12)
    want = model(ids, use_cache=False).logits
    model(text(1, 40), use_cache=False)
    got = model(ids, use_cache=False).logits
    return float((got - want).abs().max() / want.abs().max())


build = frequencies_of_the_longest_request
shows = shows_after_a_longer_request


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
