"""What can be said of a checkpoint folder before anything of it is loaded: each fault is one sentence.

Only what is cheap is read: the JSON files, and the headers of the weights. Whatever else is wrong comes out when the model
is made, behind :func:`kvinterp.models.door.loading`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from kvinterp.common.files import bytes_of, is_file, is_there, opened
from kvinterp.errors import InputError, shown

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"

_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model")
_OTHERS = ("vocab_size", "head_dim", "num_key_value_heads")
_SIZES = (*_LAYERS, *_HEADS, *_WIDTH, *_OTHERS, "max_position_embeddings", "n_positions")
_NESTED = ("text_config", "llm_config", "language_config", "decoder")
_READ = re.compile(
    r".*config\.json|.*\.index\.json|tokenizer[\w-]*\.json|special_tokens_map\.json|added_tokens\.json|vocab\.\w+|merges\.txt"
    r"|.*\.(model|tiktoken|jinja|safetensors)"
)
"""The files of a checkpoint that a library reads by itself."""
_MOST = 2**28
"""The most bytes of any of them that is not weights: they are read whole. The longest tokenizer known has 35 million."""
_OBJECTS = ("tokenizer_config.json", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json")
_TYPES: dict[str, tuple[tuple[type, ...], str]] = {
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty", "model_max_length"), ((int, float), "a number")),
    **dict.fromkeys(("top_k", "max_length", "max_new_tokens", "num_beams"), ((int,), "a whole number")),
    "do_sample": ((bool,), "true or false"),
    "chat_template": ((str, list, dict), "a text"),
}
"""What transformers takes of these as it is and fails with only when it is used."""
_TOKENS = {"eos_token_id": 0, "bos_token_id": -1, "pad_token_id": -1}
"""The least id of each; -1 is a padding token's that there is none."""


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


def check_files(folder: Path) -> None:
    """Checks every file of a checkpoint beside its config, and that the two fit, as far as that goes without loading them.

    Raises:
        InputError: A file is missing, cannot be read, or says what cannot be.
    """
    config, where = read_object(folder / "config.json", "a transformers config"), shown(folder / "config.json")
    _check_readable(folder)
    for name in _OBJECTS:
        if (folder / name).exists():
            _check_entries(read_object(folder / name, "a file of transformers"), shown(folder / name), _TYPES)
    if (tokenizer := folder / "tokenizer.json").exists():
        # It may be 20 MB long, and tokenizers reads it anyway: only what it would not name is looked at here.
        with opened(tokenizer) as found:
            start = found.read(4096).decode("utf-8", "ignore").lstrip()[:1]
        if start != "{":
            raise InputError(
                f"{shown(tokenizer)} is no tokenizer (it begins with {start!r}): expected the JSON object of a tokenizers file; "
                "copy or download it again, or remove it and give token ids."
            )
    headers = _headers(folder)
    if not headers:
        raise InputError(
            f"the weights of {shown(folder)} hold no tensor: expected those of its config; give a whole checkpoint."
        )
    # No weight is longer than all that is stored: such a config would fill the memory before anything else failed.
    stored = sum(math.prod(shape) for shape, _ in headers.values())
    limits = dict.fromkeys((*_WIDTH, *_HEADS, *_OTHERS, "intermediate_size", "n_inner"), (stored, "numbers"))
    limits |= dict.fromkeys(_LAYERS, (len(headers), "tensors"))
    for part in _parts(config):
        for name, (most, what) in limits.items():
            if isinstance(value := part.get(name), int) and value > most:
                raise InputError(
                    f"{where} says {name} is {value:,}, but the weights hold {most:,} {what} in all: give the config that "
                    "belongs to these weights."
                )
    _check_dtypes(config, {name: dtype for name, (_, dtype) in headers.items()}, where)


def _check_readable(folder: Path) -> None:
    """What a library opens by its name is a file, of which there is something to read: others wait, or never end."""
    for file in sorted((*folder.iterdir(), *folder.glob("additional_chat_templates/*.jinja"))):
        if _READ.fullmatch(file.name) and not file.is_dir():
            try:
                with opened(file, None if file.suffix == ".safetensors" else _MOST) as found:
                    found.read(1)
            except OSError as error:
                what = "is a link to a file that is not there" if isinstance(error, FileNotFoundError) else "cannot be read"
                raise InputError(
                    f"{shown(file)} {what} ({error.strerror or error}): expected a file of a checkpoint; copy or download it "
                    "again, or remove it."
                ) from error


def check_config(config: Mapping[str, Any], where: str) -> None:
    """Checks that the sizes of a transformers config can be.

    Args:
        config: The config as its JSON says it.
        where: What it is, for the message.

    Raises:
        InputError: A size is no whole number of at least 1, sizes do not fit each other, or a number is NaN.
    """
    _check_entries(config, where)
    for part in _parts(config):
        heads, keys = next((part[n] for n in _HEADS if n in part), None), part.get("num_key_value_heads")
        if isinstance(heads, int) and isinstance(keys, int) and heads % keys:
            raise InputError(
                f"{where} says {heads} attention heads and {keys} key/value heads: expected as many query heads for each of "
                "these; mend the config."
            )
        turned = part.get("rope_theta") is not None or part.get("rope_parameters") is not None
        size = part.get("head_dim")
        if turned and isinstance(size, int) and size % 2 and "partial_rotary_factor" not in json.dumps(part, default=str):
            raise InputError(
                f"{where} says head_dim is {size}, but RoPE turns pairs: expected an even number; mend the config."
            )


def _parts(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    yield config
    for name in _NESTED:
        nested = config.get(name)
        if isinstance(nested, dict):
            yield nested


_COMPUTED = re.compile(r".*(rope|rotary|factor|freq|theta|eps|epsilon|mscale|multiplier|dropout|pdrop|softcapping)")
_POSITIVE = ("rope_theta", "rope_local_base_freq", "rotary_emb_base", "factor", "low_freq_factor", "high_freq_factor")
_SHARES = ("partial_rotary_factor", "rotary_pct")


def _check_entries(
    found: Mapping[str, Any], where: str, types: Mapping[str, tuple[tuple[type, ...], str]] | None = None
) -> None:
    """The one place that says what entries of JSON can be; of ``types``, by name, those of one file."""
    waiting: list[tuple[str, Any]] = list(found.items())
    while waiting:
        path, value = waiting.pop()
        within, _, name = path.rpartition(".")
        if expected := _expected(name, value, {} if within else types or {}, within in ("", *_NESTED)):
            raise InputError(f"{where} says {path} is {_cut(value)}: expected {expected}; mend that entry.")
        if isinstance(value, dict):
            waiting += [(f"{path}.{key}", held) for key, held in value.items()]
        elif isinstance(value, list):
            waiting += [(f"{path}[]", held) for held in value]


def _expected(name: str, value: Any, types: Mapping[str, tuple[tuple[type, ...], str]], decoder: bool) -> str:
    """What an entry of this name must be, where it is something else; sizes and tokens are those of the decoder."""
    if value is None:
        return ""
    if name in types and type(value) not in types[name][0]:
        return types[name][1]
    # Some architectures say a size for every layer, in a list, and check it themselves.
    if decoder and name in _SIZES and not isinstance(value, list) and not (type(value) is int and 0 < value < 2**40):
        return "a whole number of at least 1"
    if decoder and name in _TOKENS:
        least, ids = _TOKENS[name], value if isinstance(value, list) else [value]
        if not all(type(token) is int and least <= token < 2**31 for token in ids):
            return f"a token id of at least {least} and below 2**31, or a flat list of them"
    name = name.rstrip("[]")
    if type(value) not in (int, float):
        return ""
    if value != value:
        return "a number"
    # Others may be infinite, as time_step_limit of Mamba 2 is.
    if _COMPUTED.match(name) and not abs(value) < 1e300:
        return "a finite number"
    if name in _POSITIVE and value <= 0:
        return "a number above 0"
    if name in _SHARES and not 0 <= value <= 1:
        return "a number from 0 to 1"
    return "a number of at least 0" if name.endswith(("eps", "epsilon", "dropout", "pdrop")) and value < 0 else ""


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


def _check_dtypes(config: Mapping[str, Any], dtypes: Mapping[str, str], where: str) -> None:
    """Weights are numbers that a model computes with as they are, or quantised ones, and the config says which."""
    quantised = config.get("quantization_config")
    how = quantised.get("quant_method") if isinstance(quantised, dict) else None
    if quantised is not None and not isinstance(how, str):
        raise InputError(
            f"{where} says quantization_config is {_cut(quantised)}: expected an object with a quant_method such as 'gptq', "
            "or none; mend the config."
        )
    kinds = sorted(set(dtypes.values()))
    if quantised is not None and all(dtype in _PLAIN for dtype in kinds):
        raise InputError(
            f"{where} says quant_method is {_cut(how)}, but the weights are plain numbers ({', '.join(kinds)}): give the "
            "quantised weights that belong to it, or remove quantization_config."
        )
    for name, dtype in dtypes.items():
        whole = quantised is None and name.endswith("weight") and dtype in _WHOLE
        if dtype.startswith("C") or whole:
            what = "whole" if whole else "complex"
            raise InputError(
                f"the weights beside {where} hold {what} numbers in {shown(name)} ({dtype}): expected floating-point ones, or a "
                "quantization_config that says how they were quantised; save the model again."
            )


_PLAIN = ("F64", "F32", "F16", "BF16")
_WHOLE = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")


def _headers(folder: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    """The shape and the dtype of every stored tensor, from the headers alone."""
    from safetensors import safe_open

    found: dict[str, tuple[tuple[int, ...], str]] = {}
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as held:
                slices = {name: held.get_slice(name) for name in held.keys()}  # noqa: SIM118
                found |= {name: (tuple(part.get_shape()), str(part.get_dtype())) for name, part in slices.items()}
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
    if is_there(folder / WEIGHTS):
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


def _cut(value: object) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else f"{text[:57]}..."
