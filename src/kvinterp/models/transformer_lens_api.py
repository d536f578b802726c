"""Runs TransformerLens's own ``generate()`` and records each forward of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvinterp.errors import UnsupportedError
from kvinterp.models.hooks import wrapping_methods


class Forward(NamedTuple):
    """One forward of a ``generate()``.

    Attributes:
        new: The number of positions that it was fed.
        logits: The logits of the newest position, ``[batch, vocabulary]``.
        positions: The position numbers that a learned position embedding used, ``[batch, new]``; None where there is none.
    """

    new: int
    logits: Tensor
    positions: Tensor | None


def generate(
    model: Any, tokens: Tensor, steps: int, cached: str, mask: Tensor | None = None
) -> tuple[Tensor, list[Forward]]:
    """Generates exactly ``steps`` tokens greedily, past any end token, by a model's own ``generate()``.

    Args:
        model: A HookedTransformer or a TransformerBridge.
        tokens: ``[batch, position]``.
        steps: The number of tokens to generate.
        cached: ``"yes"`` or ``"no"``.
        mask: For the tokens, 0 where there is none; None where there is nothing to mask.

    Returns:
        All tokens, and the forwards.

    Raises:
        UnsupportedError: A mask was given to a ``generate()`` that takes none.
    """
    options: dict[str, Any] = {
        "max_new_tokens": steps,
        "use_past_kv_cache": cached == "yes",
        "do_sample": False,
        "stop_at_eos": False,
        "prepend_bos": False,
        "return_type": "tokens",
        "verbose": False,
        **({} if mask is None else {"attention_mask": mask}),
    }
    takes, forwards = inspect.signature(model.generate).parameters, list[Forward]()
    positions: list[Tensor] = []
    if mask is not None and "attention_mask" not in takes:
        raise UnsupportedError(f"generate() of {type(model).__name__} takes no attention_mask.")

    def recording_forward(_: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        logits = forward(*args, **kwargs)
        new = (args[0] if args else kwargs["input"]).shape[1]
        forwards.append(Forward(new, logits[:, -1].clone(), positions[-1][:, -new:] if positions else None))
        return logits

    def record_positions(_: nn.Module, __: Any, rows: Tensor) -> None:
        # Each row is a row of the embedding's weight.
        positions.append(torch.cdist(rows.double(), model.pos_embed.W_pos.double()).argmin(-1))

    hook, point = None, getattr(model, "hook_pos_embed", None)
    if isinstance(point, nn.Module) and hasattr(getattr(model, "pos_embed", None), "W_pos"):
        hook = point.register_forward_hook(record_positions)
    try:
        with wrapping_methods([model], "forward", recording_forward):
            return model.generate(tokens, **{name: value for name, value in options.items() if name in takes}), forwards
    finally:
        if hook is not None:
            hook.remove()
