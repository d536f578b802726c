"""All claims, and the table of what a study's tables say of each."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.claims import answers, behaviour, boundary, cause, layers, patching, policies
from kvinterp.claims.base import FAILS, HOLDS, OPEN, Claim, Found, NotTestableError, Tables

LEVEL = 0.05
"""The chance that any verdict of a table which rests on a test is wrong, to each side."""
CLAIMS: tuple[Claim, ...] = (
    *behaviour.CLAIMS,
    *answers.CLAIMS,
    *layers.CLAIMS,
    *cause.CLAIMS,
    *boundary.CLAIMS,
    *patching.CLAIMS,
    *policies.CLAIMS,
)
COLUMNS = (
    "id", "source", "section", "claim", "measure", "paper_value", "paper_protocol", "matched", "n", "low", "high", "p",
    "p_corrected", "verdict", "why", "rule", "settles", "construction",
)  # fmt: skip


def claims_of(tables: Tables, claims: Sequence[Claim] = CLAIMS) -> pd.DataFrame:
    """What tables say of each claim.

    A verdict that rests on a test must hold after Holm's correction over all tests of the table, those that a claim holds and
    those that it does not apart: the chance that any "holds here" is an accident is at most 5%, and the same of any "does not
    hold here". A claim that two sources make is one test. A verdict that rests on a count (one counterexample to "always")
    needs none.

    Args:
        tables: Those of a study by name, or some of them; what is not there is not testable.
        claims: Which.

    Returns:
        One row a claim: id, source, section, claim, measure (what the numbers are), paper_value (as the source prints it),
        paper_protocol (the number here under the source's protocol; NaN where there is none), matched (under the control), n
        (independent units), low, high (95% interval of matched), p (one-sided, of the side that is nearer to a verdict),
        p_corrected, verdict, why, rule, settles, construction (why the rule gives its verdict whatever is
        measured, if it does).
    """
    found = {look: _looked(look, tables) for look in dict.fromkeys(claim.look for claim in claims)}
    sides = {
        side: metrics.corrected([getattr(each, side) for each in found.values()], "holm") for side in ("holds", "fails")
    }
    judged = {
        look: _judged(each, holds, fails)
        for (look, each), holds, fails in zip(found.items(), sides["holds"], sides["fails"], strict=True)
    }
    rows = []
    for claim in claims:
        each, (p, p_corrected, verdict, why) = found[claim.look], judged[claim.look]
        told = {
            name: getattr(claim, name)
            for name in ("id", "source", "section", "claim", "measure", "rule", "settles", "construction")
        }
        numbers = {name: getattr(each, name) for name in ("matched", "n", "low", "high")}
        told |= {"paper_value": claim.value, "paper_protocol": each.paper, "verdict": verdict, "why": why}
        rows.append(told | numbers | {"p": p, "p_corrected": p_corrected})
    return pd.DataFrame(rows, columns=list(COLUMNS))


def _looked(look: object, tables: Tables) -> Found:
    try:
        with warnings.catch_warnings():
            # Of what cannot be told the reason is in the table.
            warnings.simplefilter("ignore", RuntimeWarning)
            found: Found = look(tables)  # type: ignore[operator]
    except NotTestableError as reason:
        return Found(verdict=OPEN, why=str(reason))
    if found.verdict or np.isfinite(found.holds) or np.isfinite(found.fails):
        return found
    return dataclasses.replace(found, verdict=OPEN, why=found.why or "there is no spread to test against")


def _judged(found: Found, holds: float, fails: float) -> tuple[float, float, str, str]:
    """The p-value that counts, the same corrected, the verdict and why."""
    if found.verdict:
        return np.nan, np.nan, found.verdict, found.why
    sides = [(found.holds, float(holds), HOLDS), (found.fails, float(fails), FAILS)]
    for p, p_corrected, verdict in sides:
        if p_corrected <= LEVEL:
            return p, p_corrected, verdict, found.why
    p, p_corrected, _ = min(side for side in sides if np.isfinite(side[0]))
    said = "the correction for many tests leaves it open" if p <= LEVEL else "the interval reaches both sides of the bound"
    return p, p_corrected, OPEN, "; ".join(filter(None, (found.why, f"{said} (n is {found.n})")))
