"""The door that every model comes in by: nothing of it runs unasked, and whatever a library raises is one sentence."""

from __future__ import annotations

import contextlib
import io
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from kvinterp.errors import InputError, KvinterpError, UnsupportedError, shown
from kvinterp.models.checkpoint import check_weights, read_object, reason
from kvinterp.models.gguf_file import as_given, header_of, is_gguf
from kvinterp.models.naming import reach

log = logging.getLogger("kvinterp")


# Code of others --------------------------------------------------------------------------------------------------------


def config_of(
    source: Path | str,
    name: str,
    remote_code: str = "refuse",
    weights: str = "checked",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """The transformers config of a checkpoint, looked at before it is believed.

    Args:
        source: A folder, a GGUF file, or a hub id that was reached.
        name: What the user called it, for messages.
        remote_code: ``"trust"`` lets code that comes with the checkpoint run.
        weights: ``"none"`` for a config alone; the folder need not hold weights then.
        options: What :func:`reach` returned for a hub id.

    Raises:
        InputError: It cannot be used; or it needs code of its own and that is refused.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with loading(name):
        if isinstance(source, Path) and is_gguf(source):
            return _config_of_gguf(source, name)
        if isinstance(source, Path):
            where = shown(source / "config.json")
            held = read_object(source / "config.json", "a transformers config")
        else:
            where = f"the config of {shown(name)}"
            held, _ = PreTrainedConfig.get_config_dict(source, **(options or {}))
        if held.get("auto_map"):
            ours = held.get("model_type") in CONFIG_MAPPING
            if remote_code != "trust" and not ours:
                raise code_refused(name)
            if remote_code != "trust":
                log.info("%s comes with code of its own, which is not run: transformers' own class is used", shown(name))
        if isinstance(source, Path) and weights == "checked":
            check_weights(source)
        with explained(held, where):
            config = AutoConfig.from_pretrained(source, trust_remote_code=remote_code == "trust", **(options or {}))
    return config


def _config_of_gguf(file: Path, name: str) -> Any:
    """The config that transformers makes of a GGUF file's header, which the weights must fill."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    header, where = header_of(file), f"the header of {shown(name)}"
    try:
        with as_given(file) as (place, gguf):
            config = AutoConfig.from_pretrained(place, **gguf)
    except ValueError as error:
        if "architecture" not in str(error):
            raise
        raise UnsupportedError(
            f"{shown(name)} is a GGUF file of architecture {shown(header.architecture)}, of which transformers makes no model: "
            "give a transformers checkpoint folder of it."
        ) from error
    # Of some architectures it reads how they are scaled.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if header.scaled and rope.get("rope_type", "default") == "default":
        raise UnsupportedError(
            f"{shown(name)} scales its rotary embeddings ({header.scaled}), which transformers does not read from a GGUF file: "
            "it would compute something else; give a transformers checkpoint folder of it."
        )
    layers, numbers = config.num_hidden_layers, 0
    if layers <= header.tensors:
        with torch.device("meta"):
            numbers = sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    if layers > header.tensors or numbers > header.numbers:
        raise InputError(
            f"{where} says {layers:,} layers, {config.hidden_size:,} wide, with a vocabulary of {config.vocab_size:,}, but its "
            f"{header.tensors:,} tensors hold {header.numbers:,} numbers in all: it is damaged; copy or download it again."
        )
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "unknown")]
    return config


def code_refused(name: str) -> InputError:
    """The sentence for a checkpoint that cannot be loaded without running what came with it."""
    return InputError(
        f"model {shown(name)} needs code that comes with it (its config has auto_map), and remote_code='refuse' does not "
        "run that: read the code, and where you trust it use kv.load_model(..., kind='native', remote_code='trust') in Python, "
        "or kvinterp audit --remote-code."
    )


def check_hooked_code(name: str, remote_code: str) -> str:
    """Refuses the families for which TransformerLens runs a repository's code without asking.

    Args:
        name: The name, or alias, that TransformerLens knows.
        remote_code: ``"trust"`` lets it.

    Returns:
        TransformerLens' own name of the model.

    Raises:
        InputError: TransformerLens does not know the name, or would run code.
    """
    from transformer_lens import loading_from_pretrained as theirs

    try:
        official = theirs.get_official_model_name(name)
    # 3.9 raises ValueError, with the names of all 250 models.
    except Exception as error:
        from kvinterp.models import zoo

        raise InputError(
            f"model {shown(name)} is none that TransformerLens' HookedTransformer knows: {zoo.meant(name)}use kind='bridge' or "
            "kind='native' for a hub id, or give a checkpoint folder or zoo:NAME."
        ) from error
    if remote_code == "trust":
        return official
    if official.startswith(tuple(theirs.NEED_REMOTE_CODE_MODELS)):
        raise _runs_code(name)
    reach(official)
    with loading(name):
        config = theirs.get_pretrained_model_config(official, trust_remote_code=False)
    # For others it asks with its own code when it comes to the tokenizer.
    if getattr(config, "trust_remote_code", False):
        raise _runs_code(name)
    return official


def _runs_code(name: str) -> InputError:
    return InputError(
        f"model {shown(name)}: TransformerLens loads it with trust_remote_code=True, which runs code of its repository, and "
        "remote_code='refuse' forbids that: use kind='bridge' or kind='native', which need none where transformers has the "
        "architecture, or, where you trust the code, kv.load_model(..., remote_code='trust') in Python."
    )


# Loading it ------------------------------------------------------------------------------------------------------------


def weights_of(
    source: Path | str, model_class: Any = None, remote_code: str = "refuse", **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """The model of a checkpoint and transformers' ``output_loading_info``, which :func:`check_loaded` judges.

    Args:
        source: A folder, a GGUF file, whose weights are dequantised, or a hub id that was reached.
        model_class: What loads it; default: ``AutoModelForCausalLM``.
        remote_code: ``"trust"`` lets code that comes with the checkpoint run.
        options: Whatever else it is loaded with, such as config and dtype.
    """
    from transformers import AutoModelForCausalLM

    loader: Any = model_class or AutoModelForCausalLM
    with as_given(source) as (place, gguf), contextlib.ExitStack() as held:
        if gguf:
            from transformers import GgufConfig

            options |= {**gguf, "quantization_config": GgufConfig(dequantize=True)}
            # It draws a bar of its own there, which none of its switches stops.
            held.enter_context(contextlib.redirect_stderr(io.StringIO()))
        model, found = loader.from_pretrained(
            place,
            use_safetensors=True,
            trust_remote_code=remote_code == "trust",
            output_loading_info=True,
            # Said by check_loaded, with the tensor's name.
            ignore_mismatched_sizes=True,
            **options,
        )
    return model, found


@contextlib.contextmanager
def loading(name: str, part: str = "", config: Any = None) -> Iterator[None]:
    """Makes one sentence of whatever a library raises while it loads a model.

    Args:
        name: What the user called the model.
        part: What of it is loaded, where that is not the whole.
        config: Its config, from which the entry that an error is about is named.

    Raises:
        InputError: In the place of anything that is no error of kvinterp's own.
    """
    try:
        entries = {} if config is None else config.to_dict()
        with quiet_transformers(), explained(entries, f"the config of {shown(name)}"):
            yield
    except (KvinterpError, KeyboardInterrupt, GeneratorExit):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise too_large(name, error) from error
    # BaseException: what panics in Rust (tokenizers, safetensors) is no Exception.
    except BaseException as error:
        if "trust_remote_code" in str(error):
            raise code_refused(name) from error
        what = f"{part} cannot be loaded" if part else "cannot be loaded"
        raise InputError(
            f"model {shown(name)}: {what} ({reason(error)}): expected a whole checkpoint of a causal transformers model; "
            "mend its files, or copy or download them again."
        ) from error


@contextlib.contextmanager
def importing_transformer_lens() -> Iterator[None]:
    """Makes one sentence of a TransformerLens that cannot be imported: no model is to blame for a package that is missing.

    Raises:
        InputError: In the place of an ImportError.
    """
    try:
        yield
    except ImportError as error:
        raise InputError(
            f"TransformerLens cannot be imported here ({reason(error)}): install what it needs, which "
            "`pip install transformer-lens` does, or use kind='native', which needs none of it."
        ) from error


def too_large(name: str, error: BaseException) -> InputError:
    """The sentence for a model for which there is too little memory."""
    return InputError(
        f"model {shown(name)} does not fit into memory ({reason(error)}): use a narrower dtype, another device or a "
        "smaller model."
    )


@contextlib.contextmanager
def explained(config: Mapping[str, Any], where: str) -> Iterator[None]:
    """Adds the config's entry that an error is about, where the error repeats what that entry says."""
    try:
        yield
    except (KvinterpError, OSError):
        raise
    except Exception as error:
        said = str(error)
        entry = next((e for e in _entries(config) if f"'{e[1]}'" in said or f"`{e[1]}`" in said), None)
        if entry is None or "trust_remote_code" in str(error):
            raise
        raise InputError(
            f"{where} says {entry[0]} is {entry[1]!r}, which cannot be used ({reason(error)}): expected a value that "
            "transformers knows; mend the config, or install the transformers that knows it."
        ) from error


def _entries(config: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, str]]:
    for name, value in config.items():
        # An architecture that transformers knows is named by many errors that are not about it.
        if isinstance(value, str) and value and name not in ("architectures", "model_type"):
            yield f"{within}{name}", value.removeprefix("torch.")
        elif isinstance(value, dict) and not within.count("."):
            yield from _entries(value, f"{within}{name}.")


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' progress bars and reports off the screen, and puts them back.

    Its report of missing tensors shows names as the file spells them; :func:`check_loaded` says what matters of it.
    """
    from transformers.utils import logging as transformers_logging

    shown_bars, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(max(level, transformers_logging.ERROR))
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if shown_bars:
            transformers_logging.enable_progress_bar()
