"""The step of action.yml: audits what its inputs name, and says it as GitHub shows it.

A fault becomes an annotation at the innermost class of the author's own that the fault is in, at
the function that made the model, or at the file that was given; the verdict goes to the job's
summary and to the outputs of the step. The exit code is that of ``kvinterp audit``, or 0 where a
baseline knows every fault.

It reads its inputs from the environment, so that none is pasted into a shell: MODEL, CONFIG, AGAINST,
OPTIONS, BASELINE and FOLDER.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvinterp import KvinterpError, Verdict
from kvinterp.auditing.baseline import WRITE, departure, read_baseline, write_baseline
from kvinterp.auditing.building import is_code, users_model


def main() -> int:
    """Audits and annotates; returns the exit code."""
    sys.path.insert(0, str(Path.cwd()))  # The author's own modules, as the command finds them.
    model, folder = os.environ["MODEL"], Path(os.environ["FOLDER"])
    asked = ["--config", os.environ["CONFIG"]] if os.environ.get("CONFIG") else []
    asked += ["--against", os.environ["AGAINST"]] if os.environ.get("AGAINST") else []
    asked += shlex.split(os.environ.get("OPTIONS", ""))
    command = [str(Path(sys.executable).with_name("kvinterp")), "audit", model, *asked]
    ran = subprocess.run([*command, "--out", str(folder), "--json"], stdout=subprocess.PIPE, text=True, check=False)
    said = json.loads(ran.stdout or "{}")
    if ran.returncode not in (0, 1, 3):
        return annotated(model, "kvinterp audit", said.get("error", "it ended early"), ran.returncode)
    verdict = Verdict.load(folder)
    put("GITHUB_OUTPUT", f"verdict={verdict.verdict}\npage={folder / 'report.html'}\n")
    put("GITHUB_STEP_SUMMARY", f"```text\n{verdict.reading}\n```\n")
    print(verdict.reading)
    first, why, _ = verdict.parts
    departs, code = "\n".join([first, *why]), verdict.exit_code
    if baseline := os.environ.get("BASELINE"):
        try:
            known = read_baseline(Path(baseline))
        except KvinterpError as error:
            return annotated(model, "baseline", str(error), 2)
        held_to = Path(baseline), known, str(verdict.provenance["architecture"]), verdict
        if os.environ.get(WRITE) == "write":
            write_baseline(*held_to)
            return 0
        departs = departure(*held_to)
        code = (code or 1) if departs else 0
    if code:
        return annotated(model, f"kvinterp audit: {verdict.verdict}", departs, code, verdict.module)
    return 0


def put(variable: str, text: str) -> None:
    """Appends to a file that GitHub names."""
    if name := os.environ.get(variable):
        with open(name, "a", encoding="utf-8") as file:
            file.write(text)


def annotated(model: str, title: str, message: str, code: int, module: str = "") -> int:
    """Prints an annotation, and gives the code back."""
    at = place(model, module)
    where = "" if at is None else f"file={escaped(str(at[0]), ':,')},line={at[1]},"
    print(f"::error {where}title={escaped(title, ':,')}::{escaped(message)}", flush=True)
    return code


def escaped(text: str, more: str = "") -> str:
    """As GitHub's commands have it: what would end a line, or a property, as hexadecimal digits."""
    for letter in f"%\r\n{more}":
        text = text.replace(letter, f"%{ord(letter):02X}")
    return text


def place(model: str, module: str) -> tuple[Path, int] | None:
    """A file of the workspace, relative to it, and a line: None where the model is none of its files."""
    for given in (os.environ.get("AGAINST") or "", model, f"{model}/config.json"):
        if given and (file := here(given)) is not None:
            return file, 1
    if not is_code(model):
        return None
    for found in own_code(model, module):
        file = here(inspect.getsourcefile(found) or "")
        if file is not None:
            return file, inspect.getsourcelines(found)[1] or 1
    return None


def here(name: str) -> Path | None:
    """A file, relative to the workspace, where it is in it."""
    workspace = Path(os.environ.get("GITHUB_WORKSPACE", ".")).resolve()
    path = Path(name).resolve()
    return path.relative_to(workspace) if path.is_file() and path.is_relative_to(workspace) else None


def own_code(model: str, module: str) -> Iterator[Any]:
    """What may have the fault in it, the innermost first: the forwards of the classes from the module
    that is named up to the model's, then what the model was made by, then its file.
    """
    name, _, path = model.partition(":")
    try:
        source = importlib.import_module(name)
        made: Any = source
        for part in path.split("."):
            made = getattr(made, part)
        built: Any = users_model(model, os.environ.get("CONFIG") or None)
    except (KvinterpError, ImportError, AttributeError):
        built = made = None
    inner = getattr(built, "model", built)
    while inner is not None:
        try:
            kind = type(inner.get_submodule(module))
        except AttributeError:
            kind = object
        yield from filter(None, [vars(kind).get("forward"), kind if kind is not object else None])
        if not module:
            break
        module = module.rpartition(".")[0]
    if callable(made):
        yield made


if __name__ == "__main__":
    sys.exit(main())
