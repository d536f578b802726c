"""Options: how a field of an experiment becomes an option of the command line, and those that
several have.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from kvinterp.common.spec import split

OPTION = "option"
"""The key in a field's metadata under which its option stands."""


def option(default: Any, help: str, **shown: Any) -> Any:
    """A field that is an option of the command line: its name, type and default are the field's.

    Args:
        default: Its default.
        help: What it is.
        shown: ``flag`` where the option has another name; ``example`` for whole numbers with
            commas; ``decides="nothing"`` where it changes no number of the result; ``among``, the
            words that it may be, with ``commas="between"`` several of them; ``empty="refused"`` of
            a list that needs at least one, as those of ``among`` and those given without a name do;
            ``only``, where other choices decide
            whether it is read: whether they do, as a function of the experiment, and what to do
            where they do not, in words; ``early``, what reads the value before torch is imported,
            and raises InputError where it is none; and what typer's ``Option`` takes:
            ``show_default``, ``min``, ``hidden``.
    """
    return dataclasses.field(default=default, metadata={OPTION: {"help": help, **shown}})


def argument(default: Any, help: str, **shown: Any) -> Any:
    """A field that is given without a name; it must be, unless its default is None."""
    return option(default, help, positional="yes", **shown)


SHARED: dict[str, tuple[Any, str]] = {
    "prompts": (
        "arithmetic:6",
        "A text; a .txt file with one prompt per line; a .jsonl file with one object per line (keys: docs/data.md); "
        "arithmetic:N, restate:N, instructions:N or natural:N; or gsm8k(FILE,shots=5,count=700).",
    ),
    "kind": (
        "native",
        "What runs the model: native (transformers), or transformer_lens (hooked or bridge).",
    ),
    "dtype": ("float16", "float16, bfloat16, float32 or float64 (fp16, bf16, fp32, fp64)."),
    "device": (None, "cpu, cuda or cuda:N. Default: CUDA if there is one."),
    "attention": (
        None,
        "Attention of a native model: sdpa, eager, ... Default: the model's own choice.",
    ),
    "random_init": (False, "Read the config alone and use random weights."),
    "remote_code": (
        False,
        "Run the Python code that comes with a checkpoint; otherwise such a checkpoint is refused.",
    ),
}
"""Default and help of the options that several experiments have."""


def shared(name: str, default: Any = None) -> Any:
    """A field that several experiments have, by its name in :data:`SHARED`; with a default of its
    own where one is given.
    """
    usual, help = SHARED[name]
    return option(usual if default is None else default, help)


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


def seed() -> Any:
    """The seed of the option ``strategy``, where that draws random numbers."""
    return option(
        0,
        "Seed for the strategy's random numbers.",
        only=(lambda asked: sampled(asked.strategy), DRAWS),
    )


def model() -> Any:
    """The argument that names a model."""
    return argument(
        "zoo:mistral-mini",
        "zoo:NAME, real:NAME, a transformers checkpoint folder, a .gguf file, or a hub id.",
    )
