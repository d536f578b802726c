"""The loader: what it takes, and one clear sentence for everything it does not take."""

import json
from pathlib import Path

import pytest

from kvinterp.data import TASKS, Prompt, load_prompts, split_of
from kvinterp.errors import InputError


def written(tmp_path, *lines):
    path = tmp_path / "prompts.jsonl"
    path.write_bytes("\n".join(lines).encode())
    return path


@pytest.mark.parametrize("task", sorted(TASKS))
def test_generators_by_name(task):
    prompts = load_prompts(f"{task}:20:7")
    assert prompts == load_prompts(f"{task}:20:7")
    assert [prompt.text for prompt in prompts] == [e.prompt.text for e in TASKS[task].generate(20, 7, "heldout")]
    assert {prompt.task for prompt in prompts} == {task}
    assert {split_of(prompt.text) for prompt in prompts} == {"heldout"}
    assert len({prompt.id for prompt in prompts}) == 20
    assert load_prompts(f"{task}:5") == load_prompts(f"{task}:5:0")


def test_file_with_every_field(tmp_path):
    record = {"id": "a", "prompt": "x", "task": "restate", "answer": "y", "facts": ["z"], "meta": {"k": 1}}
    path = written(tmp_path, json.dumps(record), "", '{"text": "só"}')
    first, second = load_prompts(path)
    assert first == Prompt("a", "x", "restate", "y", ("z",), {"k": 1})
    assert second == Prompt("line-3", "só")
    assert load_prompts(str(path)) == [first, second]


@pytest.mark.parametrize(
    "text",
    [
        "The capital of France is",
        "  Question: Ben has 3 pens.\n\nAnswer: ",
        "Instruction: Jump",
        "Answer: 42",
        "print(1 + 2)",
        "Is it and/or or?",
        "// adds two numbers\nint add(",
        "法国的首都是",
        "Why?",
    ],
)
def test_a_text_is_one_prompt_as_it_stands(text):
    assert load_prompts(text) == [Prompt("prompt-0", text)]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"])
def test_a_text_file_is_a_line_a_prompt(tmp_path, line_end):
    path = tmp_path / "my prompts.txt"
    path.write_bytes("\ufeff".encode() + line_end.join(["Ben has 3 ", "", "  ", "One\u2028line"]).encode())
    wanted = [Prompt("line-1", "Ben has 3 "), Prompt("line-4", "One\u2028line")]
    assert load_prompts(path) == load_prompts(str(path)) == wanted
    path.write_text(" \n\n")
    with pytest.raises(InputError, match="is empty: expected a prompt a line"):
        load_prompts(path)


def test_sequence_of_texts_and_prompts():
    kept = Prompt("mine", "b")
    assert load_prompts(["a", kept]) == [Prompt("prompt-0", "a"), kept]


_NO_IDS = ("{}", "[1]", "null", "true")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([""], "is empty"),
        (['{"prompt": "a"}', '{"prompt": '], "line 2 is not JSON"),
        (['{"prompt": "a"}', "", '{"question": "a"}'], 'line 3 has no field "prompt" .*question'),
        (["[1]"], "line 1 is JSON but no object"),
        (['{"prompt": "  "}'], "line 1 has an empty prompt"),
        (['{"id": "q", "prompt": "a"}', "", '{"id": "q", "prompt": "b"}'], "prompts 1 and 2 share the id 'q'"),
        (['{"prompt": "a", "text": "b"}'], 'prompts.jsonl\', line 1 has both "prompt" and "text"'),
        *(([f'{{"prompt": "a", "id": {given}}}'], 'line 1: "id" is .*a text or a number') for given in _NO_IDS),
    ],
)
def test_bad_files(tmp_path, lines, message):
    with pytest.raises(InputError, match=message) as caught:
        load_prompts(written(tmp_path, *lines))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nowhere.jsonl", "does not exist"),
        ("Hello", "expected a text with a space in it"),
        ("aritmetic:5", "did you mean 'arithmetic'"),
        ("gsm8kk(test.jsonl, count=3)", "unknown source of prompts 'gsm8kk': did you mean 'gsm8k'"),
        ("arithmetic", "arithmetic:20"),
        ("arithmetic:0", "count=0 was given: expected a whole number"),
        ("arithmetic:3:x", "seed='x' was given"),
        ("arithmetic:3:1:2", "arithmetic:20"),
        ([], "at least one text"),
        ([" "], "prompt 0 has an empty text"),
        ([Prompt("a", "x"), Prompt("a", "y")], "share the id 'a'"),
    ],
)
def test_bad_sources(source, message):
    with pytest.raises(InputError, match=message):
        load_prompts(source)


def test_fields_that_are_not_read_are_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "mine.jsonl"
    file.write_text('{"prompt": "a b"}\n{"prompt": "c d", "difficulty": 3}\n')
    assert [prompt.text for prompt in load_prompts(file)] == ["a b", "c d"]
    assert "mine.jsonl' these fields are not read: 'difficulty'" in caplog.text
