"""Worked examples before a question, and the questions drawn from a larger set without replacement.

The worked examples are the same for every question, so that all prompts of a source begin with the same tokens. Which
examples are drawn is decided by the seed alone: ``count=20`` are the first 20 of ``count=700``.

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
"""How a model is asked: the bare text; one message in its chat template; the worked examples as turns of the chat."""
ENDS = ("</s>", "<|im_end|>")
"""Where a completion ends in any case that is cut at all, as in lm-evaluation-harness: tokens that end a text or a turn."""


@dataclass(frozen=True)
class FewShot(abc.ABC):
    r"""Prompts drawn from examples, each behind the same few worked ones.

    Attributes:
        shots: How many worked examples come before each question.
        count: How many questions; all that are no worked example unless given.
        seed: Decides which, and which worked examples.
        between: What stands between one example and the next.
        cut: ``"on"``: what is judged ends where the model begins a next question by itself; ``"off"``: all of it is judged.
        chat: One of :data:`CHATS`.
        system: What comes before all: the system message of a chat, a paragraph of its own elsewhere.
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
    def drawn(self) -> tuple[list[Example], list[Example]]:
        """The examples that are asked, and the worked ones before each of them."""

    @abc.abstractmethod
    def mark(self, prompt: Prompt) -> str:
        """What begins a question of this form, as ``Question:``; empty where nothing does."""

    def prompts(self) -> list[Prompt]:
        """The questions behind the worked examples; ``meta`` says which these were and where a completion is cut.

        Raises:
            InputError: There are too few examples, or one cannot be read.
        """
        asked, worked = self.drawn()
        made = []
        for example in asked:
            prompt = behind(example.prompt, worked, self.between, self.chat, self.system)
            more: dict[str, Any] = {"shots": [each.prompt.id for each in worked]} if worked else {}
            if self.cut == "on":
                more["until"] = [*filter(None, [self.mark(example.prompt)]), *ENDS]
            made.append(replace(prompt, meta={**prompt.meta, **more}))
        return made


def behind(prompt: Prompt, worked: Sequence[Example], between: str, chat: str, system: str) -> Prompt:
    """A prompt behind worked examples.

    Args:
        prompt: The question.
        worked: The examples, in order.
        between: What stands between one and the next.
        chat: One of :data:`CHATS`; other than ``"none"`` the prompt has messages, and its text is what they say.
        system: What comes before all; may be empty.

    Raises:
        InputError: One of them has no answer to show.
    """
    without = next((each.prompt.id for each in worked if not each.completion.strip()), None)
    if without is not None:
        raise InputError(
            f"example {without!r} has no answer: expected one, as it is a worked example; add it or pass shots=0."
        )
    text = between.join([*(f"{each.prompt.text}{each.completion}" for each in worked), prompt.text])
    whole = f"{system}{between}{text}" if system else text
    if chat == "none":
        return replace(prompt, text=whole)
    turns = [("user", text)]
    if chat == "turns":
        shown = [(("user", each.prompt.text), ("assistant", each.completion.strip())) for each in worked]
        turns = [turn for pair in shown for turn in pair] + [("user", prompt.text)]
    said = [("system", system), *turns] if system else turns
    return replace(prompt, text=whole, messages=tuple({"role": role, "content": content} for role, content in said))


def cut_at(completion: str, until: Sequence[str]) -> str:
    """What comes before the first of some texts.

    Args:
        completion: What a model wrote.
        until: The texts.
    """
    for end in until:
        completion = completion.partition(end)[0]
    return completion


def sampled(
    examples: Sequence[Example], train: Sequence[Example] | None, how: FewShot, source: str
) -> tuple[list[Example], list[Example]]:
    """Draws without replacement: what is asked, and the worked examples, none of which asks the same.

    All numbers are shuffled by the seed (``random.Random(seed).sample``) and the first ``count`` taken, in that order; without a
    count all in the order of the file. Worked examples are the first of ``train``, shuffled likewise, or else the last of the
    shuffled examples, so that they are the same for every count.

    Args:
        examples: What there is to ask.
        train: Where worked examples come from; None for those examples that are not asked.
        how: Count, shots and seed.
        source: What errors call the examples.

    Raises:
        InputError: There are too few.
    """
    order = Random(how.seed).sample(range(len(examples)), len(examples))
    held = how.shots if train is None else 0
    count = len(examples) - held if how.count is None else how.count
    if not 1 <= count <= len(examples) - held:
        taken = f", and {held} worked examples come from there too" if held else ""
        advice = f"ask for at most {len(examples) - held:,}" if len(examples) > held else "take fewer shots"
        raise InputError(
            f"{max(count, 1):,} examples were asked for, but {source!r} has {len(examples):,}{taken}: {advice}, or name a file "
            "of worked examples with train=FILE."
        )
    asked = [examples[number] for number in (sorted(order[:count]) if how.count is None else order[:count])]
    rest = [examples[number] for number in reversed(order[count:])]
    others = rest if train is None else [train[n] for n in Random(how.seed).sample(range(len(train)), len(train))]
    known = {example.prompt.text for example in asked}
    worked = [example for example in others if example.prompt.text not in known][: how.shots]
    if len(worked) < how.shots:
        there = len(worked)
        raise InputError(
            f"{how.shots} worked examples were asked for, but beside those that are asked there are {there}: pass shots={there}, "
            "or name a file of others with train=FILE."
        )
    return asked, worked
