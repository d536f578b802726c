"""The kit for pages and figures, and the pages of a comparison. Nothing here computes a divergence."""

from kvinterp.report.attention import attention_comparison
from kvinterp.report.compare import overview_of, write_report
from kvinterp.report.decomposition import decomposition_figure, save_decomposition_figure
from kvinterp.report.figures import FIGURES, figures, overview, precision_ladder
from kvinterp.report.recovery import recovery_figure, save_sweep_figures, step_figure
from kvinterp.report.root_cause import save_root_cause_figures
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
    "save_decomposition_figure",
    "save_root_cause_figures",
    "save_sweep_figures",
    "step_figure",
    "write_report",
]
