"""What kvinterp uses of transformers besides models and caches, so that a new version of it needs
changes in this folder alone.

Each function imports transformers when it is called: listing the ways of running needs none of it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn


def can_generate(model: nn.Module) -> bool:
    """Whether a model has a ``generate()`` of transformers'."""
    from transformers import PreTrainedModel

    return (
        isinstance(model, PreTrainedModel)
        and hasattr(model, "generate")
        and bool(model.can_generate())
    )


def greedy(steps: int, **options: Any) -> Any:
    """Makes the config of a greedy ``generate()`` of at most ``steps`` tokens, with one beam by
    default and no compilation.
    """
    from transformers import GenerationConfig

    return GenerationConfig(
        **{
            "max_new_tokens": steps,
            "do_sample": False,
            "num_beams": 1,
            "disable_compile": True,
            **options,
        }
    )


def looks_for_packed_texts(forward: Callable[[], object]) -> bool:
    """Whether a forward has transformers look for texts packed in one row, which it finds in
    positions and keeps apart.
    """
    from transformers import masking_utils

    own, calls = getattr(masking_utils, "find_packed_sequence_indices", None), list[int]()
    if own is None:
        return False

    def found(*given: Any, **more: Any) -> Any:
        calls.append(1)
        return own(*given, **more)

    masking_utils.find_packed_sequence_indices = found
    try:
        forward()
    finally:
        masking_utils.find_packed_sequence_indices = own
    return bool(calls)


@contextlib.contextmanager
def flex_uncompiled() -> Iterator[None]:
    """Runs flex attention as it is: nothing is compiled, and what transformers keeps of a compiled
    one stays as it was.

    The stance alone would do, but each ``torch.compile`` imports the compiler all the same, which
    takes seconds.
    """
    from transformers.integrations.flex_attention import WrappedFlexAttention

    def uncompiled(function: Any = None, **options: Any) -> Any:
        return function if function is not None else lambda own: own

    own, kept = torch.compile, WrappedFlexAttention._instance
    with torch.compiler.set_stance("force_eager"):
        WrappedFlexAttention._instance = None
        torch.compile = uncompiled  # type: ignore[assignment]
        try:
            yield
        finally:
            torch.compile, WrappedFlexAttention._instance = own, kept  # type: ignore[method-assign]


def from_config(config: Any, attention: str | None, trusted: bool) -> Any:
    """Makes a causal model with random weights; ``trusted``: code that came with the config may
    run.
    """
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_config(
        config, attn_implementation=attention, trust_remote_code=trusted
    )


def register_attention(name: str, attention: Callable[..., Any]) -> None:
    """Registers an attention function under a name that configs can use."""
    from transformers import AttentionInterface

    AttentionInterface.register(name, attention)


@contextlib.contextmanager
def wrapping_attention(layers: Mapping[nn.Module, int], read: Callable[..., Any]) -> Iterator[None]:
    """Replaces the keys and values of modules that get their attention function from transformers,
    while the context lasts.

    Args:
        layers: The layer of each module.
        read: Called with layer, keys and values; attention reads what it returns.
    """
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as INTERFACE

    find, before = INTERFACE.get_interface, vars(INTERFACE).get("get_interface")

    @functools.cache
    def reading(attention: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(attention)
        def wrapped(
            module: nn.Module, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if module in layers:
                key, value = read(layers[module], key, value)
            return attention(module, query, key, value, *args, **kwargs)

        return wrapped

    vars(INTERFACE)["get_interface"] = lambda *args, **kwargs: reading(find(*args, **kwargs))
    try:
        yield
    finally:
        vars(INTERFACE).pop("get_interface")
        if before is not None:
            vars(INTERFACE)["get_interface"] = before
