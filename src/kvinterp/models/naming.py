"""Finds a model by its name: in the zoo, in a folder, or on the hub, which is asked once."""

from __future__ import annotations

import difflib
import functools
from pathlib import Path
from typing import Any

from kvinterp.common.files import is_file
from kvinterp.errors import InputError, reason, shown
from kvinterp.models import real, zoo

NAMED = ("zoo:", "real:")
"""The prefixes of models that kvinterp itself provides."""
HUB_SECONDS = 2.0
"""How long the hub may take to answer; a misspelt name should not cost the retries of a
download.
"""


def check_reached(name: str) -> None:
    """Raises where no model of this name can be loaded from here; needs no slow import.

    Args:
        name: The user's name for it. Names with a colon, which are the user's own code, and
            ``.json`` files are not checked.

    Raises:
        InputError: As :func:`local_folder` and :func:`reach` say.
    """
    own_code = (":" in name and not name.startswith(NAMED)) or name.endswith(".json")
    if not own_code and local_folder(name) is None:
        reach(name)


def local_folder(name: str) -> Path | None:
    """The local checkpoint, a folder or a GGUF file, that a name stands for; None for a hub id.

    Raises:
        InputError: It looks like a path and no checkpoint is there.
    """
    if name.startswith("zoo:"):
        return zoo.folder(name.removeprefix("zoo:"))
    if name.startswith("real:"):
        return real.path(name.removeprefix("real:"))
    looks_local = name.startswith((".", "~", "/", "\\")) or name.count("/") > 1 or not name.strip()
    try:
        path = Path(name).expanduser()
        exists = path.exists()
    # An unknown user after ~, a name that is too long, or a character that no name can have.
    except (RuntimeError, OSError, ValueError):
        path, exists = Path(), False
        looks_local = looks_local or len(name) > 200
    if not exists and not looks_local and "\0" not in name and not name.lower().endswith(".gguf"):
        return None
    if exists and is_gguf(path):
        return path
    if not exists and name.lower().endswith(".gguf"):
        raise InputError(
            f"GGUF file {shown(name)} does not exist: give the name of one, a checkpoint folder or zoo:NAME."
        )
    if not exists or not path.is_dir():
        raise InputError(
            f"model folder {shown(name)} does not exist: give a transformers checkpoint folder, a GGUF file or zoo:NAME."
        )
    if not is_file(path / "config.json"):
        if is_file(path / "adapter_config.json"):
            raise InputError(
                f"model folder {shown(name)} holds a PEFT adapter and no model: save the folder of its base model with the "
                "adapter merged in (merge_and_unload(), save_pretrained()), or give the PeftModel to kv.wrap() in Python."
            )
        raise InputError(
            f"model folder {shown(name)} has no config.json that is a file: expected a transformers checkpoint folder."
        )
    return path


@functools.cache
def reach(name: str) -> dict[str, Any]:
    """Asks the hub once whether it has an id, and returns the options to load it with.

    Raises:
        InputError: It is no hub id, the hub has no such id, or the hub cannot be reached and there
            is no local copy.
    """
    from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        here = isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError as error:
        raise _not_found(name, "that is no hub id") from error
    if constants.HF_HUB_OFFLINE and not here:
        raise _not_found(name, "HF_HUB_OFFLINE is set and no copy of it is in the local cache")
    if constants.HF_HUB_OFFLINE:
        return {"local_files_only": True}
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"), timeout=HUB_SECONDS)
    # The errors of a connection depend on the HTTP library, which changes between versions.
    except Exception as error:
        if not here:
            why = (
                "the hub says" if isinstance(error, HfHubHTTPError) else "the hub cannot be reached"
            )
            raise _not_found(name, f"{why}: {reason(error)}") from error
        return {"local_files_only": True}
    return {}


def cached_folder(name: str) -> Path | None:
    """The folder of the local copy of a hub id, or None."""
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(name, "config.json")
    return Path(config).parent if isinstance(config, str) else None


OWN = {**{name: f"zoo:{name}" for name in zoo.names()}, "smollm2-135m": "real:smollm2-135m"}
"""The models that kvinterp itself provides, by their names without a prefix."""


def meant(name: str) -> str:
    """The question whether a model of kvinterp's own was meant; empty for a name that is like
    none.
    """
    near = difflib.get_close_matches(name.lower().rpartition("/")[2], OWN, n=1)
    return f"did you mean {OWN[near[0]]}? Otherwise " if near else ""


def _not_found(name: str, why: str) -> InputError:
    own = f"a class of your own (for kvinterp audit {name}, or kv.wrap(model) in Python), " * (
        ":" in name
    )
    return InputError(
        f"model {shown(name)} cannot be found ({why}): {meant(name)}expected {own}a hub id that can be reached from here, a "
        f"transformers checkpoint folder, a GGUF file, or one of {', '.join(OWN.values())}."
    )


def is_gguf(path: Path) -> bool:
    """Whether a path has the suffix of a GGUF file."""
    return path.suffix.lower() == ".gguf"
