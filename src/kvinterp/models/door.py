"""The door for every model: no code of a checkpoint runs unasked, any error of a library becomes
one sentence, and a model that passes is whole, finite, in a floating dtype and able to run.
"""

from __future__ import annotations

import contextlib
import io
import logging
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvinterp.errors import InputError, KvinterpError, UnsupportedError, reason, shown
from kvinterp.models.gguf_file import header_of, pretrained_arguments
from kvinterp.models.naming import is_gguf, meant, reach

log = logging.getLogger("kvinterp")


# Code of others -----------------------------------------------------------------------------------


def config_of(
    source: Path | str,
    name: str,
    remote_code: str = "refuse",
    options: Mapping[str, Any] | None = None,
) -> Any:
    """Reads the transformers config of a checkpoint.

    Args:
        source: A folder, a GGUF file, or a hub id that :func:`reach` has found.
        name: The user's name for it, for messages.
        remote_code: ``"trust"`` lets code that comes with the checkpoint run.
        options: The options that :func:`reach` returned for a hub id.

    Raises:
        InputError: It cannot be used; or it needs code of its own and that is refused.
    """
    from transformers import AutoConfig, PreTrainedConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    with loading(name):
        if isinstance(source, Path) and is_gguf(source):
            return _config_of_gguf(source, name)
        entries, _ = PreTrainedConfig.get_config_dict(source, **(options or {}))
        if entries.get("auto_map") and remote_code != "trust":
            if entries.get("model_type") not in CONFIG_MAPPING:
                raise code_refused(name)
            log.info(
                "%s comes with code of its own, which is not run: transformers' own class is used",
                shown(name),
            )
        return AutoConfig.from_pretrained(
            source, trust_remote_code=remote_code == "trust", **(options or {})
        )


def _config_of_gguf(file: Path, name: str) -> Any:
    """Lets transformers make a config of a GGUF file's header."""
    from transformers import AutoConfig
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    header = header_of(file)
    try:
        with pretrained_arguments(file) as (path, gguf):
            config = AutoConfig.from_pretrained(path, **gguf)
    except ValueError as error:
        if "architecture" not in str(error):
            raise
        raise UnsupportedError(
            f"{shown(name)} is a GGUF file of architecture {shown(header.architecture)}, of which transformers makes no model: "
            "give a transformers checkpoint folder of it."
        ) from error
    # transformers reads the scaling of RoPE for some architectures only.
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    if header.scaled and rope.get("rope_type", "default") == "default":
        raise UnsupportedError(
            f"{shown(name)} scales its rotary embeddings ({header.scaled}), which transformers does not read from a GGUF file: "
            "it would compute something else; give a transformers checkpoint folder of it."
        )
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(config.model_type, "unknown")]
    return config


def code_refused(name: str) -> InputError:
    """The error for a checkpoint that cannot be loaded without running code that comes with it."""
    return InputError(
        f"model {shown(name)} needs code that comes with it (its config has auto_map), and remote_code='refuse' does not "
        "run that: read the code, and where you trust it use kv.load_model(..., kind='native', remote_code='trust') in Python, "
        "or kvinterp audit --remote-code."
    )


def check_hooked_code(name: str, remote_code: str) -> str:
    """Raises for the families for which TransformerLens runs a repository's code without asking.

    Args:
        name: TransformerLens' name of the model, or an alias.
        remote_code: ``"trust"`` lets the code run.

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
        raise InputError(
            f"model {shown(name)} is none that TransformerLens' HookedTransformer knows: {meant(name)}use kind='bridge' or "
            "kind='native' for a hub id, or give a checkpoint folder or zoo:NAME."
        ) from error
    if remote_code == "trust":
        return official
    runs_code = official.startswith(tuple(theirs.NEED_REMOTE_CODE_MODELS))
    if not runs_code:
        reach(official)
        with loading(name):
            config = theirs.get_pretrained_model_config(official, trust_remote_code=False)
        # For other families TransformerLens sets it when it loads the tokenizer.
        runs_code = getattr(config, "trust_remote_code", False)
    if runs_code:
        raise InputError(
            f"model {shown(name)}: TransformerLens loads it with trust_remote_code=True, which runs code of its repository, and "
            "remote_code='refuse' forbids that: use kind='bridge' or kind='native', which need none where transformers has the "
            "architecture, or, where you trust the code, kv.load_model(..., remote_code='trust') in Python."
        )
    return official


# Loading ------------------------------------------------------------------------------------------


def load_weights(
    source: Path | str, model_class: Any = None, remote_code: str = "refuse", **options: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Loads the model of a checkpoint, with transformers' ``output_loading_info`` for
    :func:`check_loaded`.

    Args:
        source: A folder, a GGUF file, whose weights are dequantised, or a hub id that :func:`reach`
            has found.
        model_class: The class that loads it; default: ``AutoModelForCausalLM``.
        remote_code: ``"trust"`` lets code that comes with the checkpoint run.
        options: Other arguments of ``from_pretrained``, such as config and dtype.
    """
    from transformers import AutoModelForCausalLM

    loader: Any = model_class or AutoModelForCausalLM
    with pretrained_arguments(source) as (path, gguf), contextlib.ExitStack() as stack:
        if gguf:
            from transformers import GgufConfig

            options |= {**gguf, "quantization_config": GgufConfig(dequantize=True)}
            # transformers draws a progress bar there that no option switches off.
            stack.enter_context(contextlib.redirect_stderr(io.StringIO()))
        model, report = loader.from_pretrained(
            path,
            use_safetensors=True,
            trust_remote_code=remote_code == "trust",
            output_loading_info=True,
            # check_loaded reports them, with the tensor's name.
            ignore_mismatched_sizes=True,
            **options,
        )
    return model, report


@contextlib.contextmanager
def loading(name: str, part: str = "") -> Iterator[None]:
    """Turns whatever a library raises while it loads a model into one sentence.

    Args:
        name: The user's name for the model.
        part: The part that is loaded, where that is not the whole model.

    Raises:
        InputError: In the place of any error that is not kvinterp's own.
    """
    try:
        with quiet_transformers():
            yield
    except (KvinterpError, KeyboardInterrupt, GeneratorExit):
        raise
    except (MemoryError, torch.OutOfMemoryError) as error:
        raise too_large(name, error) from error
    # BaseException: a panic in Rust (tokenizers, safetensors) is no Exception.
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
    """Turns a failing import of TransformerLens into one sentence that blames no model.

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
    """The error for a model that does not fit into memory."""
    return InputError(
        f"model {shown(name)} does not fit into memory ({reason(error)}): use a narrower dtype, another device or a "
        "smaller model."
    )


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Switches off transformers' progress bars and reports, while the context lasts.

    transformers' report of missing tensors shows names unescaped; :func:`check_loaded` says what
    matters of it.
    """
    from transformers.utils import logging as transformers_logging

    bars, level = (
        transformers_logging.is_progress_bar_enabled(),
        transformers_logging.get_verbosity(),
    )
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity(max(level, transformers_logging.ERROR))
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
        if bars:
            transformers_logging.enable_progress_bar()


# What was loaded ----------------------------------------------------------------------------------

_UNUSED = re.compile(
    # Buffers that older versions saved, and that are computed.
    r"(^|\.)(attn|attention|self_attn)(\.attention)?\.(bias|masked_bias)$"
    r"|(inv_freq|(cos|sin)_cached|freqs_cis|position_ids|causal_mask|alibi|embed_positions\.(weights|_float_tensor))$"
    # Parts that a text decoder does without: several tokens at once, images and sound, other heads.
    r"|(^|[._])(mtp|nextn|eagle|vision|visual|image|img|audio|speech|video|talker|token2wav|code2wav|mm|multi_modal)(?=[._\d]|$)"
    r"|(^|\.)(v_head|value_head|reward_head|score|classifier|qa_outputs|pooler|seq_relationship)\."
)
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def _may_be_unused(tensor: str, config: Any) -> bool:
    """Whether a whole checkpoint may hold a tensor that its text decoder has no place for."""
    text = None if config is None else config.get_text_config(decoder=True)
    layers, extra = (
        getattr(text, key, None) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers")
    )
    block = _BLOCK.search(tensor)
    return bool(_UNUSED.search(tensor)) or (
        block is not None and layers <= int(block[1]) < layers + extra
    )


def check_loaded(report: Mapping[str, Any], name: str, config: Any = None) -> None:
    """Raises where weights of the model were not in the checkpoint, or weights of the checkpoint
    are not in the model.

    transformers makes random weights of the former and leaves the latter out.

    Args:
        report: transformers' ``output_loading_info``, which omits tied and legitimately absent
            tensors already.
        name: The model's name, for the message.
        config: Its config.

    Raises:
        InputError: A tensor is missing, is left over, has another shape or could not be converted.
    """
    missing, unexpected = (
        sorted(map(str, report[key])) for key in ("missing_keys", "unexpected_keys")
    )
    if missing:
        instead = f", and has {_few(unexpected)} instead" if unexpected else ""
        raise InputError(
            f"checkpoint {shown(name)} lacks weights that its config needs ({_few(missing)}{instead}): random ones would "
            "have taken their place; give a whole checkpoint."
        )
    for what in ("mismatched_keys", "error_msgs", "conversion_errors"):
        wrong = sorted(
            f"{key[0]}: {tuple(key[1])} where {tuple(key[2])} is expected"
            if isinstance(key, tuple) and len(key) == 3
            else str(key)
            for key in report.get(what) or ()
        )
        if wrong:
            raise InputError(
                f"checkpoint {shown(name)} has weights that do not fit its config ({_few(wrong)}): give the config that "
                "belongs to these weights."
            )
    if left_over := [tensor for tensor in unexpected if not _may_be_unused(tensor, config)]:
        raise InputError(
            f"checkpoint {shown(name)} holds weights that its config has no place for ({_few(left_over)}): the model would run "
            "without them; give the config that belongs to these weights."
        )


def _few(names: list[str]) -> str:
    rest = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name if len(name) <= 80 else f"{name[:77]}..." for name in names[:3]) + rest


def check_plain_weights(model: nn.Module, name: str) -> None:
    """Raises for weights that cannot be computed with as they are.

    Raises:
        InputError: Weights are on the meta device, which holds no numbers, or there are none.
        UnsupportedError: Weights are quantised, or split among processes (FSDP2, tensor
            parallelism).
    """
    parameters = list(model.parameters())
    if any(type(parameter.data).__name__ == "DTensor" for parameter in parameters):
        raise UnsupportedError(
            f"model {shown(name)} holds its weights as pieces that several processes share (DTensor), which only its own hooks "
            "put together: give the model as it was before fully_shard() or a tensor-parallel plan."
        )
    if not parameters:
        raise InputError(
            f"model {shown(name)} has no weights: expected a transformers decoder with its weights."
        )
    quantised = getattr(model, "is_quantized", False) or any(
        type(module).__module__.startswith(("torch.ao.nn.quantized", "bitsandbytes"))
        for module in model.modules()
    )
    if quantised or not any(parameter.is_floating_point() for parameter in parameters):
        raise UnsupportedError(
            f"model {shown(name)} is quantised, and kvinterp compares computation in one floating dtype: give the "
            "checkpoint that is not quantised, or dequantise it (model.dequantize())."
        )
    if any(parameter.is_meta for parameter in parameters):
        raise InputError(
            f"model {shown(name)} has weights on the meta device, which holds no numbers: load them "
            "first (what accelerate offloads is loaded by a device_map of 'cpu' or 'cuda' alone)."
        )


def check_finite(model: nn.Module, name: str, folder: Path | None = None) -> None:
    """Raises for weights that are NaN, or Inf in the checkpoint itself.

    Inf that is not in the checkpoint came from a cast to a dtype with a narrower range; a run says
    so, with the remedy.

    Args:
        model: The model, loaded.
        name: Its name, for the message.
        folder: The folder of its checkpoint, if that is known.

    Raises:
        InputError: Naming the tensor.
    """
    from safetensors import safe_open

    kinds = {
        tensor: kind for tensor, values in model.named_parameters() if (kind := _not_finite(values))
    }
    broken = next((tensor for tensor, kind in kinds.items() if kind == "NaN"), "")
    for file in (
        sorted(folder.glob("*.safetensors")) if kinds and not broken and folder is not None else ()
    ):
        with safe_open(file, framework="pt") as stored:
            names = stored.keys()
            broken = broken or next(
                (tensor for tensor in names if _not_finite(stored.get_tensor(tensor))), ""
            )
    if broken:
        raise InputError(
            f"checkpoint {shown(name)} holds {kinds.get(broken, 'Inf')} in {broken}: no dtype helps against that; give weights "
            "that are finite, or copy or download the checkpoint again."
        )


def _not_finite(tensor: torch.Tensor) -> str:
    """``"NaN"`` or ``"Inf"`` where a tensor has any, else empty."""
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return ""
    # The smallest and the largest are NaN where any element is, and need no copy of the tensor.
    ends = torch.stack(
        torch.aminmax(
            tensor.detach().to(torch.float32) if tensor.element_size() == 1 else tensor.detach()
        )
    )
    return "NaN" if bool(ends.isnan().any()) else "Inf" if bool(ends.isinf().any()) else ""


@torch.no_grad()
def check_runs(adapter: Any) -> None:
    """Runs two tokens once, so that a model that cannot run at all gives one sentence here and no
    traceback later.

    Raises:
        InputError: The forward failed, or its logits are not those of the vocabulary.
    """
    name = adapter.facts.name
    tokens = torch.tensor([[0, min(1, adapter.facts.vocabulary - 1)]], device=adapter.device)
    try:
        with adapter.own_state([]):
            logits = adapter.forward(tokens)
    except KvinterpError:
        raise
    except torch.OutOfMemoryError as error:
        raise too_large(name, error) from error
    except Exception as error:
        # An operation that the device lacks in this dtype may exist in another; a run in this one
        # raises the error.
        if isinstance(error, NotImplementedError) or "not implemented for" in str(error):
            return
        raise InputError(
            f"model {shown(name)} ({adapter.facts.architecture}) fails on two tokens ({reason(error)}): its config and its "
            "weights do not fit each other; mend the config, or give another checkpoint."
        ) from error
    if logits.dim() != 3 or logits.shape[:2] != (1, 2):
        raise InputError(
            f"model {shown(name)} gives logits of shape {tuple(logits.shape)} for two tokens: expected (1, 2, vocabulary); "
            "give a causal model."
        )
