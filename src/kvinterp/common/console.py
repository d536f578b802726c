"""What commands print: lines and tables that are safe on a terminal."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from kvinterp.errors import visible

if TYPE_CHECKING:
    from rich.console import Group
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


def lines_of(table: Table) -> Group:
    """A table of many columns as lines, since its cells would be a few letters wide: a name, and below it a line a column."""
    from rich.console import Group
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    shown: list[Text | Padding] = [Text(str(table.title), style="italic")]
    for row in rows_of(table):
        (_, name), *others = row.items()
        lines = Table.grid(padding=(0, 2, 0, 0))
        lines.add_column(no_wrap=True)
        lines.add_column(overflow="fold")
        for column, cell in others:
            if cell:
                lines.add_row(Text(column), Text(cell))
        shown += [Text(name, style="bold"), Padding(lines, (0, 0, 0, 4))]
    return Group(*shown, Text(str(table.caption or ""), style="dim"))


def rows_of(table: Table) -> list[dict[str, str]]:
    """The rows of a table as plain text, by the names of its columns."""
    from rich.text import Text

    named = [(str(column.header), list(column.cells)) for column in table.columns]
    rows = range(table.row_count)
    return [{name: Text.from_markup(str(cells[row])).plain for name, cells in named} for row in rows]


def names_in(table: Table) -> list[str]:
    """The first column of a table, as it is given to rich."""
    return [str(cell) for cell in table.columns[0].cells]
