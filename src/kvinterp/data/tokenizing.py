"""Tokenises texts, and checks that the token ids still decode to the text.

A tokenizer that drops most of a text (an empty vocabulary, a normaliser that deletes, another
model's files) would make every path equal to every other.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvinterp.errors import InputError, shown

_LEAST = 0.5


def ids_of(tokenizer: Any, text: str, model: str, **options: Any) -> list[int]:
    """Tokenises a text.

    Args:
        tokenizer: The model's tokenizer.
        text: The text.
        model: The model's name, for errors.
        options: Further arguments of the tokenizer, such as ``add_special_tokens``.

    Raises:
        InputError: The tokenizer fails, or leaves most of the text out.
    """
    excerpt = f"{shown(text[:60])}{'...' if len(text) > 60 else ''} ({len(text):,} characters)"
    try:
        ids = list(tokenizer(text, **options)["input_ids"])
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # A panic in Rust raises a BaseException.
    except BaseException as error:
        raise InputError(
            f"the tokenizer of {model} cannot take the text {excerpt}: {type(error).__name__}, {shown(str(error))}; mend its "
            "files, copy them again, or give token ids."
        ) from error
    decoded = str(tokenizer.decode(ids)) if ids else text
    if kept_of(text, decoded) < _LEAST:
        raise InputError(
            f"the tokenizer of {model} makes {len(ids):,} tokens of the text {excerpt}, and they say {shown(decoded[:60])}: "
            "expected ids that say the text; mend its vocabulary and normaliser, give the model's own tokenizer, or give "
            "token ids."
        )
    return ids


def kept_of(text: str, result: str) -> float:
    """The share of a text's characters that a result still has; case, accents, spaces and order do
    not count.
    """
    characters = Counter(_characters(text))
    return (
        (characters & Counter(_characters(result))).total() / characters.total()
        if characters
        else 1.0
    )


def _characters(text: str) -> Iterable[str]:
    return (
        c
        for c in unicodedata.normalize("NFKD", text).casefold()
        if not c.isspace() and not unicodedata.combining(c)
    )
