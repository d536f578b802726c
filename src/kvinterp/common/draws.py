"""Random numbers that depend on a key and a counter, not on the order of calls (Philox, a
counter-based generator).

The same key and counter give the same numbers, whatever batches and chunks a decode is split into.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def draws(
    key: tuple[int, int], count: int, counter: tuple[int, int, int, int] = (0, 0, 0, 0)
) -> NDArray[np.float64]:
    """Draws numbers in [0, 1), from a place in the sequence on.

    Args:
        key: Two words of 64 bits; for a negative number its two's complement.
        count: The number of draws.
        counter: The place in the sequence, in words of 64 bits; the first counts blocks of four
            numbers.
    """
    # As uint64: in a list with a small number numpy would make a float of a large one, and many
    #     keys would become the same.
    key_words, start = (
        np.array([word % 2**64 for word in numbers], dtype=np.uint64) for numbers in (key, counter)
    )
    return np.random.Generator(np.random.Philox(key=key_words, counter=start)).random(count)
