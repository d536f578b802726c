"""What is shown: figures, and one page that explains them. Nothing here computes a divergence."""

from kvinterp.views.attention import attention_comparison
from kvinterp.views.heatmap import recovery_figure, save_sweep_figures, step_figure
from kvinterp.views.plots import FIGURES, figures, overview, precision_ladder, save
from kvinterp.views.report import write_report
from kvinterp.views.root_cause import save_root_cause_figures
from kvinterp.views.split_figure import decomposition_figure, save_decomposition_figure

__all__ = [
    "FIGURES",
    "attention_comparison",
    "decomposition_figure",
    "figures",
    "overview",
    "precision_ladder",
    "recovery_figure",
    "save",
    "save_decomposition_figure",
    "save_root_cause_figures",
    "save_sweep_figures",
    "step_figure",
    "write_report",
]
