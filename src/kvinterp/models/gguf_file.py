"""GGUF files as models: what one says of itself, and what transformers is given of it."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from kvinterp.errors import InputError, UnsupportedError, reason, shown
from kvinterp.models.naming import is_gguf

_EXACT = {"F64", "F32", "F16", "BF16"}


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        architecture: ``general.architecture``, such as ``"llama"``.
        stored: How the weights are stored, for a provenance: ``"GGUF: 210 tensors in Q4_1, 61 in F32"``.
        tokenizer: Whether a tokenizer is in it.
        scaled: What of it scales RoPE, which transformers reads of few architectures; empty where nothing does.
    """

    architecture: str
    stored: str
    tokenizer: bool
    scaled: str


@contextlib.contextmanager
def as_given(source: Path | str) -> Iterator[tuple[Path | str, dict[str, str]]]:
    """What transformers' ``from_pretrained`` is given for a source: a folder and ``gguf_file`` for a GGUF file.

    The folder holds a link to the file and nothing else: of a tokenizer or an adapter that lies beside it nothing is said.
    """
    if not isinstance(source, Path) or not is_gguf(source):
        yield source, {}
        return
    header_of(source)
    with tempfile.TemporaryDirectory(prefix="kvinterp-") as folder:
        (Path(folder) / "model.gguf").symlink_to(source.resolve())
        yield Path(folder), {"gguf_file": "model.gguf"}


def header_of(file: Path) -> GgufHeader:
    """Reads what a GGUF file says of itself.

    Raises:
        InputError: It is no GGUF file, or is cut off or damaged.
        UnsupportedError: A package with which transformers reads it is not installed.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(
                f"{shown(file)} is a GGUF file, and the package {package}, with which these are read, is not installed: pip "
                "install 'kvinterp[gguf]'."
            )
    try:
        return _header(file, file.stat().st_size, file.stat().st_mtime_ns)
    # What does not fit the layout shows in as many ways as there are places.
    except Exception as error:
        raise InputError(
            f"{shown(file)} is no GGUF file, or is cut off or damaged ({reason(error)}): copy or download it again."
        ) from error


# Size and time are of its key: a file that was written anew is read anew.
@functools.lru_cache(maxsize=4)
def _header(file: Path, size: int, changed: int) -> GgufHeader:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    entries = {name: reader.fields[name].contents() for name in reader.fields if not name.startswith("tokenizer.")}
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    listed = ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common()).replace(" in", " tensors in", 1)
    exact = "" if set(kinds) <= _EXACT else ", dequantised when loaded"
    architecture = entries["general.architecture"]
    scaling = entries.get(f"{architecture}.rope.scaling.type", "none")
    factors = next((tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")), "")
    return GgufHeader(
        architecture,
        f"GGUF: {listed}{exact}",
        "tokenizer.ggml.model" in reader.fields and reader.fields["tokenizer.ggml.model"].contents() != "no_vocab",
        f"rope.scaling.type {shown(scaling)}" if scaling != "none" else factors,
    )
