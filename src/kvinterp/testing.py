"""For other projects' tests: one assertion that a model's cache is right.

from kvinterp.testing import assert_cache_consistent

def test_cache():
    assert_cache_consistent(MyModelForCausalLM(config))
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvinterp.auditing.audit import audit
from kvinterp.auditing.verdict import Verdict


class CacheInconsistency(AssertionError):  # noqa: N818  # reads as what pytest reports
    """The cached path does not compute what recomputing does; ``verdict`` holds the evidence."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.reading)
        self.verdict = verdict


def assert_cache_consistent(
    model: Any,
    prompts: Sequence[Any] | None = None,
    *,
    allow: Sequence[str] = (),
    rungs: Sequence[str] = ("float32", "float64"),
    lengths: Sequence[int] = (5, 63, 64, 65),
    steps: int = 3,
    checks: str = "quick",
    seconds: float = 20.0,
) -> Verdict:
    """Audits a model and raises where its cache is at fault, or where that cannot be told.

    By default each use of the cache is tried once, the plainest first, and the first that is wrong
    is what it raises with; then tokens are fed one by one behind some lengths in each precision.
    It is less than ``kvinterp audit`` does: no program is drawn at random or compiled, uses that no
    contract of a cache promises are not tried, and fewer lengths are gone through.

    A model in training mode, as it is fresh from its config, is in eval mode for the length of the
    audit and then again as it was.

    Args:
        model: A transformers model, or whatever else :func:`kvinterp.auditing.audit` takes.
        prompts: Texts or token ids; two random ones where none are given.
        allow: Words to accept besides equal, rounding and kernel, such as ``"hidden-cast"`` or
            ``"cannot-tell"``.
        rungs: Precisions to climb beside the model's own; float32 and float64 find wrong code,
            which is what a test is for.
        lengths: Prompt lengths after which tokens are fed one by one.
        steps: How many tokens are fed one by one after each.
        checks: What else is exercised: ``"quick"`` (left padding, ``generate()``, other caches,
            chunks, ..., each once), as much as the audit does by ``"default"``, ``"thorough"`` or
            ``"none"``.
        seconds: Processor seconds that this takes at most; what they cut off is listed in the
            verdict as not run. A tiny model takes two or three.

    Returns:
        The verdict.

    Raises:
        CacheInconsistency: The verdict is a bug, unexplained, a hidden cast, a wrong dtype or an
            overflow, or cannot be told, and is not allowed; its message is the verdict's reading.
    """
    __tracebackhide__ = True
    verdict = audit(
        model,
        prompts,
        rungs=rungs,
        lengths=lengths,
        steps=steps,
        sweep="no",
        checks=checks,
        seconds=seconds,
        allow=allow,
        detail="verdict",
    )
    if verdict.exit_code:
        raise CacheInconsistency(verdict)
    return verdict
