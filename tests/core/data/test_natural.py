"""The prompts that come with the package: in turn a chat question, an opening of a book and a word problem."""

from __future__ import annotations

import kvinterp as kv
from kvinterp.data.tasks import score


def test_there_are_48_of_three_kinds_in_turn() -> None:
    prompts = kv.load_prompts("natural")
    assert len({prompt.id for prompt in prompts}) == 48
    assert [prompt.id.split("-")[0] for prompt in prompts] == ["chat", "story", "arithmetic"] * 16
    assert all(bool(prompt.messages) == prompt.id.startswith("chat") for prompt in prompts)
    assert kv.load_prompts("natural:7") == prompts[:7]


def test_word_problems_are_scored_and_openings_name_their_book() -> None:
    for prompt in kv.load_prompts("natural"):
        if prompt.task:
            assert score(prompt, f" so it is. #### {prompt.answer}")
            assert not score(prompt, " #### 12345")
        elif not prompt.messages:
            assert prompt.meta["source"][-4:].isdigit()
