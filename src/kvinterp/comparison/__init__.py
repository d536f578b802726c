"""How far apart two paths are: run side by side, reduced on the device, told in tidy tables."""

from kvinterp.comparison.comparing import PROTOCOLS, compare, compare_traces
from kvinterp.comparison.comparison import COLUMNS, PARTS, TABLES, Comparison
from kvinterp.comparison.recordable import DEFAULT_RECORD, recordable

__all__ = [
    "COLUMNS",
    "DEFAULT_RECORD",
    "PARTS",
    "PROTOCOLS",
    "TABLES",
    "Comparison",
    "compare",
    "compare_traces",
    "recordable",
]
