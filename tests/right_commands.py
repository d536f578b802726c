"""What bad command lines are made of: a case, the commands with options that are right, and what their options take."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

MODEL = "zoo:gqa2-mini"


@dataclasses.dataclass(frozen=True)
class Case:
    """A command line and what it meets.

    Attributes:
        arguments: What stands behind ``kvinterp``.
        judged: One of the words above.
        prepare: Makes what it finds in its folder.
        environment: Variables that are set, or with None taken away.
        streams: What is wrong with standard output and error.
        codes: The exit codes that are right beside those of ``judged``.
        shown: How it is told, where the arguments do not say it.
    """

    arguments: list[str]
    judged: str
    prepare: Callable[[Path], None] = lambda folder: None
    environment: Mapping[str, str | None] = dataclasses.field(default_factory=dict)
    streams: str = ""
    codes: tuple[int, ...] = ()
    shown: str = ""


_SHORT = ["--prompts", "arithmetic:1", "--max-new-tokens", "2"]
_MODELS = [MODEL, "--out", "out", "--prompts", "arithmetic:1"]
_FEW = ["--ladder-prompts", "1", "--ladder-steps", "1"]
RIGHT: dict[str, list[str]] = {
    "accumulation": _MODELS,
    "audit": [MODEL, "--out", "out", "--lengths", "5", "--steps", "1", "--rungs", "float32", "--checks", "none"],
    "behaviour": [*_MODELS, "--max-new-tokens", "2", "--strategy", "greedy", "--controls", "0"],
    "boundary": [*_MODELS, "--max-new-tokens", "2", "--strategy", "greedy", "--controls", "0"],
    "chain": [
        *[MODEL, "--out", "out", "--policy", "int8", "--on", "kv", "--texts", "restate:1", "--hops", "1"],
        *["--temperatures", "0", "--seeds", "2", "--max-new-tokens", "2"],
    ],
    "compare": [MODEL, "--out", "out", *_SHORT, "--record", ""],
    "decompose": [MODEL, "--out", "out", *_SHORT],
    "equivalent-noise": [MODEL, "--out", "out", *_SHORT, "--policy", "int8"],
    "gqa": _MODELS,
    "kernels": ["--model", MODEL, "--out", "out", "--sizes", "1,2"],
    "kv-error": [
        *[MODEL, "--out", "out", "--repeats", "1", "--instructions", "instructions:1", "--problems", "arithmetic:1"],
        *["--texts", "restate:1", "--strings", "instructions:1", "--max-new-tokens", "2", "--readings", "exact"],
    ],
    "kv-write": _MODELS,
    "ladder": [*_MODELS, "--steps", "1", "--most", "1"],
    "layer-drift": [*_MODELS, "--max-new-tokens", "3", "--divergent", "1"],
    "list": [],
    "localisation": [*_MODELS, "--max-new-tokens", "3", "--count", "1", "--part", "residual"],
    "mitigate": [MODEL, "--out", "out", *_SHORT, "--path", "cached", "--policy", "int8"],
    "patch": [MODEL, "--out", "out", *_SHORT, "--controls", "none"],
    "propagation": _MODELS,
    "root-cause": [*_MODELS, *_FEW],
    "susceptibility": [MODEL, "--out", "out", *_SHORT, "--sizes", "1", "--seeds", "2", "--bins", "1"],
}
"""Every command, short, with options that are right."""


def options_of(verb: str) -> dict[str, tuple[str, Any]]:
    """The options of a command by field: how each is written, and the type of its value."""
    from kvinterp.study.experiments.base import OPTION
    from kvinterp.study.experiments.registry import experiment_named

    if verb == "list":
        return {"what": ("", str)}
    kind = experiment_named(verb)
    hints = typing.get_type_hints(kind)
    found = {"out": ("--out", str)}
    for field in dataclasses.fields(kind):
        about = field.metadata.get(OPTION)
        if about is None or hints[field.name] is bool:
            continue
        flag = "" if about.get("positional") == "yes" else about.get("flag", f"--{field.name.replace('_', '-')}")
        found[field.name] = (flag, str if "example" in about else hints[field.name])
    return found


def with_option(arguments: list[str], flag: str, value: str) -> list[str]:
    """Arguments with a value in the place of the one there was."""
    if not flag:
        return [value, *arguments[1:]]
    if flag not in arguments:
        return [*arguments, f"{flag}={value}"]
    place = arguments.index(flag)
    return [*arguments[:place], f"{flag}={value}", *arguments[place + 2 :]]
