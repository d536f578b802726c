"""lm-evaluation-harness on a path: its own class for transformers models, our scorers and plain loops are what it is held to."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import kvinterp as kv
from kvinterp.data import load_prompts, score
from kvinterp.models import Adapter
from kvinterp.papers.behaviour.decoding import likelihoods, write
from kvinterp.policies import CacheRows, Policy
from kvinterp.policies.base import KV
from plain import plain_loop
from support import Case

harness = pytest.importorskip("kvinterp.lm_eval")
lm_eval = pytest.importorskip("lm_eval")

PROMPTS = load_prompts("arithmetic:8")
ROOT = Path(__file__).parents[2]
TASKS = Path(__file__).with_name("tasks")
Load = Callable[..., Adapter]


@dataclasses.dataclass(frozen=True)
class Forgets(Policy):
    """What is written is nothing: whatever reads the cache is far from whatever does not."""

    def write(self, keys: torch.Tensor, values: torch.Tensor, place: CacheRows) -> KV:
        return keys, torch.zeros_like(values)


def request(*args: Any) -> Any:
    return SimpleNamespace(args=args)


@pytest.fixture
def small(load: Load) -> Adapter:
    return load(Case("zoo:gqa2-mini", "native"), "float16")


# Against our own scorer, plain loops, and the harness's own class ----------------------------------------------------------


def own_scores() -> list[bool]:
    """Answers are cut at so many tokens that some problems cannot be answered, whatever the processor."""
    adapter = kv.load_model("zoo:gqa2-mini", kind="native", device="cpu")
    traces = [kv.run(adapter, prompt, max_new_tokens=20) for prompt in PROMPTS]
    own = [score(prompt, adapter.decode(trace.tokens)) for prompt, trace in zip(PROMPTS, traces, strict=True)]
    assert 0 < sum(own) < len(own), "a score that cannot be wrong shows nothing"
    return own


def test_a_tasks_score_is_our_own_scorers_on_the_same_prompts() -> None:
    """Without the thousands of tasks that the harness reads otherwise."""
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    own = own_scores()
    found = simple_evaluate(
        model="kvinterp",
        model_args={"model": "zoo:gqa2-mini", "path": "cached", "device": "cpu"},
        tasks=["kv_problems"],
        task_manager=TaskManager(include_path=str(TASKS), include_defaults=False),
        bootstrap_iters=0,
    )
    samples = sorted(found["samples"]["kv_problems"], key=lambda one: one["doc_id"])
    assert [one["exact_match"] for one in samples] == list(map(float, own))
    assert found["results"]["kv_problems"]["exact_match,final"] == sum(own) / len(own)
    assert found["config"]["counts"]["requests"] == len(PROMPTS)


@pytest.mark.always  # In CI, too.
@pytest.mark.slow
def test_the_harnesss_own_command_takes_it(tmp_path: Path) -> None:
    """The line of docs/evaluators.md that is not marked as not run, as it stands, in a process of its own."""
    page = (ROOT / "docs" / "evaluators.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"(?m)(?<!-->)\n```bash\n(python -m kvinterp\.lm_eval .*)\n```", page)
    _, *arguments = shlex.split(line.replace("out/q8_0", str(tmp_path)))
    made = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=600)
    assert made.returncode == 0, made.stderr[-3000:]
    (written,) = tmp_path.rglob("results_*.json")
    found = json.loads(written.read_text())
    assert found["config"]["path"] == "cached+q8_0"
    adapter = kv.load_model("zoo:llama64-mini", kind="native")
    traces = [kv.run(adapter, prompt, "cached+q8_0", max_new_tokens=20) for prompt in PROMPTS]
    own = [score(prompt, adapter.decode(trace.tokens)) for prompt, trace in zip(PROMPTS, traces, strict=True)]
    assert found["results"]["kv_problems"]["exact_match,final"] == sum(own) / len(own)


class Harness:
    """The harness's command line, which says what it would run, or raises."""

    def __init__(self, given: dict[str, Any], raised: Exception | None = None) -> None:
        self.given, self.raised = {"model": "kvinterp", "device": None, "config": None, **given}, raised

    def parse_args(self) -> argparse.Namespace:
        return argparse.Namespace(**self.given)

    def execute(self, given: argparse.Namespace) -> None:
        self.ran = given
        if self.raised is not None:
            raise self.raised


@pytest.mark.parametrize(
    ("given", "file", "there", "named"),
    [
        ({}, "", False, "cpu"),
        ({}, "", True, "cuda"),
        ({"device": "cuda:1"}, "", False, "cuda:1"),
        ({"model": "hf"}, "", False, None),
        ({"model": None}, "model: kvinterp", False, "cpu"),
        ({}, "device: cuda:0", False, None),
    ],
)
def test_the_device_is_that_of_every_command(
    given: dict[str, Any], file: str, there: bool, named: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without --device the harness asks for cuda:0, which every machine without one refused; one that is named is asked for."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    if file:
        (tmp_path / "it.yaml").write_text(file)
        given = {**given, "config": str(tmp_path / "it.yaml")}
    command = Harness(given)
    monkeypatch.setattr(harness, "HarnessCLI", lambda: command)
    harness.main()
    assert command.ran.device == named


def test_what_model_args_name_goes_before_the_harnesss_own() -> None:
    given = {"model": "zoo:gqa2-mini", "device": "cpu"}
    made = harness.PathLM.create_from_arg_obj(given, {"device": "cuda:0", "batch_size": 1, "max_batch_size": None})
    assert str(made.device) == "cpu"


def test_what_is_wrong_is_one_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(kv.InputError, match="unknown policy 'q8'"):
        harness.PathLM("zoo:gqa2-mini", "cached+q8", device="cpu")
    with pytest.raises(kv.InputError, match="batch_size='auto' was given"):
        harness.PathLM("zoo:gqa2-mini", batch_size="auto", device="cpu")

    capsys.readouterr()  # what loading says, where a test before has made the log visible
    missing = ModuleNotFoundError("No module named 'langdetect'", name="langdetect")
    for raised, said in (
        (kv.InputError("no such thing"), "error: no such thing\n"),
        (missing, "error: the package langdetect is"),
    ):
        monkeypatch.setattr(harness, "HarnessCLI", lambda raised=raised: Harness({"device": "cpu"}, raised))
        with pytest.raises(SystemExit) as left:
            harness.main()
        error = capsys.readouterr().err
        assert (left.value.code, error.count("\n")) == (2, 1)
        assert error.startswith(said)


def test_the_extra_brings_what_ifeval_imports() -> None:
    """`--tasks ifeval` was a traceback: its checker imports packages that the harness has in an extra of its own."""
    assert re.search(r'(?m)^eval = \["lm-eval\[ifeval\]', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    brought = [one for one in importlib.metadata.requires("lm_eval") or () if re.search("extra == .ifeval.", one)]
    folder = Path(lm_eval.__file__).parent / "tasks" / "ifeval"
    source = "".join((folder / name).read_text() for name in ("instructions.py", "instructions_util.py"))
    imported = set(re.findall(r"(?m)^(?:import|from) (\w+)", source)) - set(sys.stdlib_module_names)
    names = {re.split(r"[^\w-]", one)[0] for one in brought}
    assert imported - {"packaging", "lm_eval"} <= names


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
