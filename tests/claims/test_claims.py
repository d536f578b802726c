"""Every verdict can go either way, is open without data, and rests on what its rule says."""

from __future__ import annotations

import functools
import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
import worlds
from scipy import stats
from worlds import CLAIMED, World, but

from kvinterp.study.claims import CLAIMS, COLUMNS, FAILS, HOLDS, OPEN, Claim, Found, claims_of
from kvinterp.study.claims.base import NotTestableError, larger, larger_of_intervals, ratio, smaller, told_again
from kvinterp.study.experiments.audit import claims_of as audits_claims

made = functools.cache(worlds.tables)
CLAIM = {claim.id: claim for claim in CLAIMS}


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda claim: claim.id)
def test_a_claim_has_a_world_for_each_answer(claim):
    """The page on claims lists the same worlds."""
    for world, verdict in zip(worlds.worlds_of(claim), (HOLDS, FAILS, OPEN), strict=True):
        (row,) = claims_of(made(world), [claim]).to_dict("records")
        assert row["verdict"] == verdict, (worlds.told(world), row)
        assert row["n"] > 0 or verdict == OPEN
        assert row["why"] or verdict != OPEN


def test_what_no_number_could_show_is_open():
    """Of five pairs Wilcoxon's test gives 0.0625 at best, even where every layer differs in every example."""
    (row,) = claims_of(made(but(CLAIMED, n=5)), [CLAIM["layers-significant"]]).to_dict("records")
    assert (row["verdict"], row["why"]) == (
        OPEN,
        "no layer is tested against the one before over 6 examples, pair by pair",
    )


def test_one_arm_is_judged():
    """What was done to K alone, or by another policy, is no draw of what was done to both."""
    tables = made(CLAIMED)
    chains = tables["chains"]
    alone = chains[chains["arm"].isin(["cached", "q8_0"])]
    wanted = [CLAIM["exact-chains"], CLAIM["not-monotone"]]
    pd.testing.assert_frame_equal(claims_of(tables, wanted), claims_of({"chains": alone}, wanted))
    (row,) = claims_of({"chains": chains[chains["arm"] != "q8_0"]}, wanted[:1]).to_dict("records")
    assert (row["verdict"], row["why"]) == (FAILS, "the arm is int8")


def test_flags_that_are_all_alike_are_no_proof():
    """Six prompts, of which the control follows one: all as without errors, which gave p < 1e-10 that 90% is kept."""
    row = {
        "policy": "q8_0",
        "reading": "stored",
        "metric": "instructions",
        "percent": 100.0,
        "percent_low": 100.0,
        "control": 1 / 6,
    }
    scores = pd.DataFrame([row | {"percent_high": 100.0 + 1e-12, "prompts": n} for n in (6, 400)])
    verdicts = [claims_of({"scores": scores[at : at + 1]}, [CLAIM["q8-instructions"]])["verdict"][0] for at in (0, 1)]
    assert verdicts == [OPEN, HOLDS]


def test_what_has_no_interval_is_open():
    with pytest.raises(NotTestableError, match="no interval"):
        larger_of_intervals(Found(1.0, np.nan, np.nan, 20), 0.0)


def test_units_above_a_bound_are_counted_whatever_their_size():
    rng = np.random.default_rng(0)
    values = np.exp(rng.normal(size=40) * 3)
    some = np.where(np.arange(40) < 10, 0.0, values * 1e3)
    found = larger(some, np.arange(40), 1.0)
    above = int((some > 1).sum())
    assert found.matched == np.median(some)
    assert found.holds == pytest.approx(stats.binomtest(above, 40, alternative="greater").pvalue)
    # Where most are 0 nothing is large, however large the others are.
    assert larger(np.where(np.arange(40) < 30, 0.0, 1e9), np.arange(40), 10.0).holds > 0.99
    pairs = ratio(values * 2, np.where(np.arange(40) < 3, 0.0, values), np.arange(40), 1.0)
    assert (pairs.matched, pairs.n, pairs.why) == (pytest.approx(2.0), 40, "")
    # What is 0 on one side alone, and always there, is beyond every bound.
    beyond = ratio(values, np.zeros(40), np.arange(40), 1e8)
    assert (beyond.holds, beyond.fails) == (0.5**40, 1.0)
    assert ratio(np.zeros(40), values, np.arange(40), 1.0).fails == 0.5**40
    both = ratio(np.where(np.arange(40) < 4, 0.0, values), np.where(np.arange(40) < 4, 0.0, 1.0), np.arange(40), 1.0)
    assert (both.n, both.why) == (36, "in 4 of 40 units both are exactly 0")
    with pytest.raises(NotTestableError, match="have a ratio is 0"):
        ratio(np.zeros(40), np.zeros(40), np.arange(40), 1.0)


def test_power_is_of_the_sources_problems_and_not_of_the_readers():
    """The same shares of answers that differ, in four times as many prompts: the same number, better known."""
    few, many = (claims_of(made(World(n=n)), [CLAIM["powered"]]).iloc[0] for n in (60, 240))
    assert (few["n"], many["n"]) == (60, 240)
    assert few["matched"] == pytest.approx(many["matched"], rel=0.1)
    assert few["paper_protocol"] < few["matched"] or few["paper_protocol"] == pytest.approx(few["matched"], rel=0.2)


def test_the_claims_are_declared_whole():
    ids = Counter(claim.id for claim in CLAIMS)
    assert max(ids.values()) == 1
    assert sum(claim.source in ("FP16 paper", "news") for claim in CLAIMS) >= 25
    assert {claim.source for claim in CLAIMS} == {
        "FP16 paper",
        "news",
        "cache-error paper",
        "drift post",
        "transformers issue",
    }
    for claim in CLAIMS:
        for name in ("section", "claim", "measure", "rule", "settles"):
            assert getattr(claim, name).strip(), (claim.id, name)
        assert claim.claim.endswith("."), claim.id
    assert set(worlds.IF_EQUAL) <= ids.keys()


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
    for n, fails in ((20, 1.0), (40, 0.5**40)):
        same = larger(np.zeros(n), np.arange(n), 0.0)
        assert (same.fails, same.holds) == (fails, 1.0), "on the bound itself few say nothing"
    assert larger(np.full(20, 0.3), np.arange(20), 0.0).holds == 0.5**20
    # Of flags: twenty that never happened are no proof that fewer than a twentieth do.
    assert smaller(np.zeros(20), np.arange(20), 0.05, of="share").holds == pytest.approx(0.95**20)
    assert larger(np.ones(20), np.arange(20), 0.9, of="share").holds == pytest.approx(0.9**20)


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


def test_an_audits_steps_are_rungs_of_a_ladder():
    """The issue's claim, of prompts that are as far apart in both precisions, and of ones that rounding explains."""
    for single, verdict in ((0.1, HOLDS), (1e-6, FAILS), (0.0, FAILS)):
        rows = [
            (rung, prompt, size * (1 + prompt / 100), 0.0)
            for rung, size in (("bfloat16", 0.125), ("float32", single)) for prompt in range(8) for _ in range(3)
        ]  # fmt: skip
        steps = pd.DataFrame(rows, columns=["rung", "prompt", "max_abs", "kl"])
        found = audits_claims({"steps": steps}, "m").set_index("id")
        assert found.loc["float32-as-large", "verdict"] == verdict, found.loc["float32-as-large"]
    assert set(audits_claims({}, "m")["verdict"]) == {OPEN}
