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

import torch

from kvinterp.auditing import batches, caches, generation, lengths
from kvinterp.auditing.bench import CASTS, FAILED, PASSED, UNCLEAR, Bench, Check, Runner, not_run, one_line
from kvinterp.auditing.inside import WithoutCasts
from kvinterp.auditing.subject import Subject

__all__ = ["Check", "exercise"]

CHECKS: dict[str, Callable[[Bench], Check | list[Check]]] = {
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


def _tried(bench: Bench, name: str, check: Callable[[Bench], Check | list[Check]]) -> list[Check]:
    """One check; what is not passed is tried again with what else may be the cause taken away."""
    before = bench.runner.forwards
    first = _run(bench, name, check)
    bad = [one for one in first if one.status in (FAILED, UNCLEAR) and one.error is not None]
    if bad and not bench.left_out:
        without = _without_casts(bench)
        first = _better(first, _run(without, name, check))
        bench.runner.forwards += without.runner.forwards
    fails = any(one.status == FAILED for one in first)
    if fails and bench.runner.subject.dtype != torch.float64:
        # Rounding can tip a choice of experts, in one prompt; a bug does not care for the prompt.
        other = dataclasses.replace(bench, pool=[list(reversed(row)) for row in bench.pool[::-1]])
        again = {one.name: one for one in _run(other, name, check)}
        first = [_confirmed(one, again.get(one.name)) for one in first]
    spent = bench.runner.forwards - before
    return [dataclasses.replace(one, forwards=spent if n == 0 else 0) for n, one in enumerate(first)]


def _run(bench: Bench, name: str, check: Callable[[Bench], Check | list[Check]]) -> list[Check]:
    try:
        made = check(bench)
    # A model that cannot be used in this way says so with whatever error its code meets first.
    except Exception as error:
        return [Check(name, UNCLEAR, f"it raised {one_line(error)}.")]
    return made if isinstance(made, list) else [made]


def _without_casts(bench: Bench) -> Bench:
    old = bench.runner
    runner = Runner(Subject(old.adapter, WithoutCasts(), old.subject.positions))
    new = dataclasses.replace(bench, runner=runner, left_out=CASTS)
    with contextlib.suppress(Exception):
        new._measure_plain()
    return new


def _better(with_casts: list[Check], without: list[Check]) -> list[Check]:
    """What passes once casts are left out is passed; what does not stays as it was."""
    passed = {one.name: one for one in without if one.status == PASSED}
    return [one if one.status == PASSED else passed.get(one.name, one) for one in with_casts]


def _confirmed(one: Check, again: Check | None) -> Check:
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
