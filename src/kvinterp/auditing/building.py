"""Models that are made, not loaded: random weights from a config alone, or whatever a user's own
code makes.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvinterp.auditing.causality import check_causal
from kvinterp.common.checks import check_known, check_seed
from kvinterp.common.files import is_file, is_folder
from kvinterp.errors import InputError, reason, shown, unknown
from kvinterp.models import Adapter, wrap
from kvinterp.models.door import check_finite, check_loaded, config_of, load_weights, loading
from kvinterp.models.load import ATTENTION, device_named
from kvinterp.models.naming import NAMED, cached_folder, local_folder, reach
from kvinterp.models.transformers_api import from_config

_CODE = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*:[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")

MOST = 300_000_000
"""Parameters of a model made from its class's defaults, which are those of a released model as a
rule.
"""


def random_model(
    source: str | Path,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    device: str | torch.device | None = "cpu",
    attention: str | None = None,
    remote_code: str = "refuse",
) -> Adapter:
    """A model of random weights from a config alone.

    Args:
        source: A config.json, a folder that holds one, ``zoo:NAME``, or a hub id.
        dtype: Dtype of the weights.
        seed: Seeds the weights.
        device: Where to put it; CUDA where there is one for None.
        attention: An attention implementation transformers knows, or None for its own choice.
        remote_code: ``"refuse"`` or ``"trust"``: whether code that comes with the config may run.
            Nothing asks.

    Raises:
        InputError: There is no such config, or transformers knows no causal model for it.
    """
    if attention is not None:
        check_known("attention implementation", attention, ATTENTION)
    check_known("remote_code", remote_code, ("refuse", "trust"))
    check_seed(seed)
    place_on, text = device_named(device), str(source)
    if text.endswith(".json") and (Path(text).name != "config.json" or not is_file(Path(text))):
        raise InputError(
            f"{shown(text)} is no file that is named config.json, as transformers reads it: give one, or its folder."
        )
    folder = Path(text).parent if text.endswith(".json") else local_folder(text)
    options = {} if folder is not None else reach(text)
    config = config_of(folder or text, text, remote_code, options)
    with loading(text), torch.random.fork_rng():
        torch.manual_seed(seed)
        model = from_config(config, attention, remote_code == "trust")
    return _made(model, dtype, place_on, text, f"{text} (random weights)")


def _made(
    model: nn.Module, dtype: torch.dtype | None, device: torch.device, given: str, name: str
) -> Adapter:
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        # Audited as it is: see kvinterp.auditing.own_code.
        return model.to(device=device, dtype=dtype).eval().requires_grad_(False)  # type: ignore[return-value]
    with loading(given):
        adapter = wrap(model.to(device=device, dtype=dtype).eval().requires_grad_(False), name=name)
        check_causal(adapter)
    return adapter


# A user's own code --------------------------------------------------------------------------------


def is_code(text: str) -> bool:
    """Whether a text has the form ``package.module:Class``."""
    return not text.startswith(NAMED) and _CODE.fullmatch(text) is not None


def users_model(
    code: str,
    source: str | Path | None = None,
    *,
    weights: str = "random",
    dtype: torch.dtype | None = None,
    seed: int = 0,
    device: str | torch.device | None = "cpu",
    remote_code: str = "refuse",
) -> Adapter:
    """A model that a user's own code makes.

    Args:
        code: ``package.module:Class``, a transformers model class; or ``package.module:function``,
            which is called without arguments and returns a model.
        source: For a class: a config.json or a folder that holds one; None for the defaults of the
            class's own config.
        weights: ``"random"``, or ``"loaded"``: those of the checkpoint folder or hub id ``source``.
        dtype: Dtype of the weights; None for the one that the code gives them.
        seed, device: As for :func:`random_model`.
        remote_code: ``"refuse"`` or ``"trust"``: whether other code, that comes with a checkpoint,
            may run.

    Raises:
        InputError: There is no such module or name in it, or no model can be made of it; the
            message says what is needed.
    """
    check_seed(seed)
    place_on = device_named(device)
    with torch.random.fork_rng():
        member = _imported(code)
        torch.manual_seed(seed)
        if inspect.isclass(member) and "PreTrainedModel" in {
            base.__name__ for base in member.__mro__
        }:
            called = code if source is None else f"{code} ({source})"
            load = weights == "loaded"
            model = (
                _loaded(code, member, str(source), remote_code)
                if load
                else _from_config(code, member, source)
            )
        elif source is not None:
            raise InputError(
                f"{code!r} is no transformers model class, and only such a class takes a config: leave the config out, and "
                "let it be a function without arguments that returns a model."
            )
        else:
            called, model = code, member if isinstance(member, nn.Module) else _called(code, member)
    if not isinstance(model, nn.Module):
        raise InputError(
            f"{code!r} gave a {type(model).__name__}: expected a model, a torch.nn.Module."
        )
    return _made(model, dtype, place_on, called, called)


def _imported(code: str) -> Any:
    if not is_code(code):
        raise InputError(
            f"{code!r} names no class: expected package.module:Class, as in mypackage.modeling:MyForCausalLM."
        )
    module, _, path = code.partition(":")
    try:
        member: Any = importlib.import_module(module)
    # A user's module may raise anything.
    except Exception as error:
        missing = (
            isinstance(error, ModuleNotFoundError)
            and error.name is not None
            and f"{module}.".startswith(error.name)
        )
        why = (
            "there is no such module"
            if missing
            else f"importing it raised {type(error).__name__}: {reason(error)}"
        )
        raise InputError(
            f"module {module!r} of {code!r} cannot be imported ({why}): it must be installed, or lie in the current folder."
        ) from error
    for name in path.split("."):
        if not hasattr(member, name):
            raise unknown(
                f"name in module {module!r}",
                name,
                [n for n in vars(member) if not n.startswith("_")],
            )
        member = getattr(member, name)
    return member


def _from_config(code: str, found: Any, source: str | Path | None) -> nn.Module:
    config_class = getattr(found, "config_class", None)
    if config_class is None:
        raise InputError(
            f"{code!r} has no config_class, so nothing says which config it takes: set config_class on it, or give a function "
            "without arguments that returns a model."
        )
    try:
        path = Path("" if source is None else source)
        file = path / "config.json" if is_folder(path) else path
        config = config_class() if source is None else config_class.from_json_file(file)
        if source is None:
            with torch.device("meta"):
                count = sum(p.numel() for p in found(config).parameters())
            if count > MOST:
                raise InputError(
                    f"{code!r} with the defaults of {config_class.__name__} has {count:.1e} parameters, too many to be made "
                    f"for an audit (at most {MOST:.0e}): give a config.json of a small one with --config."
                )
        model: nn.Module = found(config)
    except InputError:
        raise
    # Nor is there one kind of error for a config that a class cannot use.
    except Exception as error:
        of = (
            f"the defaults of {config_class.__name__}"
            if source is None
            else f"the config {str(source)!r}"
        )
        raise InputError(
            f"{code!r} cannot be made from {of} ({type(error).__name__}: {reason(error)}): give a config.json that it takes "
            "with --config, or a function without arguments that returns a model."
        ) from error
    return model


def _loaded(code: str, kind: Any, source: str, remote_code: str) -> nn.Module:
    folder = local_folder(source)
    options = {} if folder is not None else reach(source)
    with loading(source, f"{code!r}"):
        model, report = load_weights(folder or source, kind, remote_code, **options)
    check_loaded(report, source, model.config)
    check_finite(model, source, folder or cached_folder(source))
    return model  # type: ignore[no-any-return]


def _called(code: str, found: Any) -> Any:
    if not callable(found):
        raise InputError(
            f"{code!r} is a {type(found).__name__}: expected a transformers model class, a model, or a function without "
            "arguments that returns one."
        )
    try:
        return found()
    except Exception as error:
        raise InputError(
            f"{code!r} was called without arguments and raised {type(error).__name__}: {reason(error)}. Expected a transformers "
            "model class, or a function without arguments that returns a model."
        ) from error
