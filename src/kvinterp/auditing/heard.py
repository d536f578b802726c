"""What the ``generate()`` of a model's library feeds its forward, and the logits of each, with a cache and without one."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from kvinterp.auditing.bench import Bench, UnclearError
from kvinterp.models.transformer_lens_api import generated
from kvinterp.models.transformers_api import greedy
from kvinterp.paths.calls.base import Masking
from kvinterp.paths.calls.generate import Generating


class Generated(NamedTuple):
    """One ``generate()``.

    Attributes:
        tokens: ``[batch, length]``, the prompt's and the new ones but the last.
        logits: Of each new token, ``[batch, new, vocabulary]``.
        calls: The tensors that each forward was given, by name; those with a cache, filled or to be filled, are ``cached``.
        masking: The mask, 0 where there is a pad, and the positions, counted without the pads, of all tokens.
    """

    tokens: Tensor
    logits: Tensor
    calls: list[dict[str, Any]]
    masking: Masking

    @property
    def fed(self) -> tuple[Tensor, Masking]:
        """What the model was to be fed, with its mask where there are pads, and positions."""
        return self.tokens, self.masking if bool((self.mask == 0).any()) else self.masking._replace(mask=None)

    @property
    def mask(self) -> Tensor:
        """The mask of every token that was fed."""
        assert self.masking.mask is not None
        return self.masking.mask


def heard(bench: Bench, tokens: Tensor, mask: Tensor, cached: str = "yes") -> Generated:
    """Greedy generation by the library's own loop, as many tokens as there are steps, none of them an end.

    Args:
        bench: Has the model.
        tokens: ``[batch, position]``.
        mask: Of the tokens, 0 where there is a pad.
        cached: ``"no"`` is told not to use a cache.
    """
    runner = bench.runner
    if not runner.adapter.plain:
        return _by_transformer_lens(bench, tokens, mask, cached)
    known = getattr(runner.model.generation_config, "pad_token_id", None)
    more = {"min_new_tokens": bench.steps, "num_return_sequences": 1}
    chosen = greedy(bench.steps, use_cache=cached == "yes", pad_token_id=0 if known is None else known, **more)
    calls: list[dict[str, Any]] = []
    made: list[Tensor] = []
    with Generating(runner.model, tokens, chosen, mask) as generating:
        for given in generating.forwards():
            told = {name: value.clone() for name, value in given.items() if isinstance(value, Tensor)}
            calls.append({**told, "cached": given.get(runner.adapter.cache_name) is not None})
            with runner.running():
                out = runner.model(**given)
            # What generate() returns is rounded to float32.
            made.append(out.logits[:, -1].clone())
            generating.answer(out)
    runner.forwards += len(calls)
    if len(made) != bench.steps:
        raise UnclearError(f"{len(made)} forwards of generate() were heard for {bench.steps} new tokens.")
    fed = generating.made[:, :-1]
    return Generated(fed, torch.stack(made, 1), calls, Masking.counting(mask).of(0, fed.shape[1]))


def _by_transformer_lens(bench: Bench, tokens: Tensor, mask: Tensor, cached: str) -> Generated:
    """The same by TransformerLens's own loop."""
    runner, padded = bench.runner, mask if bool((mask == 0).any()) else None
    with runner.running():
        made, heard = generated(runner.model, tokens, bench.steps, cached, padded)
    runner.forwards += len(heard)
    fed, calls = made[:, :-1], list[dict[str, Any]]()
    for stop, each in enumerate(heard, tokens.shape[1]):
        calls.append(
            {"input_ids": fed[:, stop - each.new : stop], "position_ids": each.positions, "cached": cached == "yes"}
        )
    return Generated(
        fed, torch.stack([each.logits for each in heard], 1), calls, Masking.counting(mask).of(0, fed.shape[1])
    )
