"""Reads the header of a GGUF file, and passes the file to transformers."""

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
    """The header of a GGUF file, as far as it is needed.

    Attributes:
        architecture: ``general.architecture``, such as ``"llama"``.
        stored: How the weights are stored, for the provenance:
            ``"GGUF: 210 tensors in Q4_1, 61 in F32"``.
        tokenizer: Whether the file has a tokenizer.
        scaled: The entry that scales RoPE, which transformers reads for few architectures; empty
            where there is none.
    """

    architecture: str
    stored: str
    tokenizer: bool
    scaled: str


@contextlib.contextmanager
def pretrained_arguments(source: Path | str) -> Iterator[tuple[Path | str, dict[str, str]]]:
    """The arguments of transformers' ``from_pretrained`` for a source: for a GGUF file, a folder
    and ``gguf_file``.

    The folder has a link to the file and nothing else, so that transformers reads no tokenizer or
    adapter beside the file.
    """
    if not isinstance(source, Path) or not is_gguf(source):
        yield source, {}
        return
    header_of(source)
    with tempfile.TemporaryDirectory(prefix="kvinterp-") as folder:
        (Path(folder) / "model.gguf").symlink_to(source.resolve())
        yield Path(folder), {"gguf_file": "model.gguf"}


@contextlib.contextmanager
def reading_once(file: Path | None) -> Iterator[None]:
    """Within it the ``gguf`` package reads the header of a GGUF file once, and makes a table of
    names once.

    transformers asks for the header three times, and for the table once a module: half of the time
    that SmolLM2 takes to load.
    """
    if file is None or not is_gguf(file) or importlib.util.find_spec("gguf") is None:
        yield
        return
    from unittest import mock

    import gguf

    read = functools.cache(gguf.GGUFReader)
    names = functools.cache(gguf.get_tensor_name_map)
    with mock.patch.multiple(
        gguf, GGUFReader=lambda path: read(Path(path).resolve()), get_tensor_name_map=names
    ):
        yield


def header_of(file: Path) -> GgufHeader:
    """Reads the header of a GGUF file.

    Raises:
        InputError: It is no GGUF file, or is cut off or damaged.
        UnsupportedError: A package that transformers needs for reading it is not installed.
    """
    for package in ("gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            raise UnsupportedError(
                f"{shown(file)} is a GGUF file, and the package {package}, with which these are read, is not installed: pip "
                "install 'kvinterp[gguf]'."
            )
    try:
        return _read_header(file, file.stat().st_size, file.stat().st_mtime_ns)
    # A damaged file raises a different error at each place of the layout.
    except Exception as error:
        raise InputError(
            f"{shown(file)} is no GGUF file, or is cut off or damaged ({reason(error)}): copy or download it again."
        ) from error


# Size and time are part of the key, so that a file that was written again is read again.
@functools.lru_cache(maxsize=4)
def _read_header(file: Path, size: int, changed: int) -> GgufHeader:
    from gguf import GGUFReader

    reader = GGUFReader(file)
    entries = {
        name: reader.fields[name].contents()
        for name in reader.fields
        if not name.startswith("tokenizer.")
    }
    kinds = Counter(tensor.tensor_type.name for tensor in reader.tensors)
    listed = ", ".join(f"{count} in {kind}" for kind, count in kinds.most_common()).replace(
        " in", " tensors in", 1
    )
    exact = "" if set(kinds) <= _EXACT else ", dequantised when loaded"
    architecture = entries["general.architecture"]
    scaling = entries.get(f"{architecture}.rope.scaling.type", "none")
    factors = next(
        (tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_f")), ""
    )
    return GgufHeader(
        architecture,
        f"GGUF: {listed}{exact}",
        "tokenizer.ggml.model" in reader.fields
        and reader.fields["tokenizer.ggml.model"].contents() != "no_vocab",
        f"rope.scaling.type {shown(scaling)}" if scaling != "none" else factors,
    )
