"""What is asked of TransformerLens besides its models: their own ``generate()``, heard forward by forward."""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvinterp.errors import UnsupportedError


class Heard(NamedTuple):
    """One forward of a ``generate()``.

    Attributes:
        new: How many positions it was fed.
        logits: Of the newest, ``[batch, vocabulary]``.
        positions: The numbers that a learned position embedding gave what was fed, ``[batch, new]``; None where there is none.
    """

    new: int
    logits: Tensor
    positions: Tensor | None


def generated(
    model: nn.Module, tokens: Tensor, steps: int, cached: str, mask: Tensor | None = None
) -> tuple[Tensor, list[Heard]]:
    """Greedy generation of so many tokens, none of them an end, by a model's own ``generate()``.

    Args:
        model: A HookedTransformer or a TransformerBridge.
        tokens: ``[batch, position]``.
        steps: How many are generated.
        cached: ``"yes"`` or ``"no"``.
        mask: Of the tokens, 0 where there is none; None where there is nothing to mask.

    Returns:
        All tokens, and what was heard of each forward.

    Raises:
        UnsupportedError: It takes no mask, and one was given.
    """
    own: Any = model
    chosen: dict[str, Any] = {
        "max_new_tokens": steps,
        "use_past_kv_cache": cached == "yes",
        "do_sample": False,
        "stop_at_eos": False,
    }
    chosen |= {"prepend_bos": False, "return_type": "tokens", "verbose": False}
    chosen |= {} if mask is None else {"attention_mask": mask}
    takes, forward, heard = inspect.signature(own.generate).parameters, own.forward, list[Heard]()
    numbered: list[Tensor] = []
    if mask is not None and "attention_mask" not in takes:
        raise UnsupportedError(f"generate() of {type(model).__name__} takes no attention_mask.")

    def hear(*args: Any, **given: Any) -> Any:
        made = forward(*args, **given)
        new = (args[0] if args else given["input"]).shape[1]
        heard.append(Heard(new, made[:, -1].clone(), numbered[-1][:, -new:] if numbered else None))
        return made

    def number(_: nn.Module, __: Any, rows: Tensor) -> None:
        # Each row is one of the embedding's, as it stands there.
        numbered.append(torch.cdist(rows.double(), own.pos_embed.W_pos.double()).argmin(-1))

    learned = hasattr(getattr(own, "pos_embed", None), "W_pos") and isinstance(
        getattr(own, "hook_pos_embed", None), nn.Module
    )
    hook = own.hook_pos_embed.register_forward_hook(number) if learned else None
    vars(own)["forward"] = hear
    try:
        return own.generate(tokens, **{name: value for name, value in chosen.items() if name in takes}), heard
    finally:
        vars(own).pop("forward")
        if hook is not None:
            hook.remove()
