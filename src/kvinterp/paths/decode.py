"""Several runs of the same prompts in step: choose, feed, stop, collect. Whoever decodes or
compares says what it measures.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from kvinterp.paths.vocabulary import padding_of

Choose = Callable[[Tensor, int], Tensor]
"""Given logits ``[batch, vocab]`` and the step, the token of each row."""


@runtime_checkable
class Decoder(Protocol):
    """Whatever can be advanced step by step, such as a :class:`kvinterp.paths.Runner`."""

    def advance(self, tokens: Int[Tensor, " batch"] | None = None) -> Float[Tensor, "batch vocab"]:
        """Logits of the next step; the first takes no tokens."""


class Step(NamedTuple):
    """What the decoders show at one step.

    Attributes:
        number: The step; 0 is the prefill.
        logits: Of each decoder.
        chosen: The tokens each decoder chose.
        feeds: The tokens each decoder is fed next.
        fed: The tokens each decoder was fed at this step, None at step 0.
        over: Which rows had ended before this step.
    """

    number: int
    logits: list[Tensor]
    chosen: list[Tensor]
    feeds: Sequence[Tensor]
    fed: Sequence[Tensor | None]
    over: Bool[Tensor, " batch"]


def greedy(logits: Float[Tensor, "batch vocab"], step: int) -> Int[Tensor, " batch"]:
    """The token with the largest logit of each row; the first of equals."""
    return logits.argmax(-1)


def lockstep(
    decoders: Sequence[Decoder],
    steps: int,
    choose: Choose = greedy,
    *,
    follows: Sequence[int] | None = None,
    given: Sequence[Sequence[Tensor]] = (),
    ends: Int[Tensor, " ends"] | None = None,
    ended_by: Sequence[int] | None = None,
) -> Iterator[Step]:
    """Advances decoders beside each other, step by step; the caller measures between two steps.

    A row that has ended is still chosen for and fed until all have; :attr:`Step.over` marks it.

    Args:
        decoders: What is advanced, in this order.
        steps: Most steps.
        choose: How a decoder chooses its tokens.
        follows: For each decoder the decoder whose choice it is fed; default: the first (the matched
            protocol). Each its own is the free protocol.
        given: For the first steps what each decoder is fed instead of anything chosen.
        ends: Tokens that end a text; default: none.
        ended_by: The decoders whose feeds end it; default: those that are followed.

    Yields:
        Each step; the last is that at which every row has ended, or the last there is.
    """
    follows = [0] * len(decoders) if follows is None else follows
    ended_by = sorted(set(follows)) if ended_by is None else ended_by
    fed: Sequence[Tensor | None] = [None] * len(decoders)
    over: Tensor | None = None
    for number in range(steps):
        logits = [decoder.advance(tokens) for decoder, tokens in zip(decoders, fed, strict=True)]
        chosen = [*map(choose, logits, itertools.repeat(number))]
        feeds = given[number] if number < len(given) else [*map(chosen.__getitem__, follows)]
        if over is None:
            over = torch.zeros_like(chosen[0], dtype=torch.bool)
        yield Step(number, logits, chosen, feeds, fed, over)
        if ends is not None:
            for decoder in ended_by:
                over = over | torch.isin(feeds[decoder], ends)
            if bool(over.all()):
                return
        fed = feeds


def fed_to_all(
    tokens: Sequence[int] | None, decoders: int, batch: int, device: torch.device
) -> list[list[Tensor]]:
    """The same tokens, one a step, for every row of every decoder, as :func:`lockstep` takes what is
    given.
    """
    ids = torch.tensor([] if tokens is None else list(tokens), dtype=torch.long, device=device)
    return [[token.expand(batch)] * decoders for token in ids]


class Collected:
    """What decoders chose and were fed and whether their logits were sound, step by step; brought to
    the host once.

    Attributes:
        padding: Which ids of the vocabulary stand for no token, as the first step has it; None
            before that.
    """

    def __init__(self) -> None:
        self.padding: Bool[Tensor, " vocab"] | None = None
        self._tokens: Tensor | None = None
        self._decoders = 0
        self._kept: tuple[list[Tensor], ...] = ([], [], [], [])

    def add(self, now: Step) -> None:
        """Adds the tokens of a step, and the least and the most of every row's logits."""
        if self.padding is None:
            self.padding = padding_of(now.logits)
            if bool(self.padding.any()):
                self._tokens = (~self.padding).nonzero().flatten()
        chosen, feeds, least, most = self._kept
        chosen += now.chosen
        feeds += now.feeds
        for logits in now.logits:
            if self._tokens is not None and self.padding is not None:
                # Padding is 0 where it is minus infinity, as it must be.
                logits = torch.where(
                    self.padding, torch.where(logits == -torch.inf, 0.0, torch.nan), logits
                )
            # The least and the most of a row are finite where all of it is: one operation, where
            # asking each number takes five.
            extremes = torch.aminmax(logits, dim=-1)
            least.append(extremes.min)
            most.append(extremes.max)
        self._decoders = len(now.logits)

    def tokens_only(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch tokens"]:
        """The logits that stand for tokens."""
        return logits if self._tokens is None else logits[:, self._tokens]

    def lists(self) -> tuple[list[Any], ...]:
        """Chosen tokens, fed tokens and soundness, each numbered by decoder, row and step."""
        chosen, feeds, least, most = (
            torch.stack(values).unflatten(0, (-1, self._decoders)) for values in self._kept
        )
        sound = least.isfinite() & most.isfinite()
        return tuple(tensor.movedim(0, -1).tolist() for tensor in (chosen, feeds, sound))


def length_of(tokens: Sequence[int], ends: Collection[int]) -> int:
    """How many steps a text has: up to its first end, or all of them."""
    return next((count for count, token in enumerate(tokens, 1) if token in ends), len(tokens))
