"""Errors of a decode that holds keys and values in another form than the prompt does: see ``representations.py``."""

from __future__ import annotations

from typing import Any

from torch import nn

from bank.bug import Bug
from bank.representations import WRONG, attend


def _planted(name: str) -> Any:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        attend(model, name)

    return plant


def _bug(name: str, error: float, **more: Any) -> Bug:
    return Bug(name.replace("_", "-"), "llama", _planted(name), (1,), (), error, **more)


ERRORS = dict.fromkeys(WRONG, 0.0)
BUGS = (*(_bug(name, error) for name, error in ERRORS.items()), _bug("split_stale", 0.0))
