"""Tables for a paper: LaTeX in which small numbers survive, and Markdown."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

from kvinterp.common.numbers import number
from kvinterp.errors import visible

_SPECIAL = {
    "\\": r"\textbackslash{}",
    **{c: f"\\{c}" for c in "&%$#_{}"},
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    "\n": " ",
    "\t": " ",
}


def latex_text(text: object) -> str:
    """Text of which nothing is a command."""
    return "".join(_SPECIAL.get(c, c) for c in visible(text))


def latex_number(value: Any) -> str:
    r"""Three digits of any size: ``0.0195``, ``$1.00\times10^{-7}$``; exact zeros as 0, no number as a dash."""
    if pd.isna(value):
        return "--"
    if isinstance(value, int) or (float(value).is_integer() and abs(value) < 1e6):
        return f"${int(value)}$" if value < 0 else f"{int(value)}"
    if abs(value) == float("inf"):
        return r"$\infty$" if value > 0 else r"$-\infty$"
    if 1e-3 <= abs(value) < 999_999.5:
        return f"${value:.3g}$" if abs(value) < 999.5 else f"${value:.0f}$"
    mantissa, exponent = f"{value:.2e}".split("e")
    return rf"${mantissa}\times10^{{{int(exponent)}}}$"


def latex_of(name: str, table: pd.DataFrame, caption: str) -> str:
    """A table in the style of booktabs, over as many pages as it needs, under a caption; its label is ``tab:NAME``."""
    columns = "".join("r" if is_number else "l" for is_number in numeric(table).values())
    label = "".join(c for c in name if c.isalnum() or c in "-_")
    lines = [
        rf"\begin{{longtable}}{{{columns}}}",
        rf"\caption{{{latex_text(caption)}}}\label{{tab:{label}}}\\",
        r"\toprule",
        " & ".join(map(latex_text, table)) + r" \\",
        r"\midrule\endhead",
        *(" & ".join(row) + r" \\" for row in cells_of(table, latex_number, latex_text)),
        r"\bottomrule",
        r"\end{longtable}",
    ]
    return "\n".join(lines) + "\n"


def markdown_of(table: pd.DataFrame) -> str:
    """A table as Markdown; what a text holds is no markup."""
    rules = ["---:" if is_number else "---" for is_number in numeric(table).values()]
    rows = [[*map(_plain, table)], rules, *cells_of(table, number, _plain)]
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)


def numeric(table: pd.DataFrame) -> dict[str, bool]:
    """Of each column whether it holds numbers."""
    return {str(name): is_numeric_dtype(column) and not is_bool_dtype(column) for name, column in table.items()}


def cells_of(table: pd.DataFrame, written: Callable[[Any], str], said: Callable[[Any], str]) -> list[list[str]]:
    """The rows of a table as text: its numbers as they are written, all else as it is said."""
    forms = [written if is_number else said for is_number in numeric(table).values()]
    return [[form(cell) for form, cell in zip(forms, row, strict=True)] for row in table.itertuples(index=False)]


def _plain(text: object) -> str:
    # Backslashes first: the others become escaped by one.
    said = "–" if text is None or (isinstance(text, float) and pd.isna(text)) else " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\|`*_<>[]" else c for c in said)
