"""What can be said of a checkpoint folder before anything of it is loaded: each fault is one sentence.

Only what is cheap is read: the JSON files, and the headers of the weights. Whatever else is wrong comes out when the model
is made, behind :func:`kvinterp.models.door.loading`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from kvinterp.common.files import bytes_of, is_file
from kvinterp.errors import InputError, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_MOST = 2**28
"""The most bytes of a file that is not weights: they are read whole. The longest tokenizer known has 35 million."""


def reason(error: BaseException) -> str:
    """What an error of another library says, in one line of at most 240 characters."""
    said = " ".join(str(error).split())
    if isinstance(error, KeyError | IndexError | AssertionError | ZeroDivisionError | StopIteration) or not said:
        said = f"{type(error).__name__} {said}".strip()
    return said if len(said) <= 240 else said[:237].rstrip() + "..."


def read_object(file: Path, what: str) -> dict[str, Any]:
    """Reads a JSON file that must hold an object.

    Args:
        file: The file.
        what: What it is, for the message, as in ``"a transformers config"``.

    Raises:
        InputError: It cannot be read, is not JSON, is nested too deeply or holds something else.
    """
    mend = f"expected {what}, one JSON object; copy or download that file again"
    try:
        found = json.loads(bytes_of(file, _MOST).decode("utf-8"))
    except FileNotFoundError as error:
        raise InputError(f"{shown(file)} does not exist: expected the name of {what}.") from error
    except OSError as error:
        raise InputError(f"{shown(file)} cannot be read ({error.strerror or error}): {mend}.") from error
    except RecursionError as error:
        raise InputError(f"{shown(file)} is nested too deeply to be read: {mend}.") from error
    except ValueError as error:
        raise InputError(f"{shown(file)} is not JSON ({reason(error)}): {mend}.") from error
    if not isinstance(found, dict):
        raise InputError(f"{shown(file)} is JSON but holds {_kind(found)}: {mend}.")
    return found


def check_weights(folder: Path) -> None:
    """Checks that the files of a checkpoint's weights are there, whole, no pickles, and hold numbers to compute with.

    Raises:
        InputError: One is missing, cannot be read, or holds what nobody computes with.
    """
    dtypes = _dtypes(folder)
    if not dtypes:
        raise InputError(
            f"the weights of {shown(folder)} hold no tensor: expected those of its config; give a whole checkpoint."
        )
    quantised = read_object(folder / "config.json", "a transformers config").get("quantization_config")
    for name, dtype in dtypes.items():
        whole = quantised is None and name.endswith("weight") and dtype in _WHOLE
        if dtype.startswith("C") or whole:
            what = "whole" if whole else "complex"
            raise InputError(
                f"the weights in {shown(folder)} hold {what} numbers in {shown(name)} ({dtype}): expected floating-point ones, "
                "or a quantization_config that says how they were quantised; save the model again."
            )


_WHOLE = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


# Weights ---------------------------------------------------------------------------------------------------------------


def stored_tensors(folder: Path) -> Iterator[tuple[str, Any]]:
    """Every tensor of a checkpoint, by the name that its file gives it, read one at a time.

    Raises:
        InputError: A file of weights cannot be read.
    """
    from safetensors import safe_open

    for file in _files(folder):
        with safe_open(file, framework="pt") as held:
            for name in held.keys():  # noqa: SIM118  # it is no dict
                yield name, held.get_tensor(name)


def _dtypes(folder: Path) -> dict[str, str]:
    """The dtype of every stored tensor, from the headers alone."""
    from safetensors import safe_open

    found: dict[str, str] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as held:
                found |= {name: str(held.get_slice(name).get_dtype()) for name in held.keys()}  # noqa: SIM118
        except FileNotFoundError as error:
            raise InputError(f"weights file {shown(file)} is missing: copy or download that file again.") from error
        # safetensors raises an error of its own, and the system's for a folder or a file that may not be read.
        except Exception as error:
            raise InputError(
                f"weights file {shown(file)} is cut off or damaged ({reason(error)}): expected a safetensors file; copy or "
                "download it again."
            ) from error
    return found


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    index = folder / INDEX
    if not index.exists():
        pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
        others = sorted(file.name for file in folder.glob("*.safetensors"))
        if others:
            found = f"only {others[0]}, without {INDEX}"
        else:
            found = f"only pickled ones ({pickled[0]}), which can run code when they are read" if pickled else "none"
        raise InputError(
            f"model folder {shown(folder)} has no weights that can be read: expected {WEIGHTS} or {INDEX}, found {found}; "
            "save the model with save_pretrained()."
        )
    places = read_object(index, "an index of weights").get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise InputError(
            f"{shown(index)} has no weight_map from tensors to files: expected one object of names; copy or download it again."
        )
    names = sorted(set(places.values()))
    outside = [name for name in names if Path(name).name != name or name in (".", "..")]
    if outside:
        raise InputError(
            f"{shown(index)} names the file {outside[0]!r}, which is not in its folder: expected plain file names; mend it."
        )
    missing = [name for name in names if not is_file(folder / name)]
    if missing:
        raise InputError(
            f"{shown(index)} names {len(missing)} files that are not there ({', '.join(map(repr, missing[:3]))}): copy or "
            "download them too."
        )
    return [folder / name for name in names]


def _kind(value: object) -> str:
    named = {type(None): "null", bool: "true or false", int: "a number", float: "a number", str: "a text", list: "a list"}
    return named.get(type(value), type(value).__name__)
