"""What an audit exercises besides tokens that are fed one by one, and what it does not: one check each.

Every check runs the model along a way of using its cache, compares the logits with a recomputation of the very same tokens
(the same padding, the same rows) without a cache, and judges the error against what that comparison shows where no cache is
at work (see ``bench.py``). What could not be run says why.

============================  ========================================================================================
``prompt of one token``       a prompt that is as long as a decode step
``mask and positions given``  a mask of ones and the positions beside the tokens, and the mask alone
``batch``                     three prompts side by side
``left padding``              three prompts of different lengths; with the mask alone too, as most people call a model
``generate()``                what the library's own loop feeds the forward, and its logits; with padding too
``several chunks``            a prompt fed in chunks of 7, of 16, uneven ones and some that are drawn
``window``                    decoding over the edge of the model's sliding window, however long
``RoPE switch``               decoding over the length beyond which longrope, dynamic or yarn RoPE turns otherwise
``context end``               decoding up to the last position
``long prompt``               prompts about the chunk sizes of the model's own kernels
``crop and go on``            tokens taken back from the cache, others fed
``beams reordered``           three rows of the cache put in another order, repeated, selected
``StaticCache``               the preallocated cache
``quantised cache``           thorough only: whether it runs, what it costs; its first step is exact
============================  ========================================================================================
"""

from __future__ import annotations

import bisect
import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from kvinterp.auditing import batches, lengths
from kvinterp.auditing.bench import FAILED, NOT_RUN, PASSED, PLAIN, REFUSED, UNCLEAR, Bench, Check, attempted, met, one_line
from kvinterp.auditing.blocks import evaluating
from kvinterp.auditing.called import CALLED, by_call
from kvinterp.auditing.causes import COARSE, WithoutCasts
from kvinterp.auditing.first_difference import Feed, Finding, Sight
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.values import apart
from kvinterp.auditing.watch import Event
from kvinterp.models import Adapter
from kvinterp.models.door import quiet_transformers
from kvinterp.paths.calls import Call, call_named
from kvinterp.paths.kernels import BatchInvariant, Kernels

FEWER_BITS = "a tensor is cast to fewer bits than float32 that plain decoding keeps"

CHECKS: dict[str, Callable[[Bench], Any]] = {
    "prompt of one token": lengths.one_token,
    "mask and positions given": lengths.told,
    "batch": batches.side_by_side,
    "left padding": batches.left_padding,
    "left padding, mask alone": batches.mask_alone,
    "generate()": batches.generate,
    "generate(), left padding": batches.generate_padded,
    "several chunks": lengths.chunks,
    "window": lengths.window,
    "RoPE switch": lengths.rope_switch,
    "context end": lengths.context_end,
    "long prompt": lengths.long_prompt,
    "crop and go on": lengths.crop,
    "beams reordered": batches.beams,
    "rows repeated and selected": batches.repeated_rows,
    "StaticCache": lengths.static,
    "quantised cache": lengths.quantised,
}
"""What makes each check; a few make several."""


def exercise(
    adapter: Adapter,
    prompts: Sequence[Sequence[int]],
    *,
    steps: int = 3,
    thorough: bool = False,
    reach: str = "no",
    calls: Sequence[str] = (),
    progress: Callable[[str], None] | None = None,
) -> list[Check]:
    """Tries what a model's users do with its cache.

    The model is left as it was: its hooks, configs, training mode and the random state.

    Args:
        adapter: The model, in the finest precision in which it runs, where rounding excuses least, or in the one that serves.
        prompts: Token ids; random ones follow where they are too short or too few.
        steps: How many tokens are fed one by one, at least 2.
        thorough: Also what costs more: longer windows, quantised caches.
        reach: ``"yes"`` goes to every edge that the config names, whatever that costs.
        calls: Call plans to try besides.
        progress: Told the name of each check before it runs.

    Returns:
        A check each, in the order of the table above, and then of the call plans.
    """
    names = [*CHECKS, *(f"{CALLED}{plan}" for plan in calls)]
    with _as_it_was(adapter), torch.no_grad():
        try:
            bench = Bench.of(adapter, prompts, steps, thorough, reach)
        except Exception as error:
            why = f"plain decoding raised {one_line(error)}, so nothing else can be tried."
            return [met(adapter.model, "plain decoding", error), *(Check(name, NOT_RUN, why) for name in names)]
        found: list[Check] = []
        for name in names:
            if progress is not None:
                progress(name)
            found += _tried(bench, name)
        return found


def _tried(bench: Bench, name: str) -> list[Check]:
    """One check; what is not passed is tried again with what else may be the cause taken away."""
    # The model as it is, with room for the rounding of casts to float32.
    coarse_unit, before = max(bench.runner.unit, unit_roundoff(torch.float32)), bench.runner.forwards
    try:
        found = _run(bench, name)
    except Exception:
        if not bench.left_out:
            raise
        found = []
    if bench.left_out and (not found or any(one.crashed or one.status == REFUSED for one in found)):
        # Without its casts a model may raise what it never raises as it is.
        bench = bench.otherwise(None, coarse_unit)
        before, found = 0, _run(bench, name)
    benches = [bench]

    def otherwise(kernels: Kernels | None, unit: float | None = None) -> dict[str, Check]:
        """The same check on other kernels, by name; without those that could not be judged."""
        try:
            new = bench.otherwise(kernels, unit)
            made = _run(new, name)
        # A model that does not run without its casts is judged as it is.
        except Exception:
            return {}
        benches.append(new)
        return {one.name: one for one in made if one.error is not None}

    if bench.left_out:
        # The model's casts are left out all along: that this way of using the cache makes none of its own is looked at too.
        plan = _plan_of(name)
        coarse = otherwise(None, coarse_unit) if bench.thorough or (plan is not None and plan.kernels) else {}
        found = [_cast_of_its_own(one, coarse.get(one.name)) for one in found]
    elif bench.runner.narrow and _failed(found):
        fixed = otherwise(BatchInvariant())
        found = [_of_the_order(one, fixed.get(one.name), bench.beyond) for one in found]
    elif not bench.runner.narrow and any(map(_suspicious, found)):
        first, without, coarse = found, otherwise(WithoutCasts()), otherwise(None, coarse_unit)
        found = [_explained(one, without.get(one.name), coarse.get(one.name)) for one in found]
        if len(benches) > 1:
            tokens = bench.tokens(bench.short()[1])
            own, without_casts = (each.runner.recompute(tokens) for each in benches[:2])
            if apart(own, without_casts) <= benches[1].excused * benches[1].plain_null:
                # The model alone gives the same logits without: what casts is this way of calling, and nothing else.
                found = [_cast_by_call(one, before) for one, before in zip(found, first, strict=True)]
    if _failed(found) and bench.runner.dtype != torch.float64 and not any(one.crashed for one in found):
        # Rounding can tip a choice of experts, in one prompt; a bug does not care for the prompt.
        other = dataclasses.replace(bench, pool=[list(reversed(row)) for row in bench.pool[::-1]])
        # What fails with one set of prompts alone is not said to fail.
        again = {one.name for one in _run(other, name) if one.status == FAILED}
        also = "other prompts of the same lengths do not show it"
        found = [one if one.status != FAILED or one.name in again else one.also(also, status=UNCLEAR) for one in found]
    found = [_placed(bench, one, name) if one.status == FAILED and not one.crashed else one for one in found]
    spent = sum(each.runner.forwards for each in benches) - before
    return [dataclasses.replace(one, forwards=spent if n == 0 else 0) for n, one in enumerate(found)]


def _run(bench: Bench, name: str) -> list[Check]:
    plan = _plan_of(name)
    # Each check starts from what was found: not from what another's batch left on the model.
    with bench.runner.adapter.own_state([]):
        made: Any = attempted(bench, name, CHECKS[name] if plan is None else functools.partial(by_call, plan=plan))
    return made if isinstance(made, list) else [made]


def _plan_of(name: str) -> Call | None:
    return call_named(name.removeprefix(CALLED)) if name.startswith(CALLED) else None


def _failed(checks: Sequence[Check]) -> bool:
    return any(one.status == FAILED for one in checks)


def _suspicious(one: Check) -> bool:
    return one.status in (FAILED, PLAIN, UNCLEAR) and one.error is not None


def _explained(one: Check, without: Check | None, coarse: Check | None) -> Check:
    """A check that did not pass, once it was also run without the model's casts, and with room for them.

    A cast to float32 is the cause where the error vanishes with it and is of its size. Where the model cannot be run without
    its casts, what they could explain is not known.
    """
    if not _suspicious(one):
        return one
    if without is None:
        if one.status != FAILED or (coarse is not None and coarse.status == FAILED):
            return one
        also = "casts to float32 inside the model may do as much, and it does not run without"
        return one.also(also, status=UNCLEAR, hint="")
    if without.status != PASSED:
        return without
    detail = f"{without.detail.rstrip('.')} (with them {one.error:.1e})."
    return _cast_of_its_own(dataclasses.replace(without, detail=detail), coarse)


def _cast_by_call(one: Check, before: Check) -> Check:
    """A call plan that failed and passes without casts, where the model alone makes none: the plan computes in fewer bits."""
    if one.status != PASSED or before.status != FAILED or not one.name.startswith(CALLED):
        return one
    return before.also("with casts to fewer bits left out it passes, and the model alone makes none", hint=FEWER_BITS)


def _of_the_order(one: Check, fixed: Check | None, beyond: float) -> Check:
    """A check that failed in 16 bits and passes with a fixed order: a kernel, where it is no coarser than these are."""
    limit = COARSE * beyond * (one.null or 0.0)
    if one.status != FAILED or fixed is None or fixed.status != PASSED or (one.error or 0.0) > limit:
        return one
    return one.also("gone with a fixed order of additions", status=PASSED, hint="", step=None)


def served(finest: Sequence[Check], serving: Sequence[Check], dtype: str) -> list[Check]:
    """The checks of the finest precision; in their places those that fail only in the one that serves.

    Args:
        finest: Where rounding excuses least.
        serving: The same in the model's own dtype, some of whose kernels exist only there.
        dtype: What that is called.
    """
    failed = {one.name: one for one in serving if one.status == FAILED}
    return [
        dataclasses.replace(failed[one.name], detail=f"in {dtype}, {failed[one.name].detail}")
        if one.status != FAILED and one.name in failed
        else one
        for one in finest
    ]


def _cast_of_its_own(one: Check, coarse: Check | None) -> Check:
    if one.status != PASSED or coarse is None or coarse.status != FAILED:
        return one
    return coarse.also("with casts to fewer bits left out it passes", hint=coarse.hint or FEWER_BITS)


# Where what fails goes wrong ------------------------------------------------------------------------------------------


def _placed(bench: Bench, check: Check, name: str) -> Check:
    """A failed check with its first wrong layer and tensor, as far as running it again tells.

    The same check is made with each block's output in the place of the logits: the first that fails holds the error, or is
    handed it. There what attention reads in the last cached step is compared with what it reads in the recomputation.
    """
    blocks = len(bench.runner.blocks)
    seen = all(bench.runner.adapter.supports("resid_post", layer) for layer in range(blocks))
    if check.name.startswith("generate()" if seen else ("generate()", CALLED)):
        return check  # What generate() feeds is wrong, not what the blocks make of it.

    def fails(layer: int) -> bool:
        other = dataclasses.replace(bench, runner=bench.runner.otherwise(), asks="no")
        other.runner.stands_in = layer
        try:
            other.measure_plain()
            return any(one.name == check.name and one.status == FAILED for one in _run(other, name))
        # A block whose output is not one row a position cannot stand for the logits.
        except Exception:
            return False

    # What is wrong in one block stays wrong in those after it.
    layer = bisect.bisect_left(range(blocks), True, key=fails)
    if layer == blocks:
        return dataclasses.replace(check, layer=blocks, tensor="logits")
    found = _first_tensor(bench, check, name, layer)
    first: dict[str, Any] = {} if found is None else {"tensor": found.tensor, "module": found.module}
    return dataclasses.replace(check, layer=layer, **first)


def _first_tensor(bench: Bench, check: Check, name: str, layer: int) -> Finding | None:
    runner = bench.runner.otherwise()
    runner.watched = layer
    _run(dataclasses.replace(bench, runner=runner, asks="no"), name)
    whole = {(seen.shape[0], seen.total): seen for seen in reversed(runner.seen) if not seen.cached}
    single = [seen for seen in runner.seen if seen.cached and seen.shape[1] == 1 and (seen.shape[0], seen.total) in whole]
    if not single:
        return None
    mine = single[-1]
    feed = Feed(mine.total - 1, mine.total, mine.total - 1)
    theirs = whole[mine.shape[0], mine.total].watch.events
    sight = Sight(feed, layer, [_filled(e, mine.total) for e in mine.watch.events], theirs)
    found = next(iter(sight.findings(bench.beyond * (check.null or 0.0))), None)
    if found is None or found.tensor != "attention output":
        return found
    given = [any(e.name == "attention mask" for e in side) for side in (sight.mine, sight.theirs)]
    # One side has no mask at all.
    return dataclasses.replace(found, tensor="attention mask") if given[0] != given[1] else found


def _filled(event: Event, total: int) -> Event:
    """Without the slots of a static cache that are still empty."""
    axis = -2 if event.name in ("K", "V") else -1 if event.name in ("attention mask", "attention scores") else None
    tensor: Any = event.tensor
    if axis is None or tensor.shape[axis] <= total:
        return event
    return dataclasses.replace(event, tensor=tensor.narrow(axis, 0, total))


@contextlib.contextmanager
def _as_it_was(adapter: Adapter) -> Iterator[None]:
    """Restores what running a model can change: its mode, its attributes, the random state, what libraries say."""
    devices = [adapter.device] if adapter.device.type == "cuda" else []
    with torch.random.fork_rng(devices), warnings.catch_warnings(), quiet_transformers(), evaluating(adapter):
        warnings.simplefilter("ignore")
        with adapter.left_as_found():
            yield
