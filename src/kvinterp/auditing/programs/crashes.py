"""Whose an error is that a use of a cache met, read from its traceback: a library refuses, it
crashes, or kvinterp does.
"""

from __future__ import annotations

import dis
import linecache
import re
import sys
from pathlib import Path
from types import FrameType, TracebackType

from torch import nn

OURS, REFUSES, CRASHES = "ours", "refuses", "crashes"
LIBRARIES = {"transformers", "transformer_lens", "transformers_modules", "optimum", "hqq"}
"""Packages that hold models or quantise caches; that of a model's own class is asked besides."""
BELOW = sys.stdlib_module_names | {"torch", "numpy", "jaxtyping", "beartype"}
"""What raises for whoever called it."""
MODES = ("__torch_function__", "__torch_dispatch__")
"""Through these, and what they call first, torch passes every operation, whoever asked for it."""

SHAPES = re.compile(r"[(\[]\d+(, ?\d+)+[)\]]|shape mismatch|size mismatch", re.IGNORECASE)
"""What a sentence holds that quotes the sizes of tensors."""
NUMBER = re.compile(r"^assert .*[=<>] ?\d")
"""How an assert is written that compares with a number."""


def whose(error: BaseException, model: nn.Module | None, cache: object = None) -> tuple[str, str]:
    """Whether a library refuses (a ``raise`` of its own, with a sentence) or crashes, or kvinterp
    does; and file and line.

    Args:
        error: As it was caught.
        model: The model that ran; None where its user's own code did, whose ``raise`` and
            ``assert`` say what it takes.
        cache: The cache that it ran on, whose class may be anybody's.
    """
    frames, at = list[TracebackType](), error.__traceback__
    while at is not None:
        frames.append(at)
        at = at.tb_next
    names = ["", *(met.tb_frame.f_code.co_name for met in frames)]
    for met, *called in reversed([*zip(frames, names, names[1:], strict=False)]):
        package = _package(met.tb_frame.f_globals.get("__name__", ""))
        if package in BELOW or not {*called}.isdisjoint(MODES):
            continue
        line_of_code = _line_of_code(met.tb_frame, met.tb_lineno)
        if package == "kvinterp":
            return OURS, line_of_code
        if model is None and package not in LIBRARIES:
            written = linecache.getline(met.tb_frame.f_code.co_filename, met.tb_lineno).strip()
            # An assert without a sentence says what is taken where it names a number, as in assert
            # ids.shape[0] == 1.
            bare = (
                isinstance(error, AssertionError)
                and not str(error)
                and bool(NUMBER.search(written))
            )
            refuses, line_of_code = (
                _says(error) or bare,
                f"{line_of_code}: {written}" if bare else line_of_code,
            )
        else:
            theirs = {_package(type(cache).__module__)} | (
                set() if model is None else _packages(model)
            )
            refuses = _refuses(error) and package in LIBRARIES | theirs
        return (
            REFUSES if refuses and met is frames[-1] and _raises(met) else CRASHES
        ), line_of_code
    return OURS, ""


def _refuses(error: BaseException) -> bool:
    """Whether it says what is not offered: not that tensors do not fit, nor that what its author
    took for granted is not so.
    """
    return not isinstance(error, AssertionError) and _says(error)


def _says(error: BaseException) -> bool:
    said = str(error).strip()
    return isinstance(error, NotImplementedError) or bool(said and not SHAPES.search(said))


def _packages(model: nn.Module) -> set[str]:
    return {_package(type(module).__module__) for module in model.modules()}


def _package(module: str) -> str:
    return module.partition(".")[0]


def _raises(met: TracebackType) -> bool:
    """Whether the frame stands at a ``raise``, and not at something that failed."""
    return met.tb_frame.f_code.co_code[met.tb_lasti] == dis.opmap["RAISE_VARARGS"]


def _line_of_code(frame: FrameType, line: int) -> str:
    package, file = _package(frame.f_globals.get("__name__", "")), Path(frame.f_code.co_filename)
    parts = file.parts
    start = len(parts) - 1 - parts[::-1].index(package) if package in parts else len(parts) - 1
    return f"{'/'.join(parts[start:])}:{line}"
