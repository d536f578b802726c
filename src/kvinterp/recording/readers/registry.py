"""Finds every reader in this folder, and the one that a file is for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

import kvinterp.recording.readers as folder
from kvinterp.common import spec
from kvinterp.common.checks import check_instance
from kvinterp.common.files import bytes_of, is_file
from kvinterp.errors import InputError, shown, unknown
from kvinterp.recording.engine_path import EnginePath, value_in
from kvinterp.recording.readers.base import Reader, Token
from kvinterp.recording.readers.kl_base import MAGIC, read_kl_base

READERS: dict[str, type[Reader]] = spec.plugins_of(folder, Reader)  # type: ignore[type-abstract]
BINARY = "kl_base"
MOST = 2**31
"""The most bytes of a file that are read."""


def read_engine(
    file: str | Path, format: str | None = None, token: Token = lambda text: None, bos: int | None = None
) -> list[EnginePath]:
    """The paths that a file of another engine holds.

    Args:
        file: JSON, JSON a line, or a ``--kl-divergence-base`` file of llama.cpp.
        format: The reader's name; known by the content unless given.
        token: The model's own ids of texts, for answers without ids.
        bos: The token that llama.cpp put at the beginning of each chunk; None where it put none.

    Raises:
        InputError: It is not there, is of no format that is known, or holds what cannot be.
    """
    check_instance("file", file, (str, Path), "the path of a file")
    path = Path(file)
    if not is_file(path):
        raise InputError(
            f"file {str(path)!r} does not exist or is no file: expected log-probs of another engine; check it."
        )
    try:
        content = bytes_of(path, MOST)
    except OSError as error:
        raise InputError(f"file {str(path)!r} cannot be read ({error.strerror or error}): check it.") from error
    if format is not None and format not in (*READERS, BINARY):
        raise unknown("format", format, [*READERS, BINARY])
    if content[: len(MAGIC)] == MAGIC or format == BINARY:
        return read_kl_base(content, path.name, bos)
    records = _records(content, path.name)
    found = _together([each for where, record in records for each in _paths(record, where, format, token)])
    names: set[str] = set()
    for number, each in enumerate(found, 1):
        # A name that two have would make them one sequence in every table.
        each.id = f"{each.id} ({number})" if each.id in names else each.id
        names.add(each.id)
    return found


def _records(content: bytes, name: str) -> list[tuple[str, Mapping[str, Any]]]:
    if content[:2] == b"\x1f\x8b":
        raise InputError(f"file {name!r} is compressed (gzip): expected JSON, or JSON a line; unpack it.")
    if content[:2] in (b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05") or content[:4] == b"PK\x03\x04":
        raise InputError(
            f"file {name!r} is a pickle or an archive, which may run code and is not opened: convert it to JSON a line, "
            "see docs/engines.md."
        )
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InputError(f"file {name!r} is not UTF-8 text (byte {error.start}): expected JSON, or JSON a line.") from error
    lines = [(n, line) for n, line in enumerate(text.split("\n"), 1) if line.strip()]
    if not lines:
        raise InputError(f"file {name!r} is empty: expected log-probs of another engine, JSON a line; write some.")
    try:
        whole = json.loads(text)
        read = [
            (f"file {name!r}, record {n}", each) for n, each in enumerate(whole if isinstance(whole, list) else [whole], 1)
        ]
    except (ValueError, RecursionError):
        read = [(where := f"file {name!r}, line {n}", _line(where, line)) for n, line in lines]
    records: list[tuple[str, Mapping[str, Any]]] = []
    for where, each in read:
        if not isinstance(each, dict):
            raise InputError(f"{where} is {shown(each)}: expected an object, an answer of an engine; mend it.")
        response = each.get("response")
        records.append((where, {**response, "request": each.get("request")} if isinstance(response, dict) else each))
    return records


def _line(where: str, line: str) -> Any:
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{where} is not JSON ({error.msg}, column {error.colno}): expected one object a line; mend it."
        ) from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{where} is nested too deeply or holds a number too long to read: mend it.") from error


def _paths(record: Mapping[str, Any], where: str, format: str | None, token: Token) -> list[EnginePath]:
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


def _together(paths: list[EnginePath]) -> list[EnginePath]:
    """One path where several are a request a position of the same text, as llama.cpp needs them."""
    if len(paths) < 2 or any(len(path.tokens) != 1 for path in paths):
        return paths
    left = sorted(paths, key=lambda path: -len(path.prompt))
    found: list[EnginePath] = []
    for path in left:
        at = len(path.prompt)
        whole = next((w for w in found if w.prompt[:at] == path.prompt and len(w.prompt) > at), None)
        if whole is None:
            found.append(path)
            continue
        if at in path.top:
            whole.top[at] = path.top[at]
        own = value_in(path.top[at], whole.prompt[at]) if at in path.top else np.nan
        whole.chosen[at] = path.chosen[at] if path.tokens[0] == whole.prompt[at] else own
        whole.missing += path.missing
    return found
