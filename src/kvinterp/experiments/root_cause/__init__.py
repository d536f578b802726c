"""The root-cause experiments of the FP16 paper (arXiv 2604.15409, section 5.2), each a function that returns a table.

The paper argues that FP16 sums taken in another order are the cause of the divergence. Its five experiments are here, on any
model, each with the control that tells the possible readings apart: the sum whose length grows beside the one whose length
does not; a rounding planted in one layer, its size absolute and relative; the K and V projections under kernels that split
their sums and kernels that do not; flips beside the matched protocol; and the whole pipeline over a ladder that changes the
precision and the order of additions one at a time. :func:`gqa_spread` plants the same error in one KV head of models that
differ in how many query heads share it.

What comes out of one prompt or one seed is a row of its own, so that every mean has its interval.
"""

from kvinterp.experiments.root_cause.flips import flips_against_kl
from kvinterp.experiments.root_cause.ladder import LADDER, precision_ladder
from kvinterp.experiments.root_cause.planted import gqa_spread, propagation
from kvinterp.experiments.root_cause.run import TABLES, root_cause
from kvinterp.experiments.root_cause.sums import accumulation_error
from kvinterp.experiments.root_cause.written import kv_write_error

__all__ = [
    "LADDER",
    "TABLES",
    "accumulation_error",
    "flips_against_kl",
    "gqa_spread",
    "kv_write_error",
    "precision_ladder",
    "propagation",
    "root_cause",
]
