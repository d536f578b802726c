"""A trace of someone's own arrays, dense or the likeliest tokens alone, beside a path of ours or another: what can be said is said."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import kvinterp as kv
from kvinterp.errors import InputError

STEPS = 40


@pytest.fixture(scope="module")
def walked(model: Any) -> Any:
    """Prompt, tokens and logits of our cached path, as numbers that know nothing of us."""
    prompt = model.encode(kv.load_prompts("natural:1")[0].text)[:16]
    trace = kv.run(model, prompt, "cached", max_new_tokens=STEPS, logits="keep", stop="length")
    return list(trace.prompt), list(trace.tokens), trace.logits.numpy()


def beside(model: Any, given: kv.Trace, path: str = "cached") -> Any:
    """A path of ours, fed the tokens of a trace of arrays, and the trace."""
    fed: dict[str, Any] = {"continuation": given.tokens, "max_new_tokens": len(given.tokens), "stop": "length"}
    return kv.compare_traces(kv.run(model, given.prompt, path, logits="keep", **fed), given)


def likeliest(logits: np.ndarray, k: int) -> tuple[np.ndarray, np.ndarray]:
    rows = torch.from_numpy(logits).double().log_softmax(-1)
    best = rows.topk(k)
    return best.values.numpy(), best.indices.numpy()


@pytest.mark.parametrize("shift", [0.0, 3.0])
def test_dense_logits_of_our_own_path_are_equal_to_it(shift: float, model: Any, walked: Any) -> None:
    """A number added to all logits says nothing: log-probs are compared."""
    prompt, tokens, logits = walked
    given = kv.Trace.from_arrays(prompt, tokens, torch.from_numpy(logits).double() + shift)
    found = beside(model, given)
    assert found.steps["max_abs_logit"].max() < 1e-12
    assert found.steps["kl"].max() < 1e-20
    assert found.steps["compared"].tolist() == [model.facts.vocabulary] * STEPS
    assert "given" in found.where()
    assert "KL not given at 0 of 40 steps" in found.where()


def test_dense_log_probs_of_another_path_give_the_numbers_of_a_comparison(model: Any, walked: Any) -> None:
    prompt, tokens, _ = walked
    want = kv.compare(
        model, prompt, "cached", "recompute", max_new_tokens=STEPS, stop="length", record="", continuation=tokens
    )
    other = kv.run(model, prompt, "recompute", max_new_tokens=STEPS, continuation=tokens, logits="keep", stop="length")
    given = kv.Trace.from_arrays(np.array(prompt), np.array(tokens), other.logits.double().log_softmax(-1).numpy())
    found = beside(model, given)
    np.testing.assert_allclose(found.steps["kl"], want.steps["kl"], rtol=1e-3, atol=1e-18)
    np.testing.assert_array_equal(found.steps["top1_agree"], want.steps["top1_agree"])


def test_of_the_likeliest_tokens_what_cannot_be_computed_is_not_given_and_counted(model: Any, walked: Any) -> None:
    prompt, tokens, logits = walked
    values, ids = likeliest(logits, 20)
    given = kv.Trace.from_arrays(prompt, tokens, values, ids, path="engine", dtype="float32")
    for found in (beside(model, given), kv.compare_traces(given, given)):
        steps = found.steps
        assert steps["kl"].isna().all()
        assert steps["js"].isna().all()
        assert steps["compared"].tolist() == [20] * STEPS
        assert steps["max_abs_logit"].max() < 1e-12
        assert steps["top1_agree"].all()
        assert steps[["margin_a", "margin_b"]].notna().all(axis=None)
        assert "compared at 20 to 20 tokens a step; KL not given at 40 of 40 steps" in found.where()
        assert "nan" not in found.where().lower()
        assert found.summary()["mean_kl"] is None


def test_a_difference_planted_in_one_log_prob_is_found_at_its_step(model: Any, walked: Any) -> None:
    prompt, tokens, logits = walked
    values, ids = likeliest(logits, 5)
    values[7, 2] -= 0.25
    steps = beside(model, kv.Trace.from_arrays(prompt, tokens, values, ids)).steps
    assert steps["max_abs_logit"].idxmax() == 7
    assert steps["max_abs_logit"][7] == pytest.approx(0.25)
    assert steps["max_abs_logit"].drop(7).max() < 1e-12


def test_two_engines_of_unlike_tokens_have_those_in_common_compared(walked: Any) -> None:
    prompt, tokens, logits = walked
    a = kv.Trace.from_arrays(prompt, tokens, *likeliest(logits, 8))
    values, ids = likeliest(-logits, 8)
    none = kv.compare_traces(a, kv.Trace.from_arrays(prompt, tokens, values, ids))
    assert "no token is given by both sides" in none.where()
    assert none.steps["max_abs_logit"].isna().all()
    rows = torch.from_numpy(logits).double().log_softmax(-1).numpy()
    rows[3, :] = np.nan
    rows[4, 5] = -9999.0
    dense = kv.compare_traces(a, kv.Trace.from_arrays(prompt, tokens, rows))
    assert dense.steps["compared"][3] == 0
    assert "no token is given by both sides at 1 step." in dense.where()


def test_a_comparison_with_arrays_is_kept_and_read(model: Any, walked: Any, tmp_path: Path) -> None:
    prompt, tokens, logits = walked
    given = kv.Trace.from_arrays(prompt, tokens, *likeliest(logits, 4))
    for number, found in enumerate((beside(model, given), kv.compare_traces(given, given))):
        again = kv.load(found.save(tmp_path / str(number)))
        assert again.where() == found.where()
        assert found.report(tmp_path / f"page{number}").is_file()
        assert found._repr_html_()


def test_arrays_are_judged_as_a_file_is(model: Any) -> None:
    text = [t for prompt in kv.load_prompts("natural:8") for t in model.encode(prompt.text)][:120]
    run = kv.run(
        model, text[:20], "cached@float16", max_new_tokens=100, continuation=text[20:], logits="keep", stop="length"
    )
    given = kv.Trace.from_arrays(text[:20], text[20:], run.logits, dtype="float16")
    assert kv.audit(model, against=given).verdict == "rounding"
    values = run.logits.double().log_softmax(-1).gather(1, torch.tensor(text[20:])[:, None]) - 0.3
    given = kv.Trace.from_arrays(text[:20], text[20:], values, torch.tensor(text[20:])[:, None], dtype="float16")
    assert kv.audit(model, against=given).exit_code != 0


def test_the_example_of_the_docs_runs(model: Any) -> None:
    page = (Path(__file__).parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    (example,) = re.findall(r"(?s)## Your own arrays\n.*?```python\n(.*?)```", page)

    def answered(prompt: list[int], tokens: list[int]) -> Any:
        trace = kv.run(model, prompt, "recompute", max_new_tokens=4, continuation=tokens, logits="keep", stop="length")
        return likeliest(trace.logits.numpy(), 5)

    names: dict[str, Any] = {"answered": answered}
    exec(example, names)
    assert "KL not given at 4 of 4 steps" in names["found"].where()
    assert names["verdict"].exit_code == 3


@pytest.mark.parametrize(
    ("prompt", "tokens", "values", "ids", "says"),
    [
        ([1], [2, 3], np.zeros((1, 8)), None, "a row for each token"),
        ([], [2], np.zeros((1, 8)), None, "0 prompt tokens"),
        ([1.5], [2], np.zeros((1, 8)), None, "token ids"),
        ([1], [2], np.zeros((1, 8)), np.zeros((1, 7), int), "a token id for each value"),
        ([1], [2], np.full((1, 2), 0.5), [[0, 1]], "above 0"),
        ([1], [2], "abc", None, "cannot be"),
    ],
)  # fmt: skip
def test_arrays_that_do_not_fit_get_a_sentence(prompt: Any, tokens: Any, values: Any, ids: Any, says: str) -> None:
    with pytest.raises(InputError, match=says):
        kv.Trace.from_arrays(prompt, tokens, values, ids)


def test_hidden_states_of_arrays_are_compared_as_log_probs_are(model: Any) -> None:
    """Each side under its own name, and the first tensor that is not the same bits is named."""
    ours = kv.run(model, list(range(5, 12)), "cached", max_new_tokens=4, stop="length", logits="keep", record="resid_post")
    rows = {place: torch.stack(each).numpy() for place, each in ours.records.items()}
    arrays = ours.prompt, ours.tokens, ours.logits
    same = kv.compare_traces(ours, kv.Trace.from_arrays(*arrays, path="engine", hidden=rows))
    assert same.provenance["paths"] == {"a": "cached", "b": "engine"}
    assert len(same.layers) == 4 * model.facts.layers
    assert (same.layers["relative_l2"] == 0).all()
    rows["resid_post", 2] = rows["resid_post", 2] * 1.01
    found = kv.compare_traces(ours, kv.Trace.from_arrays(*arrays, path="engine", hidden=rows))
    assert (found.provenance["first"]["site"], found.provenance["first"]["layer"]) == ("resid_post", 2)
    with pytest.raises(InputError, match="does not fit 4 tokens"):
        kv.Trace.from_arrays(*arrays, hidden={("resid_post", 2): rows["resid_post", 2][1:]})


def test_what_another_library_ran_is_judged_as_an_engine() -> None:
    """A trace that kv.run made of TransformerLens's model holds logits, not the log-probs of some tokens."""
    hooked, native = (kv.load_model("zoo:gqa2-mini", kind=kind, dtype="float32") for kind in ("hooked", "native"))
    trace = kv.run(hooked, [1, 20, 30, 40], "recompute", max_new_tokens=32, stop="length", logits="keep")
    found = kv.audit(native, against=trace)
    assert found.verdict in ("rounding", "equal"), str(found)
    assert found.given["tokens"] == 32
    trace.logits[5:] *= 0.9
    assert kv.audit(native, against=trace).exit_code == 1
    with pytest.raises(kv.InputError, match="logits='keep'"):
        kv.audit(native, against=kv.run(hooked, [1, 20, 30], "recompute", max_new_tokens=2))


@pytest.mark.parametrize(
    ("made", "word", "says"),
    [
        (lambda run, k: run["resid_post", k].bfloat16().float() * 1.0, "unexplained", "first resid_post of layer 1"),
        (lambda run, k: run["resid_post", k], "rounding", "are what their names say, to rounding"),
        (lambda run, k: run["resid_post", k - 1], "misaligned", "both arrays are one layer early"),
        (lambda run, k: run["mlp_out", k], "misaligned", "both arrays are mlp_out of their layer"),
    ],
)
def test_hidden_states_are_judged_beside_log_probs(made: Any, word: str, says: str) -> None:
    """nnsight#630: log-probs were right, and the rows called the layer's output were its MLP's output alone: it passed."""
    model = kv.load_model("zoo:llama64-mini", kind="native", dtype="float32")
    ids = list(model.encode("Question: Ben has 3 pens and buys 4 more. How many pens does Ben have?"))
    run = kv.run(model, ids, "cached", max_new_tokens=20, stop="length", logits="keep", record="resid_post,mlp_out")
    hidden = {("resid_post", k): made(run, k) for k in (1, 2)}
    given = kv.Trace.from_arrays(ids, run.tokens, run.logits, path="engine", dtype="float32", hidden=hidden)
    found = kv.audit(model, against=given)
    assert found.verdict == word, str(found)
    assert says in " ".join(found.reading.split()), str(found)
    assert found.exit_code == (word != "rounding")
    if word != "rounding":
        assert found.reading.startswith(f"FAIL  {word}  another engine's hidden states against zoo:llama64-mini")
        assert kv.audit(model, against=given, allow=(word,)).exit_code == 0
