"""Choices: what is said of them before a model is loaded, and the folder that is named after them.

A choice that is printed is one that was used. So a name that is not known, and a choice that
nothing reads beside the others, are refused here, before anything runs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from kvinterp.commands.options import OPTION
from kvinterp.common import words
from kvinterp.common.checks import (
    MOST,
    check_choice,
    check_known,
    check_seed,
    check_unread,
    check_whole,
)
from kvinterp.common.spec import check_name, path_parts, plugins_read, split
from kvinterp.data import load_prompts
from kvinterp.errors import InputError, shown, unexpected
from kvinterp.models.naming import check_reached

if TYPE_CHECKING:
    from kvinterp.commands.base import Experiment

_LONGEST = 80
"""So many characters has the name of a folder that nobody named."""


def check_choices(experiment: Experiment) -> None:
    """Looks at the choices of an experiment, as far as no model is needed.

    Raises:
        InputError: One is none there is, or is not read beside the others.
        UnsupportedError: A path has no such policy.
    """
    from kvinterp.models.load import check_loadable

    readers, given = _readers(), vars(experiment)
    if "kind" in given:
        check_loadable(
            **{
                name: given[name]
                for name in ("kind", "attention", "dtype", "device")
                if name in given
            }
        )
    for name, field in _fields(type(experiment)).items():
        if (value := given[name]) is None and field.default is None:
            continue
        _check_value(field, value, readers)
        is_read, advice = field.metadata.get(OPTION, {}).get("only", (bool, ""))
        if not is_read(experiment):
            check_unread(name, value, field.default, advice)


def _dtypes(text: str) -> None:
    for name in text.split(","):
        check_known("dtype", words.dtype_word(name.strip()), get_args(words.Dtype))


def _policies(text: str) -> None:
    known = plugins_read("kvinterp.policies.base:Policy")
    for part in split(text, "+") or [text]:
        check_name("policy", part, known, "Values go in brackets, as in name(1,2).")


def _kernels(text: str) -> None:
    known = plugins_read("kvinterp.paths.kernels.base:Kernels")
    check_name(
        "kernel mode", text or "native", known, "Values go in brackets, as in split_k(4,float16)."
    )


def _path(text: str) -> None:
    _, _, policies, _ = path_parts(text)
    if policies is not None:
        _policies(policies)


def _device(text: str) -> None:
    if re.fullmatch(r"[a-z]+(:\d+)?", text) is None or text.partition(":")[0] not in DEVICES:
        raise InputError(f"unknown device {shown(text)}: expected cpu, cuda or cuda:N.")


def _strategy(text: str) -> None:
    check_name(
        "strategy", text, get_args(words.Strategy), "Values go in brackets, as in top_k(50,0.8)."
    )


DEVICES = ("cpu", "cuda", "mps", "xpu", "hpu", "xla", "mtia", "npu", "meta")
"""Kinds of device that torch or a library beside it knows."""

_EARLY: dict[str, Callable[[str], Any]] = {
    "kind": lambda text: check_known("kind", text, get_args(words.Kind)),
    "attention": lambda text: check_known(
        "attention implementation", text, get_args(words.Attention)
    ),
    "dtype": _dtypes,
    "rungs": _dtypes,
    "device": _device,
    **dict.fromkeys(("strategy", "strategies"), _strategy),
    "kernels": _kernels,
    **dict.fromkeys(("policies", "policy", "base"), _policies),
    **dict.fromkeys(("a", "b", "path"), _path),
}
"""What reads an option of this name, of whichever command, without torch."""


def check_models(given: Mapping[str, Any]) -> None:
    """Raises where a model of an experiment's choices cannot be found: before torch is imported,
    since that takes seconds.
    """
    for name in _models(given):
        # TransformerLens has names of its own.
        if given.get("kind") not in ("hooked", "transformer_lens") or "/" in name:
            check_reached(name)


def default_folder(verb: str, given: Mapping[str, Any]) -> Path:
    """The folder that a command with these choices writes unless one is given:
    ``out/VERB-MODEL``.
    """
    lasts = [re.split("[:/]", name.rstrip("/"))[-1] for name in _models(given)]
    names = [re.sub(r"[^\w.-]+", "-", last).strip("-") for last in lasts]
    return Path("out") / "-".join([verb, *names])[:_LONGEST].rstrip("-.")


def _models(given: Mapping[str, Any]) -> list[str]:
    """The models of an experiment's choices, as they were given."""
    return [str(name) for name in (given.get("model"), *given.get("models", ())) if name]


def check_early(kind: Any, given: Mapping[str, Any]) -> None:
    """Looks at those choices that need no torch to be looked at: a typing error should not cost its
    import.

    Args:
        kind: The experiment, as :func:`kvinterp.commands.registry.experiment_read` reads it.
        given: Its choices, by the names of its fields.

    Raises:
        InputError: One is a word that is not known, a path that cannot be read, or a file that is
            not there.
    """
    for name, field in _fields(kind).items():
        value = tuple(given[name]) if isinstance(given.get(name), list) else given.get(name)
        if value not in (None, field.default):
            _check_value(
                field,
                value,
                _EARLY | {name: field.metadata[OPTION].get("early", _EARLY.get(name, str))},
            )


def _check_value(
    field: dataclasses.Field[Any], value: Any, readers: Mapping[str, Callable[[Any], Any]]
) -> None:
    """Looks at a number, words, a list, prompts or text forms."""
    about, name, default = field.metadata.get(OPTION, {}), field.name, cast(Any, field.default)
    if "min" in about:
        check_whole(name, value, about["min"])
    if isinstance(value, int) and name != "seed" and value > MOST:
        raise unexpected(name, value, f"at most {MOST:,}")
    if value in ((), []) and default and about.keys() & {"among", "empty", "positional"}:
        advice = f"give at least one, such as {default[0]!r}"
        raise InputError(f"the list of {name.removesuffix('s')}s is empty: {advice}.")
    if "among" in about and isinstance(value, tuple):
        for word in value:
            check_known(name, word, about["among"])
    elif "among" in about:
        for word in map(str.strip, value.split(",")) if "commas" in about else [value]:
            check_choice(name, word, about["among"])
    if name == "prompts":
        load_prompts(value)
    for text in value if isinstance(value, tuple) else (value,):
        readers.get(name, str)(text)


def _readers() -> dict[str, Callable[[Any], Any]]:
    """What reads the text forms that experiments have in common, by the names of their fields."""
    from kvinterp.paths import kernels_named, path_named, strategy_named
    from kvinterp.policies import policy_named

    return {
        "kernels": kernels_named,
        "seed": check_seed,
        **dict.fromkeys(("strategy", "strategies"), strategy_named),
        **dict.fromkeys(("a", "b", "path"), path_named),
        **dict.fromkeys(("policy", "policies", "base"), policy_named),
    }


def _fields(kind: type[Experiment]) -> dict[str, dataclasses.Field[Any]]:
    return {field.name: field for field in dataclasses.fields(kind)}
