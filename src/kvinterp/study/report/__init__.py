"""The room of pages and figures. Nothing here computes a divergence.

matplotlib is imported first, without the backend in ``MPLBACKEND``: figures are drawn and saved without a window.
"""

import contextlib
import os
import sys

if "matplotlib" not in sys.modules:
    backend = os.environ.pop("MPLBACKEND", None)
    import matplotlib

    if backend is not None:
        os.environ["MPLBACKEND"] = backend
        # matplotlib itself would fail to import where there is no such backend.
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = backend

from kvinterp.study.report.attention import attention_comparison  # matplotlib first
from kvinterp.study.report.style import save

__all__ = ["attention_comparison", "save"]
