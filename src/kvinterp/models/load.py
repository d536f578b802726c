"""Loading a model by name, and wrapping one the user already has."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvinterp.errors import InputError, UnsupportedError, unknown
from kvinterp.models import zoo
from kvinterp.models.adapter import Adapter, dtype_named

__all__ = ["ATTENTION", "KINDS", "brings_code", "device_named", "load_model", "not_found", "wrap"]

KINDS = {
    "hooked": "TransformerLens HookedTransformer: every activation has a hook; TransformerLens 3 only",
    "bridge": "TransformerLens TransformerBridge: the same hooks over a transformers model",
    "native": "a plain transformers model with module hooks: the kernels production runs",
}
ATTENTION = ("sdpa", "eager", "flash_attention_2", "flash_attention_3", "flex_attention")

log = logging.getLogger("kvinterp")


def load_model(
    name: str | Path,
    kind: str = "hooked",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = None,
    attention: str | None = None,
    remote_code: str = "refuse",
) -> Adapter:
    """Loads a model, weights unprocessed, ready for every verb.

    Args:
        name: ``"zoo:mistral-mini"``, a local transformers checkpoint folder, or a hub id.
        kind: ``"hooked"``, ``"bridge"`` or ``"native"``.
        dtype: float16 unless said otherwise; float16, bfloat16, float32 or float64.
        device: CUDA where there is one, else the CPU, unless said otherwise.
        attention: For native only: ``"sdpa"``, ``"eager"`` (needed to patch patterns), or another implementation
            transformers knows; its own choice (SDPA where the architecture has it) unless said.
        remote_code: ``"refuse"`` (default) or ``"trust"``: whether code that comes with a checkpoint may run.

    Returns:
        The model behind kvinterp's face; ``.model`` is the thing itself.

    Raises:
        InputError: The name, kind, dtype, device or attention is not one there is.
        UnsupportedError: This kind cannot run this architecture; the message names the kinds that can.
    """
    if kind not in KINDS:
        raise unknown("kind", kind, KINDS)
    if attention is not None and kind != "native":
        raise InputError(
            f"attention={attention!r} was given for kind {kind!r}, which has its own attention: leave it out, "
            "or use kind='native'."
        )
    if attention is not None and attention not in ATTENTION:
        raise unknown("attention implementation", attention, ATTENTION)
    if remote_code not in ("refuse", "trust"):
        raise unknown("remote_code", remote_code, ("refuse", "trust"))
    wanted = dtype_named(dtype) or torch.float16
    place = device_named(device)
    shown = str(name)
    folder = _folder(shown)
    log.info("loading %s as %s in %s on %s", shown, kind, str(wanted).removeprefix("torch."), place)
    if kind == "hooked":
        return _hooked(shown, folder, wanted, place)
    source = _transformers(shown, folder, wanted, place, "eager" if kind == "bridge" else attention, remote_code)
    tokenizer = _tokenizer(folder or shown, remote_code)
    if kind == "bridge":
        from kvinterp.models.bridge import BridgeAdapter, build_bridge

        return BridgeAdapter(build_bridge(source, shown), shown, tokenizer)
    from kvinterp.models.native import NativeAdapter

    return NativeAdapter(source, shown, tokenizer)


def wrap(model: Any, tokenizer: Any = None, name: str | None = None) -> Adapter:
    """Puts kvinterp's face on a model the user already has, without changing it.

    Args:
        model: A HookedTransformer, a TransformerBridge, a transformers decoder, or an adapter (returned as it is).
        tokenizer: Its tokenizer, if it does not carry one.
        name: A name for tables.

    Raises:
        InputError: It is none of these.
    """
    if isinstance(model, Adapter):
        return model
    known = {base.__name__ for base in type(model).__mro__}
    if "HookedTransformer" in known:
        from kvinterp.models.hooked import HookedAdapter

        return HookedAdapter(model, name, tokenizer)
    if "TransformerBridge" in known:
        from kvinterp.models.bridge import BridgeAdapter

        _check_decoder(model.original_model, name)
        return BridgeAdapter(model, name, tokenizer)
    if "PreTrainedModel" in known:
        from kvinterp.models.native import NativeAdapter

        _check_decoder(model, name)
        return NativeAdapter(model, name, tokenizer)
    raise InputError(
        f"cannot wrap a {type(model).__name__}: expected a HookedTransformer, a TransformerBridge or a transformers "
        "model; give one of these, or a name to load_model()."
    )


def device_named(device: str | torch.device | None) -> torch.device:
    """The device a name stands for; CUDA where there is one, else the CPU, for None.

    Raises:
        InputError: There is no such device, or torch sees none here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
    except RuntimeError as error:
        raise InputError(f"unknown device {str(device)!r}: expected cpu, cuda or cuda:N.") from error
    if place.type == "cuda" and not torch.cuda.is_available():
        raise InputError(f"device {str(device)!r} was asked for, but torch sees no CUDA device here: use device='cpu'.")
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
    """Refuses a transformers model that does not decode, or not as it is.

    Raises:
        InputError: It has an encoder of its own, its tokens see the ones after them, it has no language-model head, or it
            is in training mode.
    """
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


def _folder(name: str) -> Path | None:
    """The local checkpoint a name stands for, or None for a hub id."""
    if name.startswith("zoo:"):
        return zoo.folder(name.removeprefix("zoo:"))
    path = Path(name).expanduser()
    looks_local = path.is_absolute() or name.startswith((".", "~")) or name.count("/") > 1
    if not path.exists() and not looks_local:
        return None
    if not path.is_dir():
        raise InputError(f"model folder {name!r} does not exist: give a transformers checkpoint folder or zoo:NAME.")
    config = path / "config.json"
    if not config.is_file():
        raise InputError(f"model folder {name!r} has no config.json: expected a transformers checkpoint folder.")
    try:
        json.loads(config.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(f"{config} is not JSON ({error}): expected a transformers checkpoint folder.") from error
    return path


def _hooked(name: str, folder: Path | None, dtype: torch.dtype, device: torch.device) -> Adapter:
    from kvinterp.models.hooked import HookedAdapter, convert_checkpoint, hooked_class, lay_out_for_products

    if folder is not None:
        tokenizer = _tokenizer(folder, "refuse")
        return HookedAdapter(convert_checkpoint(folder, name, dtype, device, tokenizer), name, tokenizer)
    model_class: Any = hooked_class()
    try:
        model = model_class.from_pretrained_no_processing(name, dtype=dtype, device=str(device))
    except (ValueError, OSError) as error:
        raise not_found(name, error) from error
    return HookedAdapter(lay_out_for_products(model.eval()), name)


def _transformers(
    name: str, folder: Path | None, dtype: torch.dtype, device: torch.device, attention: str | None, remote_code: str
) -> nn.Module:
    from transformers import AutoModelForCausalLM

    from kvinterp.models.native import plain_experts

    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                folder or name,
                dtype=dtype,
                attn_implementation=attention,
                use_safetensors=True,
                trust_remote_code=remote_code == "trust",
            )
    except (ImportError, OSError, ValueError) as error:
        if isinstance(error, ImportError) or "attention implementation" in str(error):
            raise UnsupportedError(
                f"attention {attention!r} cannot be used for {name}: {_first_line(error)}; leave attention out."
            ) from error
        raise not_found(name, error) from error
    _check_decoder(model, name)
    plain_experts(model, dtype)
    placed: nn.Module = model.to(device)  # type: ignore[arg-type]  # transformers decorates it untyped
    return placed.eval().requires_grad_(False)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keeps transformers' own progress bars off the screen, and puts them back."""
    from transformers.utils import logging as transformers_logging

    shown = transformers_logging.is_progress_bar_enabled()
    transformers_logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            transformers_logging.enable_progress_bar()


def _tokenizer(source: Path | str, remote_code: str) -> Any:
    """The checkpoint's tokenizer, or None where it has none (token ids still work)."""
    from transformers import AutoTokenizer

    has_one = not isinstance(source, Path) or any(source.glob("tokenizer*")) or any(source.glob("*.model"))
    if not has_one:
        return None
    try:
        return AutoTokenizer.from_pretrained(source, trust_remote_code=remote_code == "trust")
    except (OSError, ValueError) as error:
        code = brings_code(error, str(source))
        if code is not None:
            raise code from error
        raise InputError(f"the tokenizer of {source} cannot be loaded: {_first_line(error)}") from error


def brings_code(error: Exception, name: str = "") -> InputError | None:
    """What to say where transformers refused to run a checkpoint's own code; None where that is not what happened."""
    if "trust_remote_code" not in str(error):
        return None
    return InputError(
        f"model {name!r} brings code of its own (auto_map in its config.json), which is not run unless it is trusted: read that "
        "code, then say remote_code='trust' (kvinterp audit --remote-code), or give a model that transformers knows."
    )


def not_found(name: str, error: Exception) -> InputError:
    """What to say where transformers cannot load a model."""
    code = brings_code(error, name)
    if code is not None:
        return code
    known = ", ".join(f"zoo:{n}" for n in zoo.names())
    return InputError(
        f"model {name!r} cannot be loaded ({_first_line(error)}): expected a hub id that can be reached from here, "
        f"a transformers checkpoint folder, or one of {known}."
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)[:200]
