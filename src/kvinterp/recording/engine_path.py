"""The log-probs that another engine wrote for one sequence, as plain numbers."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from kvinterp.errors import InputError, shown

MISSING = -9000.0
"""A value at or below this means that no log-prob was given: vLLM writes -9999, llama.cpp the
lowest float32.
"""
LARGEST = 1e30
"""A number above this is no log-prob, probability or logit."""
ROUNDED = 1e-3
"""A log-prob at most this far above 0 is a rounded 0."""
Pairs = tuple[np.ndarray, np.ndarray]
"""Token ids and their log-probs at one position."""


@dataclasses.dataclass(eq=False, repr=False)
class EnginePath:
    """One sequence with the log-probs of another engine.

    Attributes:
        id: Its place in the file.
        prompt: Token ids of the prompt.
        tokens: Token ids after the prompt.
        chosen: ``[position]``, in nats: the log-prob of each id of prompt and tokens given those
            before it; NaN if not given.
        top: For some positions further ids and their log-probs.
        missing: What the file holds where no log-prob is given, and how often.
        trainer: As ``chosen``, for the trainer's log-probs in the same file; None if there are
            none.
        declared: The settings that the file names, such as ``{"dtype": "float32"}``.
        step: The step of the grid on which the format writes log-probs, in nats; None if it has no
            grid.
        zeros: ``"certain"``: an exact 0 is the log-prob of certainty; ``"doubtful"``: the format
            writes 0 where it has none too, so that only the model tells which of the two a 0 is.
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
    zeros: str = "certain"

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
        """Names the sequence and its size in one line."""
        count = int(np.isfinite(self.chosen).sum())
        return f"<EnginePath {self.id}: {len(self.prompt)} prompt tokens, {len(self.tokens)} more, {count} log-probs>"

    @property
    def ids(self) -> tuple[int, ...]:
        """Prompt and tokens."""
        return self.prompt + self.tokens


def log_probs(values: Iterable[Any], where: str, missing: Counter[str]) -> np.ndarray:
    """Converts log-probs to numbers. Values that mean "not given" become NaN and are counted.

    Args:
        values: Numbers or None.
        where: The name of the record in errors.
        missing: Counts the values that mean "not given"; changed in place.
    """
    numbers = []
    for value in values:
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise InputError(
                f"{where} has {shown(value)} for a log-prob: expected a number or null; mend it."
            )
        if value is not None and value > LARGEST:
            raise InputError(
                f"{where} has {shown(value)} for a log-prob: expected a number of at most 0, or null; mend it."
            )
        word = _missing(value)
        if word:
            missing[word] += 1
        numbers.append(math.nan if word else float(value))  # type: ignore[arg-type]
    return np.array(numbers, dtype=float)


def positive(values: np.ndarray) -> str | None:
    """Says how many log-probs are above 0 by more than rounding; None if none is."""
    above, n = int((values > ROUNDED).sum()), int(np.isfinite(values).sum())
    sentence = f"{above:,} of {n:,} values are above 0, which no log-prob is: they may be probabilities, or logits."
    return sentence if above else None


def _missing(value: float | None) -> str:
    if value is None:
        return "null"
    if value != value:
        return "NaN"
    if value <= MISSING:
        return "-inf" if value == -math.inf else "-9999" if value > -1e5 else "float lowest"
    return ""


def token_ids(values: Any, where: str) -> tuple[int, ...]:
    """Checks a list of token ids and returns it as a tuple.

    Raises:
        InputError: It is no list of whole numbers of at least 0.
    """
    if not isinstance(values, list) or any(
        type(v) is not int or not 0 <= v < 2**31 for v in values
    ):
        raise InputError(
            f"{where} is {shown(values)}: expected a list of token ids, whole numbers of at least 0; mend it."
        )
    return tuple(values)


def pairs_of(pairs: Sequence[tuple[int, Any]], where: str, missing: Counter[str]) -> Pairs:
    """Makes arrays of the ids and log-probs of one position. Log-probs that are not given are left
    out and counted.

    Raises:
        InputError: An id is negative; only -1, for a text that no single token has, is allowed.
    """
    if (wrong := next((token for token, _ in pairs if not -1 <= token < 2**31), None)) is not None:
        raise InputError(
            f"{where} has {shown(wrong)} for a token id: expected a whole number of at least 0; mend it."
        )
    numbers = log_probs([value for _, value in pairs], where, missing)
    keep = ~np.isnan(numbers)
    return np.array([token for token, _ in pairs], dtype=np.int64)[keep], numbers[keep]


def value_in(pairs: Pairs, token: int) -> float:
    """Returns a token's log-prob among those of a position; NaN if it is not among them."""
    at = np.flatnonzero(pairs[0] == token)
    return float(pairs[1][at[0]]) if len(at) else math.nan


def path_of(
    where: str,
    prompt: tuple[int, ...],
    rows: Sequence[tuple[int, Any, Sequence[tuple[int, Any]]]],
    before: Any = None,
    **declared: Any,
) -> EnginePath:
    """Makes a path of an engine's answer: for each token an id, its log-prob and further pairs of
    the same position.

    Args:
        where: The name of the record in errors.
        prompt: Token ids of the prompt.
        rows: For each token its id, its log-prob and the ids and log-probs of the same position.
        before: For each position of the prompt the same without the id; None if not given.
        declared: The settings that the file names.
    """  # fmt: skip
    missing: Counter[str] = Counter()
    head = [
        (token, *row)
        for token, row in zip(prompt, before or [(None, [])] * len(prompt), strict=True)
    ]
    every = [*head, *rows]
    logprobs = log_probs([value for _, value, _ in every], where, missing)
    if before is None:
        # Log-probs of the prompt were not requested, so they do not count as missing.
        missing["null"] -= len(prompt)
    top = {at: pairs_of(pairs, where, missing) for at, (_, _, pairs) in enumerate(every) if pairs}
    for at in map(int, np.flatnonzero(np.isnan(logprobs))):
        if at in top:
            logprobs[at] = value_in(top[at], every[at][0])
    return EnginePath(
        where, prompt, tuple(row[0] for row in rows), logprobs, top, +missing, declared=declared
    )
