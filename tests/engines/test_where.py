"""Which tokens are off: planted places are found again, and noise has none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from kvinterp.engines.numbers import Tokens
from kvinterp.engines.where import Null, Where, find_where
from kvinterp.recording.engine_path import EnginePath

SEQUENCES, LENGTH, PROMPT = 6, 160, 40


def found(off: Any, size: float = 30.0, seed: int = 0) -> Where:
    """The place of a fault at the tokens of ``off(sequence, position)``, in units of the mean rounding."""
    draw = np.random.default_rng(seed)
    ids = tuple(range(LENGTH))
    paths = [EnginePath(f"{n}", ids[:PROMPT], ids[PROMPT:], np.r_[np.nan, -np.ones(LENGTH - 1)]) for n in range(SEQUENCES)]
    tokens = Tokens.of(paths)
    noise, gap = (np.abs(draw.normal(size=len(tokens.engine))) for _ in range(2))
    gap = gap + size * off(tokens.sequence, tokens.position) * np.abs(draw.normal(size=len(gap)))
    return find_where(tokens, [PROMPT] * SEQUENCES, gap, Null(noise, 1.5, 1.5 * float(noise.max())))


@pytest.mark.parametrize(
    ("off", "said"),
    [
        (lambda s, p: s >= 0, "all 6 sequences are off"),
        (lambda s, p: s == 4, "sequence 5 of 6 is off; the others are within their null"),
        (
            lambda s, p: np.isin(s, (1, 4)) & (p < PROMPT),
            "sequences 2 and 5 of 6 are off, in prompt tokens alone; the others",
        ),
        (lambda s, p: s % 2 == 1, "every second sequence is off (2, 4 and 6 of 6); the others are within their null"),
        (lambda s, p: p >= PROMPT, "all 6 sequences are off, from their first generated token on"),
        (lambda s, p: p % 2 == 1, "all 6 sequences are off, at odd positions alone"),
        (lambda s, p: np.isin(p // 16, (3, 6)), "all 6 sequences are off, in blocks of 16, the first at position 48"),
    ],
)
def test_a_planted_place_is_said(off: Any, said: str) -> None:
    assert found(off).said.startswith(said), found(off).said


def test_a_prompt_of_whole_blocks_is_a_prompt_though_some_of_its_tokens_were_certain() -> None:
    """40 tokens are five blocks of 8, of which two are within the null: "in blocks of 8" was said of the prompt's path."""
    where = found(lambda s, p: (p < PROMPT) & ((s * 5 + p // 8) % 11 > 2))
    assert "in prompt tokens alone" in where.said, where.said


def test_the_first_position_beyond_the_null_is_said_not_the_steepest() -> None:
    """A window that is ignored: a little from its end on, and ever more."""
    where = found(lambda s, p: np.where(p >= 90, 0.2 + ((p - 90) / 20.0) ** 2, 0.0), 20.0)
    assert where.first is not None
    assert abs(where.first - 90) <= 4, where.said
    assert "from position" in where.said


def test_the_others_are_exact_only_where_they_are() -> None:
    ids = tuple(range(LENGTH))
    paths = [EnginePath(f"{n}", ids[:PROMPT], ids[PROMPT:], np.r_[np.nan, -np.ones(LENGTH - 1)]) for n in range(2)]
    tokens = Tokens.of(paths)
    noise = np.abs(np.random.default_rng(1).normal(size=len(tokens.engine)))
    gap = np.where(tokens.sequence == 1, 50 * noise, 0.0)
    where = find_where(tokens, [PROMPT] * 2, gap, Null(noise, 1.5, 1.5 * float(noise.max())))
    assert where.said == "sequence 2 of 2 is off; the other is exact"
    assert where.off.sum() == LENGTH - 1


@pytest.mark.parametrize("seed", range(5))
def test_rounding_has_no_place(seed: int) -> None:
    where = found(lambda s, p: s < 0, seed=seed)
    assert where.said == "no sequence alone is beyond its null, all 6 together are"
    assert where.first is None
