"""Finds every kernel mode in this folder, so that a new one is one new file."""

from __future__ import annotations

import kvinterp.paths.kernels as folder
from kvinterp.common import spec
from kvinterp.common.checks import check_text
from kvinterp.paths.kernels.base import Kernels

KERNELS = spec.Plugins(folder, Kernels)


def kernels_named(text: str | Kernels) -> Kernels:
    """Reads a kernel mode's text form: ``native``, ``batch_invariant``,
    ``split_k(4,float16,linear+unembed,0+2)``.

    Raises:
        InputError: The name is unknown or the values do not fit.
    """
    if isinstance(text, Kernels):
        return text
    text = check_text("kernels", text, "'batch_invariant', or a kernel mode such as SplitK(4)")
    return spec.read(
        "kernel mode", text, KERNELS, "Values go in brackets, as in split_k(4,float16)."
    )
