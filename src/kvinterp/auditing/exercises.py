"""What an audit exercises besides tokens that are fed one by one, and what it does not: one check each.

Every check runs the model along a way of using its cache, compares the logits with a recomputation of the very same tokens
(the same padding, the same rows) without a cache, and judges the error against what that comparison shows where no cache is
at work (see ``bench.py``). What could not be run says why.

==========================  ==========================================================================================
``batch``                   two prompts side by side
``left padding``            prompts of different lengths
``generate()``              what transformers' own loop feeds the forward, and its logits; with padding too
``several chunks``          a prompt fed in chunks of 7, of 16 and uneven ones
``window``                  decoding over the edge of the model's sliding window, however long
``long prompt``             prompts about the chunk sizes of the model's own kernels
``crop and go on``          tokens taken back from the cache, others fed
``beams reordered``         rows of the cache exchanged, repeated, selected
``StaticCache``             the preallocated cache
``quantised cache``         thorough only: whether it runs, what it costs; its first step is exact
==========================  ==========================================================================================
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvinterp.auditing import batches, caches, generation, lengths
from kvinterp.auditing.bench import FAILED, PASSED, UNCLEAR, Bench, Check, not_run, one_line
from kvinterp.auditing.causes import WithoutCasts
from kvinterp.auditing.feeding import Runner
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.placing import placed
from kvinterp.auditing.subject import Subject

__all__ = ["Check", "exercise"]

Trial = Callable[[Bench], Check | list[Check]]

NARROW = "a tensor is cast to fewer bits than float32 that plain decoding keeps"

CHECKS: dict[str, Trial] = {
    "batch": batches.side_by_side,
    "left padding": batches.left_padding,
    "generate()": generation.generate,
    "generate(), left padding": generation.generate_padded,
    "several chunks": lengths.chunks,
    "window": lengths.window,
    "long prompt": lengths.long_prompt,
    "crop and go on": caches.crop,
    "beams reordered": batches.beams,
    "rows repeated and selected": batches.repeated_rows,
    "StaticCache": caches.static,
    "quantised cache": caches.quantised,
}


def exercise(
    subject: Subject,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int = 3,
    thorough: bool = False,
    progress: Callable[[str], None] | None = None,
) -> list[Check]:
    """Tries what a model's users do with its cache.

    The model is left as it was: its hooks, configs, training mode and the random state.

    Args:
        subject: The model, in the finest precision in which it runs: there rounding excuses least.
        prompts: Token ids; random ones follow where they are too short or too few.
        steps: How many tokens are fed one by one, at least 2.
        thorough: Also what costs more: longer windows, quantised caches.
        progress: Told the name of each check before it runs.

    Returns:
        A check each, in the order of the table above.
    """
    with _as_it_was(subject), torch.no_grad():
        try:
            bench = Bench.of(subject, prompts, steps, thorough)
        # Whatever a model raises is no error of the audit's.
        except Exception as error:
            why = f"plain decoding on the model's own cache raised {one_line(error)}, so nothing else can be tried."
            return [not_run(name, why) for name in CHECKS]
        found: list[Check] = []
        for name, check in CHECKS.items():
            if progress is not None:
                progress(name)
            found += _tried(bench, name, check)
        return found


def _tried(bench: Bench, name: str, run: Trial) -> list[Check]:
    """One check; what is not passed is tried again with what else may be the cause taken away."""
    runners, before = [bench.runner], bench.runner.forwards
    found = _run(bench, name, run)
    if bench.left_out:
        # The model's casts are left out all along: that this way of using the cache makes none of its own is looked at too.
        if bench.thorough:
            found = [_cast_of_its_own(one, coarse) for one, coarse in _beside(found, _coarsely(bench, name, run, runners))]
    elif not bench.runner.narrow and any(_suspicious(one) for one in found):
        without = _otherwise(bench, WithoutCasts(), None, name, run, runners)
        coarse = _coarsely(bench, name, run, runners)
        found = [_explained(one, *rest) for one, *rest in _beside(found, without, coarse)]
    if any(one.status == FAILED for one in found) and bench.runner.subject.dtype != torch.float64:
        # Rounding can tip a choice of experts, in one prompt; a bug does not care for the prompt.
        other = dataclasses.replace(bench, pool=[list(reversed(row)) for row in bench.pool[::-1]])
        found = [_confirmed(*pair) for pair in _beside(found, {one.name: one for one in _run(other, name, run)})]
    found = [placed(bench, one, lambda b: _run(b, name, run)) if one.status == FAILED else one for one in found]
    spent = sum(runner.forwards for runner in runners) - before
    return [dataclasses.replace(one, forwards=spent if n == 0 else 0) for n, one in enumerate(found)]


def _suspicious(one: Check) -> bool:
    return one.status in (FAILED, UNCLEAR) and one.error is not None


def _beside(found: list[Check], *others: dict[str, Check]) -> list[tuple[Any, ...]]:
    return [(one, *(other.get(one.name) for other in others)) for one in found]


def _run(bench: Bench, name: str, run: Trial) -> list[Check]:
    try:
        made = run(bench)
    # A model that cannot be used in this way says so with whatever error its code meets first.
    except Exception as error:
        return [Check(name, UNCLEAR, f"it raised {one_line(error)}.")]
    return made if isinstance(made, list) else [made]


def _otherwise(
    bench: Bench, kernels: WithoutCasts | None, unit: float | None, name: str, run: Trial, runners: list[Runner]
) -> dict[str, Check]:
    """The same check on other kernels, by name; without those that could not be judged."""
    try:
        new = bench.otherwise(kernels, unit)
    # A model that does not run without its casts is judged as it is.
    except Exception:
        return {}
    found = _run(new, name, run)
    runners.append(new.runner)
    return {one.name: one for one in found if one.error is not None}


def _coarsely(bench: Bench, name: str, run: Trial, runners: list[Runner]) -> dict[str, Check]:
    """The same check on the model as it is, with room for the rounding of casts to float32."""
    unit = max(bench.runner.unit, unit_roundoff(torch.float32))
    return _otherwise(bench, None, unit, name, run, runners)


def _explained(one: Check, without: Check | None, coarse: Check | None) -> Check:
    """A check that did not pass, once it was also run without the model's casts, and with room for them.

    A cast to float32 is the cause where the error vanishes with it and is of its size. Where the model cannot be run without
    its casts, what they could explain is not known.
    """
    if not _suspicious(one):
        return one
    beyond = coarse is not None and coarse.status == FAILED
    if without is None:
        if one.status == FAILED and not beyond:
            detail = (
                f"{one.detail.rstrip('.')}; casts to float32 inside the model may do as much, and it does not run without."
            )
            return dataclasses.replace(one, status=UNCLEAR, detail=detail, hint="")
        return one
    if without.status != PASSED:
        return without
    detail = f"{without.detail.rstrip('.')} (with them {one.error:.1e})."
    return _cast_of_its_own(dataclasses.replace(without, detail=detail), coarse)


def _cast_of_its_own(one: Check, coarse: Check | None) -> Check:
    if one.status != PASSED or coarse is None or coarse.status != FAILED:
        return one
    detail = f"{coarse.detail.rstrip('.')}; with casts to fewer bits left out it passes."
    return dataclasses.replace(coarse, detail=detail, hint=coarse.hint or NARROW)


def _confirmed(one: Check, again: Check | None) -> Check:
    """What fails with one set of prompts alone, where rounding can tip a choice, is not said to fail."""
    if one.status != FAILED or (again is not None and again.status == FAILED):
        return one
    detail = f"{one.detail.rstrip('.')}; other prompts of the same lengths do not show it."
    return dataclasses.replace(one, status=UNCLEAR, detail=detail)


@contextlib.contextmanager
def _as_it_was(subject: Subject) -> Iterator[None]:
    """Restores what running a model can change: its mode, its attributes, the random state, what libraries say."""
    from transformers.utils import logging

    model = subject.adapter.model
    source = subject.adapter.source
    modes = {module: module.training for module in model.modules()}
    kept = {holder: dict(vars(holder)) for holder in {id(m): m for m in (model, source)}.values()}
    level, device = logging.get_verbosity(), subject.adapter.device
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            logging.set_verbosity_error()
            model.eval()
            yield
    finally:
        logging.set_verbosity(level)
        for module, training in modes.items():
            module.training = training
        for holder, attributes in kept.items():
            for name in set(vars(holder)) - set(attributes):
                vars(holder).pop(name)
            vars(holder).update(attributes)
