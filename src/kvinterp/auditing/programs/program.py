"""A program: rows of text with pads in front, and what is done to one cache that holds them; as
data, and as a text.

The text form joins its parts with ``+``: ``rows(0+4)+feed(9)+crop(2)+feed(1)`` is two rows, of
which the second begins with four pads, fed nine columns; two are taken back, and one is fed. An
audit draws the tokens and judges every row (:mod:`kvinterp.auditing.programs.running`).
"""

from __future__ import annotations

import abc
import dataclasses
import itertools
import random
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from kvinterp.common import spec
from kvinterp.common.checks import check_whole
from kvinterp.errors import InputError

if TYPE_CHECKING:
    from kvinterp.auditing.programs.running import Run
    from kvinterp.auditing.programs.subject import Subject

TOLD = ("needed", "mask", "positions", "all", "mask_alone")
"""What a forward is told: what it needs (mask and positions where there are pads); always a mask;
always positions; both; or the mask alone, whatever there is, as most people call a model."""
MASKS = {"bool_mask": "boolean 4D mask", "float_mask": "additive 4D mask"}
"""What it may be told besides: a mask of its user's own, ``[row, 1, new column, column]``, and
positions.
"""
FED = {"ids": "", "embeds": "embeddings", "types": "token types"}
"""What stands for the tokens: their ids; their embeddings alone; or the ids beside
``token_type_ids``.
"""
ASKS = {
    "logits": "", "hidden": "output_hidden_states", "attentions": "output_attentions", "last": "logits_to_keep",
    "some": "logits_to_keep, chosen columns",
}  # fmt: skip
"""What a forward is asked for: logits; hidden states too; both and the attention weights; the last
logits; those of a tensor.
"""
ATTENTION = {
    "own": "",
    "eager": "eager attention",
    "sdpa": "sdpa attention",
    "flex_attention": "flex attention",
}
"""The attention implementation: the model's own, or one of transformers' that it can be set to."""
KEEP = 2
"""How many logits ``logits_to_keep`` asks for."""
CACHES = ("own", "bare", "recording", "static", "offloaded")
"""What the model makes; ``DynamicCache()`` without a config; one whose past is kept for a crop; one
of a fixed size; one whose layers wait on the CPU, which needs CUDA."""
PADS = ("other", "model", "end")
"""The token under the mask: any other; the model's own pad, whose embedding is often zero, which
hides what it should not; or the token that ends a text, as chat models pad."""
TOKENS = ("plain", "special")
"""What texts are made of: tokens that stand for nothing else, or every second one a pad, an end or
a beginning, which no mask
hides: as in chats, whose turns end in the middle of a text."""


@dataclasses.dataclass(frozen=True)
class Rows:
    """The rows that a program begins with, and how the model is told of them.

    Attributes:
        pads: How many pads each begins with, the mask hides.
        told: One of :data:`TOLD` or :data:`MASKS`.
        cache: One of :data:`CACHES`.
        pad: One of :data:`PADS`.
        tokens: One of :data:`TOKENS`.
        beyond: ``"yes"``: what no contract of a cache promises may happen too: a pad in a forward
            of one column, pads inside a text, a crop of more than was fed since the last one.
        seed: Draws the tokens.
        fed: One of :data:`FED`.
        asks: One of :data:`ASKS`.
        attention: One of :data:`ATTENTION`.
    """

    pads: tuple[int, ...]
    _: dataclasses.KW_ONLY
    told: str = "needed"
    cache: str = "own"
    pad: str = "other"
    tokens: str = "plain"
    beyond: str = "no"
    seed: int = 0
    fed: str = "ids"
    asks: str = "logits"
    attention: str = "own"

    def __post_init__(self) -> None:
        if not self.pads or any(type(n) is not int or n < 0 for n in self.pads):
            raise InputError(
                f"rows{self.pads!r} was given: expected the pads of each row, as in rows(0) or rows(0+4)."
            )
        choices = {
            "told": (*TOLD, *MASKS),
            "cache": CACHES,
            "pad": PADS,
            "tokens": TOKENS,
            "beyond": ("no", "yes"),
        }
        for name, known in {**choices, "fed": FED, "asks": ASKS, "attention": ATTENTION}.items():
            if getattr(self, name) not in known:
                raise InputError(
                    f"rows(..., {name}={getattr(self, name)}) was given: expected one of {', '.join(known)}."
                )

    def model_kwargs(
        self, mask: Tensor, width: int, padded: bool, takes: Collection[str], offset: int | None
    ) -> dict[str, Tensor]:
        """The mask and positions that the forward of the newest columns is given.

        Args:
            mask: Of all columns so far, ``[row, column]``.
            width: How many of them are new.
            padded: Whether any was a pad.
            takes: Which of ``attention_mask`` and ``position_ids`` the forward takes.
            offset: The position of the first token; None where positions are not told.
        """
        found = dict[str, Tensor]()
        if self.told in MASKS:
            found["attention_mask"] = mask_4d(mask, width)
        elif "attention_mask" in takes and (padded or self.told in ("mask", "all", "mask_alone")):
            found["attention_mask"] = mask
        # Where several texts lie in one row, positions tell them apart.
        wanted = self.told in MASKS or (padded and self.told != "mask_alone")
        if offset is not None and (wanted or self.told in ("positions", "all")):
            found["position_ids"] = (mask.cumsum(-1) - 1).clamp(min=0)[:, -width:] + offset
        return found

    @property
    def ways(self) -> str:
        """How its forwards are called otherwise than with ids and a mask of columns, in a few
        words; empty where they are not.
        """
        named = MASKS.get(self.told, ""), FED[self.fed], ASKS[self.asks], ATTENTION[self.attention]
        return ", ".join(name for name in named if name)

    def kept(self, width: int) -> list[int] | None:
        """Which of so many columns the logits are asked for of; None: all."""
        if self.asks == "last":
            return [*range(max(width - KEEP, 0), width)]
        return [*range(width)][-3::2] if self.asks == "some" else None


def mask_4d(mask: Tensor, width: int) -> Tensor:
    """Which columns each of the newest sees, ``[row, 1, new column, column]``: those before it that
    hold a token, and itself.
    """
    columns = mask.shape[1]
    here = torch.arange(columns, device=mask.device)
    new = here[-width:, None]
    return ((here <= new) & mask.bool()[:, None, None, :]) | (here == new)


@dataclasses.dataclass(frozen=True)
class Operation(abc.ABC):
    """One use of a cache; a new one is one file in ``operations/``.

    Attributes:
        weight: How often it is drawn beside others; never for 0.
        between: What the number of one that has a single one is drawn from.
        columns: How many it leaves on the cache, or takes back.
    """

    weight: ClassVar[int] = 1
    between: ClassVar[tuple[int, int]] = (1, 1)

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value, name = getattr(self, field.name), f"{field.name} of {spec.name_of(type(self))}"
            for number in (
                value if isinstance(value, tuple) else [value] if field.type == "int" else []
            ):
                check_whole(
                    name,
                    number,
                    int(field.default is dataclasses.MISSING and not isinstance(value, tuple)),
                )

    @classmethod
    def sample(cls, draw: random.Random, rows: int, subject: Subject, beyond: str) -> Operation:
        """One for so many rows of this model: its single number is drawn, where it has one."""
        numbers = [draw.randint(*cls.between)] if dataclasses.fields(cls) else []
        return cls(*numbers)

    def offered(self, run: Run) -> bool:
        """Whether the model offers it where the program stands."""
        return run.filled and run.cache is not None

    @abc.abstractmethod
    def do(self, run: Run) -> None:
        """Does it; the logits that it makes are judged."""

    @property
    def columns(self) -> int:
        """How many columns it leaves on the cache; negative where it takes them back."""
        return 0

    def smaller(self) -> list[Operation]:
        """The same in a smaller or plainer form, the smallest first."""
        found: list[Operation] = []
        for field in dataclasses.fields(self):
            value, plain = getattr(self, field.name), field.default
            least = plain if isinstance(plain, int) else 1
            options: list[Any] = [] if plain in (dataclasses.MISSING, value) else [plain]
            if isinstance(value, int):
                options = sorted(
                    {
                        n
                        for n in (least, value // 2, value - value // 8, value - 1)
                        if least <= n < value
                    }
                )
            elif isinstance(value, tuple) and len(value) > 1:
                options.append(value[:-1])
            found += [dataclasses.replace(self, **{field.name: option}) for option in options]
        return found

    def __str__(self) -> str:
        return spec.text_of(self)


@dataclasses.dataclass(frozen=True)
class Program:
    """Rows, and the operations on their cache.

    Attributes:
        rows: The rows.
        steps: The operations.
        name: What it was asked for as, such as ``padded(left,5)``; empty where it was written out.
    """

    rows: Rows
    steps: tuple[Operation, ...] = ()
    name: str = dataclasses.field(default="", compare=False)

    @property
    def columns(self) -> int:
        """The most that the cache holds at any time."""
        return max(itertools.accumulate(step.columns for step in self.steps), default=0)

    def __str__(self) -> str:
        return "+".join([spec.text_of(self.rows), *map(str, self.steps)])
