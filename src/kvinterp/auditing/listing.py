"""What ``kvinterp list calls`` shows: the operations of programs, and the names that write some;
none is imported.
"""

from kvinterp.common.source import source
from kvinterp.common.spec import plugin_rows, plugins_read

_OPERATION, _OPERATIONS = (
    "kvinterp.auditing.programs.program:Operation",
    "kvinterp.auditing.programs.operations",
)


def calls() -> list[dict[str, str]]:
    """A row of text for each name of a program, and for each operation."""
    operations = plugin_rows(plugins_read(_OPERATION, _OPERATIONS))
    return [
        *plugin_rows(source("kvinterp.auditing.programs.names").NAMES),
        *(
            {"name": row["name"], "as text": f"rows(...)+{row['name']}(...)", **row}
            for row in operations
        ),
    ]
