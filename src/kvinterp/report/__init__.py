"""The kit for pages and figures, and the pages of a comparison. Nothing here computes a divergence."""

from kvinterp.report import backend as _  # noqa: F401  # before anything else imports matplotlib
from kvinterp.report.attention import attention_comparison
from kvinterp.report.compare import overview_of, write_report
from kvinterp.report.figures import FIGURES, figures, overview, precision_ladder
from kvinterp.report.patching import decomposition_figure, recovery_figure, step_figure, sweep_figures
from kvinterp.report.style import save

__all__ = [
    "FIGURES",
    "attention_comparison",
    "decomposition_figure",
    "figures",
    "overview",
    "overview_of",
    "precision_ladder",
    "recovery_figure",
    "save",
    "step_figure",
    "sweep_figures",
    "write_report",
]
