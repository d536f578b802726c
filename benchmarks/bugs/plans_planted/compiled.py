"""What a model does otherwise once ``torch.compile`` looks at it."""

from __future__ import annotations

import torch
from bank.planting import around, mixer

from plans_planted.fault import Fault, named
from plans_planted.tools import head, mlp


def _when_compiled(find, change):
    """Changes what a module returns in compiled code alone."""

    def plant(model):
        def wrapper(_, forward, args, given):
            made = forward(*args, **given)
            if not torch.compiler.is_compiling():
                return made
            return (change(made[0]), *made[1:]) if isinstance(made, tuple) else change(made)

        around(find(model), wrapper)
        return model

    return plant


PLAN = "compiled(eager)"
FAULTS = named(
    Fault("compiled code scales one layer's feed-forward", PLAN, _when_compiled(mlp(1), lambda made: made * 1.01)),
    Fault(
        "compiled code casts one layer's attention",
        PLAN,
        _when_compiled(lambda model: mixer(model, 0), lambda made: made.to(torch.bfloat16).to(made.dtype)),
        None,
        "gpt2",
    ),
    Fault(
        "compiled code gives the logits of the row before",
        PLAN,
        _when_compiled(head, lambda made: made.roll(1, 2)),
        None,
        "qwen2",
    ),
)
