"""Runs every script of CacheBugs, with its fault and mended, and checks what each says.

`python benchmarks/cachebugs/run.py` runs all, each in a process of its own, and prints a line a bug; `NAME ...` runs some.
`--fork` runs them in children of one process that has imported torch and transformers, in a quarter of the time.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import json
import multiprocessing
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
BUGS: dict[str, dict[str, Any]] = {
    bug["name"]: bug for bug in map(json.loads, (HERE / "bugs.jsonl").read_text(encoding="utf-8").splitlines())
}


def loaded(name: str) -> Any:
    """A script as a module: `build(fault)` makes the model, `shows(model)` says how far off it is."""
    spec = importlib.util.spec_from_file_location(name, HERE / "scripts" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def said(name: str, mended: bool) -> tuple[str, float]:
    """What a script prints, and the seconds it takes, in a process of its own."""
    command = [sys.executable, "-W", "ignore", str(HERE / "scripts" / f"{name}.py"), *["--mended"] * mended]
    began = time.monotonic()
    ran = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    printed = ran.stdout if ran.returncode == 0 else ran.stderr
    return (printed.splitlines() or ["nothing"])[-1], time.monotonic() - began


def said_here(name: str, mended: bool) -> tuple[str, float]:
    """The same, in this process, which what is planted in a library's module stays in."""
    import torch

    torch.set_num_threads(1)
    sys.argv = [name, *["--mended"] * mended]
    began, out = time.process_time(), io.StringIO()
    with contextlib.redirect_stdout(out):
        loaded(name).main()
    return out.getvalue().splitlines()[-1], time.process_time() - began


def share() -> None:
    """Imports what the scripts do, once, so that children of this process have it; nothing is built here."""
    from transformers.models.auto.configuration_auto import model_type_to_module_name

    importlib.import_module("transformers.generation.utils")
    for name in BUGS:
        with contextlib.suppress(ImportError):  # TransformerLens 4 has no HookedTransformer.
            for kind in getattr(loaded(name), "SIZES", {}):
                module = model_type_to_module_name(kind)
                importlib.import_module(f"transformers.models.{module}.modeling_{module}")


def right(bad: str, good: str) -> bool:
    """Whether the fault is shown, and is not where it is mended."""
    return bad.startswith("wrong: ") and good.startswith("right: ")


def main() -> None:
    """Prints a line a bug; exits 1 where one does not show what it should."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=list(BUGS))
    parser.add_argument("--fork", action="store_true", help="children of one process")
    given = parser.parse_args()
    failed, seconds = [], []
    with contextlib.ExitStack() as stack:
        ask = said
        if given.fork:
            share()
            context = multiprocessing.get_context("fork")
            pool = stack.enter_context(context.Pool(1, maxtasksperchild=1))
            ask = lambda name, mended: pool.apply(said_here, (name, mended))  # noqa: E731
        for name in given.names:
            (bad, took), (good, more) = ask(name, False), ask(name, True)
            seconds += [took, more]
            failed += [name] * (not right(bad, good))
            print(f"{'ok' if right(bad, good) else 'NOT SHOWN'}  {name}: {bad}; mended: {good}; {took:.1f} s", flush=True)
    print(
        f"{len(given.names) - len(failed)} of {len(given.names)} shown; {sum(seconds):.0f} s, the longest {max(seconds):.1f} s"
    )
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
