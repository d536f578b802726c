"""Random numbers by where they belong, not by when they are asked for (Philox, a counter-based generator).

Whatever is drawn under one key and counter is drawn again under them, however a decode was cut into batches and chunks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray


def draws(key: tuple[int, int], count: int, counter: tuple[int, int, int, int] = (0, 0, 0, 0)) -> NDArray[np.float64]:
    """Numbers in [0, 1), one after the other from a place on.

    Args:
        key: Two words of 64 bits; of a number with a sign its two's complement.
        count: How many.
        counter: Where, in words of 64 bits; the first counts fours of numbers.
    """
    # As whole numbers: in a list with a small one, numpy makes a float of a large one, and many keys become the same.
    words, place = (np.array([word % 2**64 for word in given], dtype=np.uint64) for given in (key, counter))
    return np.random.Generator(np.random.Philox(key=words, counter=place)).random(count)
