"""Tiny random models of architectures that the other tests do not have, made from their configs."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

SIZES = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Any]:
    """Gives a model by its class name's stem; the sizes are Llama's unless ``sizes`` says otherwise."""

    def make(
        stem: str,
        scale: float = 3.0,
        config: str = "",
        sizes: dict[str, int] | None = None,
        attention: str = "eager",
        **more: Any,
    ) -> Any:
        config_class = getattr(transformers, config or f"{stem}Config")
        made = config_class(**{**(SIZES if sizes is None else sizes), **more})
        made._attn_implementation = attention
        name = next(n for n in (f"{stem}ForCausalLM", f"{stem}LMHeadModel", stem) if hasattr(transformers, n))
        torch.manual_seed(0)
        model = getattr(transformers, name)(made).eval()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() >= 2:
                    parameter.mul_(scale)
                elif parameter.dim() == 1:
                    parameter.add_(0.3 * torch.randn_like(parameter))
        return model

    return make
