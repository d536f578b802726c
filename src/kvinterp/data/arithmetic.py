"""Generated word problems of one to three steps, with worked steps and a final answer after
``####`` as in GSM8K.

Every number stays between 1 and 99, products within nine times nine: small enough to be learned in
minutes by a model of a million parameters, and long enough (several numbers to fetch from the
prompt, each step fed to the next) that a wrong read of the cache shows in the answer.

Source of the answer format: Cobbe et al. 2021, "Training Verifiers to Solve Math Word Problems"
(GSM8K).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from random import Random

from kvinterp.data.example import Example, Prompt
from kvinterp.data.words import OBJECTS, PEOPLE, THINGS

LIMIT = 99
_Problem = tuple[str, list[str]]
"""A question, and the steps to its answer."""
_FINAL = re.compile(r"####\s*(-?\d+)")


def score(prompt: Prompt, completion: str) -> bool:
    """Tells whether the number after the first ``####`` is the answer."""
    match = _FINAL.search(completion)
    return match is not None and int(match.group(1)) == float(prompt.answer)


def draw(rng: Random) -> Example:
    """Makes one problem of a random kind."""
    question, steps = rng.choice(_KINDS)(rng)
    answer = _value(steps[-1])
    work = " ".join(f"{step} = {_value(step)}." for step in steps)
    prompt = Prompt(
        id="", text=f"Question: {question}\nAnswer:", task="arithmetic", answer=str(answer)
    )
    return Example(prompt, f" {work} #### {answer}")


def _value(step: str) -> int:
    left, sign, right = step.split()
    a, b = int(left), int(right)
    return {"+": a + b, "-": a - b, "*": a * b, "/": a // b}[sign]


def _pair(rng: Random) -> tuple[str, str, str]:
    """Draws two people and the things they have."""
    (first, _), (second, _) = rng.sample(PEOPLE, 2)
    return first, second, rng.choice(OBJECTS)


def _addend(rng: Random, total: int) -> int:
    return rng.randint(1, max(1, min(50, LIMIT - total)))


def _change(rng: Random, pronoun: str, friend: str, total: int) -> tuple[str, str]:
    """Makes one event of a story and its step."""
    if total > 5 and (total > LIMIT - 5 or rng.random() < 0.5):
        lost = rng.randint(1, min(50, total - 1))
        text = rng.choice(
            (
                f"{pronoun} gives {lost} to {friend}.",
                f"{pronoun} loses {lost}.",
                f"{pronoun} sells {lost} of them.",
            )
        )
        return text, f"{total} - {lost}"
    gained = _addend(rng, total)
    text = rng.choice(
        (
            f"{pronoun} buys {gained} more.",
            f"{pronoun} finds {gained} more.",
            f"{friend} brings {gained} more.",
        )
    )
    return text, f"{total} + {gained}"


def _story(rng: Random) -> _Problem:
    """Makes a problem with a start, a number or a product, and one to three changes."""
    (name, pronoun), (friend, _) = rng.sample(PEOPLE, 2)
    objects = rng.choice(OBJECTS)
    steps: list[str] = []
    if rng.random() < 0.35:
        groups, size = rng.randint(2, 9), rng.randint(2, 9)
        texts = [f"{name} has {groups} bags with {size} {objects} in each."]
        steps.append(f"{groups} * {size}")
        total, changes = groups * size, rng.choice((0, 1, 1, 2))
    else:
        total = rng.randint(3, 60)
        texts = [f"{name} has {total} {objects}."]
        changes = rng.choice((1, 1, 2, 2, 3))
    for _ in range(changes):
        text, step = _change(rng, pronoun, friend, total)
        texts.append(text)
        steps.append(step)
        total = _value(step)
    now = " now" if changes else ""
    return f"{' '.join(texts)} How many {objects} does {name} have{now}?", steps


def _together(rng: Random) -> _Problem:
    name, friend, objects = _pair(rng)
    a = rng.randint(2, 60)
    b = _addend(rng, a)
    return (
        f"{name} has {a} {objects} and {friend} has {b}. How many {objects} do they have together?",
        [f"{a} + {b}"],
    )


def _difference(rng: Random) -> _Problem:
    name, friend, objects = _pair(rng)
    b = rng.randint(1, 60)
    a = b + rng.randint(1, 39)
    return (
        f"{name} has {a} {objects} and {friend} has {b}. How many more {objects} does {name} have than {friend}?",
        [f"{a} - {b}"],
    )


def _relative(rng: Random) -> _Problem:
    """Makes a problem in which one has more or fewer than the other, and asks for both together."""
    name, friend, objects = _pair(rng)
    a = rng.randint(4, 45)
    if rng.random() < 0.5:
        b = rng.randint(1, max(1, min(9, LIMIT - 2 * a)))
        text, step, second = f"{friend} has {b} more than {name}.", f"{a} + {b}", a + b
    else:
        b = rng.randint(1, min(9, a - 1))
        text, step, second = f"{friend} has {b} fewer than {name}.", f"{a} - {b}", a - b
    question = f"{name} has {a} {objects}. {text} How many {objects} do they have together?"
    return question, [step, f"{a} + {second}"]


def _price(rng: Random) -> _Problem:
    name, _ = rng.choice(PEOPLE)
    objects = rng.choice(OBJECTS[1:])
    count, price = rng.randint(2, 9), rng.randint(2, 9)
    cost = count * price
    steps = [f"{count} * {price}"]
    if rng.random() < 0.5:
        extra = rng.randint(2, 18)
        thing = rng.choice(THINGS)
        steps.append(f"{cost} + {extra}")
        bought = f"{count} {objects} for {price} dollars each and a {thing} for {extra} dollars"
        return f"{name} buys {bought}. How many dollars does {name} pay?", steps
    purse = rng.randint(cost + 1, LIMIT)
    steps.append(f"{purse} - {cost}")
    question = f"{name} has {purse} dollars and buys {count} {objects} for {price} dollars each."
    return f"{question} How many dollars does {name} have left?", steps


def _share(rng: Random) -> _Problem:
    name, pronoun = rng.choice(PEOPLE)
    objects = rng.choice(OBJECTS)
    friends, size = rng.randint(2, 9), rng.randint(2, 9)
    total = friends * size
    if total > 8 and rng.random() < 0.5:
        start = rng.randint(2, total - 2)
        steps = [f"{start} + {total - start}", f"{total} / {friends}"]
        text = f"{name} has {start} {objects}. {pronoun} buys {total - start} more."
        return (
            f"{text} {pronoun} shares them among {friends} friends. How many {objects} does each friend get?",
            steps,
        )
    question = f"{name} shares {total} {objects} among {friends} friends. How many {objects} does each friend get?"
    return question, [f"{total} / {friends}"]


_KINDS: tuple[Callable[[Random], _Problem], ...] = (
    _story,
    _story,
    _story,
    _together,
    _difference,
    _relative,
    _price,
    _share,
)
