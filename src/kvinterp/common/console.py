"""What commands print: lines and tables that are safe on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvinterp.errors import visible

if TYPE_CHECKING:
    from rich.table import Table


def echo(text: object = "", err: bool = False) -> None:
    """Prints a line with its control characters shown: what every command prints goes through here.

    Args:
        text: The line, or several.
        err: Whether it goes to standard error.
    """
    print(visible(text), file=sys.stderr if err else sys.stdout, flush=True)


def escaped(text: object) -> str:
    """Text that rich shows as it is: a name in brackets is no markup, and control characters are shown."""
    from rich.markup import escape

    return escape(visible(text))


def table_of(title: str, *columns: str) -> Table:
    """An empty table; the column called name is never cut off."""
    from rich.table import Table

    table = Table(title=title, title_justify="left", caption_justify="left")
    for column in columns:
        # A name that is cut off cannot be typed.
        table.add_column(column, no_wrap=column == "name", overflow="fold")
    return table


def rows_of(table: Table) -> list[dict[str, str]]:
    """The rows of a table as plain text, by the names of its columns."""
    from rich.text import Text

    named = [(str(column.header), list(column.cells)) for column in table.columns]
    rows = range(table.row_count)
    return [{name: Text.from_markup(str(cells[row])).plain for name, cells in named} for row in rows]


def names_in(table: Table) -> list[str]:
    """The first column of a table, as it is given to rich."""
    return [str(cell) for cell in table.columns[0].cells]
