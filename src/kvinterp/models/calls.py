"""What the calls of a model tell of the texts that its passes compute: token ids, masks, prompts,
and what ``generate`` returned.

Passes (:mod:`kvinterp.models.passes`) are seen at the blocks, where there are streams and no
tokens. Tokens are seen where they are embedded, masks and logits at the model's forward, and the
prompt of a ``generate()`` with its result at that call: whichever of these a user's code goes
through.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from kvinterp.models.adapter import Adapter
from kvinterp.models.hooks import own_hook, wrapping_methods


@dataclasses.dataclass(eq=False)
class Call:
    """One ``generate()``.

    Attributes:
        prompt_length: The columns of its prompts, pads among them; 0 where it was given no token
            ids.
        mask: ``[batch, column]``, 0 at pads, if it was given one.
        ends: The tokens that end a text, none where it was told to go on behind them; None where it
            was told nothing, and they are the model's own.
        output: ``[batch, column]``, the token ids that it returned; None while it runs, and where
            it returned a text.
        beams: How many it searches with.
    """

    prompt_length: int = 0
    mask: Tensor | None = None
    ends: tuple[int, ...] | None = None
    output: Tensor | None = None
    beams: int = 1


class Calls:
    """Listens to the embedding, the forward and the ``generate`` of a model.

    Args:
        adapter: The model.
        logits: ``"keep"`` keeps the newest position's logits of each forward.

    Attributes:
        call: The ``generate()`` that runs now, or None.
        mask: The two-dimensional mask of the forward that runs or ran last, or None.
        newest_logits: ``[batch, vocabulary]`` of each forward since the last :meth:`taken`.
    """

    def __init__(self, adapter: Adapter, logits: str = "discard") -> None:
        self.adapter, self._keeps = adapter, logits == "keep"
        self.call: Call | None = None
        self.mask: Tensor | None = None
        self.newest_logits: list[Tensor] = []
        self._embedded: list[Tensor] = []
        self._running = False

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Listens, while the context lasts."""
        # A bridge's users also call generate() of the model inside it.
        models = list(
            {id(model): model for model in (self.adapter.model, self.adapter.source)}.values()
        )
        embedding = self.adapter.embedding
        with contextlib.ExitStack() as stack:
            having = [model for model in models if callable(getattr(model, "generate", None))]
            stack.enter_context(wrapping_methods(having, "generate", self._generate))
            stack.enter_context(wrapping_methods([self.adapter.model], "forward", self._forward))
            if embedding is not None:
                stack.callback(own_hook(embedding, self._embed, "input").remove)
            yield

    def fed(self, text: Tensor | None, start: int, new: int) -> Tensor | None:
        """The text up to the end of a pass that has just computed ``new`` positions from ``start``
        on.

        Args:
            text: ``[batch, column]`` before it, or None.
            start: The first column that it computed.
            new: How many.

        Returns:
            None where no token ids were seen, as with embeddings for input.
        """
        pieces, self._embedded = self._embedded, []
        if not pieces:
            return None
        ids = torch.cat(pieces, 1)
        if ids.shape[1] < new and text is not None:
            # HookedTransformer embeds a token once and keeps the embeddings of those before it.
            ids = torch.cat([text, ids], 1)
        if ids.shape[1] < new or (start and (text is None or text.shape[1] < start)):
            return None
        ids = ids[:, -new:]
        return ids if not start else torch.cat([text[:, :start], ids], 1)  # type: ignore[index]

    def taken(self) -> list[Tensor]:
        """The logits of the forwards since the last call of this."""
        logits, self.newest_logits = self.newest_logits, []
        return logits

    def _embed(self, _: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = next(
            (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), None
        )
        if ids is not None and ids.dim() == 2 and not ids.is_floating_point():
            self._embedded.append(ids.detach())

    def _forward(self, _: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self._running:
            # A forward within a forward is none of the user's: the adapter asks something of the
            # model for the first time.
            return forward(*args, **kwargs)
        mask = kwargs.get("attention_mask")
        self.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        self._running = True
        try:
            output = forward(*args, **kwargs)
        finally:
            self._running = False
        if self._keeps:
            logits = getattr(output, "logits", output)
            if isinstance(logits, Tensor) and logits.dim() == 3:
                self.newest_logits.append(logits[:, -1].detach().clone())
        return output

    def _generate(self, _: int, generate: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.call is not None:
            return generate(*args, **kwargs)
        names = ("input", "inputs", "input_ids")
        prompt = next(
            (value for value in (*args[:1], *map(kwargs.get, names)) if value is not None), None
        )
        call = self.call = Call()
        if isinstance(prompt, Tensor) and prompt.dim() == 2 and not prompt.is_floating_point():
            call.prompt_length = prompt.shape[1]
        mask = kwargs.get("attention_mask")
        call.mask = mask if isinstance(mask, Tensor) and mask.dim() == 2 else None
        call.ends = _ends_of(kwargs)
        own = getattr(self.adapter.source, "generation_config", None)
        call.beams = _told(kwargs, "num_beams") or getattr(own, "num_beams", None) or 1
        try:
            output = generate(*args, **kwargs)
            ids = getattr(output, "sequences", output)
            if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
                call.output = ids.detach()
            return output
        finally:
            self.call = None


def _ends_of(kwargs: dict[str, Any]) -> tuple[int, ...] | None:
    """The tokens at which a ``generate()`` called so ends a text, if it says."""
    # HookedTransformer's and the bridge's; transformers itself has no such argument.
    if kwargs.get("stop_at_eos") is False:
        return ()
    ends = _told(kwargs, "eos_token_id")
    return None if ends is None else tuple(torch.as_tensor(ends).flatten().tolist())


def _told(kwargs: dict[str, Any], name: str) -> Any:
    """What a ``generate()`` called so is told by an option, or else by its generation_config."""
    given = kwargs.get(name)
    return getattr(kwargs.get("generation_config"), name, None) if given is None else given
