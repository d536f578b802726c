"""How the bank audits a model, and what it holds against a verdict."""

from __future__ import annotations

from typing import Any

from torch import nn

import kvinterp as kv
from bank.bug import Bug
from bank.subjects import Patches

PASS, FAIL, CANNOT_TELL = 0, 1, 3
LENGTHS, STEPS = (9, 33), 2


def audited(model: nn.Module, dtype: str, lengths: tuple[int, ...] = LENGTHS, **more: Any) -> Any:
    """Audits with two rungs, the model's own dtype and float64 (float32 for a float64 model), short prompts and two steps.

    Args:
        model, dtype, lengths: What is audited, and the prompts.
        more: Other arguments of the audit.
    """
    rungs = (dtype, "float64") if dtype != "float64" else ("float32", "float64")
    return kv.audit(model, rungs=rungs, lengths=lengths, steps=STEPS, **more)


def audited_bug(bug: Bug, **more: Any) -> Any:
    """Audits a model with a bug planted, and takes out again what was planted outside the model."""
    model = bug.build()
    with Patches() as patches:
        bug.plant(model, patches)
        return audited(model, bug.dtype, bug.lengths, **more)


def wrong_about(bug: Bug, verdict: Any) -> str:
    """What a verdict gets wrong of a planted bug, in words; empty where it is right."""
    wrong = []
    if verdict.exit_code != FAIL:
        wrong.append(f"exit code {verdict.exit_code} ({verdict.verdict}), not {FAIL}")
    elif verdict.first_layer not in bug.layers:
        wrong.append(f"layer {verdict.first_layer}, not {' or '.join(map(str, bug.layers))}")
    elif bug.tensors and not str(verdict.tensor).startswith(bug.tensors):
        wrong.append(f"{verdict.tensor}, not {' or '.join(bug.tensors)}")
    elif bug.position is not None and verdict.first_position != bug.position:
        wrong.append(f"position {verdict.first_position}, not {bug.position}")
    return "; ".join(wrong)
