"""Says which tokens of a file are further off than rounding: which sequences, which part of them,
from which position on.

The null is that of the same file and tokens: our own distance to float64 there, times what the
furthest of the nulls had of it in one of the sequences where they were run. A set of tokens is an
answer if it is beyond that, what is left without it is not, and the two surely differ (Mann and
Whitney's test).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
import scipy

from kvinterp.common.numbers import listed
from kvinterp.engines.numbers import CHANCE, FEWEST, MOVED, TINY, Tokens

NAMED = 4
"""The most sequences that are named; of more their count is said."""
BLOCKS = (256, 128, 64, 32, 16, 8)
"""Block sizes that engines page their caches in."""
FEW = FEWEST // 2
"""The fewest tokens of a set of which anything is said."""


@dataclasses.dataclass(frozen=True, eq=False)
class Where:
    """The tokens that are off.

    Attributes:
        said: A phrase, "sequences 2 and 5 of 6 are off, in prompt tokens alone".
        off: ``[token]``, whether each is one of them.
        first: The first position that is off, if there are positions before it that are not; None
            otherwise.
        gap: ``[token]``, the distance in nats.
        rows: For each sequence its number from 1, its mean distance in nats, the null's limit of
            it, and whether it is off.
    """

    said: str
    off: np.ndarray
    first: int | None
    gap: np.ndarray
    rows: list[dict[str, object]]


@dataclasses.dataclass(frozen=True, eq=False)
class Null:
    """What rounding may do at these tokens.

    Attributes:
        noise: ``[token]``, our own distance to float64 in the engine's precision.
        spread: How many times as far off as our own path, in the sequence or in all, the furthest
            null is in one sequence.
        most: The distance at a single token that no null exceeds, in nats.
    """

    noise: np.ndarray
    spread: float
    most: float

    def limit(self, at: np.ndarray) -> float:
        """The mean distance that rounding may have at some tokens."""
        return self.spread * float(max(self.noise[at].mean(), self.noise.mean()))


def find_where(tokens: Tokens, prompts: Sequence[int], gap: np.ndarray, null: Null) -> Where:
    """Finds the smallest of some simple sets of tokens outside which nothing is beyond the null.

    Args:
        tokens: The judged tokens.
        prompts: For each sequence the length of its prompt.
        gap: ``[token]``, the distance in nats.
        null: What rounding may do.
    """
    rows, bad = list[dict[str, object]](), list[int]()
    for number in np.unique(tokens.sequence).tolist():
        at = tokens.sequence == number
        off = _beyond(at, gap, null)
        rows.append(
            {
                "sequence": number + 1,
                "mean": float(gap[at].mean()),
                "null": null.limit(at),
                "off": "yes" if off else "no",
            }
        )
        bad += [number] * off
    bad, alone = _surely(bad, gap, null, tokens)
    within = np.isin(tokens.sequence, bad) if bad else np.ones(len(gap), bool)
    cut = np.array(prompts)[tokens.sequence]
    where, mask = _part(tokens, cut, gap, null, within)
    first = int(tokens.position[mask].min()) if "from" in where or "positions" in where else None
    which, others = _sequences(bad, gap, tokens)
    return Where(f"{which}{alone}{where}{others}", mask, first, gap, rows)


def _surely(bad: list[int], gap: np.ndarray, null: Null, tokens: Tokens) -> tuple[list[int], str]:
    """All sequences, and how many are beyond their null alone, where these are not surely further
    off than the others.
    """
    numbers, own = np.unique(tokens.sequence).tolist(), np.isin(tokens.sequence, bad)
    if not 0 < len(bad) < len(numbers):
        return bad, ""
    level = (gap + TINY) / (null.noise + TINY)
    if scipy.stats.mannwhitneyu(level[own], level[~own], alternative="greater").pvalue < CHANCE:
        return bad, ""
    return numbers, f" together, {len(bad)} of them beyond their null alone"


def _beyond(at: np.ndarray, gap: np.ndarray, null: Null) -> bool:
    """Whether some tokens are further off than the null, on average or at one of them."""
    return bool(at.any()) and (
        float(gap[at].mean()) > null.limit(at) or float(gap[at].max()) > null.most
    )


def acting(
    tokens: Tokens, prompts: Sequence[int], where: Where, effect: np.ndarray, more: bool
) -> Where:
    """Says the tokens anew that a cause acts on, once it is named: what is small elsewhere is the
    cause's too.

    Args:
        tokens: The judged tokens.
        prompts: For each sequence the length of its prompt.
        where: What was found before it was known.
        effect: ``[token]``, how far the cause moves a log-prob; NaN where that is not known.
        more: Whether it acts on the sequences that were within their null as well.
    """
    bad = [int(row["sequence"]) - 1 for row in where.rows if more or row["off"] == "yes"]  # type: ignore[call-overload]
    within = np.isin(tokens.sequence, bad or np.unique(tokens.sequence))
    cut, position = np.array(prompts)[tokens.sequence], tokens.position
    acts = within & (np.nan_to_num(effect) > MOVED * np.nanmax(effect, initial=0.0))
    if not acts.any():
        return where
    first = int(position[acts].min())
    some = np.unique(tokens.sequence[within]).size > 1
    phrases = {
        ", in prompt tokens alone": position < cut,
        f", from {'their' if some else 'its'} first generated token on": position >= cut,
        f", from position {first} on": position >= first,
    }
    fitting = {said: within & mask for said, mask in phrases.items() if (mask | ~acts).all()}
    said = min(fitting, key=lambda said: int(fitting[said].sum()))
    mask = fitting[said]
    if within.sum() - mask.sum() < FEW:
        said, mask = "", within
    which, others = _sequences(bad, where.gap, tokens)
    return dataclasses.replace(
        where, said=f"{which}{said}{others}", off=mask, first=first if "position" in said else None
    )


def _sequences(bad: Sequence[int], gap: np.ndarray, tokens: Tokens) -> tuple[str, str]:
    """Says which sequences are off, and what the others are."""
    count = len(np.unique(tokens.sequence))
    if count == 1:
        return "the sequence is off", ""
    if not bad:
        return f"no sequence alone is beyond its null, all {count} together are", ""
    if len(bad) == count:
        return f"all {count} sequences are off", ""
    others = count - len(bad)
    fine = "rounding" if gap[~np.isin(tokens.sequence, bad)].any() else "exact"
    agree = {
        "rounding": ("is within its null", "are within their null"),
        "exact": ("is exact", "are exact"),
    }[fine][others > 1]
    names = (
        listed([str(number + 1) for number in bad[:NAMED]])
        if len(bad) <= NAMED
        else f"{bad[0] + 1}, {bad[1] + 1}, ..."
    )
    if len(bad) >= max(2, count // 2) and (np.diff(bad) == 2).all():
        return (
            f"every second sequence is off ({names} of {count})",
            f"; the other{'s' * (others > 1)} {agree}",
        )
    if len(bad) <= NAMED:
        verb = "s {} of {} are off" if len(bad) > 1 else " {} of {} is off"
        return f"sequence{verb.format(names, count)}", f"; the other{'s' * (others > 1)} {agree}"
    return f"{others} of {count} sequences {agree}, {len(bad)} are off", ""


def _part(
    tokens: Tokens, cut: np.ndarray, gap: np.ndarray, null: Null, within: np.ndarray
) -> tuple[str, np.ndarray]:
    """Finds the part of some sequences that is off: a phrase, and ``[token]``."""
    candidates = [*_candidates(tokens, cut, gap, null, within)]
    level = (gap + TINY) / (null.noise + TINY)
    best: tuple[str, np.ndarray] = ("", within)
    for said, mask in candidates:
        inside, outside = within & mask, within & ~mask
        if (
            min(inside.sum(), outside.sum()) < FEW
            or not _beyond(inside, gap, null)
            or _beyond(outside, gap, null)
        ):
            continue
        test = scipy.stats.mannwhitneyu(level[inside], level[outside], alternative="greater")
        # What is asked for later has to leave out surely more.
        if test.pvalue < CHANCE / len(candidates) and inside.sum() < best[1].sum() - FEW:
            best = said, inside
    return best


def _candidates(
    tokens: Tokens, cut: np.ndarray, gap: np.ndarray, null: Null, within: np.ndarray
) -> Iterator[tuple[str, np.ndarray]]:
    """Yields phrases and the tokens that they are of."""
    position = tokens.position
    yield ", in prompt tokens alone", position < cut
    yield (
        ", from their first generated token on"
        if np.unique(tokens.sequence[within]).size > 1
        else (", from its first generated token on"),
        position >= cut,
    )
    turn = _turns(tokens, cut)
    for number in range(2, min(int(turn.max(initial=0)), 8) + 1):
        yield f", from turn {number} on", turn >= number
    for what, at in (("position", position), ("generated token", position - cut + 1)):
        if (begin := _first(at, gap, null, within)) is not None and begin > 0:
            yield f", from {what} {begin} on", at >= begin
    for odd, name in enumerate(("even", "odd")):
        yield f", at {name} positions alone", position % 2 == odd
    for size in BLOCKS:
        block = tokens.sequence * (2**32) + position // size
        mask = _blocks(block, position, size, gap, null, within)
        if mask is not None:
            blocks = np.unique(position[mask] // size)
            if len(blocks) == 1:
                yield (
                    f", in positions {blocks[0] * size} to {(blocks[0] + 1) * size - 1} alone",
                    mask,
                )
            else:
                yield f", in blocks of {size}, the first at position {blocks[0] * size}", mask


def falls_along(
    tokens: Tokens, cut: np.ndarray, gap: np.ndarray, noise: np.ndarray, off: np.ndarray
) -> bool:
    """Whether the distance lies on replies alone and surely falls along them, as behind another
    prompt, which they outgrow.

    Args:
        tokens: The judged tokens.
        cut: ``[token]``, the length of the prompt before each.
        gap: ``[token]``, the distance in nats.
        noise: ``[token]``, our own.
        off: ``[token]``, whether each is one that is off.
    """
    along = (tokens.position - cut)[off]
    if len(along) < FEWEST or (along < 0).any() or along.min() > 1:
        return False
    test = scipy.stats.spearmanr(along, (gap[off] + TINY) / (noise[off] + TINY), alternative="less")
    return bool(test.pvalue < CHANCE)


def _turns(tokens: Tokens, cut: np.ndarray) -> np.ndarray:
    """``[token]``: the turn of its reply, from 1 (0: the prompt); a tool's tokens between two turns
    have no log-prob.
    """
    new = np.diff(tokens.position, prepend=-1) > 1
    new |= np.diff(tokens.sequence, prepend=-1) != 0
    reply = tokens.position >= cut
    turn = np.zeros(len(new), int)
    for number in np.unique(tokens.sequence):
        at = (tokens.sequence == number) & reply
        begins = new[at].copy()
        begins[:1] = True
        turn[at] = np.cumsum(begins)
    return turn


def _first(at: np.ndarray, gap: np.ndarray, null: Null, within: np.ndarray) -> int | None:
    """Finds the first place that is beyond the null, or earlier, where the distance surely begins
    to grow; None of none.
    """
    far = within & (gap > null.most)
    level = scipy.stats.rankdata(((gap + TINY) / (null.noise + TINY))[within])
    own = at[within]
    last = int(at[far].min()) if far.any() else int(own.max(initial=0))
    best, found, n = 0.0, last if far.any() else None, len(own)
    for begin in np.unique(own):
        late = own >= begin
        m = int(late.sum())
        if begin > last or min(m, n - m) < FEW:
            continue
        # The normal form of Mann and Whitney's test of late against early.
        z = (level[late].sum() - m * (n + 1) / 2) / np.sqrt(m * (n - m) * (n + 1) / 12)
        if z > best and scipy.stats.norm.sf(z) < CHANCE / n:
            best, found = float(z), int(begin)
    return found


def _blocks(
    block: np.ndarray,
    position: np.ndarray,
    size: int,
    gap: np.ndarray,
    null: Null,
    within: np.ndarray,
) -> np.ndarray | None:
    """``[token]``: the tokens of blocks that are off as wholes; None where one is off in a half of
    it alone, or none is.
    """
    mask, late = np.zeros(len(gap), bool), position % size >= size // 2
    for number in np.unique(block[within & (gap > null.most)]):
        at = within & (block == number)
        if not all(_beyond(half, gap, null) for half in (at & late, at & ~late) if half.any()):
            return None
        mask |= at
    # Where most blocks are off, those between are tokens that were certain anyway, and say nothing
    # of blocks.
    if not 0 < mask.sum() <= within.sum() / 2:
        return None
    # What begins at a position and stays, or ends at one, is no matter of blocks: most of what lies
    # between has to be right.
    positions = position[mask]
    hull = within & (position >= positions.min()) & (position <= positions.max())
    alone = len(np.unique(positions // size)) == 1
    return mask if alone or mask.sum() <= hull.sum() / 2 else None
