"""Generated texts to restate in other words with every fact kept.

A text is two sentences of two or three facts each, of a few kinds (who owns what, who lives where,
what costs how much), and each kind has one other wording. Scoring does not look at the wording: it
checks whether every fact (name, number, place, thing) is in the completion as a word of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random

from kvinterp.data.example import Example, Prompt
from kvinterp.data.words import ADJECTIVES, JOBS, OBJECTS, PEOPLE, PLACES, THINGS


def score(prompt: Prompt, completion: str) -> bool:
    """Tells whether every fact of the prompt is in the completion as a whole word or phrase."""
    return bool(prompt.facts) and all(
        re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", completion) is not None
        for fact in prompt.facts
    )


def draw(rng: Random) -> Example:
    """Makes one text of two sentences of different kinds about different people."""
    names = [name for name, _ in rng.sample(PEOPLE, 4)]
    parts = []
    for number, (draws, forms) in enumerate(rng.sample(_KINDS, 2)):
        words = {"name": names[2 * number], "friend": names[2 * number + 1]}
        words |= {name: str(rng.choice(choices)) for name, choices in draws.items()}
        sentence, restated, facts = rng.choice(forms)
        parts.append(
            (
                sentence.format(**words),
                restated.format(**words),
                [words[fact] for fact in facts.split()],
            )
        )
    answer = " ".join(restated for _, restated, _ in parts)
    prompt = Prompt(
        id="",
        text=f"Text: {' '.join(sentence for sentence, _, _ in parts)}\nIn other words:",
        task="restate",
        answer=answer,
        facts=tuple(dict.fromkeys(fact for _, _, facts in parts for fact in facts)),
    )
    return Example(prompt, f" {answer}")


def _kind(
    first: str, second: str, restated: str, facts: str, **draws: Sequence[object]
) -> tuple[dict[str, Sequence[object]], list[tuple[str, str, str]]]:
    """A kind of sentence: the words it draws, and for each of its two forms the sentence, the
    restatement and the facts.
    """
    return draws, [(first, restated, facts), (second, restated, facts)]


_NUMBERS = range(2, 100)
_KINDS = (
    _kind("{name} owns {count} {objects}.", "{name} has {count} {objects} at home.",
          "There are {count} {objects} that belong to {name}.", "count objects name", count=_NUMBERS, objects=OBJECTS),
    _kind("{name} lives in {place}.", "{name} has a house in {place}.", "The home of {name} is in {place}.", "name place",
          place=PLACES),
    _kind("{name} works as a {job}.", "{name} is a {job}.", "The job of {name} is {job}.", "name job", job=JOBS),
    _kind("The {adjective} {thing} is in {place}.", "The {adjective} {thing} stands in {place}.",
          "In {place} there is a {adjective} {thing}.", "place adjective thing", adjective=ADJECTIVES, thing=THINGS,
          place=PLACES),
    _kind("{name} met {friend} in {place}.", "In {place}, {name} saw {friend}.", "{name} and {friend} were both in {place}.",
          "name friend place", place=PLACES),
    (
        {"thing": THINGS, "price": _NUMBERS},
        [
            ("The {thing} costs {price} dollars.", "You pay {price} dollars for the {thing}.", "price thing"),
            ("{name} sells the {thing} for {price} dollars.", "You pay {price} dollars for the {thing} of {name}.",
             "price thing name"),
        ],
    ),
)  # fmt: skip
