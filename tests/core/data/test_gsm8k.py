"""Questions with numbers as answers: how they are read, drawn and judged. The problems in ``problems/`` are our own."""

from __future__ import annotations

import json
from pathlib import Path
from random import Random
from typing import Any

import pytest

from kvinterp.data import Prompt, extracted, load_prompts, score
from kvinterp.data.gsm8k import Gsm8k
from kvinterp.errors import InputError

FOLDER = Path(__file__).with_name("problems")
TEST, TRAIN = FOLDER / "test.jsonl", FOLDER / "train.jsonl"
QUESTIONS, WORKED = ([json.loads(line) for line in file.read_text().splitlines()] for file in (TEST, TRAIN))


def problems(**options: Any) -> list[Prompt]:
    return load_prompts(Gsm8k(str(TEST), **options))


def refused(said: str, source: object) -> None:
    with pytest.raises(InputError, match=said) as error:
        load_prompts(source)
    assert "\n" not in str(error.value)


# How an answer is read -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("completion", "strict", "flexible"),
    [
        (" 14*75 = 1,050 people.\n#### 1,050", "1050", "1050"),
        ("It is $1,050.", None, "1050"),
        ("#### 7 and #### 8", "7", "8"),
        ("#### -8.", "-8", "-8"),
        ("#### $9", None, "9"),
        ("####9", None, "9"),
        ("#### 9.0", "9.0", "9.0"),
        ("none", None, None),
        ("", None, None),
    ],
)
def test_the_first_number_after_the_marks_or_the_last_of_all(
    completion: str, strict: str | None, flexible: str | None
) -> None:
    assert (extracted(completion), extracted(completion, "flexible")) == (strict, flexible)


PIECES = (
    "####", " ", "#### ", "72", "-8", "1,050", "$", "9.", ".5", "3.0", ",", "-", "\n", "Question:", "</s>", "<|im_end|>", " is ",
    "= ", "<<6*8=48>>", "1050", "#### 1,050", "#### -8.", "#### 72", "½", "٣", "ſ", "[invalid]", "#",
)  # fmt: skip


def test_the_two_ways_are_those_of_the_harness() -> None:
    """lm-evaluation-harness's own task file, filters and metric say the same of thousands of made-up completions."""
    yaml = pytest.importorskip("yaml")
    lm_eval = pytest.importorskip("lm_eval")
    from lm_eval.api.metrics import exact_match_hf_evaluate
    from lm_eval.filters.extraction import RegexFilter

    task = yaml.safe_load((Path(lm_eval.__file__).parent / "tasks/gsm8k/gsm8k.yaml").read_text())
    metric = {name: task["metric_list"][0][name] for name in ("regexes_to_ignore", "ignore_case", "ignore_punctuation")}
    filters = {
        each["name"]: RegexFilter(**{k: v for k, v in each["filter"][0].items() if k != "function"})
        for each in task["filter_list"]
    }
    assert problems(shots=0)[0].meta["until"] == task["generation_kwargs"]["until"]
    assert Gsm8k("x").format.replace("{question}", "{{question}}") == task["doc_to_text"]
    rng = Random(0)
    right = {True: 0, False: 0}
    for name, how in (("strict-match", "strict"), ("flexible-extract", "flexible")):
        for prompt, row in zip(problems(shots=0, answer=how)[:5], QUESTIONS, strict=False):
            for number in range(400):
                said = "".join(rng.choices((*PIECES, f"#### {prompt.answer}", prompt.answer), k=rng.randint(1, 9)))
                said = row["answer"] if number == 0 else said
                kept = said
                for end in task["generation_kwargs"]["until"]:
                    kept = kept.split(end)[0]
                ((found,),) = filters[name].apply([[kept]], [{}])
                theirs = exact_match_hf_evaluate([found], [row["answer"]], **metric)["exact_match"] == 1
                assert score(prompt, said) == theirs, (how, said, found)
                right[bool(theirs)] += 1
    assert min(right.values()) > 400


# What is drawn ---------------------------------------------------------------------------------------------------------


def test_the_papers_draw_is_pythons_own_sample_and_a_smaller_one_its_beginning(tmp_path: Path) -> None:
    """700 of 1,319 with seed 42, each once; the first numbers are written down so that another Python's draw would be seen."""
    file = tmp_path / "test.jsonl"
    file.write_text("".join(json.dumps({"question": f"{n}?", "answer": n}) + "\n" for n in range(1319)))
    drawn = [prompt.id for prompt in load_prompts(f"gsm8k({file},shots=0,count=700,seed=42)")]
    assert drawn == [f"test-{n}" for n in Random(42).sample(range(1319), 700)]
    assert len(set(drawn)) == 700
    assert drawn[:5] == ["test-1309", "test-228", "test-51", "test-563", "test-501"]
    assert [prompt.id for prompt in load_prompts(f"gsm8k({file},shots=0,count=20)")] == drawn[:20]
    assert [prompt.id for prompt in load_prompts(f"gsm8k({file},shots=0,seed=1,count=20)")] != drawn[:20]


def test_five_worked_examples_stand_before_each_question_and_none_is_asked() -> None:
    made = problems(count=7)
    shots = made[0].meta["shots"]
    assert len(shots) == 5
    assert {prompt.id for prompt in made}.isdisjoint(shots)
    for prompt in made:
        assert prompt.meta["shots"] == shots
        row = QUESTIONS[int(prompt.id.removeprefix("test-"))]
        before = [QUESTIONS[int(shot.removeprefix("test-"))] for shot in shots]
        parts = [f"Question: {shot['question']}\nAnswer: {shot['answer']}" for shot in before]
        assert prompt.text == "\n\n".join([*parts, f"Question: {row['question']}\nAnswer:"])
        assert prompt.answer == row["answer"].rpartition("#### ")[2].replace(",", "")
    assert [prompt.meta["shots"] for prompt in problems(count=2)] == [shots, shots]
    assert sorted(prompt.id for prompt in problems()) == sorted(prompt.id for prompt in made)


def test_a_dataset_is_loaded_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here a folder of files: the same call as for a name on the hub, without the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    made = load_prompts(f"gsm8k({FOLDER},shots=2)")
    assert made == problems(shots=2, train=str(TRAIN))
    refused("split 'dev'\\) cannot be loaded .*Unknown split", f"gsm8k({FOLDER},split=dev,shots=0)")
    refused("config what.* cannot be loaded", f"gsm8k({FOLDER},config=what,shots=0)")
    other = load_prompts(f"gsm8k({FOLDER},split=train,train=test,shots=1)")
    assert [prompt.id for prompt in other] == [f"train-{n}" for n in range(7)]
    assert other[0].meta["shots"][0].startswith("test-")


# What is wrong -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ({"answer": "1"}, 'line 2 has no field "question"'),
        ({"question": "x"}, r'line 2 has no field "answer", or nothing in it \(fields: question\)'),
        ({"question": "x", "answer": "many"}, "line 2 has 'many' as its answer: expected a number such as 72"),
        ({"question": "x", "answer": "so 7\n#### seven"}, "line 2 has 'seven' after its last \"####\""),
        ({"question": 3, "answer": "7"}, 'line 2: "question" is int'),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: dict[str, object], said: str) -> None:
    file = tmp_path / "bad.jsonl"
    file.write_text('{"question": "x", "answer": 1}\n' + json.dumps(line) + "\n")
    refused(said, f"gsm8k({file},shots=0)")
