"""What the file of a study is written with: the names that most of them need, from the rooms where
they are defined.
"""

from kvinterp import metrics
from kvinterp.commands.base import (
    CellResults,
    Charts,
    Experiment,
    OfModel,
    OfModels,
    Rows,
    Tables,
    numbered,
)
from kvinterp.commands.cells import Cell, joined, stacked
from kvinterp.commands.circumstances import paths_of, tried
from kvinterp.commands.options import (
    DRAWN,
    DRAWS,
    SHARED,
    argument,
    model,
    option,
    sampled,
    shared,
    used_by,
)
from kvinterp.common.checks import check_known
from kvinterp.common.numbers import between, counted, listed, number
from kvinterp.common.progress import each
from kvinterp.common.result import Result
from kvinterp.common.store import CellResult
from kvinterp.comparison import compare_examples
from kvinterp.data import load_prompts
from kvinterp.errors import InputError
from kvinterp.findings import Chart, Finding, Panel, ends_of, finding, finding_from, median_of, only
from kvinterp.models import Adapter
