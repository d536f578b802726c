"""Logits of tokens fed one by one, against one forward of all: `allclose` at three settings, and top-1 agreement."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from bank.detector import Detector, Found
from bank.measure import cached, tokens
from bank.subjects import Subject

STEPS = 8


@torch.no_grad()
def decoded(subject: Subject, model: nn.Module, steps: int = STEPS) -> tuple[Tensor, Tensor]:
    """Logits of each step, cached and of one forward without a cache: ``[step, vocabulary]`` each."""
    length = max(subject.lengths)
    ids = tokens(length + steps)
    mine = cached(model, ids, length, *[1] * steps)[0, length:]
    return mine, model(ids, use_cache=False).logits[0, length:]


def _said(alarm: bool, mine: Tensor, theirs: Tensor) -> Found:
    largest = float((mine.double() - theirs.double()).abs().nan_to_num(float("inf"), float("inf")).max())
    return Found("yes" if alarm else "no", f"the largest difference of a logit is {largest:.1e}")


def _allclose(rtol: float, atol: float) -> Callable[[Subject, nn.Module], Found]:
    def detect(subject: Subject, model: nn.Module) -> Found:
        mine, theirs = decoded(subject, model)
        return _said(not torch.allclose(mine, theirs, rtol=rtol, atol=atol), mine, theirs)

    return detect


def _assert_close(subject: Subject, model: nn.Module) -> Found:
    mine, theirs = decoded(subject, model)
    try:
        torch.testing.assert_close(mine, theirs)
    except AssertionError:
        return _said(True, mine, theirs)
    return _said(False, mine, theirs)


def _top1(subject: Subject, model: nn.Module) -> Found:
    mine, theirs = decoded(subject, model, 32)
    wrong = int((mine.argmax(-1) != theirs.argmax(-1)).sum())
    return Found("yes" if wrong else "no", f"the most likely token differs at {wrong} of 32 steps")


DETECTORS = (
    Detector("allclose-default", "torch.allclose's own rtol 1e-5, atol 1e-8", _allclose(1e-5, 1e-8)),
    Detector("allclose-assert", "torch.testing.assert_close's tolerances for the dtype", _assert_close),
    Detector("allclose-loose", "allclose with rtol 1e-2, atol 1e-2", _allclose(1e-2, 1e-2)),
    Detector("top1", "the most likely token of 32 steps, of the same tokens", _top1),
)
