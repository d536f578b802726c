"""A wrong program as lines of plain Python that anybody can paste into a report, run before they
are shown.

The number that they print is the one that the verdict says. The same lines without a cache print
rounding, or they are not shown.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
from collections.abc import Sequence
from typing import Any

import torch

from kvinterp.auditing.programs.function_subject import FunctionSubject
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.operations.fork import Again
from kvinterp.auditing.programs.running import Run
from kvinterp.errors import named
from kvinterp.models.cache_kinds import MadeBy

FROM_TRANSFORMERS = ("DynamicCache", "StaticCache", "EncoderDecoderCache")
AS_MUCH = 2.0
"""What the lines show may be so many times what the program showed, or that share of it: they run
with the model's casts.
"""


def pasted(run: Run) -> str:
    """The lines, ending in a print of the error; empty where they do not show what the program
    showed.

    They are tried in float64 and then in float32, as the model's users run it, with its casts. What
    they printed is the error of the program from then on.

    Args:
        run: Of the wrong program, once it has run.
    """
    subject: Any = run.subject
    kinds: dict[str, torch.dtype | None] = {"": None}
    if isinstance(subject, ModelSubject) and subject.lifted:
        kinds = {".double()": torch.float64, ".float()": torch.float32}
    with subject.called_as(run.program.rows):
        for cast, dtype in kinds.items():
            text = _text(run, cast, run.lines)
            if (error := _shown(run, text, dtype)) is None:
                continue
            if run.wrong is not None:
                control = [*run.lines[: run.lines.before], run.lines.control]
                alone = run.wrong.pieces or not run.lines.control
                if not alone and not _rounds(
                    _said(run, _text(run, cast, control)), error, dtype or _dtype(subject)
                ):
                    continue
                run.wrong = dataclasses.replace(run.wrong, error=error)
            return text
    return ""


def _text(run: Run, cast: str, body: Sequence[str]) -> str:
    body = [*run.subject.prelude, *body]
    made = [name for name in FROM_TRANSFORMERS if any(f"{name}(" in line for line in body)]
    lines = ["import copy, torch" if any("copy." in line for line in body) else "import torch"]
    lines += [f"from transformers import {', '.join(made)}"] if made else []
    lines += [] if (kind := run.subject.kind) is None or made else [kind.written(0)[1]]
    if any("TransformerLensKeyValueCache." in line for line in body):
        lines.append("from transformer_lens import TransformerLensKeyValueCache")
    if isinstance(run.subject, FunctionSubject):
        lines.append(f"# {run.subject.yours}")
    elif isinstance(run.subject, ModelSubject):
        lines.append(f"model = model.eval(){cast}  # yours: a {type(run.subject.model).__name__}")
    if run.wrong is not None:
        wrong, row = run.wrong, run.wrong.row
        want = f"{run.subject.plain_line(run.wrong.text, **run.subject.reads(run.begins[row : row + 1]))}[0, -1]"
        body = [*body, *["model.forward = own"] * ("compiled" in run.uses)]
        if wrong.pieces:
            # What is right is the same cache without the use: this row alone, in the same pieces.
            body += [
                f"got, text, alone = {wrong.got}, {wrong.text}, {run.subject.made(run.max_columns)}"
            ]
            body += [f"for ids in text.split({[*wrong.pieces]}, 1):"]
            body += [
                f"    want = model(ids, {run.subject.adapter.cache_name}=alone, use_cache=True).logits[0, -1]"
            ]
        else:
            body += [f"got, want = {wrong.got}, {want}"]
        body += ["got, want = got[want.isfinite()], want[want.isfinite()]"] * (wrong.finite == "no")
        body += ['print(f"{float((got - want).abs().max() / want.abs().max()):.3g}")']
    elif run.lines.ends[0]:
        body = [*body, run.lines.ends[0]]
    elif run.shape:
        body = [*body, "print(*logits.shape[:2])"]
    return "\n".join([*lines, "with torch.no_grad():", *(f"    {line}" for line in body)])


def _shown(run: Run, text: str, dtype: Any) -> float | None:
    """The error that the lines, run as they stand, show, or infinity where they raise what the
    program raised; else None.
    """
    said: Any = _said(run, text)
    if run.wrong is None:
        as_run = run.lines.ends[1] or (" ".join(map(str, run.shape)) if run.shape else run.raised)
        return (
            float("inf")
            if as_run == (named(said) if isinstance(said, Exception) else said)
            else None
        )
    if isinstance(said, Exception):
        return None
    said = float(said.split()[-1])
    # What an earlier run left outside the model is met by these lines too, and by nobody who pastes
    # them: theirs is the number of the program, which was run once.
    if Again() in run.program.steps and said > run.subject.limit:
        return run.wrong.error
    # NaN where what should be finite is not.
    if said != said or run.wrong.error == float("inf"):
        return float("inf") if said != said or said == float("inf") else None
    return said if run.wrong.error / AS_MUCH <= said <= run.wrong.error * AS_MUCH else None


def _rounds(said: str | Exception, error: float, dtype: torch.dtype) -> bool:
    """Whether what the lines print without a cache is rounding: nearer to it than to the error, on
    a scale of logarithms.
    """
    return (
        not isinstance(said, Exception)
        and float(said) <= (torch.finfo(dtype).eps * min(error, 1.0)) ** 0.5
    )


def _dtype(subject: Any) -> torch.dtype:
    return subject.alone(subject.tokens[:1]).dtype  # type: ignore[no-any-return]


def _said(run: Run, text: str) -> str | Exception:
    """What the lines print, or raise."""
    subject, said = run.subject, io.StringIO()
    names: dict[str, Any] = {}
    state: Any = contextlib.nullcontext()
    if isinstance(subject, ModelSubject):
        # As it was given: a cast of ours may have chosen other kernels, which nobody has who pastes
        #     the lines.
        given = copy.deepcopy(subject.given.model) if subject.lifted else subject.model
        names, state = {"model": given, **subject.names}, subject.adapter.own_state([])
        names |= (
            {subject.kind.name: subject.kind.factory} if isinstance(subject.kind, MadeBy) else {}
        )
    elif isinstance(subject, FunctionSubject):
        names = {"full": subject.full, "step": subject.step}
    try:
        with state, contextlib.redirect_stdout(said):
            exec(compile(text, "program", "exec"), names)
    except Exception as error:
        return error
    return said.getvalue().strip()
