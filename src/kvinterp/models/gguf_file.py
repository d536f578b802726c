"""GGUF files as models: what one holds, read from its header alone and checked before any library maps it.

The layout is that of ggml's ``docs/gguf.md``, versions 2 and 3. transformers makes the model, the config and the tokenizer; only
what it would not say in a sentence, or would not bound, is looked at here: a count of 2**60 is a loop without an end there.
"""

from __future__ import annotations

import math
import struct
from collections import Counter
from pathlib import Path
from typing import Any

from kvinterp.errors import InputError, UnsupportedError, shown

__all__ = ["GgufHeader", "from_gguf", "is_gguf"]

_PLAIN = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _LIST = 8, 9
_EXACT = ("F64", "F32", "F16", "BF16")


def is_gguf(path: Path) -> bool:
    """Whether a path is called as a GGUF file is."""
    return path.suffix.lower() == ".gguf"


def from_gguf(source: Path | str) -> tuple[Path | str, dict[str, str]]:
    """What transformers' ``from_pretrained`` is given for a source: a folder and ``gguf_file`` for a GGUF file."""
    if isinstance(source, Path) and is_gguf(source):
        return source.parent, {"gguf_file": source.name}
    return source, {}


class GgufHeader:
    """What a GGUF file says of itself.

    Args:
        file: The file; only its header is read.

    Attributes:
        architecture: ``general.architecture``, such as ``"llama"``.
        kinds: How many tensors are stored in each of ggml's types, as in ``{"Q4_1": 210, "F32": 61}``.
        tokenizer: Whether a tokenizer is in it.

    Raises:
        InputError: It is no GGUF file, or is cut off or damaged.
        UnsupportedError: The gguf package, with which transformers reads it, is not installed.
    """

    def __init__(self, file: Path) -> None:
        try:
            from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
        except ImportError as error:
            raise UnsupportedError(
                f"{shown(file)} is a GGUF file, and the package that reads these is not installed: pip install 'kvinterp[gguf]'."
            ) from error
        if not file.is_file():
            raise InputError(f"{shown(file)} is no file: expected a GGUF file; give its name.")
        try:
            with file.open("rb") as opened:
                self._opened, self._size = opened, file.stat().st_size
                version = self._begin(file)
                if version not in (2, 3):
                    raise InputError(f"{shown(file)} is GGUF version {version}: expected 2 or 3; convert the model again.")
                tensors, entries = self._plain("QQ")
                held = dict(self._entry() for _ in range(self._bounded(entries, 12)))
                found = [self._tensor() for _ in range(self._bounded(tensors, 24))]
                alignment = held.get("general.alignment", 32)
                begins = -(-opened.tell() // alignment) * alignment
                ends = 0
                self.kinds: Counter[str] = Counter()
                for shape, code, offset in found:
                    kind = GGMLQuantizationType(code)
                    block, size = GGML_QUANT_SIZES[kind]
                    ends = max(ends, offset + math.prod(shape) // block * size)
                    self.kinds[kind.name] += 1
        except OSError as error:
            raise InputError(
                f"{shown(file)} cannot be read ({error.strerror or error}): copy or download it again."
            ) from error
        # What does not fit the layout shows in as many ways as there are places.
        except (struct.error, ValueError, KeyError, TypeError, OverflowError, ZeroDivisionError) as error:
            raise _damaged(file, "its header cannot be read") from error
        if not found:
            raise _damaged(file, "it holds no tensor")
        if begins + ends > self._size:
            raise _damaged(file, f"its tensors end at byte {begins + ends:,} and the file at {self._size:,}")
        self.architecture = str(held.get("general.architecture", ""))
        self.tokenizer = "tokenizer.ggml.model" in held

    @property
    def stored(self) -> str:
        """How the weights were stored, for a provenance: ``"GGUF: 210 tensors in Q4_1, 61 in F32"``."""
        listed = ", ".join(f"{count} in {kind}" for kind, count in self.kinds.most_common())
        exact = "" if set(self.kinds) <= set(_EXACT) else ", dequantised when loaded"
        return f"GGUF: {listed.replace(' in', ' tensors in', 1)}{exact}"

    def _begin(self, file: Path) -> int:
        if self._opened.read(4) != b"GGUF":
            raise InputError(f"{shown(file)} is no GGUF file (its first bytes are not 'GGUF'): copy or download it again.")
        return int(self._plain("I")[0])

    def _plain(self, form: str) -> tuple[Any, ...]:
        return struct.unpack(f"<{form}", self._opened.read(struct.calcsize(f"<{form}")))

    def _bounded(self, count: int, least: int) -> int:
        """A count of things of at least so many bytes, which the file must have room for."""
        if count * least > self._size:
            raise ValueError(count)
        return count

    def _text(self) -> str:
        (length,) = self._plain("Q")
        return self._opened.read(self._bounded(length, 1)).decode()

    def _entry(self) -> tuple[str, Any]:
        return self._text(), self._value(self._plain("I")[0])

    def _value(self, kind: int, depth: int = 0) -> Any:
        if kind == _TEXT:
            return self._text()
        if kind != _LIST:
            return self._plain(_PLAIN[kind])[0]
        inner, count = self._plain("IQ")
        if inner in _PLAIN:
            size = struct.calcsize(f"<{_PLAIN[inner]}")
            return self._opened.seek(self._bounded(count, size) * size, 1)
        if depth > 4:
            raise ValueError("nested too deeply")
        for _ in range(self._bounded(count, 8)):
            self._value(inner, depth + 1)
        return None

    def _tensor(self) -> tuple[tuple[int, ...], int, int]:
        self._text()
        (dimensions,) = self._plain("I")
        shape = self._plain(f"{self._bounded(dimensions, 8)}Q")
        code, offset = self._plain("IQ")
        return shape, code, offset


def _damaged(file: Path, why: str) -> InputError:
    return InputError(
        f"{shown(file)} is cut off or damaged ({why}): expected a whole GGUF file; copy or download it again."
    )
