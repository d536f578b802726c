"""Titles of a comparison's figures, each of which says what is to be seen in its picture."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from kvinterp.reading.numbers import every, most, short


def kl_title(frames: Mapping[str, pd.DataFrame]) -> str:
    """Of KL by step; ``frames`` are tables of steps by label, of which the first is told."""
    label, steps = next(iter(frames.items()))
    which = f" ({label})" if len(frames) > 1 else ""
    differing = steps[steps["max_abs_logit"] > 0]
    if differing.empty:
        return f"The paths are bitwise equal at {every(len(steps), 'step')}{which}"
    first = int(differing["step"].min())
    return f"The paths differ at {len(differing)} of {len(steps)} steps, first at step {first}{which}"


def drift_title(lines: Mapping[str, pd.DataFrame], what: str) -> str:
    """Of drift by layer; ``lines`` are the quartiles by layer of each line drawn."""
    medians = pd.concat([line[0.5] for line in lines.values()], axis=1).sort_index()
    above = (medians > 0).any(axis=1)
    if not above.any():
        return f"The median difference of {what} is 0 at every layer"
    begin, last, first = medians.index[0], medians.index[-1], medians.index[above.to_numpy()][0]
    ends = sorted(medians.loc[last].dropna())
    size = short(ends[0]) if ends[0] == ends[-1] else f"{short(ends[0])} to {short(ends[-1])}"
    if first != begin:
        return f"The median difference of {what} is first above 0 at layer {first}; at layer {last} it is {size}"
    if begin == last or not (medians.loc[first] > 0).all():
        return f"At layer {last} the median difference of {what} is {size}"
    grown = sorted((medians.loc[last] / medians.loc[first]).dropna())
    times = list(dict.fromkeys(f"{value:.2g}" for value in (grown[0], grown[-1])))
    return f"From layer {first} to layer {last} the median difference changes {' to '.join(times)}-fold"


def attention_title(table: pd.DataFrame, derived: str = "") -> str:
    """Of attention KL; ``table`` holds the mean KL, layer by head."""
    flat = table.stack()
    if not (flat > 0).any():
        return f"every attention pattern is exactly equal{derived}"
    largest, place = most(flat, ("layer", "head"))
    return f"attention differs most in {place} ({short(largest)} nats){derived}"


def kv_title(means: pd.Series, prompt: int, of: str = "") -> str:
    """Of K and V by position.

    Args:
        means: Mean errors by tensor, layer and position.
        prompt: The prompt's length.
        of: Of which K and V, where not of all.
    """
    positions = means.index.get_level_values("position")
    inside, decoded = means[positions < prompt], means[positions >= prompt]
    where = f", {of}," if of else ""
    if not (means > 0).any():
        return f"K and V{where} are exactly equal everywhere in this prompt and what it decoded"
    said: list[str] = []
    for name, part in (("this prompt's", inside), ("decoded", decoded)):
        if len(part):
            differ = (
                f"differ by {short(part.mean())} on average over positions" if (part > 0).any() else "are exactly equal"
            )
            said.append(f"{name} {f'K and V{where}' if not said else 'ones'} {differ}")
    return ", ".join(said)
