"""What a loaded model must be before anything is measured with it: whole, finite, in a floating dtype, and able to run."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from kvinterp.errors import InputError, KvinterpError, UnsupportedError, shown
from kvinterp.models.checkpoint import reason, stored_tensors
from kvinterp.models.door import too_large
from kvinterp.models.gguf_file import is_gguf
from kvinterp.models.hooks import hooks_suspended

_ELSEWHERE = re.compile(
    # Buffers that older versions saved, and that are computed.
    r"(^|\.)(attn|attention|self_attn)(\.attention)?\.(bias|masked_bias)$"
    r"|(inv_freq|(cos|sin)_cached|freqs_cis|position_ids|causal_mask|alibi|embed_positions\.(weights|_float_tensor))$"
    # Parts that a text decoder does without: further tokens at once, other senses, other heads.
    r"|(^|[._])(mtp|nextn|eagle|vision|visual|image|img|audio|speech|video|talker|token2wav|code2wav|mm|multi_modal)(?=[._\d]|$)"
    r"|(^|\.)(v_head|value_head|reward_head|score|classifier|qa_outputs|pooler|seq_relationship)\."
)
_BLOCK = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.(\d+)\.")


def _is_elsewhere(tensor: str, config: Any) -> bool:
    """Whether a whole checkpoint may hold a tensor that its text decoder has no place for."""
    text = None if config is None else config.get_text_config(decoder=True)
    layers, more = (getattr(text, key, None) or 0 for key in ("num_hidden_layers", "num_nextn_predict_layers"))
    block = _BLOCK.search(tensor)
    return bool(_ELSEWHERE.search(tensor)) or (block is not None and layers <= int(block[1]) < layers + more)


def check_loaded(found: Mapping[str, Any], name: str, config: Any = None) -> None:
    """Refuses a model some of whose weights were not in the checkpoint, since transformers makes random ones of them, and a
    checkpoint some of whose weights are not in the model, since transformers leaves them out.

    Args:
        found: transformers' ``output_loading_info``, from which tied and legitimately absent tensors are left out already.
        name: The model's name, for the message.
        config: Its config.

    Raises:
        InputError: A tensor is missing, is left over, has another shape or could not be converted.
    """
    missing = sorted(map(str, found["missing_keys"]))
    if missing:
        others = sorted(map(str, found["unexpected_keys"]))
        instead = f", and has {_few(others)} instead" if others else ""
        raise InputError(
            f"checkpoint {shown(name)} lacks weights that its config needs ({_few(missing)}{instead}): random ones would "
            "have taken their place; give a whole checkpoint."
        )
    for what in ("mismatched_keys", "error_msgs", "conversion_errors"):
        wrong = sorted(
            f"{key[0]}: {tuple(key[1])} where {tuple(key[2])} is expected"
            if isinstance(key, tuple) and len(key) == 3
            else str(key)
            for key in found.get(what) or ()
        )
        if wrong:
            raise InputError(
                f"checkpoint {shown(name)} has weights that do not fit its config ({_few(wrong)}): give the config that "
                "belongs to these weights."
            )
    left = sorted(tensor for tensor in map(str, found["unexpected_keys"]) if not _is_elsewhere(tensor, config))
    if left:
        raise InputError(
            f"checkpoint {shown(name)} holds weights that its config has no place for ({_few(left)}): the model would run "
            "without them; give the config that belongs to these weights."
        )


def _few(names: list[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(name if len(name) <= 80 else f"{name[:77]}..." for name in names[:3]) + more


def check_plain_weights(model: nn.Module, name: str) -> None:
    """Refuses weights that no run can compute with as they are.

    Raises:
        InputError: Weights are on the meta device, where nothing is computed, or there are none.
        UnsupportedError: Weights are quantised, or cut in pieces (FSDP2, tensor parallelism).
    """
    parameters = list(model.parameters())
    if any(type(parameter.data).__name__ == "DTensor" for parameter in parameters):
        raise UnsupportedError(
            f"model {shown(name)} holds its weights as pieces that several processes share (DTensor), which only its own hooks "
            "put together: give the model as it was before fully_shard() or a tensor-parallel plan."
        )
    if not parameters:
        raise InputError(f"model {shown(name)} has no weights: expected a transformers decoder with its weights.")
    quantised = getattr(model, "is_quantized", False) or any(
        type(module).__module__.startswith(("torch.ao.nn.quantized", "bitsandbytes")) for module in model.modules()
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
    """Refuses weights that are NaN, or Inf in the checkpoint itself.

    Inf that is not in the checkpoint came from casting to a dtype of a narrower range: what runs says that, with the
    remedy for it.

    Args:
        model: The model, loaded.
        name: Its name, for the message.
        folder: Where its checkpoint lies, if that is known.

    Raises:
        InputError: Naming the tensor.
    """
    for tensor, held in model.named_parameters():
        what = _not_finite(held)
        if what == "NaN":
            raise _broken_weights(name, tensor, what)
        if what == "Inf" and folder is not None and not is_gguf(folder):
            for stored, values in stored_tensors(folder):
                if _not_finite(values):
                    raise _broken_weights(name, stored, _not_finite(values))
            return


def _broken_weights(name: str, tensor: str, what: str) -> InputError:
    return InputError(
        f"checkpoint {shown(name)} holds {what} in {tensor}: no dtype helps against that; give weights that are finite, or "
        "copy or download the checkpoint again."
    )


def _not_finite(tensor: torch.Tensor) -> str:
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return ""
    # The least and the largest are NaN where any element is, and need no copy of the tensor.
    ends = torch.stack(torch.aminmax(tensor.detach().to(torch.float32) if tensor.element_size() == 1 else tensor.detach()))
    return "NaN" if bool(ends.isnan().any()) else "Inf" if bool(ends.isinf().any()) else ""


@torch.no_grad()
def check_runs(adapter: Any, given: bool = False) -> None:
    """Runs two tokens once, so that a model that cannot run at all is one sentence here and no traceback later.

    Args:
        adapter: The model.
        given: Whether it is the user's own, whose hooks should not hear of it.

    Raises:
        InputError: The forward failed, or its logits are not those of the vocabulary.
    """
    name = adapter.facts.name
    tokens = torch.tensor([[0, min(1, adapter.facts.vocabulary - 1)]], device=adapter.device)
    try:
        with adapter.own_state([]), hooks_suspended(adapter.model) if given else contextlib.nullcontext():
            logits = adapter.forward(tokens)
    except KvinterpError:
        raise
    except torch.OutOfMemoryError as error:
        raise too_large(name, error) from error
    except Exception as error:
        # An operation that this device lacks in this dtype may be there in another: what runs there says so.
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
