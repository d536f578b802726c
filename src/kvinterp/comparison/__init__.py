"""How far apart two paths are: run side by side, reduced on the device, told in tidy tables."""

from kvinterp.comparison.comparing import PROTOCOLS, Comparison, compare, compare_traces

__all__ = ["PROTOCOLS", "Comparison", "compare", "compare_traces"]
