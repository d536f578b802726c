"""The audit's door: what is given is checked, what runs is planned, and what was found is kept together."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from kvinterp.auditing.bench import first_line
from kvinterp.auditing.differences import difference
from kvinterp.auditing.evidence import Auditor
from kvinterp.auditing.ladder import Plan, Rung, band, dtype_name, prefix_plan
from kvinterp.auditing.lengths import CHUNK_NAMES
from kvinterp.auditing.subject import Subject, check_causal, prompts_for
from kvinterp.auditing.verdict import VERDICTS, Verdict, judge
from kvinterp.data import Prompt
from kvinterp.errors import InputError, KvinterpError, UnsupportedError, located, shown
from kvinterp.inputs import check_callable, check_choice, check_instance, check_known, check_seed, given_list, whole_number
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.threads import own_threads
from kvinterp.provenance import provenance

__all__ = ["LENGTHS", "RUNGS", "Audit", "audit"]

RUNGS = ("bfloat16", "float16", "float32", "float64")
LENGTHS = (5, 63, 64, 65, 96, 97, 128)
"""Prompt lengths on and beside the usual tile, window and chunk sizes."""

CHECKS = ("default", "thorough", "none")

LONGEST, MOST_STEPS = 32_768, 4_096
"""The longest prompt of an audit, and the most tokens that are fed singly in all."""

LONGEST_EDGE = 512
"""The longest window or chunk that default lengths reach over."""


@dataclasses.dataclass
class Audit:
    """Everything an audit measured; ``verdict`` is its conclusion.

    Attributes:
        verdict: The conclusion.
        rungs: What each precision showed.
        plan: What was run.
        about: Provenance.
    """

    verdict: Verdict
    rungs: list[Rung]
    plan: Plan
    about: dict[str, Any]

    def rung(self, name: str) -> Rung | None:
        """One rung by name, or None."""
        return next((r for r in self.rungs if r.name == name), None)

    def save(self, folder: str | os.PathLike[str]) -> Path:
        """Writes verdict.json, audit.html and the tables as CSV; returns the folder."""
        from kvinterp.auditing.report import write

        return write(self, Path(folder))


def audit(
    model: Any,
    prompts: Sequence[Any] | None = None,
    *,
    rungs: Sequence[str] = RUNGS,
    lengths: Sequence[int] | None = None,
    steps: int = 3,
    seed: int = 0,
    sweep: str = "yes",
    checks: str = "default",
    allow: Sequence[str] = (),
    out: str | os.PathLike[str] | None = None,
    detail: str = "verdict",
    progress: Callable[[str], None] | None = None,
) -> Any:
    """Says whether a model's cached decoding is right, and if not what is wrong and where.

    Args:
        model: A model of any kind or an adapter. A transformers model runs with its own cache.
        prompts: Texts or token ids, each at least as long as the longest length and its steps; default: two random ones.
        rungs: The precisions to climb.
        lengths: Prompt lengths after which tokens are fed one by one; those the context has room for are used. Default:
            :data:`LENGTHS` and those on both sides of the model's own window and chunk, as far as these are at most 512.
        steps: How many tokens are fed one by one after each.
        seed: Seeds the random prompts.
        sweep: ``"yes"`` also decodes one long sequence from a short prompt, to find a position at which something changes.
        checks: What is exercised beside tokens fed one by one: ``"default"`` (left padding, ``generate()``, other caches,
            chunks, the model's window, as far as they are cheap), ``"thorough"`` (all of it) or ``"none"``.
        allow: Words of :data:`VERDICTS` that shall not fail, such as ``"hidden-cast"``.
        out: A folder for verdict.json and the page, or None.
        detail: ``"verdict"`` returns the :class:`Verdict`, ``"everything"`` the :class:`Audit`.
        progress: Told what runs next.

    Raises:
        InputError: Something given does not fit.
    """
    with _evaluating(model):
        adapter = wrap(model)
    check_choice("detail", detail, ("verdict", "everything"))
    check_choice("sweep", sweep, ("yes", "no"))
    check_known("checks", checks, CHECKS)
    check_seed(seed)
    check_callable("progress", progress)
    allow = _allowed(allow)
    lengths, steps = _checked_lengths(_own_lengths(adapter) if lengths is None else lengths, steps)
    dtypes = _precisions(rungs, adapter)
    if out is not None:
        check_instance("out", out, (str, os.PathLike), "the name of a folder, or None")
    with _claimed(out):
        with located(f"audit of {adapter.facts.name}"), own_threads(adapter), _torchs_own_words(), _evaluating(adapter):
            check_causal(adapter)
            room = min(adapter.facts.context, max(lengths) + steps)
            plan = prefix_plan(_tokens(adapter, prompts, room, seed), lengths, steps, room)
            auditor = Auditor(adapter, plan, dtypes, sweep, checks, progress or (lambda _: None))
            auditor.seen.random = _random(adapter, plan)
            seen = auditor.run()
            about = provenance(adapter, lengths=list(plan.prefills), steps=plan.steps)
        result = Audit(judge(seen, allow), list(seen.rungs.values()), plan, about)
        if out is not None:
            result.save(out)
    return result if detail == "everything" else result.verdict


def _allowed(allow: Any) -> tuple[str, ...]:
    """The words that shall not fail."""
    words = f"a list of words of {', '.join(VERDICTS)}"
    found = (allow,) if isinstance(allow, str) else tuple(given_list("allow", allow, words))
    for word in found:
        check_known("verdict to allow", word, VERDICTS)
    return found


def _precisions(rungs: Any, adapter: Adapter) -> dict[str, torch.dtype]:
    """The precisions to climb by name, the model's own among them."""
    expected = f"a list of at least one precision of {', '.join(RUNGS)}"
    rungs = given_list("rungs", rungs, expected)
    if not rungs:
        raise InputError(f"rungs={shown(rungs)} was given: expected {expected}.")
    dtypes = {dtype_name(dtype): dtype for dtype in map(dtype_named, rungs) if dtype is not None}
    dtypes.setdefault(dtype_name(adapter.dtype), adapter.dtype)
    return dtypes


@contextlib.contextmanager
def _claimed(out: str | os.PathLike[str] | None) -> Iterator[None]:
    """Held until it is written: another audit of the folder is told now, not overwritten then."""
    if out is None:
        yield
        return
    from kvinterp.auditing.report import check_own
    from kvinterp.locks import Lock

    check_own(Path(out))
    with Lock(Path(out)):
        yield


@contextlib.contextmanager
def _evaluating(model: Any) -> Iterator[None]:
    """A model fresh from its config drops out at random until it is told not to; it is left as it was."""
    model = model.model if isinstance(model, Adapter) else model
    modules = model.modules() if isinstance(model, torch.nn.Module) else ()
    training = [module for module in modules if module.training]
    try:
        for module in training:
            module.training = False
        yield
    finally:
        for module in training:
            module.training = True


def _random(adapter: Adapter, plan: Plan) -> float:
    """The relative difference of one forward run twice, where it is beyond what rounding in another order makes."""
    subject, tokens = Subject(adapter), plan.tokens(0, adapter.device)
    first, again = subject.recompute(tokens), subject.recompute(tokens)
    kept = first.isfinite() & again.isfinite()
    size = difference(first[kept], again[kept]) if bool(kept.any()) else 0.0
    return size if size > band(adapter.dtype, adapter.facts.width) else 0.0


@contextlib.contextmanager
def _torchs_own_words() -> Iterator[None]:
    """What torch says of a forward that it cannot run, in one sentence."""
    try:
        yield
    # Models raise whatever their code meets first; kvinterp's own errors are sentences already.
    except (RuntimeError, ValueError, IndexError, KeyError, TypeError, AttributeError, ArithmeticError) as error:
        if isinstance(error, KvinterpError):
            raise
        said = first_line(error, 200)
        raise UnsupportedError(
            "this model cannot be run as the audit runs it, tokens one by one on its own cache and each block given the "
            f"recomputation's rows: {said}"
        ) from error


def _checked_lengths(lengths: Any, steps: Any) -> tuple[tuple[int, ...], int]:
    """The lengths and steps as whole numbers, where an audit of them ends."""
    expected = "whole numbers of at least 1, as in lengths=(5, 63, 64), steps=3"
    counts = [whole_number(value) or 0 for value in (*given_list("lengths", lengths, expected), steps)]
    if len(counts) < 2 or min(counts) < 1:
        raise InputError(f"lengths={shown(lengths)}, steps={shown(steps)} was given: expected {expected}.")
    *lengths, steps = counts
    if max(lengths) > LONGEST or len(set(lengths)) * steps > MOST_STEPS:
        raise InputError(
            f"{len(set(lengths)):,} lengths up to {max(lengths):,} with {steps:,} steps each were asked for, and each step "
            f"recomputes its whole prefix at every precision: expected lengths up to {LONGEST:,} and at most {MOST_STEPS:,} "
            "steps in all; give fewer."
        )
    return tuple(lengths), steps


def _own_lengths(adapter: Adapter) -> tuple[int, ...]:
    config: Any = getattr(adapter.source, "config", None)
    chunks = [getattr(config, name, None) for name in CHUNK_NAMES]
    edges = {edge for edge in (*adapter.facts.windows, *chunks) if isinstance(edge, int) and 2 < edge <= LONGEST_EDGE}
    return tuple(sorted({*LENGTHS, *(edge + side for edge in edges for side in (-1, 1))}))


def _tokens(adapter: Adapter, prompts: Sequence[Any] | None, length: int, seed: int) -> list[Sequence[int]]:
    if prompts is None:
        return prompts_for(adapter, 2, length, seed)
    prompts = given_list("prompts", prompts, "a list of prompts, each text or token ids")
    found: list[Sequence[int]] = []
    for prompt in prompts:
        text = prompt.text if isinstance(prompt, Prompt) else prompt
        if not isinstance(text, str | Iterable):
            raise InputError(f"prompt {text!r} cannot be audited: expected text or a list of token ids.")
        ids = adapter.encode(text) if isinstance(text, str) else list(text)
        wrong = next((t for t in ids if not isinstance(t, int) or not 0 <= t < adapter.facts.vocabulary), None)
        if wrong is not None or len(ids) < 3:
            what = "it has fewer than 3 tokens" if wrong is None else f"it holds token {wrong!r}"
            raise InputError(
                f"prompt {str(prompt)[:40]!r} cannot be audited: {what}; vocabulary {adapter.facts.vocabulary}."
            )
        found.append(ids)
    if not found:
        raise InputError("the list of prompts is empty: give at least one, or leave it out for random ones.")
    return found
