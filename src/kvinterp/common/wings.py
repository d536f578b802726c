"""What wings, and packages of others, hand to the core: found by entry points, imported when it is
asked for.

The core imports no wing. It asks here for what may be there: a wing that is not installed hands
nothing, so that its commands are not listed, and what cannot be done without it is refused in a
sentence. A package of anybody's hands in the same way what it adds; pyproject.toml has the groups.

======================  ==========================================================================================
``kvinterp.commands``   modules, or packages of modules, with an :class:`Experiment` each: a command
``kvinterp.studies``    the same: a command under ``kvinterp study``
``kvinterp.names``      what ``kvinterp`` itself offers besides, as in ``kv.audit``
``kvinterp.workers``    where cells of work are done, by its name in ``--engine``
``kvinterp.judges``     what judges a model beside what was computed elsewhere
``kvinterp.folders``    classes that read a folder, by the file that tells that it is theirs
``kvinterp.lists``      functions that make the rows of ``kvinterp list``
======================  ==========================================================================================
"""

from __future__ import annotations

import functools
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from kvinterp.errors import InputError


@functools.cache
def handed(group: str) -> dict[str, EntryPoint]:
    """What is handed in under ``kvinterp.GROUP``, by name, in alphabetical order; nothing is
    imported.
    """
    return {point.name: point for point in sorted(entry_points(group=f"kvinterp.{group}"))}


def taken(group: str, name: str, what: str) -> Any:
    """Imports what is handed in under a name.

    Args:
        group: The last word of the group.
        name: The name there.
        what: What was asked for, for the error, such as ``"a judgement against another engine"``.

    Raises:
        InputError: No package hands it in.
    """
    if name not in (points := handed(group)):
        raise InputError(
            f"{what} needs a part of kvinterp that is not installed ({name!r} of the entry points kvinterp.{group}): install "
            "kvinterp whole, with pip install kvinterp, or do without."
        )
    return points[name].load()
