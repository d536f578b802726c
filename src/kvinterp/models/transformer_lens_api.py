"""Runs TransformerLens's own ``generate()`` and records each forward of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models.hooks import wrapping_methods


class Forward(NamedTuple):
    """One forward of a ``generate()``.

    Attributes:
        new: The number of positions that it was fed.
        logits: The logits of the newest position, ``[batch, vocabulary]``.
        positions: The position numbers that a learned position embedding used, ``[batch, new]``;
            None where there is none.
    """

    new: int
    logits: Tensor
    positions: Tensor | None


def unequal(
    model: Any, rows: Sequence[Sequence[int]], how: str
) -> tuple[list[str] | None, list[list[int]], int]:
    """What users give ``generate()`` for prompts of several lengths, as far as it has to be told
    from the tokens.

    Args:
        model: A HookedTransformer or a TransformerBridge.
        rows: The tokens of each prompt.
        how: ``"texts"``: a list of texts, which it pads itself; ``"padded"``: padded tokens, as
            ``to_tokens`` gives them.

    Returns:
        The texts, None for tokens; the tokens of each prompt as the model then reads them,
        beginning with the token that it puts first; and the token that pads.
    """
    tokenizer: Any = getattr(model, "tokenizer", None)
    pad = getattr(tokenizer, "pad_token_id", None) or 0
    if how == "texts":
        texts = [tokenizer.decode(list(row)) for row in rows]
        return texts, [model.to_tokens(text)[0].tolist() for text in texts], pad
    begins = (
        getattr(tokenizer, "bos_token_id", None)
        if getattr(model.cfg, "default_prepend_bos", False)
        else None
    )
    return None, [[*row] if begins is None else [begins, *row[1:]] for row in rows], pad


def generated_by(model: Any, tokens: Tensor, mask: Tensor, options: Mapping[str, Any]) -> Tensor:
    """Runs a model's own ``generate()`` on token ids, quietly; greedily and until the end token
    unless the options say otherwise.

    Args:
        model: A HookedTransformer or a TransformerBridge.
        tokens: ``[batch, position]``, padded at the left.
        mask: 0 for pads.
        options: Of ``generate()``.

    Raises:
        UnsupportedError: There are pads, and this ``generate()`` takes no mask.
        InputError: It takes no option of this name.
    """
    takes = inspect.signature(model.generate).parameters
    unknown = [name for name in options if name not in takes]
    if unknown:
        raise InputError(
            f"{unknown[0]} was given, which generate() of {type(model).__name__} does not take: leave it out."
        )
    ends = (
        getattr(getattr(model, "tokenizer", None), "eos_token_id", None) is not None
        or "eos_token_id" in options
    )
    chosen = {
        "do_sample": False,
        "stop_at_eos": ends,
        "prepend_bos": False,
        "return_type": "tokens",
        "verbose": False,
    }
    if not bool(mask.all()):
        if "attention_mask" not in takes:
            raise UnsupportedError(
                f"prompts of several lengths were given, and generate() of {type(model).__name__} takes no "
                "attention_mask: give them one at a time."
            )
        chosen["attention_mask"] = mask
    return model.generate(tokens, **(chosen | dict(options)))


def generate(
    model: Any,
    tokens: Tensor | list[str],
    steps: int,
    cached: str,
    mask: Tensor | None = None,
    bos: str = "no",
) -> tuple[Tensor, list[Forward]]:
    """Generates exactly ``steps`` tokens greedily, past any end token, by a model's own
    ``generate()``.

    Args:
        model: A HookedTransformer or a TransformerBridge.
        tokens: ``[batch, position]``, or texts.
        steps: The number of tokens to generate.
        cached: ``"yes"`` or ``"no"``.
        mask: For the tokens, 0 where there is none; None where there is nothing to mask, or the
            model is to find out.
        bos: ``"yes"``: the prompts begin as the model's own ``to_tokens`` makes them begin.

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
        **({"prepend_bos": False} if bos == "no" else {}),
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
        forwards.append(
            Forward(new, logits[:, -1].clone(), positions[-1][:, -new:] if positions else None)
        )
        return logits

    def record_positions(_: nn.Module, __: Any, rows: Tensor) -> None:
        # Each row is a row of the embedding's weight.
        positions.append(torch.cdist(rows.double(), model.pos_embed.W_pos.double()).argmin(-1))

    hook, point = None, getattr(model, "hook_pos_embed", None)
    if isinstance(point, nn.Module) and hasattr(getattr(model, "pos_embed", None), "W_pos"):
        hook = point.register_forward_hook(record_positions)
    try:
        with wrapping_methods([model], "forward", recording_forward):
            return model.generate(
                tokens, **{name: value for name, value in options.items() if name in takes}
            ), forwards
    finally:
        if hook is not None:
            hook.remove()
