"""Every sentence about a patch by hand, written where it is true and not where the numbers deny it."""

import pandas as pd

from kvinterp import metrics
from kvinterp.patching import Asked, PatchAnswer
from kvinterp.study.report.panel_shown import asked_said, map_said, recovery_said

# A patch by hand -------------------------------------------------------------------------------------------------------


def answer(asked, *distances, recovery=float("nan"), l2_recovery=float("nan"), why=""):
    names = ("d_before", "d_after", "l2_before", "l2_after")
    rest = {"steps": pd.DataFrame({"step": [1]}), "tokens": pd.DataFrame(), "shown_step": 1, "pair": ("7", "8")}
    rest |= dict.fromkeys(("pair_before", "pair_after", "pair_recovery"), float("nan"))
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
