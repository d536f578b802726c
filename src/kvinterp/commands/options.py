"""Options: how a field of an experiment becomes an option of the command line, and those that
several have.

An experiment that runs a function of kvinterp's, as ``compare`` runs :func:`kvinterp.compare`, names
it (``class Compare(OfModel, of="kvinterp.comparison.comparing:compare")``). Then each parameter of
that function is an option: its name, type, default and help stand in the function's ``def`` line
and docstring, and nowhere else. Fields say what only a command line asks, such as the least number
that is taken.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvinterp.common.source import parameters
from kvinterp.common.spec import split

OPTION = "option"
"""The key in a field's metadata under which its option stands."""


_ELSEWHERE = ("model", "prompts", "progress")
"""Parameters that commands take otherwise: a model by its name, prompts as texts, a bar always."""


def option(default: Any = dataclasses.MISSING, help: str | None = None, **shown: Any) -> Any:
    """A field that is an option of the command line: its name, type and default are the field's.

    Args:
        default: Its default; that of the function's parameter unless given.
        help: What it is; what the function's docstring says unless given.
        shown: ``flag`` where the option has another name on the command line; ``example`` for whole numbers with
            commas; ``decides="nothing"`` where it changes no number of the result; ``among``, the
            words that it may be, with ``commas="between"`` several of them; ``empty="refused"`` of
            a list that needs at least one, as those of ``among`` and those given without a name do;
            ``only``, where other choices decide whether it is read: whether they do, as a function
            of the experiment, and what to do where they do not, in words; ``early``, what reads the
            value before torch is imported, and raises InputError where it is none; and what typer's
            ``Option`` takes: ``show_default``, ``min``, ``hidden``.
    """
    about = shown if help is None else {"help": help, **shown}
    return dataclasses.field(default=default, metadata={OPTION: about})


def take_parameters(
    kind: Any, function: str, without: Sequence[str], named: Mapping[str, str]
) -> dict[str, str]:
    """Makes fields of a function's parameters, before the class becomes a dataclass.

    Args:
        kind: The class of an experiment. Its own fields stand first, the function's after them in
            the function's order.
        function: The function's import name, as in ``kvinterp.comparison.comparing:compare``.
        without: The parameters that are no options.
        named: The names of options, by those of their parameters where these are others.

    Returns:
        The names of the parameters by those of their options.
    """
    hints, taken = {**vars(kind).get("__annotations__", {})}, {}
    for parameter, (declared, help) in parameters(function).items():
        if parameter not in (*_ELSEWHERE, *without):
            name = named.get(parameter, parameter)
            field = vars(kind).get(name) or option()
            default = declared.default if field.default is dataclasses.MISSING else field.default
            setattr(kind, name, option(default, **{"help": help, **field.metadata[OPTION]}))
            hints.pop(name, None)
            hints[name], taken[name] = _typed(declared.annotation, default), parameter
    kind.__annotations__ = hints
    return taken


def _typed(hint: str, default: Any) -> str:
    """The type of an option for that of a parameter: what a function takes of other kinds beside a
    number or a list is a text on the command line.
    """
    several = re.search(r"(?:Iterable|Sequence)\[(int|str)\b", hint)
    number = re.match("int|float", hint)
    typed = f"tuple[{several[1]}, ...]" if several else number[0] if number else "str"
    return typed + " | None" * (default is None)


def argument(default: Any, help: str, **shown: Any) -> Any:
    """A field that is given without a name; it must be, unless its default is None."""
    return option(default, help, positional="yes", **shown)


SHARED: dict[str, tuple[Any, str]] = {
    "prompts": (
        "arithmetic:6",
        "A text; a .txt file with one prompt per line; a .jsonl file with one object per line (keys: docs/data.md); "
        "arithmetic:N, restate:N, instructions:N or natural:N; or gsm8k(FILE,shots=5,count=700).",
    ),
    "kernels": ("native", "Kernels for both paths, such as split_k(8,float16)."),
    "random_init": (False, "Read the config alone and use random weights."),
    "remote_code": (
        False,
        "Run the Python code that comes with a checkpoint; otherwise such a checkpoint is refused.",
    ),
}
"""Default and help of what several experiments ask and no function of ours has so."""

_DECLARED = ("kvinterp.models.load:load_model", "kvinterp.comparison.comparing:compare")
"""The functions whose parameters several experiments have."""


def shared(name: str, default: Any = None, **shown: Any) -> Any:
    """A field that several experiments have, by its name in :data:`SHARED` or among the parameters
    of :data:`_DECLARED`; with a default of its own where one is given.
    """
    known = {
        parameter: (declared.default, help)
        for function in _DECLARED
        for parameter, (declared, help) in parameters(function).items()
    } | SHARED
    usual, help = known[name]
    return option(usual if default is None else default, help, **shown)


def used_by(name: str, *values: str) -> tuple[Callable[[Any], bool], str]:
    """``only`` of an option that is read where another one names one of some values."""

    def is_read(asked: Any) -> bool:
        named = getattr(asked, name)
        return not {"all", *values}.isdisjoint(
            split(named, ",") if isinstance(named, str) else named
        )

    return is_read, f"no {name} that was asked for uses it; add {' or '.join(values)} to --{name}"


def sampled(*strategies: str) -> bool:
    """Whether one of some strategies draws random numbers."""
    from kvinterp.paths import strategy_named

    return any(str(strategy_named(text)) != "greedy" for text in strategies)


DRAWS = "greedy decoding draws nothing; give a strategy that does, such as top_p(0.95,0.8), or leave it out"
"""What to do about a seed that nothing draws by."""


DRAWN = (lambda asked: sampled(asked.strategy), DRAWS)
"""``only`` of the seed of the option ``strategy``."""


def model(default: str = "zoo:mistral-mini") -> Any:
    """The argument that names a model."""
    return argument(
        default,
        "zoo:NAME, real:NAME, a transformers checkpoint folder, a .gguf file, or a hub id.",
    )
