"""For other projects' tests: one assertion that a model's cache is right, a mixin that asserts it of
every class of a model's tests as transformers writes them, and programs for tests of hypothesis.

from kvinterp.testing import assert_cache_consistent

def test_cache():
    assert_cache_consistent(MyModelForCausalLM(config))
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from kvinterp.auditing.audit import audit
from kvinterp.auditing.baseline import WRITE, departure, read_baseline, write_baseline
from kvinterp.auditing.blocks import evaluating
from kvinterp.auditing.programs.model_subject import ModelSubject
from kvinterp.auditing.programs.outcome import WRONG
from kvinterp.auditing.programs.program import Program
from kvinterp.auditing.programs.search import run_program, sample_program
from kvinterp.auditing.subjects import widest_subject
from kvinterp.auditing.uses import as_it_was
from kvinterp.auditing.verdict import Verdict
from kvinterp.models import wrap


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
    known = None if baseline is None else read_baseline(Path(baseline))
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
    if known is None:
        if verdict.exit_code:
            raise CacheInconsistency(verdict)
        return verdict
    held_to = Path(baseline or ""), known, name or type(model).__name__, verdict
    if os.environ.get(WRITE) == "write":
        write_baseline(*held_to)
    elif said := departure(*held_to):
        raise CacheInconsistency(verdict, f"{said}\n{verdict.reading}")
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


@dataclasses.dataclass(frozen=True)
class Trial:
    """A program, and the model whose cache it is done to.

    Attributes:
        program: What is done to the cache.
        subject: The model, in float64.
    """

    program: Program
    subject: ModelSubject = dataclasses.field(repr=False)

    def __repr__(self) -> str:
        """The program, as ``kvinterp audit --calls`` takes it."""
        return str(self.program)

    def check(self) -> None:
        """Runs the program.

        Raises:
            AssertionError: A row's logits are not those of one forward over its own tokens, or what
                the model offers crashes.
        """
        __tracebackhide__ = True
        with as_it_was(self.subject.given), torch.no_grad():
            run = run_program(self.subject, self.program)
        assert run.word != WRONG, f"{self.program} is wrong: {run.why}"


def programs(model: Any) -> Any:
    """A strategy of hypothesis: programs that a model offers, as the audit draws them.

    @given(programs(model))
    def test_cache(trial):
        trial.check()

    Args:
        model: A transformers model that decodes from a cache; what is tried is a copy in float64.

    Returns:
        A strategy of :class:`Trial`; hypothesis shrinks the first that is wrong.
    """
    from hypothesis import strategies

    with evaluating(model), torch.no_grad():
        adapter = wrap(model)
        with as_it_was(adapter):
            subject, _ = widest_subject(adapter, ModelSubject)

    def trial(draw: Any) -> Trial:
        return Trial(sample_program(draw, subject), subject)

    # What is drawn from it hypothesis can make smaller.
    drawn = strategies.randoms(use_true_random=False).map(trial)
    return drawn.filter(lambda one: subject.holds(one.program))
