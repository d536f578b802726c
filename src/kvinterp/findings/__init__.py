"""Findings and charts as data: rows with estimate, interval and n, and charts that name a table and its columns."""

from kvinterp.findings.charts import Chart, Panel
from kvinterp.findings.rows import (
    COLUMNS,
    UNKNOWN,
    Finding,
    ends_of,
    finding,
    finding_from,
    findings_of,
    labels_of,
    lines_of,
    median_of,
    only,
)

__all__ = [
    "COLUMNS",
    "UNKNOWN",
    "Chart",
    "Finding",
    "Panel",
    "ends_of",
    "finding",
    "finding_from",
    "findings_of",
    "labels_of",
    "lines_of",
    "median_of",
    "only",
]
