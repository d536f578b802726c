"""Laws of the generated problems: a worked solution is right, a spoiled one is wrong, no problem is in both splits."""

import re
from itertools import islice, pairwise

import pytest

from kvinterp.data import TASKS, Prompt, score, split_of, stream

TASK_NAMES = sorted(TASKS)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_own_solution_is_right_and_foreign_solution_is_wrong(task):
    examples = TASKS[task].generate(300, 5, "train")
    assert all(score(example.prompt, example.completion) for example in examples)
    assert not any(score(example.prompt, "") for example in examples)
    swapped = [score(a.prompt, b.completion) for a, b in pairwise(examples)]
    assert sum(swapped) < 0.1 * len(swapped)


@pytest.mark.parametrize("task", TASK_NAMES)
def test_splits_are_disjoint_and_follow_the_text_alone(task):
    heldout = {example.prompt.text for example in TASKS[task].generate(200, 1234, "heldout")}
    trained = {example.prompt.text for example in islice(stream(task, 7, "train"), 3000)}
    assert not heldout & trained
    assert {split_of(text) for text in heldout} == {"heldout"}
    assert {split_of(text) for text in trained} == {"train"}


@pytest.mark.parametrize("task", TASK_NAMES)
def test_same_seed_same_problems_other_seed_others(task):
    first, again = (TASKS[task].generate(40, 11, "heldout") for _ in range(2))
    other = TASKS[task].generate(40, 12, "heldout")
    assert first == again
    assert len({example.prompt.text for example in first}) == 40
    assert first != other


def test_more_problems_begin_with_the_fewer():
    assert TASKS["arithmetic"].generate(50, 3, "heldout")[:20] == TASKS["arithmetic"].generate(20, 3, "heldout")


def test_arithmetic_steps_are_true_equations_of_small_numbers():
    for example in islice(stream("arithmetic", 2, "train"), 500):
        steps = re.findall(r"(\d+) ([-+*/]) (\d+) = (\d+)\.", example.completion)
        assert 1 <= len(steps) <= 4
        for left, sign, right, result in steps:
            a, b, c = int(left), int(right), int(result)
            assert c == {"+": a + b, "-": a - b, "*": a * b, "/": a // b if b else -1}[sign]
            assert sign != "/" or a % b == 0
            assert 0 < c <= 99
        assert steps[-1][-1] == example.prompt.answer


@pytest.mark.parametrize(
    ("meta", "right", "wrong"),
    [
        ({"kind": "capitals", "text": "the red lamp"}, " THE RED LAMP.", " THE RED lamp."),
        ({"kind": "items", "count": 2, "category": "colors", "first": "red"}, " red, blue.", " red, blue, pink."),
        ({"kind": "items", "count": 2, "category": "colors", "first": "red"}, " red, pink.", " red, red."),
        ({"kind": "items", "count": 2, "category": "colors", "first": "red"}, " red, blue.", " blue, red."),
        ({"kind": "items", "count": 2, "category": "colors", "first": "red"}, " red, blue.", " red, dog."),
        ({"kind": "last_word", "word": "Oslo", "about": "Tom"}, " Tom goes to Oslo.", " To Oslo goes Tom."),
        ({"kind": "last_word", "word": "Oslo", "about": "Tom"}, " Tom goes to Oslo.", " Ben goes to Oslo."),
    ],
)
def test_instructions_are_verified_by_a_program(meta, right, wrong):
    prompt = Prompt("i", "Instruction: ...", "instructions", meta=meta)
    assert score(prompt, right)
    assert not score(prompt, wrong)
