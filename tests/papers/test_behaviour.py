"""Behaviour of two paths: decodes against compare's own tables, reductions of made-up decodes, and one small run of the command."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

import kvinterp as kv
from kvinterp.common.result import Result
from kvinterp.comparison.comparing import compare_examples
from kvinterp.data.tasks import judged
from kvinterp.findings import findings_of, lines_of
from kvinterp.papers.behaviour import divergence as d
from kvinterp.papers.behaviour.decoding import write
from kvinterp.papers.studies.behaviour import Behaviour, decodes_of
from kvinterp.paths.decoders import Memory
from support import Case

KERNELS = "split_k(8,float16)"
NOISY = "cached+normal(0,0.3,seed=0)", "recompute"
"""A pair of paths of which some decodes flip, whatever the processor: the one cache is noisy."""
SAMPLED: dict[str, Any] = {"strategy": "top_p(1.0,1.2)", "seed": 1, "max_new_tokens": 16}


# Decodes ---------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def decoded(load: Any) -> tuple[Any, dict[int, Any], dict[str, pd.DataFrame]]:
    """A model, prompts by their numbers, and their decodes, one after another with what they share computed once."""
    adapter, given = load(Case("zoo:gqa2-mini", "native"), "float16"), kv.load_prompts("arithmetic:4")
    prompts = {number: given[number] for number in (0, 3)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvinterp.papers.studies.behaviour.paths_of", lambda kernels: NOISY)
        parts = [
            decodes_of(adapter, {n: prompt}, decoders=(Memory().decoder,) * 2, **SAMPLED) for n, prompt in prompts.items()
        ]
        made = {name: pd.concat([part[name] for part in parts]).assign(model="m") for name in parts[0]}
    assert made["decodes"]["diverged"].nunique() == 2, "the case needs decodes of both kinds"
    return adapter, prompts, made


@pytest.mark.slow
def test_only_decodes_that_flip_are_run_free_and_that_is_the_free_protocol(decoded: Any) -> None:
    """Until a token flips both protocols feed the same, so the rows of a decode that never flips stand for both."""
    adapter, prompts, made = decoded
    decodes, both = made["decodes"], d.with_free_steps(made["decodes"], made["steps"])
    for protocol in ("matched", "free"):
        settings = {"record": "", "progress": "none", "examples": list(prompts), **SAMPLED}
        truth = compare_examples(adapter, list(prompts.values()), *NOISY, protocol=protocol, **settings)
        mine = decodes[decodes["protocol"] == protocol].sort_values("example", ignore_index=True)
        same = [
            "example",
            "id",
            "prompt_tokens",
            "steps",
            "flip_index",
            "mean_kl",
            "mean_kl_before_flip",
            "smallest_margin",
        ]
        pd.testing.assert_frame_equal(mine[same], truth.examples[same])
        columns = ["example", "step", "kl", "max_abs_logit", "flipped", "after_flip"]
        mine = both[both["protocol"] == protocol].sort_values(["example", "step"], ignore_index=True)
        pd.testing.assert_frame_equal(mine[columns], truth.steps[columns])
    # Up to and including the flip both are the same bits.
    for _, group in both[~both["after_flip"]].groupby("example"):
        matched, free = (part["kl"].tolist() for _, part in group.groupby("protocol", sort=False))
        assert matched == free


def test_each_path_writes_its_own_text_to_its_own_end(decoded: Any) -> None:
    adapter, prompts, made = decoded
    decodes = made["decodes"]
    free = decodes[decodes["protocol"] == "free"].set_index("example")
    for side, path in zip("ab", NOISY, strict=True):
        given = [adapter.encode(prompt.text) for prompt in prompts.values()]
        how = {name: value for name, value in SAMPLED.items() if name != "max_new_tokens"}
        texts = [each.text for each in write(adapter, path, given, 16, examples=list(prompts), **how)]
        end = adapter.tokenizer.eos_token
        assert [free.loc[n, f"text_{side}"].partition(end)[0] for n in prompts] == texts
        assert free[f"correct_{side}"].tolist() == [judged(prompts[n], free.loc[n, f"text_{side}"]) for n in free.index]
    assert (free["text_a"] != free["text_b"]).tolist() == free["diverged"].tolist()
    matched = decodes[decodes["protocol"] == "matched"]
    assert matched["correct_b"].isna().all()
    assert (matched["mean_kl"] <= matched["kl_bound"]).all()
    at_flip = made["steps"].query("flipped and not after_flip and protocol == 'free'").set_index("example")["margin_a"]
    assert free["margin_at_flip"].dropna().to_dict() == at_flip.to_dict()


def test_a_path_against_itself_differs_nowhere_and_split_k_under_a_suffix_does() -> None:
    model, how = "zoo:gqa2-mini", {"device": "cpu", "kernels": KERNELS, "max_new_tokens": 4, "stop": "length"}
    asked = Behaviour((model,), "arithmetic:1", **how)
    (same,) = asked.null_of(model, "greedy", "same path twice").to_dict("records")
    (longer,) = asked.null_of(model, "greedy", "longer suffix").to_dict("records")
    assert (same["steps"], same["differing_steps"], same["flips"], same["n"]) == (4, 0, 0, 1)
    assert longer["differing_steps"] > 0


# Reductions ------------------------------------------------------------------------------------------------------------


def made_up(flips: dict[int, list[float]], length: int = 10, strategy: str = "top_k(5,1)") -> tuple[Any, Any]:
    """Decodes of one model whose KL at step s is s before a flip and 100 after it, free; by example the flip of each seed."""
    decodes, steps = [], []
    for example, of_seeds in flips.items():
        for seed, flip in enumerate(of_seeds):
            told = {"model": "m", "strategy": strategy, "seed": seed, "example": example}
            for protocol in ("matched", "free"):
                after = [step > flip for step in range(length)]
                kl = [100.0 if protocol == "free" and late else float(step) for step, late in enumerate(after)]
                numbers = {"mean_kl": np.mean(kl), "mean_js": 0.0, "max_abs_logit": 5.0, "kl_bound": 12.5}
                before = np.mean([value for value, late in zip(kl, after, strict=True) if not late])
                numbers |= {
                    "mean_kl_before_flip": before,
                    "mean_kl_after_flip": np.nan,
                    "flip_index": flip,
                    "steps": length,
                }
                row = {**told, "id": f"id-{example}", "protocol": protocol, "diverged": flip == flip, **numbers}
                decodes.append(row | {"correct_a": example < 3, "correct_b": example < 2 or flip != flip})
                if protocol == "matched" or flip == flip:
                    steps += [
                        {
                            **told,
                            "protocol": protocol,
                            "step": step,
                            "kl": kl[step],
                            "after_flip": late,
                            "flipped": step == flip,
                        }
                        for step, late in enumerate(after)
                    ]
    return pd.DataFrame(decodes), pd.DataFrame(steps)


NEVER = float("nan")


def test_tables_of_decodes_whose_truth_is_known() -> None:
    decodes, steps = made_up({0: [NEVER, NEVER], 1: [2.0, 5.0], 2: [NEVER, 5.0], 3: [NEVER, NEVER]})
    tables = d.behaviour_tables(decodes, steps)
    (matched, free) = tables["divergence"].sort_values("protocol", ascending=False).to_dict("records")
    assert (matched["decodes"], matched["n"], matched["diverged"], matched["rate"]) == (8, 4, 3, 3 / 8)
    assert matched["at_risk"] == free["at_risk"] == 5 * 10 + 3 + 6 + 6
    assert matched["flip_rate"] == 3 / 65
    assert np.isnan(matched["low"]), "four examples are too few to resample"
    twelve, of_steps = made_up({example: [2.0 if example % 2 else NEVER, 5.0] for example in range(12)})
    (many, _) = (
        d.behaviour_tables(twelve, of_steps)["divergence"].sort_values("protocol", ascending=False).to_dict("records")
    )
    assert many["low"] < many["rate"] == 18 / 24 < many["high"] < 1
    assert (matched["above_bound"], free["above_bound"], matched["kl_bound"]) == (0, 3, 12.5)
    by_step = tables["kl_by_step"].set_index(["protocol", "step"])
    assert (by_step.loc["matched", "mean_kl"] == range(10)).all()
    assert by_step.loc[("free", 5), "mean_kl"] == (7 * 5 + 100) / 8
    assert by_step.loc[("free", 5), "flips"] == 2
    assert by_step.loc[("free", 5), "at_risk"] == 7
    assert by_step.loc[("free", 6), "at_risk"] == 5
    assert np.isnan(by_step.loc[("free", 6), "low"]), "four examples are too few for an interval"
    assert tables["survival"].set_index("step").loc[5, "survival"] == pytest.approx(7 / 8 * 5 / 7)


def test_no_flip_leaves_what_so_many_examples_leave() -> None:
    decodes, steps = made_up({example: [NEVER] * 3 for example in range(10)})
    (row, _) = d.behaviour_tables(decodes, steps)["divergence"].to_dict("records")
    assert (row["rate"], row["low"]) == (0, 0)
    assert row["high"] == pytest.approx(1 - 0.025**0.1), "examples count, and not the decodes of their seeds"
    # So rare a flip a step leaves ten steps without one with the same chance.
    assert (1 - row["flip_rate_high"]) ** 10 == pytest.approx(1 - row["high"])


def test_answers_are_compared_as_their_decodes_are_paired() -> None:
    from scipy import stats

    once, _ = made_up({example: [1.0] for example in range(8)}, strategy="greedy")
    (row,) = d.accuracy_of(once).to_dict("records")
    assert (row["test"], row["n"], row["only_a"], row["only_b"]) == ("exact McNemar", 8, 1, 0)
    assert row["p"] == stats.binomtest(1, 1).pvalue
    several, _ = made_up({example: [1.0, NEVER] for example in range(8)})
    (row,) = d.accuracy_of(several).to_dict("records")
    assert (row["test"], row["n"], row["decodes"], row["only_a"], row["only_b"]) == ("sign flips by cluster", 8, 16, 1, 5)
    assert row["difference"] == pytest.approx(-4 / 16)
    same = once.assign(correct_b=once["correct_a"])
    for each in (same, pd.concat([same, same.assign(seed=1)])):
        (row,) = d.accuracy_of(each).to_dict("records")
        assert row["low"] == -row["high"] == pytest.approx(-stats.binomtest(0, 8).proportion_ci().high)
    both = d.accuracy_of(pd.concat([once, several]))
    assert (both["p_bonferroni"] == np.minimum(2 * both["p"], 1)).all()


def test_the_sentences_follow_the_numbers() -> None:
    decodes, steps = made_up({0: [NEVER, NEVER], 1: [2.0, 5.0], 2: [NEVER, 5.0], 3: [NEVER, NEVER]})
    tables = d.behaviour_tables(decodes, steps)
    null = {
        "model": "m",
        "strategy": "greedy",
        "steps": 10,
        "differing_steps": 0,
        "flips": 0,
        "max_abs_logit": 0.0,
        "mean_kl": 0.0,
        "n": 2,
    }
    tables["nulls"] = pd.DataFrame(
        [{**null, "null": "same path twice"}, {**null, "null": "longer suffix", "differing_steps": 4}]
    )
    tables["failures"] = decodes.iloc[:0]
    headline, lines = read(tables)
    assert headline.startswith("A token flips in 3 of 8 decodes; fed the same tokens")
    assert "decodes in which a token flips 37.5% (n = 4 examples): 3 of 8 decodes." in lines
    assert "steps at risk that flip 4.62% (n = 4 examples)" in lines
    assert "of 3 decodes above what the logits' difference allows: after a flip it is of two texts" in lines
    assert "null, same path twice: steps whose logits differ 0% (n = 10 steps)" in lines
    assert "null, longer suffix: steps whose logits differ 40% (n = 10 steps)" in lines
    decodes, steps = made_up({0: [NEVER], 1: [NEVER]})
    headline, lines = read({**tables, **d.behaviour_tables(decodes, steps)})
    assert headline.startswith("A token flips in 0 of 2 decodes")
    assert "decodes in which a token flips 0% (95% interval 0% to 84.2%, n = 2 examples)" in lines
    assert "above what the logits' difference allows" not in lines


def read(tables: dict[str, pd.DataFrame]) -> tuple[str, str]:
    """The headline, and all findings a line each."""
    result = Result(tables, {})
    return "\n".join(Behaviour().headline(result)), "\n".join(lines_of(findings_of(Behaviour().rows(result))))


# The command -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_whole_command(tmp_path: Any) -> None:
    asked: dict[str, Any] = {"prompts": "arithmetic:2", "strategies": ("greedy", "top_p(1.0,1.5)"), "max_new_tokens": 5}
    asked |= {"controls": 1, "block": 1, "stop": "length", "device": "cpu"}
    outcome = Behaviour(("zoo:gqa2-mini",), **asked).run(tmp_path / "out", progress="none", figures="png")
    tables = outcome.tables
    assert set(tables) == {
        *("findings", "decodes", "kl_by_step", "survival", "divergence", "accuracy", "nulls"),
        *("flip_steps", "flip_tokens", "failures"),
    }
    decodes = tables["decodes"]
    assert len(decodes) == 2 * 2 * (1 + 2)
    assert set(decodes.loc[decodes["strategy"] == "greedy", "seed"]) == {0}
    assert {path.name for path in outcome.files} >= {"behaviour_kl_by_step.png", "behaviour_survival.png", "report.html"}
    assert len(tables["nulls"]) == 4
    # Where cells begin and end changes no number.
    other = Behaviour(("zoo:gqa2-mini",), **asked | {"block": 2, "controls": 0}).run(None, progress="none").tables
    order = [*d.DECODE, "protocol"]
    one, two = (each.sort_values(order, ignore_index=True) for each in (decodes, other["decodes"]))
    pd.testing.assert_frame_equal(one, two)
