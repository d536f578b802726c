"""A wrong program as lines of plain Python that anybody can paste into a report, run once before they are shown."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

import torch

from kvinterp.programs.running import Run
from kvinterp.programs.subject import ModelSubject


def pasted(run: Run) -> str:
    """The lines, ending in a print of the largest difference; empty where they do not show what the program showed.

    Args:
        run: Of the wrong program, once it has run.
    """
    made = [name for name in ("DynamicCache", "StaticCache") if any(f"{name}(" in line for line in run.lines)]
    lines = ["import copy, torch" if any("copy." in line for line in run.lines) else "import torch"]
    lines += [f"from transformers import {', '.join(made)}"] if made else []
    lines += _model(run)
    wide = isinstance(run.subject, ModelSubject) and bool(run.subject.lifted)
    body = list(run.lines)
    if run.wrong is not None:
        want = run.subject.written("")[1].replace("TEXT", f"torch.tensor([{list(run.wrong.text)}])")
        last = body[-1] if not body or not body[-1].startswith("cache =") else body[-2]
        generated = last.startswith("out = model.generate")
        row, column = run.wrong.row, run.wrong.column
        got = f"out.logits[{column}][{row}]" if generated else f"logits[{row}, {column}]"
        body += [f"want = {want}", f"print(float(({got} - want).abs().max() / want.abs().max()))"]
    lines += [f"with torch.no_grad():{'  # in float64' if wide else ''}", *(f"    {line}" for line in body)]
    text = "\n".join(lines)
    return text if _shows(run, text) else ""


def _model(run: Run) -> list[str]:
    if not isinstance(run.subject, ModelSubject):
        return ["# full(ids) and step(ids, cache) are yours"]
    double = ".double()" if run.subject.lifted else ""
    lines = [f"model = model.eval(){double}  # yours: a {type(run.subject.model).__name__}"]
    if any("assistant_model=assistant" in line for line in run.lines):
        lines.append("assistant = copy.deepcopy(model)")
    return lines


def _shows(run: Run, text: str) -> bool:
    """Whether the lines, run as they stand, show the error, or raise where the program did."""
    subject: Any = run.subject
    names: dict[str, Any] = {"torch": torch, "copy": copy}
    if isinstance(subject, ModelSubject):
        names["model"] = subject.model
    else:
        names |= {"full": subject.full, "step": subject.step}
    said = io.StringIO()
    try:
        with subject.running(), contextlib.redirect_stdout(said):
            exec(compile(text, "program", "exec"), names)
    except Exception:
        return run.wrong is None
    printed = said.getvalue().split()
    return bool(printed) and not float(printed[-1]) <= subject.limit
