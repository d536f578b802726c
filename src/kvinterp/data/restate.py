"""Generated texts to restate in other words with every fact kept.

A text is two sentences of two or three facts each, of a few kinds (who owns what, who lives where, what costs how much), and each
kind has one other wording. Scoring does not look at the wording: it checks whether every fact (name, number, place, thing) is in
the completion as a word of its own.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from kvinterp.data.example import Example, Prompt
from kvinterp.data.words import ADJECTIVES, JOBS, OBJECTS, PEOPLE, PLACES, THINGS


def score(prompt: Prompt, completion: str) -> bool:
    """Tells whether every fact of the prompt is in the completion as a whole word or phrase."""
    return bool(prompt.facts) and all(
        re.search(rf"(?<!\w){re.escape(fact)}(?!\w)", completion) is not None for fact in prompt.facts
    )


def draw(rng: Random) -> Example:
    """Makes one text of two sentences of different kinds about different people."""
    names = [name for name, _ in rng.sample(PEOPLE, 4)]
    parts = [kind(rng, names[2 * i], names[2 * i + 1]) for i, kind in enumerate(rng.sample(_KINDS, 2))]
    text = " ".join(sentence for sentence, _, _ in parts)
    again = " ".join(restated for _, restated, _ in parts)
    facts = tuple(dict.fromkeys(fact for _, _, facts_of in parts for fact in facts_of))
    prompt = Prompt(id="", text=f"Text: {text}\nIn other words:", task="restate", answer=again, facts=facts)
    return Example(prompt, f" {again}")


_Part = tuple[str, str, tuple[str, ...]]


def _owns(rng: Random, name: str, friend: str) -> _Part:
    count, objects = str(rng.randint(2, 99)), rng.choice(OBJECTS)
    sentence = rng.choice((f"{name} owns {count} {objects}.", f"{name} has {count} {objects} at home."))
    return sentence, f"There are {count} {objects} that belong to {name}.", (count, objects, name)


def _lives(rng: Random, name: str, friend: str) -> _Part:
    place = rng.choice(PLACES)
    sentence = rng.choice((f"{name} lives in {place}.", f"{name} has a house in {place}."))
    return sentence, f"The home of {name} is in {place}.", (name, place)


def _works(rng: Random, name: str, friend: str) -> _Part:
    job = rng.choice(JOBS)
    sentence = rng.choice((f"{name} works as a {job}.", f"{name} is a {job}."))
    return sentence, f"The job of {name} is {job}.", (name, job)


def _stands(rng: Random, name: str, friend: str) -> _Part:
    adjective, thing, place = rng.choice(ADJECTIVES), rng.choice(THINGS), rng.choice(PLACES)
    sentence = rng.choice((f"The {adjective} {thing} is in {place}.", f"The {adjective} {thing} stands in {place}."))
    return sentence, f"In {place} there is a {adjective} {thing}.", (place, adjective, thing)


def _met(rng: Random, name: str, friend: str) -> _Part:
    place = rng.choice(PLACES)
    sentence = rng.choice((f"{name} met {friend} in {place}.", f"In {place}, {name} saw {friend}."))
    return sentence, f"{name} and {friend} were both in {place}.", (name, friend, place)


def _costs(rng: Random, name: str, friend: str) -> _Part:
    thing, price = rng.choice(THINGS), str(rng.randint(2, 99))
    sentence = rng.choice((f"The {thing} costs {price} dollars.", f"{name} sells the {thing} for {price} dollars."))
    facts = (price, thing) if name not in sentence else (price, thing, name)
    again = f"You pay {price} dollars for the {thing}" + (f" of {name}." if name in sentence else ".")
    return sentence, again, facts


_KINDS: tuple[Callable[[Random, str, str], _Part], ...] = (_owns, _lives, _works, _stands, _met, _costs)
