"""Errors of the cached path alone, planted in small random models: an audit of each must fail, and name the place.

Every plant leaves the full forward as it is. A bug's `error` is the largest relative difference of the logits, cached against full,
in the model's own dtype, as plain transformers code measures it (`measure_bugs.py` makes the numbers again): why it is
detectable. Inspired by reports against transformers, llama.cpp, vLLM, mlx-lm and TransformerLens; all are our own.
"""

from __future__ import annotations

import importlib
import pkgutil

import bank
from bank.bug import Bug

FAMILIES: dict[str, tuple[Bug, ...]] = {
    found.name.removeprefix("bugs_"): importlib.import_module(f"bank.{found.name}").BUGS
    for found in pkgutil.iter_modules(bank.__path__)
    if found.name.startswith("bugs_")
}
"""Bugs by what they are of: of each file `bugs_NAME.py` beside this one."""

BUGS: dict[str, Bug] = {bug.name: bug for family in FAMILIES.values() for bug in family}

assert len(BUGS) == sum(map(len, FAMILIES.values())), "two bugs have one name"
