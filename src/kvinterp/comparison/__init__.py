"""How far apart two paths are: run side by side, reduced on the device, told in tidy tables."""

from kvinterp.common.vocabulary import PROTOCOLS
from kvinterp.comparison.cache_errors import CACHE_ERRORS
from kvinterp.comparison.comparing import compare, compare_each, compare_examples
from kvinterp.comparison.comparison import COLUMNS, PARTS, TABLES, Comparison
from kvinterp.comparison.recordable import DEFAULT_RECORD, recordable
from kvinterp.metrics.statistics import mean_error
