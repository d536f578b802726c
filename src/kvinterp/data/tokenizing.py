"""The one place where a text becomes token ids: bounded in time, and asked whether the ids still say the text.

A tokenizer is a file that somebody else wrote. Its regexes may never come to an end, what panics in Rust is no Exception,
and one that drops what it is given (an empty vocabulary, a normaliser that deletes) makes every path equal to every other.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Iterable
from typing import Any

from kvinterp.common.bounded import within
from kvinterp.errors import InputError, shown

SECONDS = 10.0
"""How long tokenising may take, beside a second for each 20,000 characters: the slowest in Python takes less than that."""
_CHARACTERS = 20_000
_LEAST = 0.5
_BYTE = re.compile("<0x([0-9A-F]{2})>")
_PLAIN_BYTES = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHER_BYTES = [byte for byte in range(256) if byte not in _PLAIN_BYTES]
_BYTES = {chr(byte): byte for byte in _PLAIN_BYTES} | {chr(256 + n): byte for n, byte in enumerate(_OTHER_BYTES)}
"""The letters that stand for bytes in the vocabularies of GPT-2 and its heirs (``bytes_to_unicode`` there)."""


def ids_of(tokenizer: Any, text: str, model: str, **how: Any) -> list[int]:
    """Token ids of a text.

    Args:
        tokenizer: That of the model.
        text: The text.
        model: The model's name, for messages.
        how: Whatever else the tokenizer is asked with, as ``add_special_tokens``.

    Raises:
        InputError: The tokenizer fails, takes too long, or leaves most of the text out.
    """
    given = f"{shown(text[:60])}{'...' if len(text) > 60 else ''} ({len(text):,} characters)"
    try:
        ids = within(SECONDS + len(text) / _CHARACTERS, lambda: list(tokenizer(text, **how)["input_ids"]))
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    # BaseException: what panics in Rust is no Exception.
    except BaseException as error:
        raise InputError(
            f"the tokenizer of {model} cannot take the text {given}: {type(error).__name__}, {shown(str(error))}; mend its "
            "files, copy them again, or give token ids."
        ) from error
    said = str(tokenizer.decode(ids)) if ids else text
    if kept_of(text, said) < _LEAST and kept_of(text, _by_hand(tokenizer, ids)) < _LEAST:
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


def _by_hand(tokenizer: Any, ids: list[int]) -> str:
    """The text of tokens that spell bytes, for a tokenizer that came without a decoder."""
    joined = bytearray()
    for piece in map(str, tokenizer.convert_ids_to_tokens(ids)):
        byte = _BYTE.fullmatch(piece)
        if byte is not None:
            joined.append(int(byte[1], 16))
        elif all(letter in _BYTES for letter in piece):
            joined += bytes(_BYTES[letter] for letter in piece)
        else:
            joined += piece.encode(errors="replace")
    return joined.decode(errors="replace")
