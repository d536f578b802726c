"""Whole studies whose answer is known before: two paths in a fixed order of sums, and two that differ by construction."""

from __future__ import annotations

import pandas as pd
import pytest
from worlds import IF_EQUAL

from kvinterp.study.claims import CLAIMS, FAILS, HOLDS
from kvinterp.study.experiments.study import Study

pytestmark = pytest.mark.long

ONLY = ("behaviour", "boundary", "layer-drift", "localisation")
"""Those in which both paths have the kernels that one gives; the root cause switches them itself."""


def study_on(kernels: str) -> dict[str, pd.DataFrame]:
    small = ("localisation.count=1", "localisation.max_new_tokens=3", "behaviour.controls=1")
    study = Study(
        preset="quick",
        models=("zoo:gqa2-mini",),
        kinds=("native",),
        prompts="arithmetic:6",
        strategies=("greedy",),
        max_new_tokens=6,
        device="cpu",
        only=ONLY,
        more=(*(f"{name}.kernels={kernels}" for name in ONLY), *small),
    )
    return dict(study.run(None, progress="none").tables)


def verdicts(tables: dict[str, pd.DataFrame], if_equal: str) -> set[str]:
    """Of the claims that would be wrong (or right) if both paths computed the same."""
    found = tables["claims"].set_index("id")["verdict"]
    return {found[claim.id] for claim in CLAIMS if IF_EQUAL.get(claim.id, "false") == if_equal}


def test_a_study_of_two_paths_that_compute_the_same() -> None:
    """In one order of sums cached and recompute are bitwise equal, and no claim of a difference may hold."""
    tables = study_on("batch_invariant")
    for name, column in (
        ("decodes", "max_abs_logit"),
        ("decodes", "mean_kl"),
        ("layer_drift", "l2"),
        ("head_kl", "kl"),
        ("nulls", "max_abs_logit"),
    ):
        assert len(tables[name]), name
        assert (tables[name][column] == 0).all(), (name, column)
    assert HOLDS not in verdicts(tables, "false")
    assert FAILS not in verdicts(tables, "true")
    assert FAILS in verdicts(tables, "false")


def test_a_study_of_two_paths_that_differ_by_construction() -> None:
    """Sums in two parts in float16: the paths differ by rounding, and are not called equal, nor their KL large."""
    tables = study_on("split_k(2,float16)")
    assert (tables["decodes"]["max_abs_logit"] > 0).any()
    assert (tables["layer_drift"]["l2"] > 0).any()
    found = tables["claims"].set_index("id")
    assert found.loc["drift-is-rounding", "verdict"] == HOLDS
    for name in ("kl-large", "decorrelated"):
        assert found.loc[name, "verdict"] == FAILS, found.loc[name]
        assert found.loc[name, "n"] == 6
    assert 0 < found.loc["kl-large", "matched"] < 1e-4
