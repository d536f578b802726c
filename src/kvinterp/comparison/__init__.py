"""Runs two paths side by side, measures on the device how far apart they are, and returns tidy
tables.
"""

from kvinterp.comparison.comparing import compare, compare_each, compare_examples
from kvinterp.comparison.comparison import COLUMNS, PARTS, TABLES, Comparison
from kvinterp.comparison.recordable import recordable
from kvinterp.metrics.statistics import mean_error
