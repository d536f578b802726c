"""Random errors in keys and values as they enter the cache: ``uniform(low,high)`` and
``normal(mean,std)``.

The source (a study of errors in the KV cache by what they do to a model's answers) writes
``kv + kv * error``. The error of an element belongs to a seed, layer, tensor, absolute position, KV
head and place in the head, and to nothing else: it is the same whether a prompt is fed at once or
in chunks, alone or in a batch, from the beginning or from a resumed run. All sequences of a batch,
and all prompts, get the same errors at the same positions; other draws are another ``seed``.

``preserve`` takes one effect of the noise away, so that flipped signs, a shifted mean and a changed
magnitude can be told apart:

- ``sign``: no element changes its sign. An error that would flip the sign is taken with the other
  sign, so errors are as large as without it (their mean square is the same), and their mean is
  shifted;
- ``magnitude``: elements change their signs where the noise would flip them, and nothing else;
- ``mean``: the written element is divided by the mean factor of the noise, so that its expectation
  is the exact element (of additive errors the mean is subtracted); with the others as ``sign+mean``
  and ``magnitude+mean``.
"""

from __future__ import annotations

import abc
import dataclasses
import math
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from kvinterp.common.checks import check_choice, check_number, check_seed
from kvinterp.common.draws import draws
from kvinterp.common.spec import name_of
from kvinterp.errors import InputError
from kvinterp.models.adapter import ModelInfo
from kvinterp.policies.base import CacheRows, Policy, Selective, running

PRESERVED = ("nothing", "sign", "magnitude", "mean", "sign+mean", "magnitude+mean")
AT_ONCE = 64
"""How many positions' errors are drawn together: one draw a step would take longer than a small
model's step.
"""
OF_NOISE = 1
"""The last word of the counter of noise; sampling draws at 0."""


@dataclasses.dataclass(frozen=True)
class _Noise(Selective):
    """Adds a random error to every element that is written; a subclass defines the distribution.

    Attributes:
        seed: Seeds the errors.
        error: ``"multiplicative"``: ``kv + kv * error``; ``"additive"``: ``kv + error``.
        preserve: The property of K and V that the noise preserves; one of PRESERVED.
    """

    SOURCE: ClassVar[str] = "the KV cache error study: kv + kv * error on write"

    seed: int = dataclasses.field(default=0, kw_only=True)
    error: Literal["multiplicative", "additive"] = dataclasses.field(
        default="multiplicative", kw_only=True
    )
    preserve: str = dataclasses.field(default="nothing", kw_only=True)
    _blocks: ClassVar[dict[tuple[int, str, int], Tensor] | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_seed(self.seed)
        check_choice("error", self.error, ("multiplicative", "additive"))
        check_choice("preserve", self.preserve, PRESERVED)
        for field in dataclasses.fields(self):
            if not field.kw_only:
                check_number(f"{name_of(type(self))}'s {field.name}", getattr(self, field.name))
        if self.error == "additive" and "+" in self.preserve:
            raise InputError(
                f"policy {self}: preserve={self.preserve} is for multiplicative errors; give one of its two, or neither."
            )
        if "mean" in self.preserve and self.error == "multiplicative" and self._factor() < 1e-6:
            raise InputError(
                f"policy {self} multiplies by {self._factor():.3g} on average, and preserve={self.preserve} divides by that: "
                "give errors that are smaller or above -1."
            )

    @abc.abstractmethod
    def errors(self, uniform: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
        """Converts numbers drawn evenly from [0, 1) to errors of this distribution."""

    @abc.abstractmethod
    def below(self, bound: float) -> tuple[float, float]:
        """The share of errors below a bound, and their contribution to the mean."""

    @property
    @abc.abstractmethod
    def expected(self) -> float:
        """The mean of the errors that it draws, as a share of the value."""

    def start(self, facts: ModelInfo) -> Policy:
        """A copy that keeps the errors it draws ahead."""
        super().start(facts)
        return running(self, _blocks={})

    def write_rows(self, tensor: Tensor, which: str, cache_rows: CacheRows) -> Tensor:
        """The rows with their errors, computed in float32 at least and rounded once."""
        wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
        heads = cache_rows.heads or tuple(range(tensor.shape[1]))
        error = self._errors_at(which, cache_rows, heads, tensor.shape[3]).to(wide)
        if self.error == "multiplicative":
            error = wide * error
        elif self.preserve == "mean":
            error = error - self.expected
        noisy = wide + error
        flipped = noisy.sign() * wide.sign() < 0
        if "sign" in self.preserve:
            noisy = torch.where(flipped, wide - error, noisy)
        elif "magnitude" in self.preserve:
            noisy = torch.where(flipped, -wide, wide)
        if "mean" in self.preserve and self.error == "multiplicative":
            noisy = noisy / self._factor()
        return noisy.to(tensor.dtype)

    def _factor(self) -> float:
        """The mean factor of the noise."""
        share, part = self.below(-1.0)
        if "magnitude" in self.preserve:
            return 1 - 2 * share
        return 1 + self.expected - (2 * part if "sign" in self.preserve else 0)

    def _errors_at(
        self, which: str, cache_rows: CacheRows, heads: tuple[int, ...], width: int
    ) -> Float[Tensor, "kv_head row head_dim"]:
        """The errors of the rows from ``cache_rows.start`` to ``cache_rows.stop``."""
        first, last = cache_rows.start // AT_ONCE, (cache_rows.stop - 1) // AT_ONCE
        blocks = [
            self._block(which, cache_rows.layer, number, heads, width)
            for number in range(first, last + 1)
        ]
        whole = blocks[0] if len(blocks) == 1 else torch.cat(blocks, 1)
        return whole[:, cache_rows.start - first * AT_ONCE : cache_rows.stop - first * AT_ONCE]

    def _block(
        self, which: str, layer: int, number: int, heads: tuple[int, ...], width: int
    ) -> Tensor:
        """The errors of AT_ONCE positions. The newest block of each layer and tensor is kept for
        the steps that follow.
        """
        blocks = {} if self._blocks is None else self._blocks
        if (layer, which, number) not in blocks:
            fours = -(-width // 4)
            key, start, count = (
                (self.seed, 2 * layer + (which == "v")),
                number * AT_ONCE * fours,
                AT_ONCE * fours * 4,
            )
            uniform = [
                torch.from_numpy(draws(key, count, (start, head, 0, OF_NOISE))) for head in heads
            ]
            blocks.pop((layer, which, number - 1), None)
            blocks[layer, which, number] = self.errors(
                torch.stack(uniform).view(len(heads), AT_ONCE, -1)[..., :width]
            )
        return blocks[layer, which, number]


@dataclasses.dataclass(frozen=True)
class Uniform(_Noise):
    """Relative errors drawn evenly from ``low`` to ``high``; an error below -1 flips the sign."""

    low: float = -1.0
    high: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low > self.high:
            raise InputError(
                f"policy {self} has low={self.low:g} above high={self.high:g}: give the smaller first."
            )

    def errors(self, uniform: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
        """Stretches [0, 1) to [low, high)."""
        return self.low + (self.high - self.low) * uniform

    def below(self, bound: float) -> tuple[float, float]:
        """Computes both in closed form."""
        if self.low == self.high:
            return float(self.low < bound), self.low * (self.low < bound)
        end = min(max(bound, self.low), self.high)
        return (end - self.low) / (self.high - self.low), (end**2 - self.low**2) / (
            2 * (self.high - self.low)
        )

    @property
    def expected(self) -> float:
        """The middle of the range."""
        return (self.low + self.high) / 2


@dataclasses.dataclass(frozen=True)
class Normal(_Noise):
    """Relative errors drawn from a normal distribution; an error below -1 flips the sign."""

    mean: float = 0.0
    std: float = 0.25

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.std < 0:
            raise InputError(
                f"policy {self} has std={self.std:g}: expected a standard deviation of at least 0."
            )

    def errors(self, uniform: Float[Tensor, "*places"]) -> Float[Tensor, "*places"]:
        """Takes the quantiles, so that each error needs one number."""
        return self.mean + self.std * torch.special.ndtri(uniform.clamp(min=2.0**-54))

    def below(self, bound: float) -> tuple[float, float]:
        """Computes both in closed form."""
        if self.std == 0:
            return float(self.mean < bound), self.mean * (self.mean < bound)
        z = (bound - self.mean) / self.std
        share = math.erfc(-z / math.sqrt(2)) / 2
        return share, self.mean * share - self.std * math.exp(-(z**2) / 2) / math.sqrt(2 * math.pi)

    @property
    def expected(self) -> float:
        """The distribution's mean."""
        return self.mean
