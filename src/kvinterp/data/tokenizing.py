"""The one place where a text becomes token ids, which are asked whether they still say the text.

A tokenizer that drops what it is given (an empty vocabulary, a normaliser that deletes, another model's files) makes every
path equal to every other.
"""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvinterp.errors import InputError, shown

_LEAST = 0.5


def ids_of(tokenizer: Any, text: str, model: str, **how: Any) -> list[int]:
    """Token ids of a text.

    Args:
        tokenizer: That of the model.
        text: The text.
        model: The model's name, for messages.
        how: Whatever else the tokenizer is asked with, as ``add_special_tokens``.

    Raises:
        InputError: The tokenizer fails, or leaves most of the text out.
    """
    given = f"{shown(text[:60])}{'...' if len(text) > 60 else ''} ({len(text):,} characters)"
    try:
        ids = list(tokenizer(text, **how)["input_ids"])
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # BaseException: what panics in Rust is no Exception.
    except BaseException as error:
        raise InputError(
            f"the tokenizer of {model} cannot take the text {given}: {type(error).__name__}, {shown(str(error))}; mend its "
            "files, copy them again, or give token ids."
        ) from error
    said = str(tokenizer.decode(ids)) if ids else text
    if kept_of(text, said) < _LEAST:
        raise InputError(
            f"the tokenizer of {model} makes {len(ids):,} tokens of the text {given}, and they say {shown(said[:60])}: expected "
            "ids that say the text; mend its vocabulary and normaliser, give the model's own tokenizer, or give token ids."
        )
    return ids


def kept_of(text: str, said: str) -> float:
    """The share of a text's characters that what was made of it still has; case, accents, spaces and order do not count."""
    wanted = Counter(_characters(text))
    return (wanted & Counter(_characters(said))).total() / wanted.total() if wanted else 1.0


def _characters(text: str) -> Iterable[str]:
    return (c for c in unicodedata.normalize("NFKD", text).casefold() if not c.isspace() and not unicodedata.combining(c))
