"""A wrong program as lines of plain Python that anybody can paste into a report, run once before they are shown."""

from __future__ import annotations

import contextlib
import copy
import io
from typing import Any

from kvinterp.programs.running import Run, named
from kvinterp.programs.subject import FunctionSubject, ModelSubject

AS_MUCH = 0.5
"""The share of the program's error that the lines must show: as its users run the model, its casts are there."""


def pasted(run: Run) -> str:
    """The lines, ending in a print of the largest difference; empty where they do not show what the program showed.

    They are tried in float64 and then in float32, as the model's users run it, with its casts.

    Args:
        run: Of the wrong program, once it has run.
    """
    subject: Any = run.subject
    if not isinstance(subject, ModelSubject):
        return _text(run, "") if _shows(run, _text(run, ""), {"full": subject.full, "step": subject.step}) else ""
    if not subject.lifted:
        return _text(run, "") if _shows(run, _text(run, ""), {"model": subject.model}) else ""
    for kind in ("double", "float"):
        # As it was given: a cast of ours may have chosen other kernels, which nobody has who pastes the lines.
        if _shows(run, text := _text(run, f".{kind}()"), {"model": copy.deepcopy(subject.given.model)}):
            return text
    return ""


def _text(run: Run, cast: str) -> str:
    body = list(run.lines)
    made = [name for name in ("DynamicCache", "StaticCache") if any(f"{name}(" in line for line in body)]
    assisted = any("assistant_model=assistant" in line for line in body)
    copies = assisted or any("copy." in line for line in body)
    lines = ["import copy, torch" if copies else "import torch"]
    lines += [f"from transformers import {', '.join(made)}"] if made else []
    if isinstance(run.subject, FunctionSubject):
        lines.append(f"# {run.subject.yours}")
    elif isinstance(run.subject, ModelSubject):
        lines.append(f"model = model.eval(){cast}  # yours: a {type(run.subject.model).__name__}")
    lines += ["assistant = copy.deepcopy(model)"] if assisted else []
    if run.wrong is not None:
        want = run.subject.written("")[1].replace("TEXT", f"torch.tensor([{list(run.wrong.text)}])")
        generated = body[-1].startswith("out = model.generate")
        row, column = run.wrong.row, run.wrong.column
        got = f"out.logits[{column}][{row}]" if generated else f"logits[{row}, {column}]"
        body += ["model.forward = own"] * ("compiled" in run.uses)
        body += [f"want = {want}", f"print(float(({got} - want).abs().max() / want.abs().max()))"]
    return "\n".join([*lines, "with torch.no_grad():", *(f"    {line}" for line in body)])


def _shows(run: Run, text: str, names: dict[str, Any]) -> bool:
    """Whether the lines, run as they stand, show the error, or raise what the program raised."""
    subject, said = run.subject, io.StringIO()
    state = subject.adapter.own_state([]) if isinstance(subject, ModelSubject) else contextlib.nullcontext()
    try:
        with state, contextlib.redirect_stdout(said):
            exec(compile(text, "program", "exec"), names)
    except Exception as error:
        return run.wrong is None and named(error) == run.raised
    printed = said.getvalue().split()
    return run.wrong is not None and bool(printed) and not float(printed[-1]) < AS_MUCH * run.wrong.error
