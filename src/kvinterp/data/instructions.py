"""Generated instructions whose answer a program can verify: capitals, exactly N items, a given last
word.

The idea of instructions with a verifying program is IFEval's (Zhou et al. 2023,
"Instruction-Following Evaluation for Large Language Models"); the words are few, so that a model of
a million parameters can follow them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from random import Random
from typing import Any

from kvinterp.common.checks import check_known
from kvinterp.data.example import Example, Prompt
from kvinterp.data.words import ADJECTIVES, CATEGORIES, PEOPLE, PLACES, THINGS

MOST = {"train": 110_917, "heldout": 12_283}
"""How many different instructions each split has; a test generates them all."""


def score(prompt: Prompt, completion: str) -> bool:
    """Tells whether the completion follows the instruction that ``prompt.meta`` describes.

    Raises:
        InputError: If ``prompt.meta["kind"]`` is not a kind of instruction.
    """
    kind = prompt.meta.get("kind", "")
    check_known("kind of instruction", kind, _CHECKS)
    return _CHECKS[kind](prompt.meta, completion.strip())


def draw(rng: Random) -> Example:
    """Makes one instruction of a random kind."""
    text, answer, meta = rng.choice(_KINDS)(rng)
    prompt = Prompt(
        id="", text=f"Instruction: {text}\nResponse:", task="instructions", answer=answer, meta=meta
    )
    return Example(prompt, f" {answer}")


_Part = tuple[str, str, dict[str, Any]]


def _capitals(rng: Random) -> _Part:
    name, _ = rng.choice(PEOPLE)
    sentence = (
        f"the {rng.choice(ADJECTIVES)} {rng.choice(THINGS)} of {name} is in {rng.choice(PLACES)}"
    )
    text = rng.choice((f"Write in capitals: {sentence}.", f"Answer in capitals. Say: {sentence}."))
    return text, f"{sentence.upper()}.", {"kind": "capitals", "text": sentence}


def _items(rng: Random) -> _Part:
    category = rng.choice(tuple(CATEGORIES))
    members = CATEGORIES[category]
    count, start, (name, _) = rng.randint(2, 6), rng.randrange(len(members)), rng.choice(PEOPLE)
    items = [members[(start + i) % len(members)] for i in range(count)]
    text = rng.choice(
        (
            f"List exactly {count} {category} for {name}, and begin with {items[0]}.",
            f"{name} wants a list of exactly {count} {category} that begins with {items[0]}.",
        )
    )
    return (
        text,
        f"{', '.join(items)}.",
        {"kind": "items", "count": count, "category": category, "first": items[0]},
    )


def _last_word(rng: Random) -> _Part:
    (name, _), thing, word = rng.choice(PEOPLE), rng.choice(THINGS), rng.choice(PLACES)
    adjective = rng.choice(ADJECTIVES)
    if rng.random() < 0.5:
        text = f"Write a sentence about {name} and a {adjective} {thing} that ends with the word {word}."
        answer = f"{name} takes the {adjective} {thing} to {word}."
    else:
        text = f"End your answer with the word {thing}. Write about {name}, who is in {word}, and a {adjective} thing."
        answer, word = f"In {word}, {name} sees a {adjective} {thing}.", thing
    return text, answer, {"kind": "last_word", "word": word, "about": name}


def _is_capitals(meta: Mapping[str, Any], completion: str) -> bool:
    return completion.rstrip(".") == str(meta["text"]).upper()


def _has_items(meta: Mapping[str, Any], completion: str) -> bool:
    items = [item.strip() for item in completion.rstrip(".").split(",")]
    category = CATEGORIES[str(meta["category"])]
    right = items[0] == meta["first"] and all(item in category for item in items)
    return right and len(items) == len(set(items)) == int(meta["count"])


def _ends_with(meta: Mapping[str, Any], completion: str) -> bool:
    words = re.findall(r"\w+", completion)
    return bool(words) and words[-1] == meta["word"] and meta["about"] in words


_KINDS: tuple[Callable[[Random], _Part], ...] = (_capitals, _items, _last_word)
_CHECKS: dict[str, Callable[[Mapping[str, Any], str], bool]] = {
    "capitals": _is_capitals,
    "items": _has_items,
    "last_word": _ends_with,
}
