"""Tables inside a page: columns of numbers in few bytes, compressed; draw.js reads them (``unpacked``).

A number on the page has three digits, so a column holds three digits of each: 16 bits, and a factor of two less than its bytes
when compressed. What a page shows is then what the table holds, to the digits that are shown.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Mapping
from typing import Any

import numpy as np

_LEAST, _MOST = -40, 31
_SIGNED_LEAST, _SIGNED_MOST = -24, 11


def three_digits(values: Any) -> np.ndarray:
    """Numbers of at least 0 as 16 bits each: 0 is 0, else ``1 + (exponent + 40) * 900 + digits - 100``; NaN is 65535.

    Numbers outside 1e-40 to 1e32 are taken to be at the end; infinity is 65534.
    """
    values = np.asarray(values, np.float64)
    codes = _codes(values, _LEAST, _MOST)
    codes[np.isposinf(values)] = 65534
    codes[np.isnan(values)] = 65535
    return codes.astype("<u2")


def signed_codes(values: Any) -> np.ndarray:
    """Numbers of any sign likewise, from 1e-24 to 1e12 and with their sign; NaN is -32768."""
    values = np.asarray(values, np.float64)
    codes = _codes(np.abs(values), _SIGNED_LEAST, _SIGNED_MOST) * np.where(values < 0, -1, 1)
    codes[np.isnan(values)] = -32768
    return codes.astype("<i2")


def _codes(sizes: np.ndarray, least: int, most: int) -> np.ndarray:
    there = np.isfinite(sizes) & (sizes > 0)
    some = np.where(there, sizes, 1.0).clip(10.0**least, 9.99 * 10.0**most)
    exponents = np.floor(np.log10(some)).astype(np.int64)
    digits = np.round(some / 10.0 ** (exponents - 2)).astype(np.int64)
    # A logarithm may be off by its last bit, and 9.996 rounds to 10.0.
    low, high = digits < 100, digits > 999
    exponents = exponents - low + high
    digits = np.where(low | high, np.round(some / 10.0 ** (exponents - 2)).astype(np.int64), digits)
    return np.where(there, 1 + (exponents - least) * 900 + digits - 100, 0)


def packed(head: Mapping[str, Any], columns: Mapping[str, np.ndarray]) -> bytes:
    """A head of plain JSON values and columns of whole numbers, compressed; the same input gives the same bytes.

    Args:
        head: What is not a column.
        columns: Arrays of uint8, uint16, int16 or uint32. Of each, all first bytes stand before all second ones: alike bytes
            beside each other take less room.
    """
    kinds = [[name, column.dtype.str[1:], int(column.size)] for name, column in columns.items()]
    text = json.dumps({**head, "columns": kinds}, separators=(",", ":")).encode()
    planes = [
        column.astype(column.dtype.newbyteorder("<"))
        .ravel()
        .view(np.uint8)
        .reshape(column.size, column.itemsize)
        .T.tobytes()
        for column in columns.values()
    ]
    return gzip.compress(b"".join([len(text).to_bytes(4, "little"), text, *planes]), mtime=0)
