"""Use_cache=False gives garbage: K and V are shared through the cache.

https://github.com/huggingface/transformers/issues/45242, 2026-04. `--mended` runs it without the fault.
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


def keys_shared_through_the_cache(fault: bool) -> nn.Module:
    model: Any = small("llama", num_hidden_layers=4)
    source, reader = model.model.layers[1].self_attn, model.model.layers[3].self_attn
    kept: dict[str, Any] = {}

    def asked(module: nn.Module, args: Any, given: dict[str, Any]) -> None:
        kept["cache"] = given.get("past_key_values")

    reader.register_forward_pre_hook(asked, with_kwargs=True)
    for name in ("k_proj", "v_proj"):
        getattr(source, name).register_forward_hook(lambda m, a, out, name=name: kept.update({name: out}))
        getattr(reader, name).register_forward_hook(
            lambda m, a, out, name=name: kept[name] if kept["cache"] is not None or not fault else out
        )
    return model


build = keys_shared_through_the_cache
shows = of_steps(9, 1, 1)


def main() -> None:
    """Says whether the cached path gives what one forward without a cache gives."""
    off = shows(build("--mended" not in sys.argv))
    print(f"{'wrong' if off > 1e-4 else 'right'}: off by {off:.2g} of the largest logit")


if __name__ == "__main__":
    main()
