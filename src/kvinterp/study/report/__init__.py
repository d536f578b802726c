"""The kit for pages and figures, and the pages of a comparison. Nothing here computes a divergence."""

from kvinterp.study.report import backend as _  # noqa: F401  # before anything else imports matplotlib
from kvinterp.study.report.attention import attention_comparison
from kvinterp.study.report.compare import overview_of, write_report
from kvinterp.study.report.figures import FIGURES, figures, overview, precision_ladder
from kvinterp.study.report.patching import decomposition_figure, recovery_figure, step_figure, sweep_figures
from kvinterp.study.report.style import save

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
