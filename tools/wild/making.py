"""How a small random model of each type is made, and what its rows read besides tokens: lines that anybody can run."""

from __future__ import annotations

import importlib
import inspect
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from bank.clean import ARCHITECTURES, KNOWN_TRANSFORMERS_BUGS
from bank.small import SIZES, sizes
from torch import nn
from transformers import PretrainedConfig
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from wild.configs import SOURCED, WILD

AUTO = {
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSeq2SeqLM": modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSpeechSeq2Seq": modeling_auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "AutoModelForImageTextToText": modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
}
"""The model types that each auto class names."""
CAUSAL = "AutoModelForCausalLM"
MODEL = """import torch
from transformers import AutoConfig, {auto}

torch.manual_seed(0)
config = AutoConfig.for_model({name!r}, {fields})
model = {auto}.from_config(config, dtype=torch.float32)
with torch.no_grad():  # What is initialised to a constant is not left at it.
    for p in model.parameters():
        p += 0.1 * torch.randn_like(p) * (p == p.flatten()[0]).all()
"""
SEEN: dict[str, Any] = {
    **SIZES,
    **dict.fromkeys(("depth", "encoder_layers", "num_hidden_layers", "num_layers", "num_blocks"), 1),
    **dict.fromkeys(("embed_dim", "d_model", "out_hidden_size"), 32),
    **dict.fromkeys(("mlp_dim", "encoder_ffn_dim", "ffn_dim"), 48),
    **dict.fromkeys(("num_heads", "encoder_attention_heads", "num_key_value_heads"), 4),
    "head_dim": 8,
    "image_size": 28,
    "patch_size": 7,
    "num_position_embeddings": 16,
    "deepstack_visual_indexes": [0],
}
"""As the bank's sizes, of what sees or hears."""
IMAGE_TOKENS = ("image_token_id", "image_token_index", "video_token_index", "audio_token_id", "audio_token_index")
MARK = 90
"""The token that stands for a part of an image."""


def known(auto: str) -> dict[str, dict[str, Any]]:
    """Every model type of an auto class with what its config needs beside small sizes."""
    bugs = {name: bug.build.keywords for name, bug in KNOWN_TRANSFORMERS_BUGS.items()}
    needed: dict[str, dict[str, Any]] = {**ARCHITECTURES, **bugs, **WILD} if auto == CAUSAL else SOURCED
    return {name: needed.get(name, {}) for name in sorted(AUTO[auto])}


def written(auto: str, name: str, config: Mapping[str, Any]) -> str:
    """Lines that make a small random model of a type."""
    fields = {**sizes(name), **config} if auto == CAUSAL else nested(name, config)
    return MODEL.format(auto=auto, name=name, fields=", ".join(f"{field}={value!r}" for field, value in fields.items()))


def nested(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Small sizes of a config and of the configs within it; what is said of one of these goes over them."""
    kind = CONFIG_MAPPING[name]
    fields: dict[str, Any] = {**sizes(name)}
    marks = {field: MARK for field in IMAGE_TOKENS if field in _fields(kind)}
    for part in getattr(kind, "sub_configs", {}):
        said = config.get(part, {})
        made = said.get("model_type") if isinstance(said, dict) else None
        inner = CONFIG_MAPPING[made]() if made else getattr(kind(), part, None)
        if isinstance(inner, PretrainedConfig) and isinstance(said, dict):
            fields[part] = {**_small(inner, part), **said}
    parts = getattr(kind, "sub_configs", {})
    return {**fields, **marks, **{key: value for key, value in config.items() if key not in fields or key not in parts}}


def _small(inner: PretrainedConfig, part: str) -> dict[str, Any]:
    wanted = SIZES if part in ("text_config", "decoder", "decoder_config") else SEEN
    made: dict[str, Any] = {"model_type": inner.model_type} if inner.model_type in CONFIG_MAPPING else {}
    modeling = importlib.import_module(type(inner).__module__.replace(".configuration_", ".modeling_"))
    if wanted is SIZES and "mrope_section" in inspect.getsource(modeling):
        rope = getattr(inner, "rope_parameters", None) or {"rope_type": "default", "rope_theta": 1e4}
        # Three axes of the halves of a head.
        made["rope_parameters"] = {**rope, "mrope_section": [2, 1, 1]}
    return made | {name: value for name, value in wanted.items() if name in inner.to_dict()}


def _fields(kind: Any) -> set[str]:
    return {name for base in kind.__mro__ for name in getattr(base, "__annotations__", {})}


def untried(auto: str, name: str, why: str = "") -> dict[str, Any]:
    """The row of one of which nothing is known."""
    return {
        "auto": auto,
        "type": name,
        "class": "",
        "model": "",
        "inputs": "",
        "read": "",
        "why": why,
        "uses": {},
        "wrong": [],
    }


def file_of(auto: str, name: str) -> str:
    """The name of the file that keeps what came of a type; some have a class of several auto classes."""
    kind = auto.removeprefix("AutoModelFor").replace(" ", "-")
    return f"{name}.json" if auto == CAUSAL else f"{name.replace(' ', '-')}.{kind}.json"


def script(row: Mapping[str, Any], one: Mapping[str, Any]) -> str:
    """A failure of a row as a script: the model, what its rows read besides, and the lines of the program."""
    return "\n".join([row["model"], *[row["inputs"]] * bool(row["inputs"]), one["lines"]])


def subject_of(auto: str, model: nn.Module) -> tuple[Any, str]:
    """What programs run on, and the line that makes what its rows read besides tokens.

    A decoder of sound is asked behind text alone.
    """
    from kvinterp.auditing.programs.model_subject import ModelSubject
    from kvinterp.auditing.programs.sourced import EncoderDecoderSubject, PromptSubject
    from kvinterp.models import wrap

    if auto != CAUSAL and getattr(model.config, "is_encoder_decoder", False):
        return EncoderDecoderSubject(model), ""
    if auto != "AutoModelForImageTextToText":
        return ModelSubject(wrap(model)), ""
    prompt, line = inputs_of(model)
    made: dict[str, Any] = {"torch": torch}
    exec(line, made)
    return PromptSubject(wrap(model), [prompt], made["inputs"]), line


# What rows of an image's prompt read --------------------------------------------------------------------------------------


def images(model: nn.Module) -> Iterator[tuple[int, str]]:
    """Ways in which models of transformers take an image, each as the number of its tokens and a dictionary as it is written."""
    config: Any = model.config
    seen: Any = getattr(config, "vision_config", config)
    get = lambda name, default: getattr(seen, name, None) or default  # noqa: E731
    size, patch = get("image_size", 28), get("patch_size", 7)
    size, patch = (one[0] if isinstance(one, list | tuple) else one for one in (size, patch))
    channels = get("num_channels", get("in_channels", get("in_chans", 3)))
    merge, frames = get("spatial_merge_size", 1), get("temporal_patch_size", 1)
    grid = 4
    flat = f"{grid * grid}, {channels * frames * patch * patch}"
    of_tokens = "torch.tensor([[0, *[1] * {count}, 0, 0]])"
    of_grid = f"image_grid_thw=torch.tensor([[1, {grid}, {grid}]])"
    of_shapes = f"spatial_shapes=torch.tensor([[{grid}, {grid}]]), pixel_attention_mask=torch.ones(1, {grid * grid}, dtype=torch.long)"
    for wide, shape, more in (
        (0, f"1, {channels}, {size}, {size}", ""),
        (0, f"1, {channels}, {size}, {size}", f"image_sizes=torch.tensor([[{size}, {size}]])"),
        (0, f"1, {channels}, {size}, {size}", f"token_type_ids={of_tokens}"),
        ((grid // merge) ** 2, flat, of_grid),
        ((grid // merge) ** 2, flat, f"{of_grid}, mm_token_type_ids={of_tokens}"),
        ((grid // merge) ** 2, f"{grid * grid}, {channels}, {patch}, {patch}", of_grid),
        ((grid // merge) ** 2, f"1, {flat}", of_shapes),
        (0, f"1, 1, {channels}, {size}, {size}", ""),
        (0, f"1, 1, {channels}, {size}, {size}", f"image_sizes=torch.tensor([[{size}, {size}]])"),
    ):
        made = f"torch.randn({shape}, generator=torch.Generator().manual_seed(4))"
        text = f"dict(pixel_values={made}{', ' * bool(more)}{more})"
        for count in dict.fromkeys([_counted(model, text), *([wide] if wide else (4, 16))]):
            if count:
                yield count, text.replace("{count}", str(count))


def _marked(model: Any) -> bool:
    return any(getattr(model.config, field, None) == MARK for field in IMAGE_TOKENS)


def _counted(model: Any, text: str) -> int:
    """How many tokens the model makes of an image, where it says so."""
    try:
        with torch.no_grad():
            out = model.get_image_features(**eval(text.replace("{count}", "1"), {"torch": torch}))
    except Exception:  # It has another way of reading one.
        return 0
    out = getattr(out, "pooler_output", out)
    out = torch.cat([*out]) if isinstance(out, list | tuple) else out
    return int(out.shape[:-1].numel())


def inputs_of(model: nn.Module) -> tuple[list[int], str]:
    """A prompt with an image, and the line that makes what else the forward reads.

    Raises:
        ValueError: None of the ways that are known here is the model's.
    """
    why = list[str]()
    for count, text in images(model):
        # Where no token stands for an image the model reads it from elsewhere, as in cross-attention.
        prompt = [5, *[MARK] * count * _marked(model), 7, 8]
        ids = torch.tensor([prompt])
        try:
            with torch.no_grad():
                given = eval(text, {"torch": torch})
                out = model(input_ids=ids, use_cache=False, **given).logits
                given["pixel_values"] = given["pixel_values"].flip(-1)
                other = model(input_ids=ids, use_cache=False, **given).logits
        except Exception as error:  # Another way may be its own.
            why.append(f"{type(error).__name__}: {' '.join(str(error).split())[:150]}")
            continue
        if out.shape[1] == len(prompt) and not torch.allclose(out, other, atol=1e-4):
            return prompt, f"inputs = [{text}]"
        why.append("another image gives the same logits")
    # What most ways ran into is about the model, not about a way.
    raise ValueError(
        f"no way was found to give it an image ({Counter(why).most_common(1)[0][0] if why else 'none to try'})"
    )
