"""The command line looks for cycles seldom while it imports, and as always from its first model on; the library never."""

from __future__ import annotations

import gc
import subprocess
import sys

from kvinterp.common import collecting


def test_it_is_as_always_behind_the_first_model_and_for_whoever_imports_kvinterp() -> None:
    before = gc.get_threshold()
    collecting.as_always()
    assert gc.get_threshold() == before, "nobody asked for less"
    collecting.seldom()
    collecting.seldom()
    assert gc.get_threshold()[0] == collecting.OBJECTS
    assert gc.isenabled()
    collecting.as_always()
    assert gc.get_threshold() == before
    gc.unfreeze()


def test_the_entry_point_asks_for_it_and_the_import_does_not() -> None:
    code = """
import gc
before = gc.get_threshold()
import kvinterp as kv, kvinterp.cli
assert gc.get_threshold() == before
kvinterp.cli.app = lambda: print(gc.get_threshold()[0])
kvinterp.cli.main()
"""
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert made.stdout.strip() == str(collecting.OBJECTS)
