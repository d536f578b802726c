"""The kit for pages and figures. Nothing here computes a divergence.

matplotlib is imported first, whatever ``MPLBACKEND`` names: figures here are drawn and saved without a window.
"""

import contextlib
import os
import sys

if "matplotlib" not in sys.modules:
    named = os.environ.pop("MPLBACKEND", None)
    import matplotlib

    if named is not None:
        os.environ["MPLBACKEND"] = named
        # As matplotlib itself takes it up, but that it is not imported at all where there is no such backend.
        with contextlib.suppress(ValueError):
            matplotlib.rcParams["backend"] = named

from kvinterp.study.report.attention import attention_comparison  # matplotlib first
from kvinterp.study.report.style import save

__all__ = ["attention_comparison", "save"]
