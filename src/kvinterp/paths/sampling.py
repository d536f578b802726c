"""How the next token is chosen. Both paths draw from the same random number at each step."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.common import spec
from kvinterp.common.checks import check_seed, check_text, check_whole
from kvinterp.common.draws import draws
from kvinterp.errors import InputError, shown


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A rule that chooses a token from logits and one uniform random number."""

    def choose(
        self, logits: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]
    ) -> Int[Tensor, " batch"]:
        """The token ids, one for each row.

        Args:
            logits: Logits of the newest position.
            uniform: One number in [0, 1) for each row, the same on both paths.
        """
        return self.drawn(logits, uniform)[0]

    def drawn(
        self, logits: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]
    ) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
        """The tokens as :meth:`choose` gives them, and how far each choice was from falling on
        another token.

        That distance is along the cumulative probability that the number is looked up in: from the
        number to the nearer end of the chosen token's stretch, in [0, 1]; infinite where no other
        token could be drawn. (A cut, of k or p, may move too and let other tokens in; of that it
        says nothing.)
        """
        weights = _quanta(self.distribution(logits.double()))
        total = weights.cumsum(-1)
        # Vocabulary order, not order of probability: a rounding difference then moves the
        # boundaries by as little.
        threshold = (uniform.double() * total[:, -1]).long()
        chosen = torch.searchsorted(total, threshold[:, None], right=True)[:, 0]
        last = weights.shape[-1] - 1 - weights.flip(-1).gt(0).int().argmax(-1)
        chosen = torch.minimum(chosen, last)
        above = total.gather(-1, chosen[:, None])[:, 0]
        below = above - weights.gather(-1, chosen[:, None])[:, 0]
        # The ends of the whole are no boundary: nothing lies behind them.
        far = torch.iinfo(total.dtype).max
        to_below = torch.where(below > 0, threshold - below, far)
        nearest = torch.minimum(to_below, torch.where(above < total[:, -1], above - threshold, far))
        return chosen, torch.where(
            nearest < far, nearest.double() / total[:, -1].double(), torch.inf
        )

    def distribution(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """The probabilities it draws from, float64."""
        return torch.softmax(logits, -1)

    def __str__(self) -> str:
        """The strategy as a text, such as ``top_k(50,0.8)``."""
        return spec.text_of(self)


@dataclasses.dataclass(frozen=True)
class Greedy(Strategy):
    """The token with the largest logit; the first of equals."""

    def drawn(
        self, logits: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]
    ) -> tuple[Int[Tensor, " batch"], Float[Tensor, " batch"]]:
        """The argmax; nothing is drawn, and no distance is known: a choice among logits is as sure
        as their margin.
        """
        return logits.argmax(-1), torch.full_like(uniform, torch.nan, dtype=torch.float64)


@dataclasses.dataclass(frozen=True)
class TopK(Strategy):
    """Draws among the k largest logits."""

    k: int = 50
    temperature: float = 1.0

    def __post_init__(self) -> None:
        check_whole("top_k's k", self.k)
        _check_temperature(self.temperature)

    def distribution(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """The softmax over the k largest logits; the lower token id is kept where two are equal."""
        order = logits.argsort(dim=-1, descending=True, stable=True)[:, : self.k]
        largest = torch.full_like(logits, -torch.inf).scatter(-1, order, logits.gather(-1, order))
        return torch.softmax(largest / float(self.temperature), -1)


@dataclasses.dataclass(frozen=True)
class TopP(Strategy):
    """Draws among the fewest tokens whose probabilities add up to p (nucleus sampling)."""

    p: float = 0.95
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not _is_number(self.p) or not 0 < self.p <= 1:
            raise InputError(f"top_p's p={shown(self.p)}: expected a number above 0 and at most 1.")
        _check_temperature(self.temperature)

    def distribution(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """The softmax at the temperature, cut to the nucleus and scaled back to 1."""
        probabilities = torch.softmax(logits / float(self.temperature), -1)
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        weights = _quanta(ranked)
        total = weights.cumsum(-1)
        before = (total - weights).double()
        nucleus = torch.zeros_like(probabilities).scatter(
            -1, order, torch.where(before < self.p * total[:, -1:].double(), ranked, 0.0)
        )
        return nucleus / nucleus.sum(-1, keepdim=True)


QUANTUM = 2.0**-60
"""The unit in which probabilities are added up: 128 times finer than float64's at 1, and 8 of them
fit into 64 bits.
"""


def _quanta(probabilities: Float[Tensor, "batch vocab"]) -> Int[Tensor, "batch vocab"]:
    """Probabilities as whole multiples of QUANTUM, NaN as none.

    Whole numbers have one running sum, in whatever order a device adds them up; of floating-point
    numbers torch has no deterministic one on CUDA.
    """
    return (probabilities / QUANTUM).round().nan_to_num(0.0).long()


STRATEGIES: dict[str, type[Strategy]] = spec.by_name(Greedy, TopK, TopP)


def strategy_named(text: object) -> Strategy:
    """Reads a strategy's text form: ``greedy``, ``top_k(50,0.8)``, ``top_p(0.95,0.8)``.

    Raises:
        InputError: The name is unknown or the values do not fit.
    """
    if isinstance(text, Strategy):
        return text
    text = check_text("strategy", text, "'greedy' or 'top_p(0.95,0.8)', or a Strategy")
    return spec.read("strategy", text, STRATEGIES, "Values go in brackets, as in top_k(50,0.8).")


def uniforms(seed: int, example: int, steps: int) -> Float[Tensor, " steps"]:
    """The random numbers of one example, one a step, whatever batch it runs in (Philox, keyed by
    seed and example).
    """
    return torch.from_numpy(draws((check_seed(seed), example), steps))


class Drawing:
    """Chooses the tokens of some examples at a step, by their own random numbers: every path that
    asks draws from the same one.

    Attributes:
        distances: Of each call, in their order, how far each choice was from another one; see
            :meth:`Strategy.drawn`.
    """

    def __init__(
        self,
        strategy: Strategy,
        seed: int,
        examples: Sequence[int],
        steps: int,
        device: torch.device,
    ) -> None:
        self.strategy, self.distances = strategy, list[Tensor]()
        if type(strategy) is Greedy:  # A user's own may draw all the same.
            self.random = torch.zeros(len(examples), steps, dtype=torch.float64, device=device)
        else:
            self.random = torch.stack([uniforms(seed, example, steps) for example in examples]).to(
                device
            )

    def __call__(self, logits: Float[Tensor, "batch vocab"], step: int) -> Int[Tensor, " batch"]:
        """The token of each row, ``[batch]``."""
        tokens, distance = self.strategy.drawn(logits, self.random[:, step])
        self.distances.append(distance)
        return tokens


COLDEST, HOTTEST = 1e-30, 1e30
"""Beyond these, logits divided by the temperature overflow, or all become the same."""


def _check_temperature(temperature: float) -> None:
    if not _is_number(temperature) or not COLDEST <= temperature <= HOTTEST:
        raise InputError(
            f"temperature={shown(temperature)}: expected a number from {COLDEST:g} to {HOTTEST:g} (for 0 use the strategy "
            "greedy)."
        )


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
