"""Colours that can be read on both grounds of a page.

Figures are drawn for a white ground. On a dark one each colour becomes the colour of its hue that has there the contrast which
it had on white, so that what was legible stays legible, whatever was drawn.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float

DARK = "#15181c"
"""The page's ground in the dark; the light one is white (``static/page.css``)."""
INK = "#e8eaed"
"""The page's ink in the dark: what is black on white."""


def luminance(rgb: np.ndarray) -> np.ndarray:
    """Relative luminance of sRGB colours (WCAG 2.2, https://www.w3.org/TR/WCAG22/#dfn-relative-luminance).

    Args:
        rgb: Colours between 0 and 1, in the last axis.
    """
    return _linear(rgb) @ _WEIGHTS


def contrast(one: str, other: str) -> float:
    """The contrast of two colours as hexadecimal numbers, 1 to 21 (WCAG 2.2, contrast ratio)."""
    low, high = sorted(float(luminance(_of_hex(color))) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def ink_on(color: Sequence[float] | np.ndarray) -> str:
    """Black or white: what can be read better on a colour, of which the first three numbers are red, green and blue."""
    # The luminance that has the same contrast with both.
    return "#ffffff" if luminance(np.asarray(color[:3])) < 0.1791 else "#000000"


def on_dark(rgb: Float[np.ndarray, "*any 3"]) -> Float[np.ndarray, "*any 3"]:
    """What colours chosen for a white ground become on the dark one: of the same hue, and of the same contrast with the ground.

    With the luminances Y on white and Y' on the dark ground D, (Y' + 0.05) / (D + 0.05) = 1.05 / (Y + 0.05): so two colours
    of a figure keep the contrast that they have with each other too. Only what is nearly black has less, since nothing is
    lighter than white.

    Args:
        rgb: sRGB colours between 0 and 1, in the last axis.
    """
    linear = _linear(rgb)
    have = linear @ _WEIGHTS
    ground = float(luminance(_of_hex(DARK)))
    wanted = np.clip(1.05 * (ground + 0.05) / (have + 0.05) - 0.05, 0, 1)
    top = linear.max(-1)
    # Made lighter until a channel is full, and from there mixed with white; black has no hue.
    full = np.where(top[..., None] > 0, linear / np.maximum(top, 1e-9)[..., None], 1.0)
    brightest = full @ _WEIGHTS
    scaled = full * (wanted / brightest)[..., None]
    white = np.clip((wanted - brightest) / np.maximum(1 - brightest, 1e-9), 0, 1)[..., None]
    found = np.where((wanted <= brightest)[..., None], scaled, full + (1 - full) * white)
    srgb = np.where(found <= 0.0031308, found * 12.92, 1.055 * np.maximum(found, 0.0031308) ** (1 / 2.4) - 0.055)
    return np.where((rgb >= 1).all(-1, keepdims=True), _of_hex(DARK), srgb)


_WEIGHTS = np.array([0.2126, 0.7152, 0.0722])


def _linear(rgb: np.ndarray) -> np.ndarray:
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def _of_hex(color: str) -> np.ndarray:
    return np.array([int(color[place : place + 2], 16) / 255 for place in (1, 3, 5)])


def on_dark_hex(color: str) -> str:
    """What a colour as a hexadecimal number becomes on the dark ground; black becomes the page's ink."""
    if color == "#000000":
        return INK
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in on_dark(_of_hex(color)))
