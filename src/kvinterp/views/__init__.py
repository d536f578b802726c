"""What is shown: figures, and one page that explains them. Nothing here computes a divergence."""

from kvinterp.views.plots import FIGURES, figures, overview, precision_ladder, save
from kvinterp.views.report import write_report

__all__ = ["FIGURES", "figures", "overview", "precision_ladder", "save", "write_report"]
