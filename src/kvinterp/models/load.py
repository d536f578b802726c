"""Loading a model by name, and wrapping one the user already has."""

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
    loading,
    weights_of,
)
from kvinterp.models.gguf_file import as_given, header_of
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
    dtype: words.Dtype | str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: words.Attention | str | None = None,
    remote_code: str = "refuse",
) -> Adapter:
    """Loads a model, weights unprocessed, ready for every verb.

    Args:
        name: ``"zoo:mistral-mini"``, ``"real:smollm2-135m"``, a local transformers checkpoint folder, a GGUF file (whose weights
            are dequantised), or a hub id.
        kind: ``"native"``, ``"hooked"``, ``"bridge"``, or ``"transformer_lens"`` for whichever of the last two the installed
            TransformerLens has; the adapter's ``kind`` says which.
        dtype: float16, bfloat16, float32 or float64 (default: float16).
        device: Where it runs (default: CUDA where there is one, else the CPU).
        attention: For native only: ``"sdpa"``, ``"eager"`` (needed to patch patterns), or another implementation
            transformers knows (default: its own choice, SDPA where the architecture has it).
        remote_code: ``"refuse"`` (default) or ``"trust"``: whether code that comes with a checkpoint may run.

    Returns:
        The model behind kvinterp's face; ``.model`` is the thing itself.

    Raises:
        InputError: The name, kind, dtype, device or attention is not one there is.
        UnsupportedError: This kind cannot run this architecture; the message names the kinds that can.
    """
    wanted, place = check_loadable(kind, attention, dtype, device)
    check_known("remote_code", remote_code, ("refuse", "trust"))
    if not isinstance(name, str | Path):
        raise InputError(
            f"model {shown(name)} is a {type(name).__name__}: expected a name or a folder; use wrap() for a model."
        )
    called = str(name)
    folder = local_folder(called)
    kind = settled_kind(kind)
    first = " (importing TransformerLens first takes seconds)" * (
        kind != "native" and "transformer_lens" not in sys.modules
    )
    log.info("loading %s as %s in %s on %s%s", called, kind, str(wanted).removeprefix("torch."), place, first)
    adapter: Adapter
    if kind == "hooked":
        adapter = _hooked(called, folder, wanted, place, remote_code)
    else:
        eager = "eager" if kind == "bridge" else attention
        source, tokenizer = _transformers(called, folder, wanted, place, eager, remote_code)
        from kvinterp.models.bridge import BridgeAdapter, build_bridge
        from kvinterp.models.native import NativeAdapter

        with loading(called):
            if kind == "bridge":
                adapter = BridgeAdapter(build_bridge(source, called), called, tokenizer)
            else:
                adapter = NativeAdapter(source, called, tokenizer)
            log.debug("%s ends at %s", called, sorted(adapter.end_tokens))  # Which raises where its files say nonsense.
    if folder is not None and is_gguf(folder):
        adapter.stored = header_of(folder).stored
    check_runs(adapter)
    return adapter


def settled_kind(kind: str) -> str:
    """``hooked`` or ``bridge`` for ``transformer_lens``, by what the installed TransformerLens has; else the kind itself."""
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
    """The dtype and the device of a model that is to be loaded, where there are these, the kind and the attention.

    Raises:
        InputError: One is none there is, or the attention is none of this kind's.
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
    """Puts kvinterp's face on a model the user already has, without changing it.

    Args:
        model: A HookedTransformer, a TransformerBridge, a transformers decoder, an adapter (returned as it is), or a wrapper of
            one of these (DistributedDataParallel, a PeftModel with LoRA), which is run as what it holds where both give the same
            logits on a few tokens, bit for bit.
        tokenizer: Its tokenizer, if it does not carry one; an adapter has its own.
        name: A name for tables.

    Raises:
        InputError: It is none of these, or a wrapper that computes something else than what it holds.
    """
    if isinstance(model, Adapter):
        for what, given, own in (("tokenizer", tokenizer, model.tokenizer), ("name", name, model.facts.name)):
            if given is not own:
                check_unread(what, given, None, f"an adapter has its own; give kv.wrap(adapter.model, {what}=...)")
        return model
    if name is not None:
        check_text("name", name, "'my-model'")
    if tokenizer is not None and not callable(tokenizer):
        raise unexpected("tokenizer", tokenizer, "a tokenizer of transformers, which is called with a text")
    known = {base.__name__ for base in type(model).__mro__}
    if "HookedTransformer" in known:
        from kvinterp.models.hooked import HookedAdapter

        return HookedAdapter(model, name, tokenizer)
    if "TransformerBridge" in known:
        from kvinterp.models.bridge import BridgeAdapter

        _check_decoder(model.original_model, name)
        check_plain_weights(model.original_model, _called(model, name))
        return BridgeAdapter(model, name, tokenizer)
    if "PreTrainedModel" in known:
        from kvinterp.models.native import NativeAdapter

        _check_decoder(model, name)
        check_plain_weights(model, _called(model, name))
        made = NativeAdapter(model, name, tokenizer)
        if len({p.dtype for p in model.parameters() if p.is_floating_point()}) > 1:
            check_runs(made, given=True)  # Some architectures keep a few weights in float32 and run so.
        return made
    if isinstance(model, nn.Module) and "_orig_mod" in model._modules:
        raise InputError(
            f"cannot wrap what torch.compile returned, which runs no hooks: give the model that was compiled "
            f"(model._orig_mod, a {type(model._orig_mod).__name__})."
        )
    if isinstance(model, str):
        raise InputError(f"a name was given where a model is expected: give kv.load_model({model!r}).")
    where, held = _held_by(model)
    if held is None:
        raise InputError(
            f"cannot wrap a {type(model).__name__}: expected a HookedTransformer, a TransformerBridge or a transformers "
            "model; give one of these, or a name to load_model()."
        )
    adapter = wrap(held, tokenizer or getattr(model, "tokenizer", None), name)
    what, inside = type(model).__name__, f"the {type(held).__name__} that it holds"
    if fault := _unlike(model, adapter):
        raise InputError(
            f"cannot wrap a {what}: {fault} {inside}, so that this one alone would not be what you run; give model.{where} "
            f"to look at that without what the {what} adds."
        )
    log.info("a %s is run as %s (model.%s): on a few tokens both give the same logits, bit for bit", what, inside, where)
    return adapter


def _held_by(model: Any) -> tuple[str, nn.Module | None]:
    """The outermost model of a known kind within somebody's wrapper, and where it is kept there."""
    modules = isinstance(model, nn.Module)
    parts = (
        {"": model} if modules else {n: v for n, v in getattr(model, "__dict__", {}).items() if isinstance(v, nn.Module)}
    )
    for place, part in parts.items():
        for name, module in part.named_modules():
            known = {base.__name__ for base in type(module).__mro__}
            decodes = "PreTrainedModel" in known and module.get_output_embeddings() is not None
            if module is not model and (decodes or known & {"HookedTransformer", "TransformerBridge"}):
                return ".".join(filter(None, (place, name))), module
    return "", None


@torch.no_grad()
def _unlike(wrapper: Any, held: Adapter) -> str:
    """How a wrapper's logits differ from those of the model it holds, as the beginning of a sentence; empty where they do not."""
    tokens = torch.arange(2, 10, device=held.device)[None] % held.facts.vocabulary
    with hooks_suspended(held.model), held.left_as_found():
        own = _logits(held.model(tokens))
        try:
            made = _logits(wrapper(tokens))
        # Whatever the wrapper's own code raises.
        except Exception as error:
            return f"calling it with token ids raises {type(error).__name__} ({reason(error)}), which would be asked beside"
    if not isinstance(made, torch.Tensor) or made.shape != own.shape:
        return f"for {tokens.shape[1]} tokens it gives {getattr(made, 'shape', type(made).__name__)}, not logits of the shape of"
    most = (made.double() - own.double()).abs().max().item()
    return "" if torch.equal(made, own) else f"its logits differ by {most:.2g} from those of"


def _logits(output: Any) -> Any:
    first = output[0] if isinstance(output, tuple | list) else output
    return getattr(output, "logits", first)


def _called(model: Any, name: str | None) -> str:
    return name or type(model).__name__


def device_named(device: str | torch.device | None) -> torch.device:
    """The device a name stands for; CUDA where there is one, else the CPU, for None.

    Raises:
        InputError: There is no such device, or torch sees none here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise InputError(f"unknown device {shown(device)}: expected cpu, cuda or cuda:N.") from error
    if place.type == "meta":
        raise InputError("device 'meta' holds no numbers, so nothing can be computed there: use device='cpu' or 'cuda'.")
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {str(device)!r} was asked for, but torch sees no CUDA device here: use device='cpu'.")
    count = torch.cuda.device_count() if place.type == "cuda" else 1
    if (place.index or 0) >= count and place.type in ("cpu", "cuda"):
        raise InputError(
            f"device {str(device)!r} was asked for, but there are {count} of that kind here, counted from 0: use "
            f"device={place.type!r}."
        )
    if place.type not in ("cpu", "cuda"):
        try:
            torch.empty(1, device=place)
        # Each backend has an error of its own for not being there.
        except Exception as error:
            raise InputError(
                f"device {str(device)!r} was asked for, but torch cannot use it here: use device='cpu'."
            ) from error
    return place


def _check_decoder(model: Any, name: str | None) -> None:
    """Raises InputError for a transformers model that does not decode, or not as it is."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_MASKED_LM_MAPPING_NAMES

    config = model.config
    what = type(model).__name__ if name is None else f"model {name} ({type(model).__name__})"
    if getattr(config, "is_encoder_decoder", False):
        raise InputError(f"{what} is an encoder with a decoder, and kvinterp runs decoders alone: give a causal model.")
    masked = getattr(config, "model_type", "") in MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if masked and not getattr(config, "is_decoder", False):
        raise InputError(
            f"{what} is no decoder, its tokens see the ones after them (config.is_decoder is false): give a causal model."
        )
    if model.get_output_embeddings() is None:
        raise InputError(f"{what} has no language-model head and so no logits: give the model with one, ...ForCausalLM.")
    if model.training:
        raise InputError(f"{what} is in training mode, in which dropout changes what it computes: call model.eval() first.")


def _hooked(name: str, folder: Path | None, dtype: torch.dtype, device: torch.device, remote_code: str) -> Adapter:
    from kvinterp.models.convert import convert_checkpoint, hooked_class, lay_out_for_products
    from kvinterp.models.hooked import HookedAdapter

    model_class: Any = hooked_class()
    if folder is not None:
        # Its conversion is of three families that transformers has, whatever comes with the checkpoint.
        config = config_of(folder, name)
        tokenizer = _tokenizer(folder, name, "refuse")
        with loading(name):
            return HookedAdapter(convert_checkpoint(folder, name, config, dtype, device, tokenizer), name, tokenizer)
    official = check_hooked_code(name, remote_code)
    with loading(name):
        model = model_class.from_pretrained_no_processing(
            official, dtype=dtype, device=str(device), trust_remote_code=remote_code == "trust"
        )
    check_finite(model, name)
    with loading(name):
        return HookedAdapter(lay_out_for_products(model.eval()), name)


def _transformers(
    name: str, folder: Path | None, dtype: torch.dtype, device: torch.device, attention: str | None, remote_code: str
) -> tuple[nn.Module, Any]:
    """The model and its tokenizer."""
    options = {} if folder is not None else reach(name)
    source = folder or name
    config = config_of(source, name, remote_code, options=options)
    from kvinterp.models.native import drops_soft_cap, plain_experts

    with loading(name):
        try:
            settings = {"config": config, "dtype": dtype, "attn_implementation": attention}
            model, found = weights_of(source, remote_code=remote_code, **settings, **options)
        except (ImportError, ValueError, RuntimeError) as error:
            if getattr(config, "quantization_config", None):
                raise UnsupportedError(
                    f"model {shown(name)} is quantised ({reason(error)}): give the checkpoint that is not quantised, or "
                    "install what it needs."
                ) from error
            if attention is not None and (isinstance(error, ImportError) or "attention implementation" in str(error)):
                raise UnsupportedError(
                    f"attention {attention!r} cannot be used for {shown(name)}: {reason(error)}; leave attention out."
                ) from error
            if isinstance(error, ImportError):
                raise UnsupportedError(
                    f"model {shown(name)} needs a package that is not installed ({reason(error)}): install it."
                ) from error
            raise
    _check_decoder(model, name)
    check_loaded(found, name, config)
    check_plain_weights(model, name)
    check_finite(model, name, folder or cached_folder(name))
    plain_experts(model, dtype)
    with loading(name):
        placed: Any = model.to(device)
    if drops_soft_cap(placed.eval()):
        used = placed.config._attn_implementation
        if attention is not None or used == "eager":
            raise UnsupportedError(
                f"attention {used!r} of this transformers leaves out the soft cap of {type(placed).__name__}, another model's "
                "numbers: leave attention out, or use attention='eager'."
            )
        log.warning("%s: %s leaves out the soft cap of its scores in this transformers: eager is run", name, used)
        placed.set_attn_implementation("eager")
    return placed.eval().requires_grad_(False), _tokenizer(source, name, remote_code, options)


def _tokenizer(source: Path | str, name: str, remote_code: str, options: Mapping[str, Any] | None = None) -> Any:
    """The checkpoint's tokenizer, or None where it has none (token ids still work)."""
    if isinstance(source, Path) and is_gguf(source):
        has_one = header_of(source).tokenizer
    else:
        has_one = not isinstance(source, Path) or any(source.glob("tokenizer*")) or any(source.glob("*.model"))
    if not has_one:
        return None
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    with loading(name, "its tokenizer"), as_given(source) as (place, gguf):
        if gguf:
            # The class that AutoTokenizer ends with, having read the whole header once more for it.
            return PreTrainedTokenizerFast.from_pretrained(place, gguf_file=gguf["gguf_file"])
        return AutoTokenizer.from_pretrained(place, trust_remote_code=remote_code == "trust", **(options or {}))
