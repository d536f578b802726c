"""Writes a Llama as a GGUF file, as llama.cpp's ``convert_hf_to_gguf.py`` does, so that a second engine can run the weights."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from einops import rearrange

from kvinterp.common.checks import check_choice
from kvinterp.common.store import write_whole
from kvinterp.errors import InputError, UnsupportedError, shown
from kvinterp.models.adapter import Adapter
from kvinterp.models.load import wrap
from kvinterp.models.naming import is_gguf

if TYPE_CHECKING:
    import gguf

STORED = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}
"""GGUF's type for the weights of products, by dtype; norms stay in F32, as in llama.cpp."""


def export(model: Any, file: str | Path, format: str = "gguf", dtype: str = "float32", existing: str = "error") -> Path:
    """Writes a Llama as a GGUF file, weights and tokenizer, which llama.cpp and what is built on it read.

    Args:
        model: The model, as :func:`kvinterp.wrap` takes it: ``native``, of transformers' Llama, with RoPE as it is by default.
        file: The file, which ends with ``.gguf``.
        format: ``"gguf"``.
        dtype: The dtype of the weights of products in the file: float32, float16 or bfloat16; norms are float32.
        existing: What to do where the file is there: ``"error"`` or ``"overwrite"``.

    Returns:
        The file.

    Raises:
        InputError: The file cannot be written, or something given is not one there is.
        UnsupportedError: The model is no plain Llama, or the package ``gguf`` is not installed.
    """
    check_choice("format", format, ("gguf",))
    check_choice("dtype", dtype, tuple(STORED))
    check_choice("existing", existing, ("error", "overwrite"))
    path = Path(file)
    if not is_gguf(path):
        raise InputError(f"file {shown(path)} was given: expected a name that ends with .gguf; give one.")
    if existing == "error" and path.exists():
        raise InputError(f"file {shown(path)} is there: give another name, or --overwrite (existing='overwrite').")
    if importlib.util.find_spec("gguf") is None:
        raise UnsupportedError(
            "the package gguf, with which GGUF files are written, is not installed: pip install 'kvinterp[gguf]'."
        )
    adapter = wrap(model)
    _check_plain(adapter)
    with adapter.one_call(), torch.no_grad():
        write_gguf(adapter.model, adapter.tokenizer, path, dtype)
    return path


def _check_plain(adapter: Adapter) -> None:
    """Raises UnsupportedError for a model that llama.cpp's ``llama`` would not compute."""
    name, config = adapter.facts.name, getattr(adapter.model, "config", None)
    if adapter.kind != "native" or getattr(config, "model_type", "") != "llama":
        kind = getattr(config, "model_type", None) or type(adapter.model).__name__
        raise UnsupportedError(
            f"{name} ({adapter.kind}, {kind}) is no Llama of kind native: such alone is written as GGUF."
        )
    assert config is not None
    rope, act = config.rope_parameters.get("rope_type", "default"), config.hidden_act
    extras = [name for name, _ in adapter.model.named_parameters() if name.endswith(".bias")]
    for what, wrong in ((f"RoPE of type {rope!r}", rope != "default"), (f"{act!r} in its MLP", act not in ("silu", "swish")),
                        (f"a bias ({extras[:1]})", bool(extras))):  # fmt: skip
        if wrong:
            raise UnsupportedError(f"{name} has {what}, of which nothing is written as GGUF: export a plain Llama.")


def write_gguf(model: Any, tokenizer: Any, file: Path, dtype: str = "float32") -> None:
    """Writes a Llama of transformers.

    Args:
        model: The model.
        tokenizer: Its byte-level BPE tokenizer; without one the file has none.
        file: The file; it appears whole or not at all.
        dtype: One of :data:`STORED`.
    """
    import gguf

    file.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix=".gguf-") as folder:
        part = Path(folder) / "model.gguf"
        writer = gguf.GGUFWriter(part, "llama")
        add_header(writer, model.config, file.stem)
        if tokenizer is not None:
            add_tokenizer(writer, tokenizer)
        for name, values in tensors(model):
            kind = gguf.GGMLQuantizationType[STORED[dtype] if values.ndim > 1 else "F32"]
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
        finish(writer)
        with part.open("rb") as source:
            write_whole(file, lambda target: shutil.copyfileobj(source, target, 1 << 20))


def finish(writer: gguf.GGUFWriter) -> None:
    """Writes everything that was added, and closes the file."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def add_header(writer: gguf.GGUFWriter, config: Any, name: str) -> None:
    """Adds the sizes, epsilon and RoPE of a Llama's config."""
    writer.add_name(name)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)


def tensors(model: Any) -> Iterator[tuple[str, np.ndarray]]:
    """Yields GGUF's name and the float32 numbers of each tensor of a Llama, with rows in the order of llama.cpp's RoPE."""
    import gguf

    config = model.config
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.detach().float().cpu().numpy()
        for part, count in heads.items():
            if f".{part}." in name:
                values = permuted(values, count)
        gguf_name = names.get_name(name, try_suffixes=(".weight",))
        if gguf_name is None:
            raise UnsupportedError(f"the tensor {name!r} has no place in a Llama's GGUF file: export a plain Llama.")
        yield gguf_name, np.ascontiguousarray(values)


def permuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Reorders rows of queries or keys so that the two halves of a pair are neighbours (convert_hf_to_gguf.py)."""
    return rearrange(weight, "(head half dim) ... -> (head dim half) ...", head=heads, half=2)


def add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Any, bos: bool | None = None) -> None:
    """Adds a byte-level BPE tokenizer.

    Args:
        writer: The writer.
        tokenizer: The tokenizer.
        bos: Whether it puts its first token before a text (default: as the tokenizer does).

    Raises:
        UnsupportedError: It is of another kind.
    """
    import gguf

    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"] if hasattr(tokenizer, "backend_tokenizer") else {}
    if bpe.get("type") != "BPE" or bpe.get("byte_fallback"):
        raise UnsupportedError(
            f"a tokenizer of type {bpe.get('type')!r} is not written as GGUF: expected a byte-level BPE; wrap the model without "
            "its tokenizer, and give the engine token ids."
        )
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    special = set(tokenizer.all_special_tokens)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("default")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if t in special else gguf.TokenType.NORMAL for t in tokens])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]])
    for kind in ("bos", "eos", "pad"):
        if (number := getattr(tokenizer, f"{kind}_token_id")) is not None:
            getattr(writer, f"add_{kind}_token_id")(number)
    adds_bos = tokenizer.bos_token_id is not None and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]
    writer.add_add_bos_token(adds_bos if bos is None else bos)
    if tokenizer.chat_template:
        writer.add_chat_template(tokenizer.chat_template)
