"""Reads a file of another engine with the reader of this folder that fits it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kvinterp.engines.readers as folder
from kvinterp.common import spec
from kvinterp.common.checks import check_instance, check_known
from kvinterp.common.files import bytes_of, is_file
from kvinterp.engines.readers.base import Reader, Token
from kvinterp.engines.readers.kl_base import MAGIC, read_kl_base
from kvinterp.errors import InputError, shown
from kvinterp.recording.engine_path import EnginePath, value_in

READERS = spec.Plugins(folder, Reader)  # type: ignore[type-abstract]
BINARY = "kl_base"
MOST = 2**31
"""The most bytes that are read of a file."""


def read_engine(
    file: str | Path,
    format: str | None = None,
    token: Token = lambda text: None,
    bos: int | None = None,
) -> list[EnginePath]:
    """Reads the paths of a file of another engine.

    Args:
        file: JSON, JSON a line, or a ``--kl-divergence-base`` file of llama.cpp.
        format: The reader's name; by default the content decides.
        token: Returns the model's id of a text, for answers without ids.
        bos: The token that llama.cpp put at the beginning of each chunk; None if it put none.

    Raises:
        InputError: The file does not exist, has an unknown format, or holds an impossible value.
    """
    check_instance("file", file, (str, Path), "the path of a file")
    location = Path(file)
    if not is_file(location):
        raise InputError(
            f"file {str(location)!r} does not exist or is no file: expected log-probs of another engine; check it."
        )
    try:
        content = bytes_of(location, MOST)
    except OSError as error:
        raise InputError(
            f"file {str(location)!r} cannot be read ({error.strerror or error}): check it."
        ) from error
    if format is not None:
        check_known("format", format, [*READERS, BINARY])
    if content[: len(MAGIC)] == MAGIC or format == BINARY:
        return read_kl_base(content, location.name, bos)
    records = _records(content, location.name)
    paths = _merged(
        [path for where, record in records for path in _paths(record, where, format, token)]
    )
    names: set[str] = set()
    for number, path in enumerate(paths, 1):
        # Two paths of one name would be one sequence in every table.
        path.id = f"{path.id} ({number})" if path.id in names else path.id
        names.add(path.id)
    return paths


def _records(content: bytes, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    if content[:2] == b"\x1f\x8b":
        raise InputError(
            f"file {name!r} is compressed (gzip): expected JSON, or JSON a line; unpack it."
        )
    if (
        content[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05")
        or content[:4] == b"PK\x03\x04"
    ):
        raise InputError(
            f"file {name!r} is a pickle or an archive, which may run code and is not opened: convert it to JSON a line, "
            "see docs/engines.md."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(
            f"file {name!r} is not UTF-8 text (byte {error.start}): expected JSON, or JSON a line."
        ) from error
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(
            f"file {name!r} is empty: expected log-probs of another engine, JSON a line; write some."
        )
    try:
        whole = json.loads(text)
        values = [
            (f"file {name!r}, record {n}", value)
            for n, value in enumerate(whole if isinstance(whole, list) else [whole], 1)
        ]
    except (ValueError, RecursionError):
        values = [(where := f"file {name!r}, line {n}", _line(where, line)) for n, line in lines]
    records: list[tuple[str, Mapping[str, Any]]] = []
    for where, value in values:
        if not isinstance(value, dict):
            raise InputError(
                f"{where} is {shown(value)}: expected an object, an answer of an engine; mend it."
            )
        response = value.get("response")
        records.append(
            (
                where,
                {**response, "request": value.get("request")}
                if isinstance(response, dict)
                else value,
            )
        )
    return records


def _line(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON ({error.msg}, column {error.colno}): expected one object a line; mend it."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{where} is nested too deeply or holds a number too long to read: mend it."
        ) from error


def _paths(
    record: Mapping[str, Any], where: str, format: str | None, token: Token
) -> list[EnginePath]:
    kinds = [kind() for name, kind in READERS.items() if format in (None, name)]
    reader = next((kind for kind in kinds if kind.fits(record)), None)
    if reader is None:
        fields = ", ".join(map(shown, list(record)[:6])) or "none"
        raise InputError(
            f"{where} is of no format that is known{'' if format is None else f' as {format}'} (fields: {fields}): expected one "
            f"of {', '.join([*READERS, BINARY])} with log-probs in it. The simplest is a line "
            'for each text, {"prompt": [ids], "tokens": [ids], "logprobs": [nats]}; docs/engines.md has the others.'
        )
    return list(reader.paths(record, where, token))


def _merged(paths: list[EnginePath]) -> list[EnginePath]:
    """Merges paths of one token each, which llama.cpp needs for log-probs of a prompt, into one
    path a text.
    """
    if len(paths) < 2 or any(len(path.tokens) != 1 for path in paths):
        return paths
    merged: list[EnginePath] = []
    for path in sorted(paths, key=lambda path: -len(path.prompt)):
        at = len(path.prompt)
        whole = next(
            (w for w in merged if w.prompt[:at] == path.prompt and len(w.prompt) > at), None
        )
        if whole is None:
            merged.append(path)
            continue
        if at in path.top:
            whole.top[at] = path.top[at]
        beside = value_in(path.top[at], whole.prompt[at]) if at in path.top else np.nan
        whole.chosen[at] = path.chosen[at] if path.tokens[0] == whole.prompt[at] else beside
        whole.missing += path.missing
    return merged
