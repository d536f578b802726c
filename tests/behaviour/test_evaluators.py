"""lm-evaluation-harness on a path: its own class for transformers models, our scorers and plain loops are what it is held to."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch

import kvinterp as kv
import kvinterp.study.behaviour as behaviour
from command_line import wrong
from kvinterp.common.result import Result
from kvinterp.common.store import Store
from kvinterp.data import load_prompts, score
from kvinterp.findings import lines_of
from kvinterp.models import Adapter
from kvinterp.paths import Greedy, TopK, TopP
from kvinterp.policies import Place, Policy
from kvinterp.policies.base import KV
from kvinterp.study.behaviour.decoding import likelihoods, write
from kvinterp.study.experiments.eval import Eval
from plain import plain_loop
from support import Case

harness = pytest.importorskip("kvinterp.study.behaviour.harness")
evaluating = pytest.importorskip("kvinterp.study.behaviour.evaluating")

PROMPTS = load_prompts("arithmetic:8")
Load = Callable[..., Adapter]


@dataclasses.dataclass(frozen=True)
class Forgets(Policy):
    """What is written is nothing: whatever reads the cache is far from whatever does not."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, place: Place) -> KV:
        return keys, torch.zeros_like(values)


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.fixture
def small(load: Load) -> Adapter:
    return load(Case("zoo:gqa2-mini", "native"), "float16")


@pytest.fixture(scope="session")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of three tasks over generated problems: one that writes, one that chooses, one that reads."""
    folder = tmp_path_factory.mktemp("tasks")
    lines = [json.dumps({"text": prompt.text, "answer": prompt.answer}) for prompt in PROMPTS]
    (folder / "problems.jsonl").write_text("\n".join(lines) + "\n")
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {
            "data_files": {"test": str(folder / "problems.jsonl")},
            "cache_dir": str(tmp_path_factory.mktemp("cache")),
        },
        "test_split": "test",
    }
    writes = {
        "output_type": "generate_until",
        "doc_to_text": "{{text}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["Question:"], "max_gen_toks": 48},
        "filter_list": [
            {
                "name": "final",
                "filter": [
                    {"function": "regex", "regex_pattern": r"####\s*(-?\d+)"},
                    {"function": "take_first"},
                ],
            }
        ],
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    }
    chooses = {
        "output_type": "multiple_choice",
        "doc_to_text": "{{text}} ####",
        "doc_to_choice": [" 1", " 2", " 3", " 4"],
        "doc_to_target": 2,
        "metric_list": [{"metric": "acc"}],
    }
    reads = {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{text}}",
        "metric_list": [{"metric": "word_perplexity"}, {"metric": "bits_per_byte"}],
    }
    for name, task in {"writes": writes, "chooses": chooses, "reads": reads}.items():
        # JSON is YAML.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": f"kv_{name}", **common, **task}))
    return folder


def asked(tasks: Path, names: str, **more: Any) -> Eval:
    return Eval("zoo:gqa2-mini", names, include=str(tasks), unsafe_code=True, device="cpu", **more)


# Against our own scorer, plain loops, and the harness's own class ----------------------------------------------------------


@pytest.mark.slow
def test_a_tasks_score_is_our_own_scorers_on_the_same_prompts() -> None:
    """Answers are cut at so many tokens that some problems cannot be answered, whatever the processor."""
    outcome = asked(Path(__file__).with_name("tasks"), "kv_problems", against="none").run(None, progress="none")
    adapter = kv.load_model("zoo:gqa2-mini", kind="native", device="cpu")
    traces = [kv.run(adapter, prompt, max_new_tokens=20) for prompt in PROMPTS]
    own = [score(prompt, adapter.decode(trace.tokens)) for prompt, trace in zip(PROMPTS, traces, strict=True)]
    assert outcome.tables["samples"].sort_values("doc")["value"].tolist() == list(map(float, own))
    (row,) = outcome.tables["results"].to_dict("records")
    assert (row["metric"], row["filter"], row["documents"]) == ("exact_match", "final", len(PROMPTS))
    assert row["value"] == sum(own) / len(own)
    assert 0 < sum(own) < len(own), "a score that cannot be wrong shows nothing"


@pytest.mark.bits
@pytest.mark.parametrize("through", [0, 1, 3])
def test_likelihoods_are_those_of_the_plain_loop_to_the_bit(small: Adapter, through: int) -> None:
    """docs/laws.md, law 10: what is prefilled and what is fed is what a plain loop of transformers is given."""
    context, continuation = small.encode(PROMPTS[0].text), small.encode(" 12 + 3")[1:]
    (made,) = likelihoods(small, "cached", [(context, continuation)], through=through)
    tokens, head = torch.tensor([context + continuation]), len(context) - through
    logits = plain_loop(small.model, tokens[:, :head], tokens[0, head:-1].tolist())[through:]
    by_token = torch.log_softmax(logits.double(), -1).gather(1, tokens[0, len(context) :, None])
    assert made.log_probability == pytest.approx(float(by_token.sum()), rel=1e-14)
    assert made.greedy == (logits.argmax(-1).tolist() == continuation)


def test_in_float64_all_of_it_is_the_harnesss_own_class(load: Load) -> None:
    from lm_eval.models.huggingface import HFLM

    adapter = load(Case("zoo:gqa2-mini", "native"), "float64")
    theirs = HFLM(pretrained=adapter.model, tokenizer=adapter.tokenizer, batch_size=1, max_length=24)
    ours = harness.PathLM(adapter, "cached", through=2)
    ours.__class__ = type("Short", (harness.PathLM,), {"max_length": 24})
    text = PROMPTS[0].text
    # An empty context, a space that belongs to the continuation, one that does not fit, one that is greedy.
    pairs = [("", "Omar has"), ("Omar has ", "12 pens"), (text * 2, " 3"), ("Answer: 4 / 2 = 2. ####", " 2"), ("A", "1")]
    found, wanted = (lm.loglikelihood([request(*pair) for pair in pairs]) for lm in (ours, theirs))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in wanted]
    torch.testing.assert_close(
        *(torch.tensor([p for p, _ in each]).double() for each in (found, wanted)), rtol=1e-6, atol=1e-6
    )
    assert ours.counts["truncated"] == 1
    texts = [request(text), request("Omar"), request(text * 2)]
    rolled = [torch.tensor(lm.loglikelihood_rolling(texts)).double() for lm in (ours, theirs)]
    torch.testing.assert_close(*rolled, rtol=1e-6, atol=1e-6)
    how = {"until": [" +", "####"], "max_gen_toks": 12, "do_sample": False}
    written = [request(prompt.text, dict(how)) for prompt in PROMPTS[:3]]
    assert ours.generate_until(written) == theirs.generate_until(written)


# The policy is met, the bits are kept ---------------------------------------------------------------------------------------


def test_an_answer_of_one_token_meets_the_policy_only_through_the_cache(small: Adapter) -> None:
    requests = [request(PROMPTS[0].text, f"{number}") for number in (1, 2)]
    plain = harness.PathLM(small, "cached", through=0).loglikelihood(requests)
    found = {}
    for through in (0, 1):
        lm = harness.PathLM(small, kv.Cached(Forgets()), through=through)
        found[through] = lm.loglikelihood(requests)
        assert lm.counts["answered_by_prefill"] == (2 if through == 0 else 0)
        # The same rule where a token is written.
        lm.generate_until([request(PROMPTS[0].text, {"max_gen_toks": 1, "until": []})])
        assert lm.counts["answered_by_prefill"] == (3 if through == 0 else 0)
    assert found[0] == plain
    assert abs(found[1][0][0] - plain[0][0]) > 0.1
    stored = harness.PathLM(small, kv.Cached(Forgets(), prefill="stored"), through=0)
    assert stored.loglikelihood(requests) != plain
    assert stored.counts["answered_by_prefill"] == 0


def test_stop_strings_end_a_text_and_are_not_in_it(small: Adapter) -> None:
    prompts = [small.encode(PROMPTS[number].text) for number in (0, 1)]
    whole = write(small, "cached", prompts, 48)
    assert [each.ended for each in whole] == ["end of sequence"] * 2
    assert all(score(PROMPTS[n], each.text) for n, each in enumerate(whole))
    cut = write(small, "cached", prompts, 48, stops=["####", ""])
    for short, long in zip(cut, whole, strict=True):
        assert short.ended == "stop string"
        assert short.text == long.text.split("####")[0]
        assert len(short.tokens) < len(long.tokens)
        assert long.tokens[: len(short.tokens)] == short.tokens
    assert [each.ended for each in write(small, "cached", prompts, 3)] == ["length"] * 2


@pytest.mark.slow
@pytest.mark.bits
def test_a_batch_writes_and_scores_what_each_does_alone(small: Adapter) -> None:
    tokens = small.encode(PROMPTS[0].text)[:12]
    prompts = [[*tokens[:-1], last] for last in (tokens[-1], tokens[-2], tokens[-3])]
    how: dict[str, Any] = {"strategy": "top_p(1.0,2.0)", "seed": 5, "stops": ["."], "through": 2}
    together = write(small, "cached", prompts, 6, batch_size=3, **how)
    alone = [write(small, "cached", [p], 6, examples=[n], **how)[0] for n, p in enumerate(prompts)]
    assert together == alone
    assert len({each.text for each in together}) > 1
    pairs = [(prompt, continuation) for prompt in prompts for continuation in ([5, 6], [5, 7])]
    scored = likelihoods(small, "cached", pairs, batch_size=3)
    assert scored == [likelihoods(small, "cached", [pair])[0] for pair in pairs]


def test_choices_that_differ_in_one_token_share_a_run(small: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    forwards: list[int] = []
    forward = type(small).forward

    def counted(self: Any, tokens: torch.Tensor, store: Any = None) -> torch.Tensor:
        forwards.append(tokens.shape[1])
        return forward(self, tokens, store)

    monkeypatch.setattr(type(small), "forward", counted)
    context = small.encode(PROMPTS[0].text)
    made = likelihoods(small, "recompute", [(context, [token]) for token in range(5, 9)])
    assert forwards == [len(context)]
    assert len({each.log_probability for each in made}) == 4


def test_nan_is_no_score(small: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = type(small).forward
    monkeypatch.setattr(type(small), "forward", lambda self, tokens, store=None: forward(self, tokens, store) * torch.nan)
    with pytest.raises(kv.NonFiniteError, match="model zoo:gqa2-mini: path cached: NaN first appeared in the logits"):
        likelihoods(small, "cached", [([5, 6], [7])])


def test_what_tasks_sample_with() -> None:
    assert harness.strategy_of({"do_sample": False, "temperature": 0.0}) == Greedy()
    assert harness.strategy_of({"do_sample": True, "temperature": 0.7}) == TopP(1.0, 0.7)
    assert harness.strategy_of({"do_sample": True}) == TopP(1.0, 1.0)
    assert harness.strategy_of({"do_sample": True, "temperature": 0.5, "top_k": 3}) == TopK(3, 0.5)
    both = harness.strategy_of({"do_sample": True, "temperature": 1.0, "top_k": 2, "top_p": 0.6})
    logits = torch.tensor([[0.0, 1.0, 3.0, 2.0]], dtype=torch.float64)
    # Of the two largest the first alone has more than 0.6.
    assert both.distribution(logits).tolist() == [[0.0, 0.0, 1.0, 0.0]]
    with pytest.raises(kv.InputError, match="'num_beams': 4"):
        harness.strategy_of({"num_beams": 4})


# The experiment ---------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_writes_scores_a_page_and_goes_on(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    what = asked(tasks, "kv_chooses,kv_reads", path="cached[cache=float32]", limit=4)
    keep, kept = Store.keep, []

    def cut(self: Store, key: str, *part: Any) -> None:
        keep(self, key, *part)
        kept.append(key)
        if len(kept) == 2:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Store, "keep", cut)
        with pytest.raises(KeyboardInterrupt):
            what.run(tmp_path / "out", progress="none")
    outcome = what.run(tmp_path / "out", progress="none")
    assert len(kept) == 2
    whole = what.run(None, progress="none")
    for name in ("results", "samples"):
        frame = pd.read_parquet(tmp_path / "out" / f"{name}.parquet")
        pd.testing.assert_frame_equal(frame, whole.tables[name], check_exact=True, check_dtype=False)
    page = (tmp_path / "out" / "report.html").read_text()
    assert "kv_reads, word_perplexity" in page
    # Their K and V are kept in float32, where float16's are exact.
    assert whole.tables["changed"].empty
    assert (tmp_path / "out" / "figures" / "eval_scores.png").is_file()
    assert outcome.summary["paths"] == ["cached", "cached[cache=float32]"]
    asked_for = outcome.summary["counts"]["cached[cache=float32]"]["requests"]
    assert asked_for > 0
    assert "never read the cache" not in " ".join(what.sentences(outcome))
    # A perplexity is that of all words; of so few documents it has no interval.
    reads = whole.tables["results"].query("metric == 'word_perplexity'").iloc[0]
    samples = whole.tables["samples"]
    of = samples[(samples["metric"] == "word_perplexity") & (samples["path"] == "cached")]
    assert reads["value"] == pytest.approx(torch.tensor(-of["value"].sum() / of["weight"].sum()).exp().item())
    assert pd.isna([reads["low"], reads["high"]]).all()


def test_documents_are_compared_one_by_one() -> None:
    right = {"cached": [1, 1, 1, 0, 0, 0], "other": [1, 0, 0, 1, 0, 0]}
    samples = pd.DataFrame(
        [
            {"task": "t", "doc": doc, "metric": "acc", "filter": "none", "value": float(one), "weight": 1.0, "path": path}
            for path, values in right.items()
            for doc, one in enumerate(values)
        ]
    )
    results = pd.DataFrame(
        [
            {"task": "t", "metric": "acc", "filter": "none", "path": path, "value": sum(values) / 6, "documents": 6}
            for path, values in right.items()
        ]
    )
    first, second = evaluating.compared(results, samples, "cached").to_dict("records")
    assert pd.isna(first["difference"])
    differing = evaluating.changed(samples.assign(answer="x"), ["cached", "other"])
    assert differing["doc"].tolist() == [1, 2, 3]
    assert (second["better"], second["worse"], second["changed"]) == (1, 2, 3)
    assert second["difference"] == pytest.approx(-1 / 6)
    assert pd.isna(second["difference_low"]), "six documents are too few to resample"
    twice = pd.concat([samples, samples.assign(doc=samples["doc"] + 6)])
    (_, many) = evaluating.compared(results.assign(documents=12), twice, "cached").to_dict("records")
    assert many["difference_low"] < -1 / 6 < many["difference_high"]
    assert second["p"] == 1.0
    assert (second["low"], second["high"]) == pytest.approx((0.0433, 0.7772), abs=1e-4)  # Exact for 2 of 6.
    counts = {path: {"requests": 6, "answered_by_prefill": 0, "truncated": 0, "sampled": 0} for path in right}
    tables = {"results": pd.DataFrame([first, second]).assign(higher_is_better=True)}
    outcome = Result(tables, {"paths": ["cached", "other"], "counts": counts})
    (said,) = Eval().headline(outcome)
    assert said == "other scores 0.333 in t, acc (6 documents), cached 0.5: 3 score otherwise."
    found = " ".join(lines_of(Eval().findings(outcome)))
    assert "p = 1): 1 document only other has right, 2 only cached." in found
    assert "--seed 3 changed nothing" in " ".join(Eval(seed=3).headline(outcome))
    counts["cached"] |= {"answered_by_prefill": 5, "truncated": 2}
    outcome.summary["paths"] = ["cached"]
    said = " ".join(Eval().headline(outcome))
    assert "5 of 6 requests never read the cache" in said
    assert "cut from the left to fit the model's: 2 on cached" in said
    assert "McNemar" not in " ".join(lines_of(Eval().findings(Result({"results": tables["results"][:1]}, outcome.summary))))


def test_a_folder_of_tasks_runs_no_code_unless_it_may(tmp_path: Path) -> None:
    """`--include DIR` ran the YAML's own functions and its templates without a word."""
    (tmp_path / "planted.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w').close()\ndef text(doc): return 'a'\n")
    (tmp_path / "planted.yaml").write_text(
        "task: kv_planted\ndataset_path: json\ntest_split: test\noutput_type: generate_until\n"
        "doc_to_text: !function planted.text\ndoc_to_target: '1'\n"
    )
    for refused in (
        lambda: Eval("zoo:gqa2-mini", "kv_planted", include=str(tmp_path)).check(),
        lambda: evaluating.evaluated(None, "kv_planted", include=str(tmp_path)),
    ):
        with pytest.raises(
            kv.InputError, match=r"task files run code of their own.*pass --unsafe-code if you trust them"
        ) as said:
            refused()
        assert "\n" not in str(said.value)
    assert not (tmp_path / "mark").exists()
    with pytest.raises(kv.InputError, match="cannot be loaded"):
        evaluating.evaluated(None, "kv_planted", include=str(tmp_path), unsafe_code=True)
    assert (tmp_path / "mark").exists(), "where it may, it runs: the refusal is what keeps it from running"


@pytest.mark.slow
def test_wrong_input_is_one_sentence(tasks: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = ("eval", "zoo:gqa2-mini", "--out", tmp_path / "out")
    wrong("--policy q8_0 and --path cached were both given", *made, "--policy", "q8_0", "--path", "cached")
    wrong("no task was given", *made, "--tasks", ",")
    wrong("unknown policy 'q8'", *made, "--policy", "q8")
    wrong("expected 'none' or 'template'", *made, "--chat", "yes")
    wrong("is no folder: give one that holds task files", *made, "--include", tmp_path / "nowhere")
    wrong("run code of their own", *made, "--tasks", "kv_writes", "--include", tasks)
    own = ("--include", tasks, "--unsafe-code", "--device", "cpu")
    wrong("has no chat template: leave out", *made, "--tasks", "kv_writes", "--chat", "template", *own)
    # Without the thousands of the harness, which take seconds to be read.
    manager = evaluating.TaskManager
    monkeypatch.setattr(evaluating, "TaskManager", lambda **given: manager(**{**given, "include_defaults": False}))
    evaluating._manager.cache_clear()
    wrong("unknown task 'kv_write': did you mean 'kv_writes'", *made, "--tasks", "kv_write", *own)
    lost = json.loads((tasks / "writes.yaml").read_text()) | {"task": "kv_lost", "dataset_path": "nobody/nothing"}
    lost.pop("dataset_kwargs")
    (tmp_path / "own").mkdir()
    (tmp_path / "own" / "lost.yaml").write_text(json.dumps(lost))
    wrong(
        "are neither on this machine nor to be had",
        *made,
        "--tasks",
        "kv_lost",
        "--unsafe-code",
        "--include",
        tmp_path / "own",
    )
    monkeypatch.delitem(sys.modules, evaluating.__name__)
    monkeypatch.delattr(behaviour, "evaluating")
    for module in ("lm_eval", "lm_eval.evaluator"):
        monkeypatch.setitem(sys.modules, module, None)
    wrong("is not installed: pip install 'kvinterp[eval]'", *made, "--tasks", "kv_writes", *own)
    assert not (tmp_path / "out").exists()
