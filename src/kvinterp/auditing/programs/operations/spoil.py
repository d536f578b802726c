"""``spoil``: every number on a copy of the cache is changed, and a decode step must change with
them.
"""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import torch
from torch import Tensor, nn

from kvinterp.auditing.programs.outcome import WrongError
from kvinterp.auditing.programs.program import Operation
from kvinterp.auditing.programs.running import Run

SPOILS = (
    "kept = copy.deepcopy(cache)",
    "for name, value in ((name, value) for layer in kept.layers for name, value in vars(layer).items()):",
    "    _ = value.add_(torch.randn_like(value)) if torch.is_tensor(value) and value.is_floating_point() else None",
)
"""The same in lines of Python."""


@dataclasses.dataclass(frozen=True)
class Spoil(Operation):
    """The next column is fed to two copies of the cache, of which one holds other numbers: where
    the logits are the same to the bit, the cache is not read, and what was right in other programs
    was computed without it.
    """

    def offered(self, run: Run) -> bool:
        """Where the subject is a transformers model itself, and its cache holds more than pads."""
        return (
            super().offered(run)
            and run.subject.native
            and run.ids.shape[1] + 3 <= run.max_columns
            and not any(run.pads)
            and any(run.texts)
        )

    def do(self, run: Run) -> None:
        """Feeds both; the program goes on with the original.

        Raises:
            WrongError: The logits are the same.
        """
        changed = list[Tensor]()
        other = _other(copy.deepcopy(run.cache), changed, {})
        if not changed:
            return  # What it holds is nothing that was found: a state on the model, or whole numbers.
        run.tries("the cache is read")
        back = run.aside()
        ids, mask = run.columns(1)
        model_kwargs = run.model_kwargs(torch.cat([run.mask, mask], 1), 1)
        before = run.subject.feed(ids, copy.deepcopy(run.cache), **model_kwargs)[0]
        after = run.subject.feed(ids, other, **model_kwargs)[0]
        back()
        if torch.equal(before, after):
            line = run.subject.feed_line(ids, "yes", **model_kwargs)
            run.lines += [*SPOILS, line, "before, cache = logits, kept", line]
            run.lines.ends = "print(torch.equal(before, logits))", "True"
            raise WrongError(
                "a decode step is the same to the bit whatever numbers the cache holds: it is not read"
            )


def _other(value: Any, changed: list[Tensor], known: dict[int, Any]) -> Any:
    """The same with other numbers in every tensor of floating point.

    Args:
        value: A tensor, or what holds some.
        changed: Gets those that are new.
        known: What stands for what was met, by its id.
    """
    if id(value) in known:
        return known[id(value)]
    if isinstance(value, Tensor):
        made = value
        if value.is_floating_point() and value.numel():
            noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(len(changed)))
            made = value + noise.to(value) * (value.std(correction=0) + 1)
            changed.append(made)
        known[id(value)] = made
        return made
    known[id(value)] = value
    if isinstance(value, list | tuple | dict):
        pairs = [*value.items()] if isinstance(value, dict) else [*enumerate(value)]
        each = {name: _other(one, changed, known) for name, one in pairs}
        if isinstance(value, dict):
            value.update(each)
        elif isinstance(value, list):
            value[:] = each.values()
        else:
            return type(value)(each.values()) if type(value) is tuple else value
    elif (
        hasattr(value, "__dict__")
        and not isinstance(value, nn.Module | type)
        and not callable(value)
    ):
        vars(value).update(
            {name: _other(one, changed, known) for name, one in [*vars(value).items()]}
        )
    return value
