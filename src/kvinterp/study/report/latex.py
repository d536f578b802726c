"""Tables for a paper: LaTeX in which small numbers survive, and Markdown."""

from __future__ import annotations

from typing import Any

import pandas as pd
from pandas.api.types import is_bool_dtype, is_numeric_dtype

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
    numbers = numeric(table)
    lines = [
        rf"\begin{{longtable}}{{{''.join('r' if is_number else 'l' for is_number in numbers.values())}}}",
        rf"\caption{{{latex_text(caption)}}}\label{{tab:{''.join(c for c in name if c.isalnum() or c in '-_')}}}\\",
        r"\toprule",
        " & ".join(map(latex_text, table)) + r" \\",
        r"\midrule\endhead",
        *(
            " & ".join(
                (latex_number if is_number else latex_text)(cell)
                for cell, is_number in zip(row, numbers.values(), strict=True)
            )
            + r" \\"
            for row in table.itertuples(index=False)
        ),
        r"\bottomrule",
        r"\end{longtable}",
    ]
    return "\n".join(lines) + "\n"


def markdown_of(table: pd.DataFrame) -> str:
    """A table as Markdown; what a text holds is no markup."""
    from kvinterp.common.numbers import number

    numbers = numeric(table)
    head = [f"| {' | '.join(map(_plain, table))} |", f"|{'|'.join('---:' if n else '---' for n in numbers.values())}|"]
    rows = [
        "| " + " | ".join(number(cell) if n else _plain(cell) for cell, n in zip(row, numbers.values(), strict=True)) + " |"
        for row in table.itertuples(index=False)
    ]
    return "\n".join([*head, *rows]) + "\n"


def numeric(table: pd.DataFrame) -> dict[str, bool]:
    """Of each column whether it holds numbers."""
    return {str(name): is_numeric_dtype(column) and not is_bool_dtype(column) for name, column in table.items()}


def _plain(text: object) -> str:
    # Backslashes first: the others become escaped by one.
    said = "–" if text is None or (isinstance(text, float) and pd.isna(text)) else " ".join(str(text).split())
    return "".join(f"\\{c}" if c in "\\|`*_<>[]" else c for c in said)
