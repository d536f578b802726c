"""Loads a model by name, and wraps a model that the user already has."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvinterp.common import words
from kvinterp.common.checks import check_known, check_text, check_unread
from kvinterp.errors import InputError, UnsupportedError, reason, shown, unexpected
from kvinterp.models.adapter import Adapter, dtype_named
from kvinterp.models.door import (
    check_finite,
    check_hooked_code,
    check_loaded,
    check_plain_weights,
    check_runs,
    config_of,
    load_weights,
    loading,
)
from kvinterp.models.gguf_file import header_of, pretrained_arguments, reading_once
from kvinterp.models.hooks import hooks_suspended
from kvinterp.models.naming import cached_folder, is_gguf, local_folder, reach

KINDS = {
    "native": "a plain transformers model with module hooks: the kernels production runs",
    "transformer_lens": "TransformerLens's own: hooked where the installed version has HookedTransformer, bridge from 4.0 on",
    "hooked": "TransformerLens HookedTransformer: every activation has a hook; TransformerLens 3 only",
    "bridge": "TransformerLens TransformerBridge: the same hooks over a transformers model",
}
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")

log = logging.getLogger("kvinterp")


def load_model(
    name: str | Path,
    kind: words.Kind | str = "native",
    dtype: words.Dtype | str | torch.dtype | None = "float16",
    device: str | torch.device | None = None,
    attention: words.Attention | str | None = None,
    remote_code: str = "refuse",
) -> Adapter:
    """Loads a model, weights unprocessed, ready for every verb.

    Args:
        name: ``"zoo:mistral-mini"``, ``"real:smollm2-135m"``, a local transformers checkpoint
            folder, a GGUF file (whose weights are dequantised), or a hub id.
        kind: What runs the model: native (transformers), or transformer_lens (hooked or bridge).

            Of these two ``"transformer_lens"`` takes whichever the installed TransformerLens has;
            the adapter's ``kind`` says which.
        dtype: float16, bfloat16, float32 or float64 (fp16, bf16, fp32, fp64).
        device: cpu, cuda or cuda:N. Default: CUDA if there is one.
        attention: Attention of a native model: sdpa, eager, ... Default: the model's own choice.

            Eager is needed to patch patterns. The model's own choice is SDPA where the architecture
            has it.
        remote_code: ``"refuse"`` (default) or ``"trust"``: whether code that comes with a
            checkpoint may run.

    Returns:
        The model as an adapter; ``.model`` is the model itself.

    Raises:
        InputError: The name, kind, dtype, device or attention does not exist.
        UnsupportedError: This kind cannot run this architecture; the message names the kinds that
            can.
    """
    dtype, device = check_loadable(kind, attention, dtype, device)
    check_known("remote_code", remote_code, ("refuse", "trust"))
    if not isinstance(name, str | Path):
        raise InputError(
            f"model {shown(name)} is a {type(name).__name__}: expected a name or a folder; use wrap() for a model."
        )
    name = str(name)
    folder = local_folder(name)
    kind = resolved_kind(kind)
    first = " (importing TransformerLens first takes seconds)" * (
        kind != "native" and "transformer_lens" not in sys.modules
    )
    log.info(
        "loading %s as %s in %s on %s%s",
        name,
        kind,
        str(dtype).removeprefix("torch."),
        device,
        first,
    )
    adapter: Adapter
    if kind == "hooked":
        with reading_once(folder):
            adapter = _load_hooked(name, folder, dtype, device, remote_code)
    else:
        eager = "eager" if kind == "bridge" else attention
        with reading_once(folder):
            source, tokenizer = _load_transformers(name, folder, dtype, device, eager, remote_code)
        with loading(name):
            if kind == "bridge":
                from kvinterp.models.bridge import BridgeAdapter, build_bridge

                adapter = BridgeAdapter(build_bridge(source, name), name, tokenizer)
            else:
                from kvinterp.models.native import NativeAdapter

                adapter = NativeAdapter(source, name, tokenizer)
            # end_tokens raises here, within loading(), where the generation config is nonsense.
            log.debug("%s ends at %s", name, sorted(adapter.end_tokens))
    if folder is not None and is_gguf(folder):
        adapter.stored = header_of(folder).stored
    check_runs(adapter)
    return adapter


def resolved_kind(kind: str) -> str:
    """Resolves ``transformer_lens`` to ``hooked`` or ``bridge``, whichever the installed
    TransformerLens has.
    """
    if kind != "transformer_lens":
        return kind
    from kvinterp.models.convert import hooked_class

    try:
        hooked_class()
    except UnsupportedError:
        return "bridge"
    return "hooked"


def check_loadable(
    kind: str = "native",
    attention: str | None = None,
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
) -> tuple[torch.dtype, torch.device]:
    """Checks the options of :func:`load_model` and returns the dtype and the device that they stand
    for.

    Raises:
        InputError: One of them does not exist, or the attention was given for another kind than
            native.
    """
    check_known("kind", kind, KINDS)
    if attention is not None and kind != "native":
        raise InputError(
            f"attention={attention!r} was given for kind {kind!r}, which has its own attention: leave it out, "
            "or use kind='native'."
        )
    if attention is not None:
        check_known("attention implementation", attention, ATTENTION)
    return dtype_named(dtype) or torch.float16, device_named(device)


def wrap(model: Any, tokenizer: Any = None, name: str | None = None) -> Adapter:
    """Makes an adapter of a model that the user already has, without changing the model.

    Args:
        model: A HookedTransformer, a TransformerBridge, a transformers decoder, an adapter
            (returned as it is), or a wrapper of one of these (DistributedDataParallel, a PeftModel
            with LoRA). A wrapper's inner model is used where both give the same logits on a few
            tokens, bit for bit.
        tokenizer: Its tokenizer, if it has none with it; an adapter has its own. A model that was
            loaded or wrapped with one before is found to have that one.
        name: A name for tables.

    Raises:
        InputError: It is none of these, or a wrapper that computes something else than its inner
            model.
    """
    if isinstance(model, Adapter):
        for option, value, current in (
            ("tokenizer", tokenizer, model.tokenizer),
            ("name", name, model.facts.name),
        ):
            if value is not current:
                check_unread(
                    option,
                    value,
                    None,
                    f"an adapter has its own; give kv.wrap(adapter.model, {option}=...)",
                )
        return model
    if name is not None:
        check_text("name", name, "'my-model'")
    if tokenizer is not None and not callable(tokenizer):
        raise unexpected(
            "tokenizer", tokenizer, "a tokenizer of transformers, which is called with a text"
        )
    classes = _class_names(model)
    if "HookedTransformer" in classes:
        from kvinterp.models.hooked import HookedAdapter

        return HookedAdapter(model, name, tokenizer)
    if classes & {"TransformerBridge", "PreTrainedModel"}:
        decoder = model if "PreTrainedModel" in classes else model.original_model
        _check_decoder(decoder, name)
        check_plain_weights(decoder, name or type(model).__name__)
        if decoder is not model:
            from kvinterp.models.bridge import BridgeAdapter

            return BridgeAdapter(model, name, tokenizer)
        from kvinterp.models.native import NativeAdapter

        native = NativeAdapter(model, name, tokenizer)
        # Architectures that keep a few weights in float32 run so; other mixtures may not.
        if len({p.dtype for p in model.parameters() if p.is_floating_point()}) > 1:
            with hooks_suspended(model):
                check_runs(native)
        return native
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        raise InputError(
            f"cannot wrap what torch.compile returned, which runs no hooks: give the model that was compiled "
            f"(model._orig_mod, a {type(model._orig_mod).__name__})."
        )
    if isinstance(model, str):
        raise InputError(
            f"a name was given where a model is expected: give kv.load_model({model!r})."
        )
    path, inner = _inner_model(model)
    if inner is None:
        raise InputError(
            f"cannot wrap a {type(model).__name__}: expected a HookedTransformer, a TransformerBridge or a transformers "
            "model; give one of these, or a name to load_model()."
        )
    adapter = wrap(inner, tokenizer or getattr(model, "tokenizer", None), name)
    what, inside = type(model).__name__, f"the {type(inner).__name__} that it holds"
    if difference := _difference(model, adapter):
        raise InputError(
            f"cannot wrap a {what}: {difference} {inside}, so that this one alone would not be what you run; give "
            f"model.{path} to look at that without what the {what} adds."
        )
    log.info(
        "a %s is run as %s (model.%s): on a few tokens both give the same logits, bit for bit",
        what,
        inside,
        path,
    )
    return adapter


def _class_names(model: Any) -> set[str]:
    """The names of a model's class and its bases, which need no import of the library that defines
    them.
    """
    return {base.__name__ for base in type(model).__mro__}


def _inner_model(model: Any) -> tuple[str, nn.Module | None]:
    """Finds the outermost model of a known kind within somebody's wrapper, and the path of
    attributes to it.
    """
    parts = {"": model} if isinstance(model, nn.Module) else dict(getattr(model, "__dict__", {}))
    for attribute, part in parts.items():
        for name, module in part.named_modules() if isinstance(part, nn.Module) else ():
            classes = _class_names(module)
            decodes = "PreTrainedModel" in classes and module.get_output_embeddings() is not None
            if module is not model and (
                decodes or classes & {"HookedTransformer", "TransformerBridge"}
            ):
                return ".".join(filter(None, (attribute, name))), module
    return "", None


@torch.no_grad()
def _difference(wrapper: Any, inner: Adapter) -> str:
    """Says how a wrapper's logits differ from its inner model's, as the beginning of a sentence;
    empty where they do not.
    """
    tokens = torch.arange(2, 10, device=inner.device)[None] % inner.facts.vocabulary
    with hooks_suspended(inner.model), inner.left_as_found():
        expected = _logits(inner.model(tokens))
        try:
            logits = _logits(wrapper(tokens))
        # Whatever the wrapper's own code raises.
        except Exception as error:
            return f"calling it with token ids raises {type(error).__name__} ({reason(error)}), which would be asked beside"
    if not isinstance(logits, torch.Tensor) or logits.shape != expected.shape:
        shape = getattr(logits, "shape", type(logits).__name__)
        return f"for {tokens.shape[1]} tokens it gives {shape}, not logits of the shape of"
    largest = (logits.double() - expected.double()).abs().max().item()
    return (
        "" if torch.equal(logits, expected) else f"its logits differ by {largest:.2g} from those of"
    )


def _logits(output: Any) -> Any:
    first = output[0] if isinstance(output, tuple | list) else output
    return getattr(output, "logits", first)


def device_named(device: str | torch.device | None) -> torch.device:
    """The device that a name stands for; for None, CUDA where there is one, else the CPU.

    Raises:
        InputError: There is no such device, or torch sees none here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(
            f"unknown device {shown(device)}: expected cpu, cuda or cuda:N."
        ) from error
    if chosen.type == "meta":
        raise InputError(
            "device 'meta' holds no numbers, so nothing can be computed there: use device='cpu' or 'cuda'."
        )
    try:
        torch.empty(1, device=chosen)
    # Each backend has an error of its own for not being there.
    except Exception as error:
        raise InputError(
            f"device {str(device)!r} was asked for, but torch cannot use it here ({reason(error)}): use device='cpu'."
        ) from error
    return chosen


def _check_decoder(model: Any, name: str | None) -> None:
    """Raises InputError for a transformers model that is no decoder, or is in training mode."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = model.config
    what = type(model).__name__ if name is None else f"model {name} ({type(model).__name__})"
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(
            f"{what} is an encoder with a decoder, and kvinterp runs decoders alone: give a causal model."
        )
    masked = getattr(config, "model_type", "") in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if masked and not getattr(config, "is_decoder", False):
        raise InputError(
            f"{what} is no decoder, its tokens see the ones after them (config.is_decoder is false): give a causal model."
        )
    if model.get_output_embeddings() is None:
        raise InputError(
            f"{what} has no language-model head and so no logits: give the model with one, ...ForCausalLM."
        )
    if model.training:
        raise InputError(
            f"{what} is in training mode, in which dropout changes what it computes: call model.eval() first."
        )


def _load_hooked(
    name: str, folder: Path | None, dtype: torch.dtype, device: torch.device, remote_code: str
) -> Adapter:
    from kvinterp.models.convert import convert_checkpoint, hooked_class, lay_out_for_products
    from kvinterp.models.hooked import HookedAdapter

    model_class: Any = hooked_class()
    if folder is not None:
        # Only families that transformers has can be converted, so code that comes with the
        # checkpoint is not needed.
        config = config_of(folder, name)
        tokenizer = _load_tokenizer(folder, name, "refuse")
        with loading(name):
            return HookedAdapter(
                convert_checkpoint(folder, name, config, dtype, device, tokenizer), name, tokenizer
            )
    official = check_hooked_code(name, remote_code)
    with loading(name):
        model = model_class.from_pretrained_no_processing(
            official, dtype=dtype, device=str(device), trust_remote_code=remote_code == "trust"
        )
    check_finite(model, name)
    with loading(name):
        return HookedAdapter(lay_out_for_products(model.eval()), name)


def _load_transformers(
    name: str,
    folder: Path | None,
    dtype: torch.dtype,
    device: torch.device,
    attention: str | None,
    remote_code: str,
) -> tuple[nn.Module, Any]:
    """Loads a transformers model and its tokenizer."""
    options = {} if folder is not None else reach(name)
    source = folder or name
    config = config_of(source, name, remote_code, options=options)
    from kvinterp.models.native import drops_soft_cap, plain_experts

    with loading(name):
        try:
            settings = {"config": config, "dtype": dtype, "attn_implementation": attention}
            model, report = load_weights(source, remote_code=remote_code, **settings, **options)
        except (ImportError, ValueError, RuntimeError) as error:
            if getattr(config, "quantization_config", None):
                raise UnsupportedError(
                    f"model {shown(name)} is quantised ({reason(error)}): give the checkpoint that is not quantised, or "
                    "install what it needs."
                ) from error
            if attention is not None and (
                isinstance(error, ImportError) or "attention implementation" in str(error)
            ):
                raise UnsupportedError(
                    f"attention {attention!r} cannot be used for {shown(name)}: {reason(error)}; leave attention out."
                ) from error
            if isinstance(error, ImportError):
                raise UnsupportedError(
                    f"model {shown(name)} needs a package that is not installed ({reason(error)}): install it."
                ) from error
            raise
    _check_decoder(model, name)
    check_loaded(report, name, config)
    check_plain_weights(model, name)
    check_finite(model, name, folder or cached_folder(name))
    plain_experts(model, dtype)
    with loading(name):
        placed: Any = model.to(device)
    if drops_soft_cap(placed.eval()):
        default = placed.config._attn_implementation
        if attention is not None or default == "eager":
            raise UnsupportedError(
                f"attention {default!r} of this transformers leaves out the soft cap of {type(placed).__name__}, another "
                "model's numbers: leave attention out, or use attention='eager'."
            )
        log.warning(
            "%s: %s leaves out the soft cap of its scores in this transformers: eager is run",
            name,
            default,
        )
        placed.set_attn_implementation("eager")
    return placed.eval().requires_grad_(False), _load_tokenizer(source, name, remote_code, options)


def _load_tokenizer(
    source: Path | str, name: str, remote_code: str, options: Mapping[str, Any] | None = None
) -> Any:
    """Loads the checkpoint's tokenizer; None where it has none (token ids still work)."""
    if isinstance(source, Path) and is_gguf(source):
        has_one = header_of(source).tokenizer
    else:
        has_one = (
            not isinstance(source, Path)
            or any(source.glob("tokenizer*"))
            or any(source.glob("*.model"))
        )
    if not has_one:
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with loading(name, "its tokenizer"), pretrained_arguments(source) as (path, gguf):
        if gguf:
            # AutoTokenizer would read the whole header once more, and use this class.
            return PreTrainedTokenizerFast.from_pretrained(path, gguf_file=gguf["gguf_file"])
        return AutoTokenizer.from_pretrained(
            path, trust_remote_code=remote_code == "trust", **(options or {})
        )
