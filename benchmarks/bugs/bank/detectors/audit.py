"""kvinterp's audit, on two rungs and short prompts; with all named programs besides."""

from __future__ import annotations

from torch import nn

from bank.detector import Detector, Found
from bank.run import CANNOT_TELL, FAIL, PASS, audited
from bank.subjects import Subject

_WORDS = {PASS: "no", FAIL: "yes", CANNOT_TELL: "cannot tell"}


def _audit(subject: Subject, model: nn.Module, calls: str = "") -> Found:
    verdict = audited(model, subject.dtype, subject.lengths, calls=calls)
    said = f"{verdict.verdict}: {verdict.parts[1][0] if verdict.parts[1] else verdict.parts[0]}"
    if verdict.exit_code != FAIL:
        return Found(_WORDS[verdict.exit_code], said)
    return Found("yes", said, verdict.first_layer, str(verdict.tensor))


DETECTORS = (
    Detector("audit", "kvinterp audit, of two precisions", _audit),
    Detector("audit-calls", "the same with --calls all", lambda subject, model: _audit(subject, model, "all")),
)
