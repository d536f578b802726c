"""What was found, as data: rows with estimate, interval and n, and charts that say what is drawn of which table."""

from kvinterp.study.findings.charts import Chart, Panel
from kvinterp.study.findings.rows import COLUMNS, finding, findings_of, labels_of, lines_of, median_of

__all__ = ["COLUMNS", "Chart", "Panel", "finding", "findings_of", "labels_of", "lines_of", "median_of"]
