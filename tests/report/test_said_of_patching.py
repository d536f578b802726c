"""Every sentence about a sweep or a decomposition, written where it is true and not where the numbers deny it."""

import pandas as pd
import pytest

from kvinterp import metrics
from kvinterp.patching import ANEW, PARTS, Asked, PatchAnswer
from kvinterp.reading.patching import asked_said, map_said, recovery_said, said_of_decomposition, said_of_sweep
from synthetic import ABOUT

NULLS = ("fresh", "alone", "anew", "cache", *ANEW)


def decomposition(lengths=None, nulls=None, **more):
    lengths = lengths or {}
    names = ("total", *PARTS, *ANEW, "cache")
    found = {f"{name}_l2": lengths.get(name, 0.0) for name in names}
    found |= {name: lengths.get(name, 0.0) ** 2 for name in names}
    found |= {f"null_{name}_l2": (nulls or {}).get(name, 0.0) for name in NULLS}
    rest = {"steps": 10, "differ": 6, "most": {}, "without_cache": 0, "within_null": 0, "suffix": 8}
    rest |= {"examples": 2, "provenance": ABOUT}
    return " ".join(said_of_decomposition({**found, **rest, **more}))


def test_a_decomposition_with_nothing_to_split_says_which_nothing():
    assert decomposition(steps=0, differ=0) == "No step was decoded after the prefill: there is nothing to split."
    equal = decomposition(differ=0)
    assert equal.startswith("The paths' logits are bitwise equal at all 10 decode steps of 2 prompts: there is nothing to")
    assert "Measured on a processor" in equal
    assert "bitwise equal" not in decomposition({"total": 1.0, "fresh": 1.0})


@pytest.mark.parametrize("part", list(PARTS))
def test_a_part_is_named_where_it_is_there_and_only_there(part):
    said = decomposition({"total": 1.0, part: 1.0, "prompt": float(part == "anew")}, most={part: 4})
    assert f"  {part}: {PARTS[part]}: 1" in said
    assert "most of the difference at 4 steps" in said
    for other in set(PARTS) - {part}:
        assert PARTS[other] not in said
    assert (ANEW["prompt"] in said) == (part == "anew")
    assert ANEW["remade"] not in said
    assert ("no cache makes it" in said) == (part == "anew")
    assert ("null" in said) == (part != "kept"), "a policy or a narrower cache has no null"


def test_what_a_cache_contributes_is_said_by_its_own_numbers():
    without = decomposition({"total": 1.0, "anew": 1.0, "prompt": 1.0}, without_cache=6)
    assert "At 6 of the 6 steps that differ a cache as such contributes nothing." in without
    assert "A cache as such contributes the rows" not in without
    assert "needs no cache" not in without
    made = decomposition({"total": 1.0, "fresh": 0.5, "cache": 0.5}, {"cache": 0.2})
    assert "A cache as such contributes the rows computed alone, fresh: 0.5 (null" in made
    both = decomposition({"total": 1.0, "fresh": 0.5, "alone": 0.5, "cache": 0.5})
    assert "A cache as such contributes the rows computed alone, fresh and alone: 0.5" in both
    assert "contributes nothing" not in made
    assert "needs no cache" not in made
    within = decomposition({"total": 1.0, "fresh": 0.5, "cache": 0.5}, {"cache": 0.6}, within_null=3)
    assert "At 3 of the 6 it contributes no more than its null" in within


def sweep(median=0.5, kl=0.4, defined=3, place=None, **more):
    best = {
        "layer": 2, "head": -1, "positions": "all", "site": "kv", "sweep": "single", "median": median, "median_kl": kl,
        "defined": defined, "mean": 0.45, "interval_low": 0.3 if defined > 1 else float("nan"), "interval_high": 0.6,
        **(place or {}),
    }  # fmt: skip
    given = {
        "sweep": "single", "direction": "into-cached", "distance": "l2", "distances": ["l2", "kl"], "examples": 3,
        "examples_undefined": {}, "best": best, "together": {}, "floor": {}, "protocol": "matched", "provenance": ABOUT,
    }  # fmt: skip
    return " ".join(said_of_sweep({**given, **more}))


def test_a_block_of_positions_is_named_as_one_where_layers_were_swept_beside_it():
    """The best place of a sweep of several kinds was said to be at layer -1."""
    said = sweep(place={"layer": -1, "positions": "16:32", "sweep": "blocks"}, sweep="single,blocks")
    assert "at positions 16:32" in said
    assert "layer -1" not in said
    assert "at layer 2" in sweep(sweep="single,blocks")


def test_a_sweep_says_what_recovers_most_by_both_distances_and_nothing_it_did_not_measure():
    said = sweep()
    assert "The largest median recovery of the L2 distance of the logits, by kv (single, into-cached), is 50.0%" in said
    assert "at layer 2, of the KL 40.0%, over 3 prompts (95% interval 30.0% to 60.0%, mean 45.0%)." in said
    assert "Measured on a processor" in said
    for false in ("No place recovers", "undefined", "together", "Floor", "no difference", "too few"):
        assert false not in said
    none = sweep(0.01, float("nan"))
    assert "No place recovers a twentieth: the largest median" in none
    assert "of the KL undefined" in none
    assert "No place recovers a twentieth" in sweep(-3.0)
    one = sweep(defined=1)
    assert "over 1 prompt, too few for an interval." in one
    assert "95%" not in one


def test_a_sweep_says_what_no_patch_reaches_and_why_recovery_is_undefined():
    left = {"l2": {"mean": 0.02, "share": 0.43}, "kl": {"mean": 1e-9, "share": 0.08}}
    said = sweep(together=left, floor={"l2": {"mean": 0.001, "share": 0.02}})
    assert (
        "With kv of all the layers swept patched together, the median prompt keeps 43.0% of the L2, 8.0% of the KL." in said
    )
    floor = "Floor: with the last residual patched L2 0.001 is left, what the final norm and the unembedding make."
    assert floor in said
    free = sweep(floor={"l2": {"mean": 0.001, "share": 0.02}}, protocol="free")
    assert "L2 0.001 is left." in free
    assert "unembedding" not in free
    short = sweep(
        best=None, examples_undefined={"no patched step was decoded: take others.": 3}, examples_without_difference=0
    )
    assert short.startswith("3 of 3 prompts: recovery is undefined, for no patched step was decoded: take others. Measured")
    equal = sweep(
        best=None,
        examples_without_difference=3,
        examples_undefined={"the paths' logits are bitwise equal: take others.": 3},
    )
    assert equal.startswith("3 of 3 prompts: recovery is undefined, for the paths' logits are bitwise equal")
    assert "There is no difference to recover. Measured on" in equal
    assert "try another dtype" in metrics.why_undefined(3, 0.0, 0.0)
    assert "recovers" not in equal


# A patch by hand -------------------------------------------------------------------------------------------------------


def answer(asked, *distances, recovery=float("nan"), l2_recovery=float("nan"), why=""):
    names = ("d_before", "d_after", "l2_before", "l2_after")
    rest = {"steps": pd.DataFrame({"step": [1]}), "tokens": pd.DataFrame(), "shown_step": 1}
    found = dict(zip(names, distances, strict=True))
    return PatchAnswer(asked=asked, recovery=recovery, l2_recovery=l2_recovery, why=why, **found, **rest)


def test_a_patch_says_its_recovery_and_equal_paths_have_none():
    lead, rest = recovery_said(answer(Asked(), 0.0, 0.0, 0.0, 0.0, why=metrics.why_undefined(1, 0.0, 0.0)))
    assert lead == "Recovery undefined"
    assert rest.startswith(
        "over 1 step. KL to the donor: exactly 0 before, exactly 0 after the patch. The paths' logits are bitwise"
    )
    assert "try another dtype" in rest
    lead, rest = recovery_said(answer(Asked(), 2.0, 1.0, 5.0, 3.0, recovery=0.5, l2_recovery=0.4))
    assert lead == "Recovery 50.00% of the KL, 40.00% of the L2 distance of the logits"
    assert rest == "over 1 step. KL to the donor: 2 nats before, 1 nats after the patch."


def test_an_ablation_says_what_it_changes_and_no_recovery():
    lead, rest = recovery_said(answer(Asked(donor="zero"), 0.0, 0.25, 0.0, 3.0))
    assert lead == "KL(unpatched || patched) 0.25 nats, L2 distance of the logits 3"
    assert "An ablation restores nothing" in rest
    assert "exactly 0 nats" not in lead
    assert recovery_said(answer(Asked(donor="mean"), 0.0, 0.0, 0.0, 0.0))[0].startswith(
        "KL(unpatched || patched) exactly 0,"
    )


def test_a_patch_is_said_in_words_and_all_is_said_where_it_is_meant():
    said = asked_said(Asked("z", 2), (8, "query head"), 11)
    assert said == (
        "z of layer 2, all 8 query heads at once, at the newest position, at every step from 1 to 11, and the distances are "
        "means over them: replaced in the recompute path by the cached path's."
    )
    one = asked_said(Asked("kv", 0, 1, 3, (4, 9), "into-cached"), (2, "KV head"), 11)
    assert one == (
        "kv of layer 0, KV head 1, at positions 4 to 8, at step 3 alone: replaced in the cached path by the recompute path's."
    )
    for donor, words in (
        ("zero", "by zeros"),
        ("mean", "the mean over"),
        ("resample", "seed 7"),
        ("prompt", "other prompt"),
    ):
        said = asked_said(Asked("resid_post", donor=donor, seed=7), (0, ""), 3)
        assert words in said
        assert "every step from 0 to 3" in said
        assert "heads" not in said
    assert "1 all of it" in map_said("kl", False)
    assert "recovers" not in map_said("l2", True)
