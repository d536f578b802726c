"""Seven small trained checkpoints that come with the package, so that everything runs offline and
on a laptop's CPU.

Four of them differ in nothing but how many query heads share a KV head (``llama-mini`` 1,
``gqa2-mini`` 2, ``mistral-mini`` 4, ``mqa-mini`` 8); ``gemma2-mini`` has the parts of Gemma 2 that
the others lack, ``llama64-mini`` the heads of 64 that block formats of a quantised cache need, and
``moe-mini`` eight experts a layer. ``CARD.md`` says how they were trained and how well they do;
``tools/zoo`` makes them again (``make zoo``).
"""

from __future__ import annotations

import json
from importlib.resources import files
from pathlib import Path
from typing import Any

from kvinterp.common.checks import check_known

__all__ = ["describe", "folder", "names"]

_NAMES = (
    "llama-mini",
    "gqa2-mini",
    "mistral-mini",
    "mqa-mini",
    "gemma2-mini",
    "llama64-mini",
    "moe-mini",
)

_SIZES = {
    "layers": "num_hidden_layers",
    "width": "hidden_size",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}


def names() -> tuple[str, ...]:
    """Gives the names of the checkpoints."""
    return _NAMES


def folder(name: str) -> Path:
    """Finds the folder of a checkpoint, as ``AutoModelForCausalLM.from_pretrained`` takes it.

    Args:
        name: One of :func:`names`.

    Raises:
        InputError: If there is no such checkpoint; the message gives the near names.
    """
    check_known("zoo model", name, _NAMES)
    return Path(str(files(__name__))) / name


def describe() -> list[dict[str, Any]]:
    """Reads the sizes and the training of each checkpoint from its ``config.json`` and
    ``training.json``.

    Returns:
        One record a checkpoint: ``name``, ``architecture``, ``parameters``, ``layers``, ``width``,
        ``heads``, ``kv_heads``, ``head_dim``, ``steps``, ``tokens``, ``minutes``, ``accuracy``
        (task to fraction right) and ``bytes`` (of the whole folder).
    """
    records = []
    for name in _NAMES:
        path = folder(name)
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
        training = json.loads((path / "training.json").read_text(encoding="utf-8"))
        records.append(
            {
                "name": name,
                "architecture": config["architectures"][0],
                **{ours: config[theirs] for ours, theirs in _SIZES.items()},
                **{
                    key: training[key]
                    for key in ("parameters", "steps", "tokens", "minutes", "accuracy")
                },
                "bytes": sum(file.stat().st_size for file in path.iterdir()),
            }
        )
    return records
