"""The difference between the logits of two answers, as TransformerLens's ``logits_to_logit_diff``
computes it.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float, Float64
from torch import Tensor

from kvinterp.common.checks import check_unread, given_list, whole_number
from kvinterp.data.tokenizing import ids_of
from kvinterp.errors import InputError, unexpected
from kvinterp.models import Adapter

LOGIT_DIFFERENCE = "logit_difference"
"""The distance that compares two answers."""


def logit_difference(
    logits: Float[Tensor, "*batch vocab"], pair: tuple[int, int]
) -> Float64[Tensor, "*batch"]:
    """The logit of the first token of a pair, less the logit of the second."""
    return logits[..., pair[0]].double() - logits[..., pair[1]].double()


def answer_pair(adapter: Adapter, answers: Sequence[str | int] | None) -> tuple[int, int]:
    """The token ids of two answers (texts of one token, or ids): the one whose logit counts, and
    the one that is subtracted.

    Raises:
        InputError: They are not two answers of one token each.
    """
    expected = (
        "two answers of one token each, the one that counts first, such as (' Paris', ' Rome')"
    )
    pair = given_list("answers", answers, expected)
    if len(pair) != 2:
        raise unexpected("answers", answers, expected)
    first, second = (_token(adapter, answer, expected) for answer in pair)
    if first == second:
        raise InputError(
            f"answers={answers!r} are one token, whose difference from itself is 0: expected {expected}."
        )
    return first, second


def pair_for(
    adapter: Adapter, distance: str, answers: Sequence[str | int] | None
) -> tuple[int, int] | None:
    """The two answers for a distance that compares answers; None for any other distance, which
    takes no answers.

    Raises:
        InputError: They are not two answers of one token each, or the distance does not read them.
    """
    if LOGIT_DIFFERENCE in str(distance):
        return answer_pair(adapter, answers)
    if answers is not None and answers != ():
        check_unread(
            "answers",
            answers,
            None,
            f"distance={distance!r} is not of answers; add {LOGIT_DIFFERENCE!r} to it",
        )
    return None


def _token(adapter: Adapter, answer: str | int, expected: str) -> int:
    if isinstance(answer, str) and adapter.tokenizer is not None:
        tokens = ids_of(adapter.tokenizer, answer, adapter.facts.name, add_special_tokens=False)
        if len(tokens) != 1:
            raise InputError(
                f"answer {answer!r} is {len(tokens)} tokens, {adapter.pieces(tokens)}: expected {expected}."
            )
        return int(tokens[0])
    token = whole_number(answer)
    if token is None or not 0 <= token < adapter.facts.vocabulary:
        raise unexpected(
            "answer", answer, f"{expected}, or token ids from 0 to {adapter.facts.vocabulary - 1}"
        )
    return token
