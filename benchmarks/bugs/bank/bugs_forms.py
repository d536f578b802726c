"""Errors of a decode that holds keys and values in another form than the prompt does: see ``representations.py``."""

from __future__ import annotations

from typing import Any

from torch import nn

from bank.bug import Bug
from bank.representations import attend


def _planted(name: str) -> Any:
    def plant(model: nn.Module, monkeypatch: Any) -> None:
        attend(model, name)

    return plant


def _bug(name: str, error: float, **more: Any) -> Bug:
    return Bug(name.replace("_", "-"), "llama", _planted(name), (1,), (), error, **more)


BUGS = (
    _bug("turned_but_the_first_key", 9.7e-2),
    _bug("turned_back_the_wrong_way", 6.2e-1),
    _bug("shifted_but_the_newest_key", 1.0e-3),
    _bug("reordered_but_two_values", 7.5e-2),
    _bug("split_stale", 8.6e-2),
)
