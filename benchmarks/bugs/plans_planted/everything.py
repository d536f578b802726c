"""All faults by name, and their table."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from collections.abc import Sequence

import plans_planted
from plans_planted.fault import Fault, found, placed

NO_FAMILY = ("fault", "tools", "everything")
FAULTS: dict[str, Fault] = {}
for _found in pkgutil.iter_modules(plans_planted.__path__):
    if _found.name not in NO_FAMILY:
        _more = importlib.import_module(f"{plans_planted.__name__}.{_found.name}").FAULTS
        assert not FAULTS.keys() & _more.keys(), "two faults have one name"
        FAULTS |= _more


def main(chosen: Sequence[str]) -> None:
    """Prints a line a fault: clean, faulty, where, and what was said."""
    seen = {"found": 0, "placed": 0, "missed": 0}
    for name, fault in FAULTS.items():
        if chosen and not any(part in name or fault.plan.startswith(part) for part in chosen):
            continue
        began = time.process_time()
        check = found(fault)
        right = check is not None and placed(fault, check)
        seen["found"] += check is not None
        seen["placed"] += right
        seen["missed"] += check is None
        took, word = time.process_time() - began, ("missed", None) if check is None else (check.status, check.layer)
        print(
            f"{name:70} {fault.architecture:10} {fault.plan:22} {word} {fault.layer} {took:4.1f}{'' if right else '  <<<'}",
            flush=True,
        )
    print(len(FAULTS), seen)


if __name__ == "__main__":
    import warnings

    import torch

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(sys.argv[1:])
