"""matplotlib, imported whatever ``MPLBACKEND`` names: figures here are drawn and saved without a window."""

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
