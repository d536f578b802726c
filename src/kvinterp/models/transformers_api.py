"""What is asked of transformers besides its models and caches, so that a new version of it touches this folder alone.

It is imported when it is first asked: call plans are listed without it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


def can_generate(model: nn.Module) -> bool:
    """Whether a model has a ``generate()`` of transformers'."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel) and hasattr(model, "generate") and bool(model.can_generate())


def greedy(steps: int, **more: Any) -> Any:
    """The config of a greedy ``generate()`` of at most so many tokens, in one beam, that compiles nothing."""
    from transformers import GenerationConfig

    return GenerationConfig(max_new_tokens=steps, do_sample=False, num_beams=1, disable_compile=True, **more)


def from_config(config: Any, attention: str | None, trusted: bool) -> Any:
    """A causal model of random weights; ``trusted``: code that came with the config may run."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=trusted)


def register_attention(name: str, attention: Callable[..., Any]) -> None:
    """Makes an attention that a config can name."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)
