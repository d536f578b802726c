"""GGUF files of models that transformers has as folders, written by the ``gguf`` package as llama.cpp's converter writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import transformers
from einops import rearrange
from gguf import GGMLQuantizationType

from kvinterp.models import zoo

TYPES = ("F32", "F16", "BF16", "Q8_0", "Q4_1", "Q4_K")
CHAT = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
SUPERBLOCK, BLOCK = 256, 32

Change = Callable[[gguf.GGUFWriter], None]


def write_gguf(
    model: Any,
    tokenizer: Any,
    file: Path,
    kind: str = "F32",
    *,
    change: Change | None = None,
    architecture: str = "llama",
    add_bos: bool = True,
) -> Path:
    """Writes a Llama of transformers as a GGUF file.

    Args:
        model: The model, its weights in float32.
        tokenizer: Its byte-level BPE tokenizer; without one the file has none.
        file: Where.
        kind: How products' weights are stored, one of :data:`TYPES`; norms stay in F32, and rows that no block fills in F16.
        change: Adds what else the header says.
        architecture: What the header calls it.
        add_bos: Whether the tokenizer puts its first token before a text.
    """
    writer = gguf.GGUFWriter(file, architecture)
    add_header(writer, model.config, file.stem)
    if tokenizer is not None:
        add_tokenizer(writer, tokenizer, add_bos)
        if not tokenizer.chat_template:
            writer.add_chat_template(CHAT)
    if change is not None:
        change(writer)
    for name, values in tensors(model):
        stored = stored_as(values, kind)
        writer.add_tensor(name, packed(values, stored), raw_dtype=stored)
    finish(writer)
    return file


def zoo_gguf(name: str, file: Path, kind: str = "F32", **more: Any) -> Path:
    """A Llama of the zoo as a GGUF file."""
    folder = zoo.folder(name)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="float32")
    tokenizer = more.pop("tokenizer", transformers.AutoTokenizer.from_pretrained(folder))
    return write_gguf(model, tokenizer, file, kind, **more)


def stored_as(values: np.ndarray, kind: str) -> GGMLQuantizationType:
    """The type that a tensor is stored in where products are in ``kind``."""
    wanted = GGMLQuantizationType[kind]
    if values.ndim == 1:
        return GGMLQuantizationType.F32
    return wanted if values.shape[-1] % gguf.GGML_QUANT_SIZES[wanted][0] == 0 else GGMLQuantizationType.F16


def packed(values: np.ndarray, kind: GGMLQuantizationType) -> np.ndarray:
    """A tensor's bytes in a type."""
    return q4_k(values) if kind == GGMLQuantizationType.Q4_K else gguf.quants.quantize(np.ascontiguousarray(values), kind)


def q4_k(values: np.ndarray) -> np.ndarray:
    """Q4_K, which the ``gguf`` package reads and does not write: superblocks of 8 blocks of 32, an affine scale each.

    A block's scale and minimum are of its own range (llama.cpp searches a little for better ones) and stored in 6 bits, as
    multiples of the superblock's two numbers in float16; the integers are of the scales that are read back.
    """
    blocks = values.reshape(-1, SUPERBLOCK // BLOCK, BLOCK).astype(np.float32)
    least = np.minimum(blocks.min(-1), 0)
    scales, minima = (blocks.max(-1) - least) / 15, -least
    sixes, halves = [], []
    for each in (scales, minima):
        half = (each.max(-1, keepdims=True) / 63).astype(np.float16)
        wide = half.astype(np.float32)
        sixes.append(np.where(wide > 0, np.rint(each / np.where(wide > 0, wide, 1)), 0).clip(0, 63).astype(np.uint8))
        halves.append(half)
    scale, minimum = (half.astype(np.float32) * six for half, six in zip(halves, sixes, strict=True))
    over = np.where(scale > 0, scale, 1)[..., None]
    four = np.rint((blocks + minimum[..., None]) / over).clip(0, 15).astype(np.uint8)
    (scale_six, least_six), halfway = sixes, 4
    tops = [(six[:, halfway:] >> 4) << 6 for six in sixes]
    rest = (scale_six[:, halfway:] & 15) | ((least_six[:, halfway:] & 15) << 4)
    twelve = np.concatenate([scale_six[:, :halfway] | tops[0], least_six[:, :halfway] | tops[1], rest], 1)
    pairs = four.reshape(-1, 4, 2, BLOCK)
    nibbles = (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(len(four), -1)
    bytes_ = np.concatenate([*(half.view(np.uint8) for half in halves), twelve, nibbles], 1)
    return bytes_.reshape(*values.shape[:-1], -1)


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
        assert gguf_name is not None, name
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
    """
    bpe = json.loads(tokenizer.backend_tokenizer.to_str())["model"]
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
