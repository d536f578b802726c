"""Call plans as checks of an audit: the path's own runner feeds them, the bench judges them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from kvinterp.auditing.bench import Bench, Check, Errors, NotRunError, UnclearError, short
from kvinterp.auditing.ladder import unit_roundoff
from kvinterp.auditing.values import apart
from kvinterp.errors import InputError, UnsupportedError
from kvinterp.models import Adapter
from kvinterp.paths import ExecutionPath, Runner
from kvinterp.paths.calls import CALLS, Call, call_named
from kvinterp.paths.kernels import Native
from kvinterp.recording import Recorder

CALLED = "call="
STEPS = 8
"""Tokens fed one by one: enough for rows to leave and to join."""


def plans_of(calls: str) -> tuple[str, ...]:
    """The call plans of a text with commas; one of each for ``"all"``, none for an empty text.

    Raises:
        InputError: One is unknown.
    """
    from kvinterp.common import spec

    if calls == "all":
        return (*(kind.audited or str(kind()) for kind in CALLS.values()), "padded(right,5)")
    return tuple(str(call_named(part)) for part in spec.split(calls, ","))


def check_plans(adapter: Adapter, plans: tuple[str, ...]) -> None:
    """Raises where the model cannot run one: a plan that was named and is not run would leave a PASS that says nothing of it."""
    prompt, length = short(adapter.facts.context, STEPS)
    for plan in filter(None, map(call_named, plans)):
        ExecutionPath(call=plan)
        plan.check(adapter, prompt, length - prompt)


def by_call(bench: Bench, plan: Call) -> Check:
    """A prompt that reaches the model along a call plan, against recomputation of the same tokens alone."""
    prompt, length = short(bench.context, STEPS)
    adapter, block = bench.runner.adapter, bench.runner.stands_in
    if not plan.kernels and bench.runner.kernels is not None:
        # Of one whose kernels are its own the model's casts cannot be left out: there is room for them instead.
        bench = bench.otherwise(None, max(bench.runner.unit, unit_roundoff(torch.float32)))
        bench.runner.stands_in = block
    tokens = _drafted(bench.tokens(length), prompt, bench.row(1, length))
    path = ExecutionPath(kernels=bench.runner.kernels or Native(), call=plan)
    try:
        plan.check(adapter, prompt, length - prompt)
        made, witness = decoded(adapter, path, tokens, prompt, plan, block)
    except (InputError, UnsupportedError) as why:
        if why.__cause__ is not None:
            raise
        raise NotRunError(str(why)) from why
    if missing := plan.missing(witness):
        raise NotRunError(f"not exercised: {missing}.")
    reference = bench.reference(tokens, first=prompt - 1)
    errors, off = Errors().add(made, reference, length - made.shape[1]), 0.0
    if "recompute" in plan.forms and block is None:
        whole = decoded(adapter, dataclasses.replace(path, form="recompute"), tokens, prompt, plan)[0]
        errors.add(whole, reference, prompt - 1)
        off = apart(whole, reference.logits[:, prompt - 1 :])
        if not math.isfinite(off):
            raise UnclearError(f"without a cache {plan} gives no numbers, so it shows nothing of the cache.", off)
    happened = ", ".join(f"{name} {count}" for name, count in witness.items())
    what = f"a prompt of {prompt} tokens and {length - prompt} decode steps ({happened}), against recomputation alone"
    alike = off > bench.excused * reference.null
    hint = (
        f"without a cache too, by {off:.1e}: it is {plan} that changes the answer, whatever the cache does" if alike else ""
    )
    return bench.settle(errors, what, hint)


def _drafted(tokens: Tensor, prompt: int, others: Sequence[int]) -> Tensor:
    """The same prompt, going on as it went before but for a few tokens: some of what is drafted from the text is right.

    Args:
        tokens: ``[1, position]``.
        prompt: How many are the prompt.
        others: What stands between.
    """
    at, made = 2, tokens.clone()
    for n in range(prompt, tokens.shape[1]):
        turn = (n - prompt) % 4
        made[0, n] = others[n] if turn == 3 else tokens[0, (at + turn) % prompt]
        at = (at + 3) % prompt if turn == 3 else at
    return made


def decoded(
    adapter: Adapter, path: ExecutionPath, tokens: Tensor, prompt: int, plan: Call | None = None, block: int | None = None
) -> tuple[Tensor, dict[str, int]]:
    """Logits from the prompt's last token on, ``[1, step, vocab]``, and the witness; that of an option by its plan.

    Of a cached path what a block returns for every token, in their place, where one is named.
    """
    recorder = Recorder(adapter, () if block is None else "resid_post", block, positions="all")
    with Runner(adapter, path, tokens[:, :prompt], tokens.shape[1] - prompt, [recorder]) as runner:
        made = [logits[:, None] for logits in (runner.advance(), *map(runner.advance, tokens[:, prompt:].unbind(1)))]
    recorder.end_step()
    made = next(iter(recorder.kept.values()), made)
    return torch.cat(made, 1), runner.witness | (plan.seen(runner.cache, prompt) if plan else {})
