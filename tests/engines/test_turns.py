"""Whether a turn's prompt is the tokens of the turns before it: the first that is not, and what did it."""

from __future__ import annotations

from typing import Any

import pytest

import kvinterp as kv

THINK = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}\n{% endfor %}"
TRIM = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content | trim }}\n{% endfor %}"
PLAIN = "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}\n{% endfor %}"
BEGIN = "{% if add_generation_prompt %}<s>assistant\n{% endif %}"


def check(model: Any, template: str, reply: Any) -> Any:
    given = reply if isinstance(reply, dict) else {"content": reply}
    messages = [
        {"role": "user", "content": "How many pens does Ben have?"},
        {"role": "assistant", **given},
        {"role": "user", "content": "How many boxes does Ben have?"},
    ]
    before = getattr(model.tokenizer, "chat_template", None)
    model.tokenizer.chat_template = template + BEGIN
    try:
        return kv.check_turns(model, messages, model)
    finally:
        model.tokenizer.chat_template = before


@pytest.mark.parametrize(
    ("template", "reply", "cause"),
    [
        (PLAIN, "Ben has 3 pens.", ""),
        (THINK, "<think>He buys 4 more, so 7.</think>Ben has 7 pens.", "think part left out"),
        (TRIM, "Ben has 3 pens. \n\n ", "white space"),
    ],
)
def test_the_part_of_the_template_that_did_it_is_named(template: str, reply: str, cause: str, model: Any) -> None:
    found = check(model, template, reply)
    (row,) = found.table.to_dict("records")
    assert row["cause"] == cause, found.reading
    assert (row["exact"] == "yes") == (not cause) == found.exact
    if cause:
        assert row["reusable"] < row["cached"]
        assert row["cached_ids"] != row["prompt_ids"]
        assert row["nats"] > 1e-3, "other tokens before it give other log-probs"
    else:
        assert row["reusable"] == row["cached"]
        assert row["nats"] == 0


def test_a_reply_that_was_tokenised_again_is_told_from_another_text(model: Any) -> None:
    whole = model.tokenizer.encode(" Benjamin", add_special_tokens=False)
    parts = [t for letter in " Benjamin" for t in model.tokenizer.encode(letter, add_special_tokens=False)]
    assert len(parts) > len(whole)
    ids = model.encode("How many pens?")
    found = kv.check_turns(model, [{"prompt": ids, "tokens": parts}, {"prompt": [*ids, *whole, 5, 6]}])
    assert found.table["cause"][0] == "retokenised across the border", found.reading
    assert found.table["reusable"][0] == len(ids)
    found = kv.check_turns(model.tokenizer, [ids, [*ids[:-1], *model.encode("Other text")]])
    assert found.table["cause"][0] == "other text"


def test_a_special_token_that_was_dropped_is_named(model: Any) -> None:
    ids, end = model.encode("How many pens?"), model.tokenizer.eos_token_id
    found = kv.check_turns(model, [{"prompt": ids, "tokens": [40, 50, end]}, [*ids, 40, 50, 60, 70]])
    assert found.table["cause"][0] == "special tokens"
    assert found.table["reusable"][0] == len(ids) + 2


@pytest.mark.parametrize("wrong", [[], "text", [[1, 2]], [[1, 2], ["a"]], [[1, 2], {"prompt": [-1]}]])
def test_what_is_no_conversation_is_refused(wrong: Any, model: Any) -> None:
    with pytest.raises(kv.InputError, match="turn"):
        kv.check_turns(model, wrong)
