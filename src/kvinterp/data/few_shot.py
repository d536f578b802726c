"""Questions drawn from a larger set without replacement, each after the same worked examples.

The worked examples are the same for every question, so that all prompts of a source begin with the same tokens. The seed alone
decides which examples are drawn: ``count=20`` are the first 20 of ``count=700``.

Format: that of lm-evaluation-harness (task ``gsm8k``: five shots, a blank line between them).
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, replace
from random import Random
from typing import Any

from kvinterp.common.checks import check_choice, check_instance, check_whole
from kvinterp.data.example import Example, Prompt
from kvinterp.errors import InputError

CHATS = ("none", "template", "turns")
"""The form of a prompt: the bare text; one message in the chat template; the worked examples as turns of the chat."""
ENDS = ("</s>", "<|im_end|>")
"""Tokens that end a text or a turn, at which every completion is cut, as in lm-evaluation-harness."""


@dataclass(frozen=True)
class FewShot(abc.ABC):
    r"""Prompts drawn from examples, each after the same few worked ones.

    Attributes:
        shots: How many worked examples come before each question.
        count: How many questions; by default all that are no worked example.
        seed: Decides which questions and which worked examples.
        between: The text between one example and the next.
        cut: ``"on"``: the judged text ends where the model begins a next question by itself; ``"off"``: all of it is judged.
        chat: One of :data:`CHATS`.
        system: A text before everything: the system message of a chat, otherwise a paragraph of its own.
    """

    _: KW_ONLY
    shots: int = 5
    count: int | None = None
    seed: int = 42
    between: str = "\n\n"
    cut: str = "on"
    chat: str = "none"
    system: str = ""

    def __post_init__(self) -> None:
        for name, least in (("shots", 0), ("count", 1), ("seed", 0)):
            if getattr(self, name) is not None or name != "count":
                check_whole(name, getattr(self, name), least)
        check_choice("cut", self.cut, ("on", "off"))
        check_choice("chat", self.chat, CHATS)
        for name in ("between", "system"):
            check_instance(name, getattr(self, name), str, "a text; put it in quotes")

    @abc.abstractmethod
    def draw(self) -> tuple[list[Example], list[Example]]:
        """Returns the examples that are asked, and the worked examples before each of them."""

    @abc.abstractmethod
    def mark(self, prompt: Prompt) -> str:
        """The text with which every question begins, such as ``Question:``; may be empty."""

    def prompts(self) -> list[Prompt]:
        """Makes the prompts; ``meta`` names the worked examples and the texts at which a completion is cut.

        Raises:
            InputError: There are too few examples, or one cannot be read.
        """
        questions, worked = self.draw()
        shots: dict[str, Any] = {"shots": [example.prompt.id for example in worked]} if worked else {}
        prompts = []
        for question in questions:
            prompt = with_examples(question.prompt, worked, self.between, self.chat, self.system)
            until = {"until": [*filter(None, [self.mark(question.prompt)]), *ENDS]} if self.cut == "on" else {}
            prompts.append(replace(prompt, meta={**prompt.meta, **shots, **until}))
        return prompts


def with_examples(prompt: Prompt, worked: Sequence[Example], between: str, chat: str, system: str) -> Prompt:
    """Puts worked examples before a prompt.

    Args:
        prompt: The question.
        worked: The examples, in order.
        between: The text between one and the next.
        chat: One of :data:`CHATS`; unless it is ``"none"`` the prompt has messages, and its text is their content.
        system: A text before everything; may be empty.

    Raises:
        InputError: A worked example has no answer.
    """
    without = next((example.prompt.id for example in worked if not example.completion.strip()), None)
    if without is not None:
        raise InputError(
            f"example {without!r} has no answer: expected one, as it is a worked example; add it or pass shots=0."
        )
    text = between.join([*(f"{example.prompt.text}{example.completion}" for example in worked), prompt.text])
    whole = f"{system}{between}{text}" if system else text
    if chat == "none":
        return replace(prompt, text=whole)
    turns = [("user", text)]
    if chat == "turns":
        pairs = [(("user", example.prompt.text), ("assistant", example.completion.strip())) for example in worked]
        turns = [turn for pair in pairs for turn in pair] + [("user", prompt.text)]
    messages = [("system", system), *turns] if system else turns
    return replace(prompt, text=whole, messages=tuple({"role": role, "content": content} for role, content in messages))


def cut_at(completion: str, until: Sequence[str]) -> str:
    """Cuts a completion at the first of some texts.

    Args:
        completion: The text that a model wrote.
        until: The texts.
    """
    for end in until:
        completion = completion.partition(end)[0]
    return completion


def sample(
    examples: Sequence[Example], train: Sequence[Example] | None, settings: FewShot, source: str
) -> tuple[list[Example], list[Example]]:
    """Draws questions and worked examples without replacement; no worked example has the text of a question.

    All numbers are shuffled by the seed (``random.Random(seed).sample``) and the first ``count`` taken, in that order; without a
    count all are taken in the order of the file. Worked examples are the first of ``train``, shuffled likewise, or else the last
    of the shuffled examples, so that they are the same for every count.

    Args:
        examples: The examples to ask.
        train: The worked examples to draw from; None for those examples that are not asked.
        settings: Count, shots and seed.
        source: The name of the examples in errors.

    Raises:
        InputError: There are too few examples.
    """
    order = Random(settings.seed).sample(range(len(examples)), len(examples))
    reserved = settings.shots if train is None else 0
    count = len(examples) - reserved if settings.count is None else settings.count
    if not 1 <= count <= len(examples) - reserved:
        remark = f", and {reserved} worked examples come from there too" if reserved else ""
        advice = f"ask for at most {len(examples) - reserved:,}" if len(examples) > reserved else "take fewer shots"
        raise InputError(
            f"{max(count, 1):,} examples were asked for, but {source!r} has {len(examples):,}{remark}: {advice}, or name a file "
            "of worked examples with train=FILE."
        )
    questions = [examples[number] for number in (sorted(order[:count]) if settings.count is None else order[:count])]
    rest = [examples[number] for number in reversed(order[count:])]
    candidates = rest if train is None else [train[n] for n in Random(settings.seed).sample(range(len(train)), len(train))]
    texts = {example.prompt.text for example in questions}
    worked = [example for example in candidates if example.prompt.text not in texts][: settings.shots]
    if len(worked) < settings.shots:
        count = len(worked)
        raise InputError(
            f"{settings.shots} worked examples were asked for, but beside those that are asked there are {count}: pass "
            f"shots={count}, or name a file of others with train=FILE."
        )
    return questions, worked
