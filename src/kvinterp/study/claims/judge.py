"""The one judge: what a study's tables say of each claim."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import numpy as np
import pandas as pd

from kvinterp import metrics
from kvinterp.study.claims.base import FAILS, HOLDS, LEVEL, OPEN, Claim, Found, NotTestableError, Tables
from kvinterp.study.claims.table import CLAIMS

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
    holds, fails = (
        metrics.corrected([getattr(each, side) for each in found.values()], "holm") for side in ("holds", "fails")
    )
    judged = {look: _judged(*each) for look, *each in zip(found, found.values(), holds, fails, strict=True)}
    rows = pd.DataFrame([vars(claim) | vars(judged[claim.look]) for claim in claims])
    return rows.rename(columns={"value": "paper_value", "paper": "paper_protocol"}).reindex(columns=list(COLUMNS))


def _looked(look: Callable[[Tables], Found], tables: Tables) -> Found:
    try:
        with warnings.catch_warnings():
            # Of what cannot be told the reason is in the table.
            warnings.simplefilter("ignore", RuntimeWarning)
            found = look(tables)
    except NotTestableError as reason:
        return Found(verdict=OPEN, why=str(reason))
    except (KeyError, pd.errors.UndefinedVariableError) as missing:
        return Found(verdict=OPEN, why=f"a table that it reads has no such column: {missing}")
    if found.verdict or np.isfinite([found.holds, found.fails]).any():
        return found
    return found.but(verdict=OPEN, why=found.why or "there is no spread to test against")


def _judged(found: Found, holds: float, fails: float) -> Found:
    """With the verdict and the p-value that counts, given both p-values as they are corrected for all tests."""
    if found.verdict:
        return found
    sides = [(found.holds, holds, HOLDS), (found.fails, fails, FAILS)]
    for p, p_corrected, verdict in sides:
        if p_corrected <= LEVEL:
            return found.but(p=p, p_corrected=p_corrected, verdict=verdict)
    p, p_corrected, _ = min(side for side in sides if np.isfinite(side[0]))
    said = "the correction for many tests leaves it open" if p <= LEVEL else "the interval reaches both sides of the bound"
    why = "; ".join(filter(None, (found.why, f"{said} (n is {found.n})")))
    return found.but(p=p, p_corrected=p_corrected, verdict=OPEN, why=why)
