"""The law of flips on a model: what is kept of a step, and that the very same streams are unembedded twice."""

from __future__ import annotations

import pytest
import torch

import kvinterp as kv
from command_line import kvinterp
from kvinterp.errors import InputError
from kvinterp.models.unembedding import Unembedding
from kvinterp.papers.studies.flip_law import FlipLaw, steps_of
from support import Case

pytestmark = pytest.mark.bits


@pytest.mark.parametrize("kind", ["native", pytest.param("hooked", marks=pytest.mark.hooked)])
def test_the_steps_are_those_of_a_plain_comparison(kind: str, load) -> None:
    adapter = load(Case("zoo:gqa2-mini", kind), "bfloat16")
    prompt = kv.load_prompts("arithmetic:1")[0]
    steps = steps_of(adapter, prompt, ["recompute", "cached+int4"], max_new_tokens=8)
    same, coarse = (group for _, group in steps.groupby("path", sort=False))
    assert (same[["first_error", "second_error", "largest"]] == 0).all(axis=None), "a path beside itself has no error"
    assert not same[["flip", "wide_flip", "third"]].any(axis=None)
    both = kv.compare(adapter, [prompt], "recompute", "cached+int4", max_new_tokens=8, record="", progress="none")
    expected = both.steps[both.steps["step"] > 0]
    assert coarse["flip"].tolist() == expected["flipped"].astype(bool).tolist()
    last = adapter.facts.layers - 1
    kept = kv.run(adapter, prompt, "recompute", max_new_tokens=len(both.steps), record="resid_post", layers=last)
    streams = torch.stack([row.reshape(-1) for row in kept.records["resid_post", last][1 : len(coarse) + 1]])
    top = Unembedding(adapter, torch.float32).logits(streams).topk(2).values.T
    for name, values in zip(("first", "second"), top, strict=True):
        # The norm in front is in 16 bits there and in float32 here.
        torch.testing.assert_close(torch.tensor(coarse[name].to_numpy()), values, rtol=0.02, atol=0.02)


def test_a_drawn_text_leads_and_the_highest_logit_is_what_flips(load) -> None:
    """Of a text drawn at temperature 2 the token fed is often not the one of the highest logit; the flips are of the latter."""
    adapter, prompt = load(Case("zoo:gqa2-mini", "native"), "bfloat16"), kv.load_prompts("arithmetic:1")[0]
    drawn = {"max_new_tokens": 12, "strategy": "top_k(50,4)", "seed": 3}
    steps = steps_of(adapter, prompt, ["cached+int4"], **drawn)
    leader = kv.run(adapter, prompt, "recompute", logits="keep", **drawn)
    fed = kv.run(
        adapter,
        prompt,
        "cached+int4",
        max_new_tokens=len(leader.tokens),
        stop="length",
        logits="keep",
        continuation=list(leader.tokens),
    )
    best = leader.logits.argmax(-1)
    assert best.tolist() != list(leader.tokens), "at this temperature something else is drawn somewhere"
    assert steps["flip"].tolist() == (best != fed.logits.argmax(-1))[1:].tolist()


def test_what_cannot_be_asked_is_refused_before_a_model_runs() -> None:
    for given, sentence in (
        ({"path": ()}, "at least one"),
        ({"path": ("cached@float64",)}, "--dtype"),
        ({"max_new_tokens": 1}, "at least 2"),
    ):
        with pytest.raises(InputError, match=sentence):
            FlipLaw(model="zoo:mistral-mini", **given).run(None, progress="none")


@pytest.mark.slow
def test_the_command_writes_its_page_and_goes_on_where_it_stopped(tmp_path) -> None:
    out = tmp_path / "law"
    done = kvinterp("flip-law", "zoo:mistral-mini", "--prompts", "arithmetic:5", "--max-new-tokens", "6", "--out", out)
    assert done.exit_code == 0, done.stderr
    assert "open" in done.stdout
    assert (out / "report.html").exists()
    assert len(kv.load(out).tables["law"]) == 8
