"""Worked examples, samples, chat templates and cuts, of problems from anywhere; and that they reach a model as they are."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

import kvinterp as kv
from kvinterp.data import load_prompts, score
from kvinterp.data.few_shot import cut_at
from kvinterp.models import Adapter
from kvinterp.models.inputs import encode
from support import Case

CHAT = "{% for m in messages %}[{{ m.role }}] {{ m.content }} {% endfor %}[assistant]"


@pytest.fixture
def small(load: Callable[..., Adapter]) -> Adapter:
    return load(Case("zoo:gqa2-mini", "native"), "float16")


def test_a_generated_problem_is_cut_where_the_model_asks_itself_the_next() -> None:
    (prompt,) = load_prompts("arithmetic(1)")
    goes_on = f" I do not know.\n\nQuestion: x\nAnswer: #### {prompt.answer}"
    assert not score(prompt, goes_on)
    assert score(load_prompts("arithmetic(1,cut=off)")[0], goes_on)
    assert cut_at("a b c", ["c", "b"]) == "a "
    assert cut_at("a", []) == "a"


def test_a_sample_of_any_file_of_prompts(tmp_path: Path) -> None:
    file = tmp_path / "mine.jsonl"
    lines = [
        {"id": f"n{n}", "prompt": f"say {n}:", "answer": f"it is {n}", "task": "restate", "facts": [str(n)]}
        for n in range(9)
    ]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    first, second = load_prompts(f"jsonl({file},count=2,shots=1,seed=5)")
    assert first.meta["shots"] == second.meta["shots"]
    (shot,) = first.meta["shots"]
    assert first.text == f"say {shot[1:]}: it is {shot[1:]}\n\nsay {first.id[1:]}:"
    assert score(first, f"it is {first.id[1:]}")
    assert load_prompts(f"jsonl({file})") == load_prompts(file)
    file.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    with pytest.raises(kv.InputError, match="has no answer: expected one, as it is a worked example"):
        load_prompts(f"jsonl({file},shots=1)")


# Chats -------------------------------------------------------------------------------------------------------------------


def test_a_chat_is_one_message_or_a_turn_an_example(small: Adapter, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = load_prompts("arithmetic(1,shots=1)")[0]
    shown, asked = bare.text.split("\n\n")
    monkeypatch.setattr(small.tokenizer, "chat_template", CHAT, raising=False)
    (one,), (turns,) = (
        load_prompts(f"arithmetic(1,shots=1,chat={chat},system='Be brief, x.')") for chat in ("template", "turns")
    )
    assert small.decode(encode(small, one, 1)) == f"[system] Be brief, x. [user] {bare.text} [assistant]"
    worked = shown.replace("Answer: ", "Answer: \u0000").split("\u0000")
    said = f"[system] Be brief, x. [user] {worked[0].strip()} [assistant] {worked[1]} [user] {asked} [assistant]"
    assert small.decode(encode(small, turns, 1)) == said
    assert encode(small, bare, 1) == small.encode(bare.text)
    assert load_prompts("arithmetic(1,shots=1,system=Hm)")[0].text == f"Hm\n\n{bare.text}"


def test_a_model_without_a_template_or_with_one_that_refuses_says_so(
    small: Adapter, monkeypatch: pytest.MonkeyPatch
) -> None:
    (prompt,) = load_prompts("arithmetic(1,chat=template,system=Hm)")
    with pytest.raises(kv.InputError, match="has no chat template"):
        kv.compare(small, [prompt], max_new_tokens=2)
    with pytest.raises(kv.InputError, match="has no chat template"):
        kv.run(small, prompt, max_new_tokens=2)
    refuses = "{{ raise_exception('System role not supported') }}"
    monkeypatch.setattr(small.tokenizer, "chat_template", refuses, raising=False)
    with pytest.raises(
        kv.InputError, match=r"does not take these messages \(System role not supported; roles: system, user\)"
    ):
        encode(small, prompt, 1)


# To a model ----------------------------------------------------------------------------------------------------------------
