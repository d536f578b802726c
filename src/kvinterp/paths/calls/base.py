"""What a call plan is: how the tokens of a path reach the model, as data; and what drives it.

A plan may put other tokens beside those of the path: pads, neighbours in the batch, drafts. Whoever looks into the path sees its
own rows alone, in the order of its own tokens, so that two plans can be compared and patched token by token.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Generator
from typing import Any, ClassVar, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.common.spec import text_of
from kvinterp.errors import UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths.chunks import in_chunks
from kvinterp.paths.view import View

log = logging.getLogger("kvinterp")

Loop = Generator[Float[Tensor, "batch vocab"], Int[Tensor, " batch"], None]


@dataclasses.dataclass(frozen=True)
class Call:
    """A call plan, as data: a frozen dataclass in a file of this folder. Its text form is its name with its values.

    Attributes:
        forms: The forms of path that it can drive.
        policies: Whether it goes together with a policy, whose memory it then does not cut or reorder.
        kernels: Whether it goes together with a kernel mode.
        feeds: Whether it says what is fed; of those that do one alone can be given.
        audited: The text form that an audit of all plans takes, where that is not its name alone.
    """

    forms: ClassVar[tuple[str, ...]] = ("cached",)
    policies: ClassVar[bool] = False
    kernels: ClassVar[bool] = True
    feeds: ClassVar[bool] = True
    audited: ClassVar[str] = ""

    @property
    def options(self) -> dict[str, Any]:
        """Other options of a path that it is a name for, by name."""
        return {}

    @property
    def rest(self) -> Call | None:
        """What is left of it once its options were taken."""
        return None if self.options else self

    def running(self, feeder: Feeder) -> contextlib.AbstractContextManager[None]:
        """How the forwards of a pass are run."""
        return contextlib.nullcontext()

    def feed(self, feeder: Feeder) -> Loop:
        """Drives the model: yields the newest logits of the path's row, ``[1, vocab]``, and is sent the next token.

        Unless a plan says otherwise that is the prompt alone, and then a token a step.
        """
        with self.running(feeder):
            feeder.start(feeder.prompt, feeder.steps)
            logits = feeder.pieces(feeder.prompt)
            while True:
                token = yield logits[:, -1]
                logits = feeder.forward(token[:, None])

    def room(self, length: int, steps: int) -> tuple[int, int, int]:
        """Rows of the batch, positions before the first decode step and after it, for a prompt of ``length`` tokens."""
        return 1, length, steps

    def check(self, adapter: Adapter, length: int, steps: int) -> None:
        """Raises InputError or UnsupportedError, before anything runs, where a model or a prompt cannot be run so.

        Args:
            adapter: The model.
            length: Tokens of the prompt.
            steps: Most tokens that are fed after it.
        """

    def seen(self, cache: str, length: int) -> dict[str, int]:
        """What an option that it is a name for did, where the path itself counts nothing.

        Args:
            cache: The name of the cache that was run.
            length: Tokens of the prompt.
        """
        return {}

    def missing(self, witness: dict[str, int]) -> str:
        """What did not happen although the plan stands for it, in a few words; empty where it ran as said."""
        return ""

    def __str__(self) -> str:
        """The text form used on the command line and in tables."""
        return text_of(self)


class Masking(NamedTuple):
    """What a forward is told beside its tokens.

    Attributes:
        mask: ``[batch, position]`` of all positions so far, 0 where there is no token; None where there is nothing to mask.
        positions: ``[batch, new]``; None for the model's own.
    """

    mask: Tensor | None = None
    positions: Tensor | None = None

    @classmethod
    def counting(cls, mask: Tensor) -> Masking:
        """A mask, with the positions that it leaves where what is masked is not counted."""
        return cls(mask, (mask.cumsum(-1) - 1).clamp(min=0))

    def rows(self, rows: Tensor) -> Masking:
        """What is said of these rows."""
        return Masking(*(None if said is None else said[rows] for said in self))

    def of(self, start: int, stop: int) -> Masking:
        """What belongs to the tokens from ``start`` to ``stop``; none is masked that nothing is said of."""
        mask, positions = self
        if mask is not None and mask.shape[1] < stop:
            mask = torch.cat([mask, mask.new_ones(len(mask), stop - mask.shape[1])], 1)
            positions = None if positions is None else Masking.counting(mask).positions
        return Masking(None if mask is None else mask[:, :stop], None if positions is None else positions[:, start:stop])


NOTHING = Masking()


class Feeding:
    """Rows of tokens on one cache: what feeds a model, under a call plan and in an audit.

    Attributes:
        length: Positions that are on the cache.
        masking: Of all positions.
    """

    length: int = 0
    masking: Masking = NOTHING

    def run(self, tokens: Tensor, masking: Masking) -> Tensor:
        """Logits of new tokens, ``[batch, new, vocab]``, of one forward on the cache."""
        raise NotImplementedError

    def forward(self, tokens: Tensor) -> Tensor:
        """The same, told what belongs to their positions."""
        stop = self.length + tokens.shape[1]
        logits = self.run(tokens, self.masking.of(self.length, stop))
        self.length = stop
        return logits


@dataclasses.dataclass
class Feeder(Feeding):
    """What a plan drives a model with.

    Attributes:
        adapter: The model, in the path's dtype.
        form: That of the path.
        prompt: ``[1, position]``.
        steps: Most tokens that are fed after it.
        chunk: Most tokens of the prompt in one forward, or None.
        begin: Begins a pass of ``[batch, position]`` tokens with so many positions after them: gives its store, or None.
        aside: The same for another request, which nobody hears.
        view: Which part of a forward is shown.
        witness: What happened, by name.
        store: The store of the pass that runs.
    """

    adapter: Adapter
    form: str
    prompt: Tensor
    steps: int
    chunk: int | None
    begin: Callable[[Tensor, int], Any]
    aside: Callable[[Tensor, int], Any]
    view: View
    witness: dict[str, int] = dataclasses.field(default_factory=dict)
    store: Any = None

    def start(self, tokens: Tensor, room: int, masking: Masking = NOTHING) -> None:
        """Begins a pass."""
        self.view.crop(0)
        self.length, self.masking = 0, masking
        self.store = self.begin(tokens, room)

    def forward(self, tokens: Tensor, own: Tensor | None = None, shown: int | None = None) -> Tensor:
        """Logits of new tokens, ``[batch, new, vocab]``, on the store of the pass.

        Args:
            tokens: ``[batch, new]``.
            own: Which of them are the path's, ``[new]``; all of them by default.
            shown: How many of them are shown; all by default.
        """
        self.view.feed(torch.ones(tokens.shape[1], dtype=torch.bool) if own is None else own.cpu(), shown)
        return super().forward(tokens)

    def run(self, tokens: Tensor, masking: Masking) -> Tensor:
        """One forward on the store."""
        logits = self.adapter.forward(tokens, self.store, **masking._asdict())
        if self.store is not None:
            self.store.settle()
        return logits

    def shown(self, new: int, run: Callable[[], Any], shown: int | None = None) -> Any:
        """What a forward of ``new`` of the path's own tokens gives, run by whoever knows what else it is given."""
        self.view.feed(torch.ones(new, dtype=torch.bool), shown)
        made = run()
        self.store.settle()
        return made

    def checked(self, logits: Tensor, drafts: Tensor) -> Generator[Tensor, Tensor, list[Tensor]]:
        """Yields the logits of the newest token, and those of each draft behind it that turns out right.

        The rows of such a draft stay in the cache, and what was seen in them is what its step is shown; but where a hook may
        write, which could come too late for them, no draft is taken.

        Args:
            logits: Of the newest token and of the drafts, ``[1, 1 + draft, vocab]``, of a forward that showed none of these.
            drafts: ``[1, draft]``.

        Returns:
            The tokens that were sent: one more than there were right drafts.
        """
        sent: list[Tensor] = []
        first = self.view.new - logits.shape[1]
        for at in range(logits.shape[1]):
            if at:
                self.view.show(first + at)
            sent.append((yield logits[:, at]))
            if at == drafts.shape[1] or self.view.writes or bool(drafts[0, at] != sent[-1][0]):
                break
        self.count("drafts accepted", len(sent) - 1)
        self.count("drafts rejected", drafts.shape[1] - len(sent) + 1)
        return sent

    def pieces(self, tokens: Tensor, own: Tensor | None = None) -> Tensor:
        """Logits of a prompt, ``[batch, position, vocab]``, fed in chunks where the path says so."""
        pieces = list(in_chunks(tokens, self.chunk))
        owned = [None] * len(pieces) if own is None else own.split([piece.shape[1] for piece in pieces])
        return torch.cat([self.forward(piece, mine) for piece, mine in zip(pieces, owned, strict=True)], 1)

    def crop(self, length: int) -> None:
        """Takes back all positions from ``length`` on, and counts them."""
        self.count("positions taken back", len(self.view.own) - length)
        self.store.crop(length)
        self.view.crop(length)
        self.length = length

    def select(self, rows: Tensor) -> None:
        """Keeps these rows, in this order."""
        self.store.select(rows)
        self.masking = self.masking.rows(rows)

    def count(self, name: str, more: int = 1) -> None:
        """Counts what happened."""
        self.witness[name] = self.witness.get(name, 0) + more


def witnessed(path: Any, witness: dict[str, int]) -> dict[str, int]:
    """What a path's call plan saw itself do; what it stands for and did not happen is said, and counted."""
    why = path.call.missing(witness)
    if why:
        log.warning("call=%s was not exercised: %s", path.call, why)
    return witness | ({"not exercised": 1} if why else {})


def check_masks(adapter: Adapter, what: str) -> None:
    """Raises UnsupportedError where a model cannot be told which positions hold no token."""
    if not adapter.takes_mask:
        raise UnsupportedError(
            f"call={what} has rows to be masked, and {adapter.facts.architecture}, as kind {adapter.kind} runs it, cannot be "
            "told which: leave the call out, or load the model with kind='native'."
        )
