"""How far apart two paths are: run side by side, reduced on the device, told in tidy tables."""

from kvinterp.comparison.attribution import LogitAttribution, logit_attribution
from kvinterp.comparison.cache_errors import CACHE_ERRORS
from kvinterp.comparison.comparing import compare, failures_kept
from kvinterp.comparison.comparison import COLUMNS, PARTS, TABLES, Comparison
from kvinterp.comparison.lens import LogitLens, logit_lens
from kvinterp.comparison.recordable import DEFAULT_RECORD, recordable
from kvinterp.comparison.several import Comparisons
from kvinterp.comparison.traces import compare_traces
from kvinterp.comparison.vocabulary import PROTOCOLS
from kvinterp.metrics.statistics import mean_error
