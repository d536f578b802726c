r"""Grade-school problems in the form of GSM8K, or any file of questions with a number as answer,
and their judge.

``gsm8k(FILE_OR_NAME,shots=5,count=700,seed=42)``: a ``.jsonl`` file whose lines have ``question``
(or ``prompt``) and ``answer``, or the name of a dataset that ``datasets`` loads, such as
``openai/gsm8k``.

The answer is read in one of two ways, both those of lm-evaluation-harness (task ``gsm8k``, version
3): *strict*, the number after the first ``####``; *flexible*, the last number of the text. Commas,
dollar signs and a full stop at the end do not count; what is left has to be the same to the letter,
so that 72.0 is not 72.

Source: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems" (arXiv 2110.14168).
"""

from __future__ import annotations

import functools
import re
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

from kvinterp.common.checks import check_instance, check_known
from kvinterp.common.files import is_file
from kvinterp.data.example import Example, Prompt
from kvinterp.data.few_shot import FewShot
from kvinterp.data.jsonl import normalised, number_of, objects_of, own_id
from kvinterp.errors import InputError, shown, unexpected

QUESTION = "{question}"
"""The place of the question in a format."""
ANSWERS = {
    "strict": re.compile(r"#### (-?[0-9.,]+)"),
    "flexible": re.compile(r"-?[$0-9.,]{2,}|-?[0-9]+"),
}
"""The pattern of an answer for each way to read it: ``strict`` takes the first match, ``flexible``
the last.
"""


# Judging ------------------------------------------------------------------------------------------


def extracted(completion: str, answer: str = "strict") -> str | None:
    """Returns the number that a completion gives as its answer, normalised; None if it gives none.

    Args:
        completion: The text that a model wrote.
        answer: The way to read it, one of :data:`ANSWERS`.

    Raises:
        InputError: ``answer`` is none of :data:`ANSWERS`.
    """
    check_known("way to read an answer", answer, ANSWERS)
    numbers = ANSWERS[answer].findall(completion)
    return normalised(numbers[0 if answer == "strict" else -1]) if numbers else None


def score(prompt: Prompt, completion: str) -> bool:
    """Tells whether a completion gives the prompt's number, read in the way that
    ``prompt.meta["answer"]`` names.
    """
    return extracted(completion, str(prompt.meta.get("answer", "strict"))) == normalised(
        prompt.answer.strip()
    )


# Prompts ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gsm8k(FewShot):
    r"""Questions with a number as answer.

    Attributes:
        file: A ``.jsonl`` file, or the name of a dataset, which ``datasets`` loads (a folder of
            files too).
        split: The split of a dataset; by default ``test``.
        config: The configuration of a dataset; by default ``main`` for ``openai/gsm8k``, else the
            dataset's default.
        train: The source of worked examples: another file, or a split of the dataset. By default
            the ``train`` split of a dataset, or the examples of a file that are not asked.
        format: The form of a question.
        answer: The way to read the answer, one of :data:`ANSWERS`.
    """

    file: str
    _: KW_ONLY
    split: str | None = None
    config: str | None = None
    train: str | None = None
    format: str = f"Question: {QUESTION}\nAnswer:"
    answer: str = "strict"

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("file", "split", "config", "train", "format"):
            if getattr(self, name) is not None:
                check_instance(name, getattr(self, name), str, "a text; put it in quotes")
        if QUESTION not in self.format:
            raise unexpected(
                "format", self.format, f"a text with {QUESTION} where the question goes"
            )
        check_known("way to read an answer", self.answer, ANSWERS)
        if self.cut == "on" and not self.mark():
            raise InputError(
                f"cut=on cuts where a next question begins, but format={shown(self.format)} begins with the question itself: "
                "put a word before it, or pass cut=off."
            )
        if _is_path(self.file) and (self.split or self.config):
            raise InputError(
                f"split and config are a dataset's, and {self.file!r} is a file: leave them out."
            )

    def draw(self) -> tuple[list[Example], list[Example]]:
        """Draws from the file or the dataset."""
        questions = self._examples(self.file, self.split or "test")
        if self.train is None:
            train = (
                None
                if _is_path(self.file) or not self.shots
                else self._examples(self.file, "train")
            )
        else:
            of_file = _is_path(self.train) or _is_path(self.file)
            train = (
                self._examples(self.train, "test")
                if of_file
                else self._examples(self.file, self.train)
            )
        return self.sampled(questions, train, self.file)

    def mark(self, prompt: Prompt | None = None) -> str:
        """The beginning of the format."""
        return self.format.partition(QUESTION)[0].strip()

    def _examples(self, file: str, split: str) -> list[Example]:
        if _is_path(file):
            rows, stem = objects_of(Path(file)), Path(file).stem
        else:
            config = self.config or ("main" if file in ("openai/gsm8k", "gsm8k") else None)
            rows, stem = _dataset(file, config, split), split
        return [
            self._example(where, own_id(where, row, f"{stem}-{number}"), row)
            for number, (where, row) in enumerate(rows)
        ]

    def _example(self, where: str, example_id: str, record: dict[str, Any]) -> Example:
        question, answer = record.get("question", record.get("prompt")), record.get("answer")
        for name, value in (("question", question), ("answer", answer)):
            if value is None or not str(value).strip():
                fields = ", ".join(map(str, record)) or "none"
                raise InputError(
                    f'{where} has no field "{name}", or nothing in it (fields: {fields}): add it.'
                )
        if not isinstance(question, str):
            raise InputError(
                f'{where}: "question" is {type(question).__name__}, expected a text; write one.'
            )
        prompt = Prompt(
            id=example_id,
            text=self.format.replace(QUESTION, question),
            task="gsm8k",
            answer=number_of(where, str(answer)),
            meta={"answer": self.answer},
        )
        return Example(prompt, f" {answer}")


def _is_path(file: str) -> bool:
    return file.endswith((".jsonl", ".json", ".txt")) or is_file(Path(file))


@functools.lru_cache(maxsize=8)
def _dataset(name: str, config: str | None, split: str) -> list[tuple[str, dict[str, Any]]]:
    """Loads the rows of a dataset's split, each with its name for errors."""
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise InputError(
            f"{name!r} is no .jsonl file; as the name of a dataset it needs pip install 'kvinterp[data]', a file needs nothing."
        ) from error
    try:
        rows = datasets.load_dataset(name, config, split=split)
    except (OSError, ValueError, KeyError, datasets.exceptions.DatasetsError) as error:
        raise InputError(
            f"dataset {name!r} (config {config or 'its default'}, split {split!r}) cannot be loaded ({shown(str(error))}): check "
            "the name, split=, train= and config=, or give a .jsonl file."
        ) from error
    return [
        (f"dataset {name!r}, split {split!r}, row {number}", dict(row))
        for number, row in enumerate(rows)
    ]
