"""What is asked of transformers besides its models and caches, so that a new version of it touches this folder alone.

It is imported when it is first asked: call plans are listed without it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn


def can_generate(model: nn.Module) -> bool:
    """Whether a model has a ``generate()`` of transformers'."""
    from transformers import PreTrainedModel

    return isinstance(model, PreTrainedModel) and hasattr(model, "generate") and bool(model.can_generate())


def greedy(steps: int, **more: Any) -> Any:
    """The config of a greedy ``generate()`` of at most so many tokens, in one beam unless told, that compiles nothing."""
    from transformers import GenerationConfig

    return GenerationConfig(
        **{"max_new_tokens": steps, "do_sample": False, "num_beams": 1, "disable_compile": True, **more}
    )


def from_config(config: Any, attention: str | None, trusted: bool) -> Any:
    """A causal model of random weights; ``trusted``: code that came with the config may run."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(config, attn_implementation=attention, trust_remote_code=trusted)


def register_attention(name: str, attention: Callable[..., Any]) -> None:
    """Makes an attention that a config can name."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)


@contextlib.contextmanager
def interface_led(layers: Mapping[nn.Module, int], read: Callable[..., Any]) -> Iterator[None]:
    """Leads the keys and values of modules that ask transformers for their attention function through ``read``.

    Args:
        layers: The layer of each module.
        read: Called with layer, keys and values; what it returns is handed on.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    find, before = INTERFACE.get_interface, vars(INTERFACE).get("get_interface")

    def found(*asked: Any, **named: Any) -> Callable[..., Any]:
        own = find(*asked, **named)

        @functools.wraps(own)
        def attention(module: nn.Module, query: Any, key: Any, value: Any, *given: Any, **more: Any) -> Any:
            if module in layers:
                key, value = read(layers[module], key, value)
            return own(module, query, key, value, *given, **more)

        return attention

    vars(INTERFACE)["get_interface"] = found
    try:
        yield
    finally:
        vars(INTERFACE).pop("get_interface")
        if before is not None:
            vars(INTERFACE)["get_interface"] = before
