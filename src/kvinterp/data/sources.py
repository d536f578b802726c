"""The sources of prompts by text form: ``gsm8k(FILE,shots=5,count=700)``, ``jsonl(FILE,...)``,
``arithmetic(20,shots=5)``.

Their common options are the fields of :class:`kvinterp.data.few_shot.FewShot`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass, replace

from kvinterp.common import spec
from kvinterp.data.example import Example, Prompt
from kvinterp.data.few_shot import FewShot
from kvinterp.data.gsm8k import Gsm8k
from kvinterp.data.jsonl import Jsonl
from kvinterp.data.tasks import TASKS


@dataclass(frozen=True)
class Generated(FewShot):
    """Held-out problems of a generator; worked examples are training problems, which are never held
    out.

    Attributes:
        count: How many problems.
        shots: How many worked examples come before each.
        seed: Seeds the problems and the worked examples.
    """

    count: int = 20
    _: KW_ONLY
    shots: int = 0
    seed: int = 0

    def draw(self) -> tuple[list[Example], list[Example]]:
        """Generates both; the id of each example is its task, seed and number."""
        name = spec.name_of(type(self))
        questions = TASKS[name].generate(self.count, self.seed, "heldout")
        worked = TASKS[name].generate(self.shots, self.seed, "train") if self.shots else []
        return _numbered(questions, f"{name}-{self.seed}"), _numbered(
            worked, f"{name}-train-{self.seed}"
        )

    def mark(self, prompt: Prompt) -> str:
        """The first word of a problem, such as ``Question:``."""
        return "".join(prompt.text.partition(":")[:2])


class Arithmetic(Generated):
    """Word problems of GSM8K, with worked examples before each."""


class Restate(Generated):
    """Texts to be said in other words."""


class Instructions(Generated):
    """Instructions that a program can verify."""


def _numbered(examples: list[Example], name: str) -> list[Example]:
    return [
        replace(example, prompt=replace(example.prompt, id=f"{name}-{number}"))
        for number, example in enumerate(examples)
    ]


SOURCES: dict[str, type[FewShot]] = spec.by_name(Gsm8k, Jsonl, Arithmetic, Restate, Instructions)


def source_named(text: str) -> FewShot:
    """Makes the source of a text form.

    Raises:
        InputError: A value does not fit its field.
    """
    return spec.read(
        "prompts",
        text,
        SOURCES,
        "Values go in brackets, as in gsm8k(test.jsonl,shots=5,count=700).",
    )
