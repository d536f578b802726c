"""A path that was walked elsewhere: what another engine says it computed, as plain numbers."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvinterp.errors import InputError, shown

MISSING = -9000.0
"""At or below this a log-prob stands for none: vLLM writes -9999, llama.cpp the lowest float32."""
LARGEST = 1e30
"""Above this a number is no log-prob, nor a probability or a logit in its place."""
ROUNDED = 1e-3
"""So far above 0 a log-prob is 0, rounded."""
Pairs = tuple[np.ndarray, np.ndarray]
"""Token ids and their log-probs at one position."""


@dataclasses.dataclass(eq=False, repr=False)
class EnginePath:
    """One sequence that another engine walked.

    Attributes:
        id: Where it stands in its file.
        prompt: Token ids of the prompt.
        tokens: Token ids behind it.
        chosen: ``[position]``, in nats: the log-prob of each id of prompt and tokens given those before it; NaN: not given.
        top: For a position the ids that were given there besides, and their log-probs.
        missing: What stood where no log-prob was given, and how often.
        trainer: As ``chosen``, of a second side in the same file; None where there is none.
        declared: What the file says it was made with, such as ``{"dtype": "float32"}``.
        step: The step of the grid that the format writes log-probs on, in nats; None where it has none.
    """

    id: str
    prompt: tuple[int, ...]
    tokens: tuple[int, ...]
    chosen: np.ndarray
    top: dict[int, Pairs] = dataclasses.field(default_factory=dict)
    missing: Counter[str] = dataclasses.field(default_factory=Counter)
    trainer: np.ndarray | None = None
    declared: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    step: float | None = None

    def __post_init__(self) -> None:
        sides = {"log-probs": self.chosen, "log-probs of the trainer": self.trainer}
        for name, row in sides.items():
            if row is not None and len(row) != len(self.ids):
                raise InputError(
                    f"{self.id} has {len(row)} {name} for {len(self.ids)} tokens: expected one for each, null where none is "
                    "given; write them so."
                )
        if not self.ids:
            raise InputError(f"{self.id} has no token: expected token ids; leave it out.")

    def __repr__(self) -> str:
        """What it is of, in one line."""
        count = int(np.isfinite(self.chosen).sum())
        return f"<EnginePath {self.id}: {len(self.prompt)} prompt tokens, {len(self.tokens)} more, {count} log-probs>"

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and tokens."""
        return self.prompt + self.tokens


def log_probs(values: Iterable[Any], where: str, missing: Counter[str], zero: str = "missing") -> np.ndarray:
    """Log-probs as numbers; NaN, and counted, where what stands there means that none was given.

    Args:
        values: Numbers or None.
        where: What errors call it.
        missing: What was found to be missing is counted here.
        zero: ``"missing"``: an exact 0 fills a gap, as in rollout dumps; ``"certain"``: it is the log-prob of certainty.
    """
    found = []
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(f"{where} has {shown(value)} for a log-prob: expected a number or null; mend it.")
        if value is not None and value > LARGEST:
            raise InputError(
                f"{where} has {shown(value)} for a log-prob: expected a number of at most 0, or null; mend it."
            )
        word = _missing(value, zero)
        if word:
            missing[word] += 1
        found.append(math.nan if word else float(value))  # type: ignore[arg-type]
    return np.array(found, dtype=float)


def positive(values: np.ndarray) -> str | None:
    """What is wrong with log-probs that are above 0, None where none is by more than rounding."""
    above, n = int((values > ROUNDED).sum()), int(np.isfinite(values).sum())
    said = f"{above:,} of {n:,} values are above 0, which no log-prob is: they may be probabilities, or logits."
    return said if above else None


def _missing(value: float | None, zero: str) -> str:
    if value is None:
        return "null"
    if value != value:
        return "NaN"
    if value <= MISSING:
        return "-inf" if value == -math.inf else "-9999" if value > -1e5 else "float lowest"
    return "0.0" if value == 0 and zero == "missing" else ""


def token_ids(values: Any, where: str) -> tuple[int, ...]:
    """Token ids of a list.

    Raises:
        InputError: It is no list of whole numbers of at least 0.
    """
    if not isinstance(values, list) or any(type(v) is not int or not 0 <= v < 2**31 for v in values):
        raise InputError(f"{where} is {shown(values)}: expected a list of token ids, whole numbers of at least 0; mend it.")
    return tuple(values)


def pairs_of(pairs: Sequence[tuple[int, Any]], where: str, missing: Counter[str]) -> Pairs:
    """Ids and log-probs of one position; those that are not given are left out, and counted.

    Raises:
        InputError: An id is none; -1 stands for a text that no single token has.
    """
    if (wrong := next((token for token, _ in pairs if not -1 <= token < 2**31), None)) is not None:
        raise InputError(f"{where} has {shown(wrong)} for a token id: expected a whole number of at least 0; mend it.")
    numbers = log_probs([value for _, value in pairs], where, missing, "certain")
    keep = ~np.isnan(numbers)
    return np.array([token for token, _ in pairs], dtype=np.int64)[keep], numbers[keep]


def value_in(pairs: Pairs, token: int) -> float:
    """The log-prob of a token among those of a position, NaN where it is not there."""
    at = np.flatnonzero(pairs[0] == token)
    return float(pairs[1][at[0]]) if len(at) else math.nan


def path_of(
    where: str,
    prompt: tuple[int, ...],
    rows: Sequence[tuple[int, Any, Sequence[tuple[int, Any]]]],
    before: Any = None,
    **declared: Any,
) -> EnginePath:
    """A path of what an engine answered: an id, its log-prob and the pairs beside it for each token.

    Args:
        where: What errors call it.
        prompt: Token ids of the prompt.
        rows: For each token its id, its log-prob and the ids and log-probs of the same position.
        before: The same for each position of the prompt, without the ids; None where they were not given.
        declared: What is known of how it was made.
    """  # fmt: skip
    missing: Counter[str] = Counter()
    head = [(token, *row) for token, row in zip(prompt, before or [(None, [])] * len(prompt), strict=True)]
    every = [*head, *rows]
    chosen = log_probs([value for _, value, _ in every], where, missing, "certain")
    if before is None:
        # Nobody asked for those of the prompt.
        missing["null"] -= len(prompt)
    top = {at: pairs_of(pairs, where, missing) for at, (_, _, pairs) in enumerate(every) if pairs}
    for at in map(int, np.flatnonzero(np.isnan(chosen))):
        if at in top and not math.isnan(found := value_in(top[at], every[at][0])):
            chosen[at] = found
    return EnginePath(where, prompt, tuple(row[0] for row in rows), chosen, top, +missing, declared=declared)
