"""How the next token is chosen. Both paths draw from the same random number at each step."""

from __future__ import annotations

import ast
import dataclasses
import re

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from kvinterp.errors import InputError, unknown

__all__ = ["STRATEGIES", "Greedy", "Strategy", "TopK", "TopP", "strategy_named", "uniforms"]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """A rule that chooses a token from logits and one uniform random number."""

    def choose(self, logits: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The token ids, one for each row.

        Args:
            logits: Logits of the newest position.
            uniform: One number in [0, 1) for each row, the same on both paths.
        """
        probabilities = self.distribution(logits.double())
        total = probabilities.cumsum(-1)
        # Vocabulary order, not order of probability: a rounding difference then moves the boundaries by as little.
        chosen = torch.searchsorted(total, (uniform.double() * total[:, -1])[:, None], right=True)[:, 0]
        last = probabilities.shape[-1] - 1 - probabilities.flip(-1).gt(0).int().argmax(-1)
        return torch.minimum(chosen, last)

    def distribution(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """The probabilities it draws from, float64."""
        return torch.softmax(logits, -1)

    def __str__(self) -> str:
        """The text form."""
        values = ",".join(f"{getattr(self, field.name):g}" for field in dataclasses.fields(self))
        name = next(name for name, rule in STRATEGIES.items() if rule is type(self))
        return f"{name}({values})" if values else name


@dataclasses.dataclass(frozen=True)
class Greedy(Strategy):
    """The token with the largest logit; the first of equals."""

    def choose(self, logits: Float[Tensor, "batch vocab"], uniform: Float[Tensor, " batch"]) -> Int[Tensor, " batch"]:
        """The argmax; the random number is not used."""
        return logits.argmax(-1)


@dataclasses.dataclass(frozen=True)
class TopK(Strategy):
    """Draws among the k largest logits."""

    k: int = 50
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or self.k < 1:
            raise InputError(f"top_k's k={self.k!r}: expected a whole number of at least 1.")
        _check_temperature(self.temperature)

    def distribution(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """The softmax over the k largest logits; the lower token id is kept where two are equal."""
        order = logits.argsort(dim=-1, descending=True, stable=True)[:, : self.k]
        kept = torch.full_like(logits, -torch.inf).scatter(-1, order, logits.gather(-1, order))
        return torch.softmax(kept / self.temperature, -1)


@dataclasses.dataclass(frozen=True)
class TopP(Strategy):
    """Draws among the fewest tokens whose probabilities add up to p (nucleus sampling)."""

    p: float = 0.95
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise InputError(f"top_p's p={self.p!r}: expected a number above 0 and at most 1.")
        _check_temperature(self.temperature)

    def distribution(self, logits: Float[Tensor, "batch vocab"]) -> Float[Tensor, "batch vocab"]:
        """The softmax at the temperature, cut to the nucleus and scaled back to 1."""
        probabilities = torch.softmax(logits / self.temperature, -1)
        ranked, order = probabilities.sort(dim=-1, descending=True, stable=True)
        before = ranked.cumsum(-1) - ranked
        kept = torch.zeros_like(probabilities).scatter(-1, order, torch.where(before < self.p, ranked, 0.0))
        return kept / kept.sum(-1, keepdim=True)


STRATEGIES: dict[str, type[Strategy]] = {"greedy": Greedy, "top_k": TopK, "top_p": TopP}


def strategy_named(text: str | Strategy) -> Strategy:
    """Reads a strategy's text form: ``greedy``, ``top_k(50,0.8)``, ``top_p(0.95,0.8)``.

    Raises:
        InputError: The name is unknown or the values do not fit.
    """
    if isinstance(text, Strategy):
        return text
    match = re.fullmatch(r"\s*([\w-]+)\s*(?:\((.*)\))?\s*", text)
    name = match.group(1).replace("-", "_") if match else text
    if match is None or name not in STRATEGIES:
        raise unknown("strategy", text, STRATEGIES, "Values go in brackets, as in top_k(50,0.8).")
    try:
        values = ast.literal_eval(f"({match.group(2)},)") if match.group(2) else ()
        return STRATEGIES[name](*values)
    except (SyntaxError, ValueError, TypeError) as error:
        if isinstance(error, InputError):
            raise
        fields = ", ".join(field.name for field in dataclasses.fields(STRATEGIES[name])) or "no values"
        raise InputError(f"strategy {text!r} cannot be read: {name} takes {fields}.") from error


def uniforms(seed: int, example: int, steps: int) -> Float[Tensor, " steps"]:
    """The random numbers of one example, one a step, whatever batch it runs in (Philox, keyed by seed and example)."""
    generator = np.random.Generator(np.random.Philox(key=[seed % 2**64, example]))
    return torch.from_numpy(generator.random(steps))


def _check_temperature(temperature: float) -> None:
    if not temperature > 0:
        raise InputError(f"temperature={temperature!r}: expected a number above 0 (for 0 use the strategy greedy).")
