"""Questions drawn from a larger set without replacement, each after the same worked examples.

The worked examples are the same for every question, so that all prompts of a source begin with the
same tokens. The seed alone
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
"""The form of a prompt: the bare text; one message in the chat template; the worked examples as
turns of the chat.
"""
ENDS = ("</s>", "<|im_end|>")
"""Tokens that end a text or a turn, at which every completion is cut, as in
lm-evaluation-harness.
"""


@dataclass(frozen=True)
class FewShot(abc.ABC):
    r"""Prompts drawn from examples, each after the same few worked ones.

    Attributes:
        shots: How many worked examples come before each question.
        count: How many questions; by default all that are no worked example.
        seed: Decides which questions and which worked examples.
        between: The text between one example and the next.
        cut: ``"on"``: the judged text ends where the model begins a next question by itself;
            ``"off"``: all of it is judged.
        chat: One of :data:`CHATS`.
        system: A text before everything: the system message of a chat, otherwise a paragraph of its
            own.
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

    def mark(self, prompt: Prompt) -> str:
        """The text with which every question begins, such as ``Question:``; empty where it is not
        known.
        """
        return ""

    def prompts(self) -> list[Prompt]:
        """Makes the prompts; ``meta`` names the worked examples and the texts at which a completion
        is cut.

        Raises:
            InputError: There are too few examples, one cannot be read, or a worked example has no
                answer.
        """
        questions, worked = self.draw()
        for example in worked:
            if not example.completion.strip():
                raise InputError(
                    f"example {example.prompt.id!r} has no answer: expected one, as it is a worked example; add it or pass "
                    "shots=0."
                )
        shots: dict[str, Any] = (
            {"shots": [example.prompt.id for example in worked]} if worked else {}
        )
        prompts = []
        for question in questions:
            prompt = self._asked(question.prompt, worked)
            until = (
                {"until": [*filter(None, [self.mark(question.prompt)]), *ENDS]}
                if self.cut == "on"
                else {}
            )
            prompts.append(replace(prompt, meta={**prompt.meta, **shots, **until}))
        return prompts

    def _asked(self, prompt: Prompt, worked: Sequence[Example]) -> Prompt:
        """A question behind worked examples, in order; in a chat it has messages, and its text is
        their content.
        """
        text = self.between.join(
            [*(f"{example.prompt.text}{example.completion}" for example in worked), prompt.text]
        )
        whole = f"{self.system}{self.between}{text}" if self.system else text
        if self.chat == "none":
            return replace(prompt, text=whole)
        turns = [("user", text)]
        if self.chat == "turns":
            pairs = [
                (("user", example.prompt.text), ("assistant", example.completion.strip()))
                for example in worked
            ]
            turns = [turn for pair in pairs for turn in pair] + [("user", prompt.text)]
        messages = [("system", self.system), *turns] if self.system else turns
        return replace(
            prompt,
            text=whole,
            messages=tuple({"role": role, "content": said} for role, said in messages),
        )

    def sampled(
        self, examples: Sequence[Example], train: Sequence[Example] | None, source: str
    ) -> tuple[list[Example], list[Example]]:
        """Draws questions and worked examples without replacement; no worked example has the text
        of a question.

        All numbers are shuffled by the seed (``random.Random(seed).sample``) and the first
        ``count`` taken, in that order; without a count all are taken in the order of the file.
        Worked examples are the first of ``train``, shuffled likewise, or else the last of the
        shuffled examples, so that they are the same for every count.

        Args:
            examples: The examples to ask.
            train: The worked examples to draw from; None for those examples that are not asked.
            source: The name of the examples in errors.

        Raises:
            InputError: There are too few examples.
        """
        order = Random(self.seed).sample(range(len(examples)), len(examples))
        reserved = self.shots if train is None else 0
        most = len(examples) - reserved
        count = most if self.count is None else self.count
        if not 1 <= count <= most:
            remark = f", and {reserved} worked examples come from there too" if reserved else ""
            advice = f"ask for at most {most:,}" if most > 0 else "take fewer shots"
            raise InputError(
                f"{max(count, 1):,} examples were asked for, but {source!r} has {len(examples):,}{remark}: {advice}, or name a "
                "file of worked examples with train=FILE."
            )
        questions = [
            examples[number]
            for number in (sorted(order[:count]) if self.count is None else order[:count])
        ]
        rest = [examples[number] for number in reversed(order[count:])]
        candidates = rest if train is None else Random(self.seed).sample(train, len(train))
        texts = {example.prompt.text for example in questions}
        worked = [example for example in candidates if example.prompt.text not in texts][
            : self.shots
        ]
        if len(worked) < self.shots:
            raise InputError(
                f"{self.shots} worked examples were asked for, but beside those that are asked there are {len(worked)}: pass "
                f"shots={len(worked)}, or name a file of others with train=FILE."
            )
        return questions, worked


def cut_at(completion: str, until: Sequence[str]) -> str:
    """Cuts a completion at the first of some texts.

    Args:
        completion: The text that a model wrote.
        until: The texts.
    """
    for end in until:
        completion = completion.partition(end)[0]
    return completion
