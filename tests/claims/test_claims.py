"""Every verdict can go either way, is open without data, and rests on what its rule says."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import worlds
from worlds import CLAIMED, World, equal

from kvinterp import metrics
from kvinterp.claims import CLAIMS, COLUMNS, FAILS, HOLDS, OPEN, Claim, Found, claims_of
from kvinterp.claims.base import larger, smaller, told_again


def but(world: World, **changed: object) -> World:
    return dataclasses.replace(world, **changed)


OTHERWISE = World(
    n=60, differing_null=9, flips_single=4, right=0.25, other=0.75, gemma=-1e-6, residual=0.5, cumulative=0.5, cache=0.1,
    state=0.1, percent=(70.0, 60.0, 99.0), factors=0.2, chains=0.1, keys=0.1, wider=1.0, written=0.0, compounds=0.5,
    broadcast=0.5, amplifies=-0.5, fixed=1e-6, drift=(1e-3, 1e-3, 5e-3, 5e-3), twice=3, js=-1, repeated=1.6,
)  # fmt: skip
"""Where most of what is claimed is wrong; the paths differ as rounding makes them differ."""
LINKED = but(CLAIMED, link=0.9, common=0.0)
HOLDS_IN = {
    "n-is-3500": but(CLAIMED, seeds=1),
    "mcnemar": but(CLAIMED, n=80, right=0.85, other=0.15),
    "powered": equal(n=2000),
    "eight-orders-logits": but(CLAIMED, half=0.5, single=1e-19),
    "format-causes": but(CLAIMED, fixed=1e-4),
    "restricted": but(LINKED, n=120, at_once=0.6),
    "margin-tells": but(CLAIMED, parts=0.5, by_margin=0.8),
    "margin-delays": but(CLAIMED, n=25, parts=0.5, by_margin=0.5),
    "not-monotone": but(CLAIMED, disagree=1.0),
}
"""Of claims that are wrong where most are right: a world in which they are."""
LATE = but(OTHERWISE, parts=1.0, link=-0.8, kl=0.5, spread=0.6, early=0.1)
FAILS_IN = {
    "not-sampling": equal(n=40),
    "seed-independent": but(OTHERWISE, parts=0.6, by_seed=0.0),
    "mcnemar": equal(n=2000),
    "direction": but(OTHERWISE, n=250),
    "format-causes": World(),
    "eight-orders": World(),
    "early-more-kl": LATE,
    "restricted": LINKED,
    "terciles": LATE,
    "uncertainty": LINKED,
    "margin-tells": but(OTHERWISE, by_margin=-0.4),
    "margin-delays": but(OTHERWISE, n=25, by_margin=-0.4),
    "gemma-partial": but(OTHERWISE, residual=-0.2),
    "news-accuracy": OTHERWISE,
}  # fmt: skip
"""Of claims that the world where most are wrong does not refute: one that does."""
made = functools.cache(worlds.tables)


@pytest.mark.slow
@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_holds_where_it_is_right_and_not_where_it_is_wrong(claim):
    for world, verdict in (
        (HOLDS_IN.get(claim.id, CLAIMED), HOLDS),
        (FAILS_IN.get(claim.id, OTHERWISE), FAILS),
    ):
        (row,) = claims_of(made(world), [claim]).to_dict("records")
        assert row["verdict"] == verdict, row
        assert row["n"] > 0


def test_the_claims_are_declared_whole():
    ids = Counter(claim.id for claim in CLAIMS)
    assert max(ids.values()) == 1
    assert sum(claim.source in ("FP16 paper", "news") for claim in CLAIMS) >= 25
    assert {claim.source for claim in CLAIMS} == {"FP16 paper", "news", "cache-error paper", "drift post"}
    for claim in CLAIMS:
        for name in ("section", "claim", "measure", "rule", "settles"):
            assert getattr(claim, name).strip(), (claim.id, name)
        assert claim.claim.endswith("."), claim.id
        assert claim.if_equal in ("true", "false", "open")


def test_without_tables_nothing_is_testable_and_the_reason_is_said():
    found = claims_of({})
    assert list(found.columns) == list(COLUMNS)
    assert set(found["verdict"]) == {OPEN}
    assert found["why"].str.contains("there is no table").all()
    assert found[["paper_protocol", "matched", "low", "high", "p"]].isna().all(axis=None)


def test_tables_with_nothing_in_them_are_not_testable_either():
    some = made(World(n=8))
    for cut in (
        {name: table.iloc[:0] for name, table in some.items()},
        {name: table.iloc[:, :1] for name, table in some.items()},
    ):
        found = claims_of(cut)
        assert set(found["verdict"]) == {OPEN}
        assert (found["why"].str.len() > 10).all()


def test_few_examples_decide_nothing_but_by_counterexample():
    """Of two examples only what one case refutes, or arithmetic without examples, is decided."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = claims_of(worlds.tables(World(n=2, parts=1.0))).set_index("id")
    tested = found["p"].notna()
    assert set(found.index[tested]) <= {"sums-flat", "sums-head", "exact-chains", "keys-matter", "not-monotone"}
    assert (found.loc[found["verdict"] != OPEN, "why"].str.len() > 0)[~tested].all()


def test_models_of_several_kinds_are_told_apart():
    """A study calls a model by its kind too; its two Gemma models are one side of the claim on Gemma."""
    tables = made(CLAIMED)
    more = {
        name: pd.concat([table.assign(model=table["model"] + f" ({kind})") for kind in ("native", "hooked")])
        for name, table in tables.items()
        if "model" in table
    }
    wanted = [claim for claim in CLAIMS if claim.id in ("gemma-highest", "layer-1", "gemma-partial", "diverges-greedy")]
    one, two = (claims_of(each, wanted) for each in (tables, more))
    assert two["n"].tolist() == one["n"].tolist()
    assert two["verdict"].tolist() == one["verdict"].tolist() == [HOLDS] * 4


def test_every_position_is_the_control_of_patching_one():
    tables = made(CLAIMED)
    recovery = tables["recovery"].assign(positions="newest")
    every = recovery[(recovery["site"] == "resid_post") & (recovery["protocol"] == "matched")]
    every = every.assign(positions="all", recovery=0.95)
    wanted = [claim for claim in CLAIMS if claim.id in ("residual-single", "residual-all")]
    found = claims_of({**tables, "recovery": pd.concat([recovery, every], ignore_index=True)}, wanted)
    assert found["verdict"].tolist() == [FAILS, FAILS]
    assert found["matched"].tolist() == pytest.approx([0.95, 0.95])
    assert found["paper_protocol"].tolist() == pytest.approx([0.0, -0.3], abs=0.05)


# The rules -------------------------------------------------------------------------------------------------------------


def claim_of(name: str, look) -> Claim:
    return Claim(name, "FP16 paper", "1", "That.", "", "it", "if", "so", look)


def test_a_verdict_needs_its_p_value_to_stand_the_correction():
    """A p of 0.02 alone holds; among ten tests of which nothing holds it is open, and the table says why."""
    one = claim_of("one", lambda tables: Found(1.0, 0.5, 1.5, 20, holds=0.02, fails=0.98))
    others = [
        claim_of(f"other-{k}", lambda tables, k=k: Found(0.0, -1, 1, 20, holds=0.3 + k / 20, fails=0.5)) for k in range(9)
    ]
    assert claims_of({}, [one])["verdict"].tolist() == [HOLDS]
    row = claims_of({}, [one, *others]).iloc[0]
    assert (row["verdict"], row["p"]) == (OPEN, 0.02)
    assert row["p_corrected"] == pytest.approx(0.2)
    assert "correction" in row["why"]


def test_a_claim_that_two_sources_make_is_one_test():
    look = lambda tables: Found(1.0, 0.5, 1.5, 20, holds=0.04, fails=0.96)  # noqa: E731
    first = claim_of("paper", look)
    twice = claims_of({}, [first, told_again([first], "paper", id="news", source="news")])
    assert twice["source"].tolist() == ["FP16 paper", "news"]
    assert twice["measure"].nunique() == 1
    assert twice["p_corrected"].tolist() == [0.04, 0.04]
    assert set(twice["verdict"]) == {HOLDS}


def test_larger_is_decided_on_both_sides_of_its_bounds():
    rng = np.random.default_rng(0)
    values, units = rng.normal(1.0, 0.5, 80), np.repeat(np.arange(20), 4)
    assert larger(values, units, 0.0).holds < 1e-4
    assert larger(values, units, 2.0).fails < 1e-4
    between = larger(values, units, 1.0)
    assert min(between.holds, between.fails) > 0.01
    # Shown to be above 0, but below what is claimed: the claim of a direction holds, and the size is for all to see.
    assert larger(values, units, 0.0, claimed=5.0).fails < 1e-4
    same = larger(np.zeros(20), np.arange(20), 0.0)
    assert (same.fails, same.holds) == (0.5**20, 1.0), "so many alike on one side, by the sign test"
    assert larger(np.full(20, 0.3), np.arange(20), 0.0).holds == 0.5**20
    # Of flags: twenty that never happened are no proof that fewer than a twentieth do.
    assert smaller(np.zeros(20), np.arange(20), 0.05, flags=True).holds == pytest.approx(0.95**20)
    assert larger(np.ones(20), np.arange(20), 0.9, flags=True).holds == pytest.approx(0.9**20)


def test_copies_of_greedy_decodes_are_counted_in_the_papers_column_alone():
    tables = made(World(n=40))
    decodes = tables["decodes"]
    copies = decodes[decodes["strategy"] == "greedy"]
    more = {**tables, "decodes": pd.concat([decodes, *(copies.assign(seed=k) for k in range(1, 5))], ignore_index=True)}
    wanted = [claim for claim in CLAIMS if claim.id in ("kl-large", "direction")]
    one, five = (claims_of(each, wanted).set_index("id") for each in (tables, more))
    assert one["n"].tolist() == five["n"].tolist() == [40, 40]


def test_the_matched_column_knows_nothing_of_texts_after_a_flip():
    """Free KL may be anything; the verdict on what rounding does is the same."""
    tables = made(World(n=40))
    decodes = tables["decodes"]
    louder = decodes.assign(mean_kl=decodes["mean_kl"].where(decodes["protocol"] == "matched", 50.0))
    wanted = [claim for claim in CLAIMS if claim.id == "kl-large"]
    one, other = (claims_of({**tables, "decodes": each}, wanted).iloc[0] for each in (decodes, louder))
    assert other["paper_protocol"] == 50
    assert one["paper_protocol"] < 5
    assert (one["verdict"], one["matched"]) == (other["verdict"], other["matched"]) == (FAILS, one["matched"])


def test_power_is_of_examples_and_not_of_rows():
    row = claims_of(made(World(n=60)), [claim for claim in CLAIMS if claim.id == "powered"]).iloc[0]
    assert row["n"] == 60
    assert row["matched"] > row["paper_protocol"] or row["paper_protocol"] == pytest.approx(row["matched"])
    assert metrics.detectable_difference(60, 0.5, 0.05 / 9) == pytest.approx(row["matched"], abs=0.05)


@pytest.mark.parametrize("flips", [1, 5, 9])
def test_a_few_flips_are_no_ranking(flips):
    """One flip of forty decodes, wherever its margin, gave a verdict in two of three draws."""
    rng, count = np.random.default_rng(flips), 40
    decodes = pd.DataFrame(
        {
            "model": "m", "strategy": "greedy", "seed": 0, "example": range(count), "id": [f"p{n}" for n in range(count)],
            "protocol": "matched", "flip_index": [3.0] * flips + [np.nan] * (count - flips),
            "smallest_margin": rng.uniform(0, 1, count),
        }
    )  # fmt: skip
    (row,) = claims_of({"decodes": decodes}, [claim for claim in CLAIMS if claim.id == "margin-tells"]).to_dict("records")
    assert (row["verdict"], row["why"].startswith(f"a token flips in {flips} of 40 examples")) == (OPEN, True)
