"""Loops are found exactly, and words outside a task are counted."""

from kvinterp.data import TASKS, loop_at_end, outside_share, task_words
from kvinterp.data.degeneracy import LONGEST


def test_a_loop_is_the_smallest_period_that_the_text_ends_in() -> None:
    assert loop_at_end("the end. " + "abc" * 4) == 3
    assert loop_at_end([5] * 9) == 1
    # Cut off in the middle of a repetition, it is one still.
    assert loop_at_end("x" + "abcd" * 3 + "ab") == 4
    # Six times ab is three times abab too.
    assert loop_at_end("ab" * 6) == 2


def test_what_ends_otherwise_or_repeats_too_little_is_no_loop() -> None:
    for text in ("", "a", "abc" * 4 + "x", "abcdefgh", "abcdefgh" * 2, "= 111", "#### 7777777"):
        assert loop_at_end(text) == 0, text
    period = [*range(LONGEST)]
    assert loop_at_end(period * 3) == LONGEST
    assert loop_at_end([*period, LONGEST] * 3) == 0


def test_no_reference_completion_is_degenerate() -> None:
    for task in TASKS.values():
        examples = task.generate(40, 3)
        known = task_words([example.prompt for example in examples])
        for example in examples:
            assert outside_share(example.completion, known) == 0, example.completion
            assert loop_at_end(example.completion.split()) == 0
