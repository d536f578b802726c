"""For other projects' tests: one assertion that a model's cache is right, and a mixin that asserts
it of every class of a model's tests as transformers writes them.

from kvinterp.testing import assert_cache_consistent

def test_cache():
    assert_cache_consistent(MyModelForCausalLM(config))
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvinterp.auditing.audit import audit
from kvinterp.auditing.programs.outcome import RIGHT, WRONG
from kvinterp.auditing.programs.search import base_of
from kvinterp.auditing.verdict import Verdict
from kvinterp.common.files import read_json, strict_json, write_whole
from kvinterp.errors import InputError

WRITE = "KVINTERP_BASELINE"
"""The environment variable that, where it is ``write``, has baselines written and not held to."""


class CacheInconsistency(AssertionError):  # noqa: N818  # reads as what pytest reports
    """The cached path does not compute what recomputing does; ``verdict`` holds the evidence."""

    def __init__(self, verdict: Verdict, said: str = "") -> None:
        super().__init__(said or verdict.reading)
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
    baseline: str | Path | None = None,
    name: str | None = None,
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
        baseline: A JSON file of the faults that are known, by the names of models: the uses that
            are wrong. It may only shrink: another fault fails, and so does a known one that is
            right now, with what to take out. Each use is tried then, whatever is wrong. With
            ``KVINTERP_BASELINE=write`` in the environment it is written instead.
        name: The model's name in the baseline (default: that of its class).

    Returns:
        The verdict.

    Raises:
        CacheInconsistency: The verdict is a bug, unexplained, a hidden cast, a wrong dtype or an
            overflow, or cannot be told, and is not allowed; its message is the verdict's reading.
        InputError: The baseline is none.
    """
    __tracebackhide__ = True
    known = None if baseline is None else _read_baseline(Path(baseline))
    verdict = audit(
        model,
        prompts,
        rungs=rungs,
        lengths=lengths,
        steps=steps,
        sweep="no",
        # What is quick ends with the first fault, which may be a known one.
        checks="each" if baseline is not None and checks == "quick" else checks,
        seconds=seconds,
        allow=allow,
        detail="verdict",
    )
    if known is not None:
        return _held_to(Path(baseline or ""), known, name or type(model).__name__, verdict)
    if verdict.exit_code:
        raise CacheInconsistency(verdict)
    return verdict


class CacheTesterMixin:
    """For the model tests of transformers, beside ``ModelTesterMixin``: each class that generates,
    small as its ``model_tester`` makes it, has a cache that computes what recomputing does.

    Attributes:
        cache_baseline: The baseline of :func:`assert_cache_consistent`, if there is one.
    """

    cache_baseline: str | Path | None = None

    def test_cached_decoding_is_recomputation(self) -> None:
        """Audits each of ``all_generative_model_classes``; names all that fail."""
        here: Any = self
        for kind in here.all_generative_model_classes:
            with here.subTest(kind.__name__), torch.random.fork_rng():
                torch.manual_seed(0)
                config, _ = here.model_tester.prepare_config_and_inputs_for_common()
                assert_cache_consistent(kind(config), baseline=self.cache_baseline)


def _held_to(baseline: Path, known: dict[str, list[str]], name: str, verdict: Verdict) -> Verdict:
    """The verdict, where it has the faults that a baseline knows of this model and no others.

    Raises:
        CacheInconsistency: It has others, or lacks one.
    """
    wrong = [check.name for check in verdict.checks if check.status == WRONG]
    found = wrong or [verdict.verdict] * bool(verdict.exit_code)
    if os.environ.get(WRITE) == "write":
        faults = {**known, name: sorted(found)}
        write_whole(
            baseline, strict_json({one: faults[one] for one in sorted(faults) if faults[one]})
        )
        return verdict
    listed = known.get(name, [])
    told = {base_of(use) for use in listed}
    if new := [use for use in found if base_of(use) not in told]:
        said = f"{', '.join(new)}: not among the faults of {name} that {baseline} knows.\n"
        raise CacheInconsistency(verdict, said + verdict.reading)
    right = {check.name for check in verdict.checks if check.status == RIGHT}
    others = {check.name for check in verdict.checks} - right
    # A word of the whole verdict, such as "bug", is no use that has a check.
    passes = not verdict.exit_code
    if mended := [use for use in listed if use in right or (passes and use not in others)]:
        raise CacheInconsistency(
            verdict,
            f"{name} is right now in what {baseline} lists as wrong: {', '.join(mended)}. Take it out of the file, "
            f"or run once with {WRITE}=write.",
        )
    return verdict


def _read_baseline(baseline: Path) -> dict[str, list[str]]:
    """By model, the uses that are known to be wrong; none where there is no file.

    Raises:
        InputError: The file is no baseline.
    """
    if not baseline.exists():
        return {}
    read = read_json(baseline)
    if read is None or not all(
        isinstance(uses, list) and all(isinstance(use, str) for use in uses)
        for uses in read.values()
    ):
        raise InputError(
            f"{baseline} is no baseline: expected a JSON object with a list of uses by the name of each model; delete it and run "
            f"once with {WRITE}=write."
        )
    return read
