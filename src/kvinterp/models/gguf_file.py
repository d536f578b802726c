"""GGUF files as models: what one holds, read from its header alone and checked before any library maps it.

The layout is that of ggml's ``docs/gguf.md``, versions 2 and 3. transformers makes the model, the config and the tokenizer; only
what it would not say in a sentence, or would not bound, is looked at here: a count of 2**60 is a loop without an end there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import math
import struct
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from kvinterp.errors import InputError, UnsupportedError, shown

_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_EXACT = {"F64", "F32", "F16", "BF16"}
_MOST = 1 << 22
"""Most entries of all lists together: 256 thousand tokens need a million, and transformers makes an object of each."""


@dataclasses.dataclass(frozen=True)
class GgufHeader:
    """What a GGUF file says of itself.

    Attributes:
        architecture: ``general.architecture``, such as ``"llama"``.
        kinds: How many tensors are stored in each of ggml's types, as in ``{"Q4_1": 210, "F32": 61}``.
        numbers: How many numbers its tensors hold.
        tokenizer: Whether a tokenizer is in it.
        scaled: What of it scales RoPE, which transformers reads of few architectures; empty where nothing does.
    """

    architecture: str
    kinds: Counter[str]
    numbers: int
    tokenizer: bool
    scaled: str

    @property
    def tensors(self) -> int:
        """How many tensors it holds."""
        return sum(self.kinds.values())

    @property
    def stored(self) -> str:
        """How the weights were stored, for a provenance: ``"GGUF: 210 tensors in Q4_1, 61 in F32"``."""
        listed = ", ".join(f"{count} in {kind}" for kind, count in self.kinds.most_common())
        exact = "" if set(self.kinds) <= _EXACT else ", dequantised when loaded"
        return f"GGUF: {listed.replace(' in', ' tensors in', 1)}{exact}"


def is_gguf(path: Path) -> bool:
    """Whether a path is called as a GGUF file is."""
    return path.suffix.lower() == ".gguf"


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
    """Reads a GGUF file's header, and nothing else of it.

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
    if not file.is_file():
        raise InputError(f"{shown(file)} is no file: expected a GGUF file; give its name.")
    try:
        found = file.stat()
        return _read(file, found.st_size, found.st_mtime_ns)
    except OSError as error:
        raise InputError(f"{shown(file)} cannot be read ({error.strerror or error}): copy or download it again.") from error


# Size and time are of its key: a file that was written anew is read anew.
@functools.lru_cache(maxsize=4)
def _read(file: Path, size: int, changed: int) -> GgufHeader:
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    with file.open("rb") as opened:
        if opened.read(4) != b"GGUF":
            raise InputError(f"{shown(file)} is no GGUF file (its first bytes are not 'GGUF'): copy or download it again.")
        reader = _Reader(opened, size)
        try:
            (version,) = reader.plain("I")
            if version not in (2, 3):
                raise InputError(f"{shown(file)} is GGUF version {version}: expected 2 or 3; convert the model again.")
            tensors, entries = reader.plain("QQ")
            held = dict(reader.entry() for _ in range(reader.bounded(entries, 12)))
            found = [reader.tensor() for _ in range(reader.bounded(tensors, 24))]
            alignment, twice = held.get("general.alignment", 32), len(held) < entries or len(dict(found)) < tensors
            begins, ends, numbers = _padded(opened.tell(), alignment), 0, 0
            kinds: Counter[str] = Counter()
            for shape, code, offset in (each for _, each in found):
                kind, count = GGMLQuantizationType(code), math.prod(shape)
                block, bytes_ = GGML_QUANT_SIZES[kind]
                kinds[kind.name] += 1
                # As ggml asks: one behind the other, so that a flipped bit of an offset, a shape or a type is seen.
                twice, numbers = twice or offset != _padded(ends, alignment), numbers + count
                ends = offset + count // block * bytes_
        except InputError:
            raise
        # What does not fit the layout shows in as many ways as there are places.
        except (struct.error, ValueError, KeyError, TypeError, OverflowError, ZeroDivisionError) as error:
            raise _damaged(file, "its header cannot be read") from error
    if not found:
        raise _damaged(file, "it holds no tensor")
    if begins + ends > size:
        raise _damaged(file, f"its tensors end at byte {begins + ends:,} and the file at {size:,}")
    if twice:
        raise _damaged(file, "entries come twice, or tensors do not lie one behind the other")
    architecture = held.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise _damaged(file, "it names no architecture")
    scaling = held.get(f"{architecture}.rope.scaling.type", "none")
    factors = next((name for name, _ in found if name.startswith("rope_f")), "")
    scaled = f"rope.scaling.type {shown(scaling)}" if scaling != "none" else factors
    return GgufHeader(architecture, kinds, numbers, held.get("tokenizer.ggml.model", "no_vocab") != "no_vocab", scaled)


class _Reader:
    """Reads the parts of a header, none of which may be longer than the file."""

    def __init__(self, opened: BinaryIO, size: int) -> None:
        self.opened, self.size, self.listed = opened, size, 0

    def plain(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self.opened.read(struct.calcsize(f"<{form}")))

    def bounded(self, count: int, least: int) -> int:
        """A count of things of at least so many bytes, which the file must have room for."""
        if count * least > self.size:
            raise ValueError(count)
        return count

    def text(self) -> str:
        (length,) = self.plain("Q")
        return self.opened.read(self.bounded(length, 1)).decode()

    def entry(self) -> tuple[str, Any]:
        return self.text(), self.value(self.plain("I")[0])

    def value(self, kind: int) -> Any:
        """A value; of a list nothing, since nothing asks."""
        if kind == _TEXT:
            return self.text()
        if kind != _LIST:
            return self.plain(_PLAIN[kind])[0]
        inner, count = self.plain("IQ")
        self.listed += count
        if self.listed > _MOST:
            raise ValueError(self.listed)
        if inner != _TEXT:
            self.opened.seek(self.bounded(count, 1) * struct.calcsize(f"<{_PLAIN[inner]}"), 1)
            return None
        for _ in range(self.bounded(count, 8)):
            self.text()
        return None

    def tensor(self) -> tuple[str, tuple[tuple[int, ...], int, int]]:
        name, (dimensions,) = self.text(), self.plain("I")
        if not 1 <= dimensions <= 4:
            raise ValueError(dimensions)
        shape = self.plain(f"{dimensions}Q")
        code, offset = self.plain("IQ")
        return name, (shape, code, offset)


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


def _damaged(file: Path, why: str) -> InputError:
    return InputError(
        f"{shown(file)} is cut off or damaged ({why}): expected a whole GGUF file; copy or download it again."
    )
