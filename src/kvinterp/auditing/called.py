"""Call plans as checks of an audit: the path's own runner feeds them, the bench judges them."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from kvinterp.auditing.bench import PROMPT, Bench, Check, Errors, NotRunError, UnclearError
from kvinterp.auditing.comparing import apart
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
    from kvinterp import spec

    if calls == "all":
        return (*(str(kind()) for kind in CALLS.values()), "padded(right,5)")
    return tuple(str(call_named(part)) for part in spec.split(calls, ","))


def check_plans(adapter: Adapter, plans: tuple[str, ...]) -> None:
    """Raises where the model cannot run one: a plan that was named and is not run would leave a PASS that says nothing of it."""
    for plan in filter(None, map(call_named, plans)):
        plan.check(adapter, _lengths(adapter.facts.context)[0])


def _lengths(context: int) -> tuple[int, int]:
    """The length of the prompt, and that with the tokens fed after it."""
    length = min(PROMPT + STEPS, context)
    return max(length - STEPS, 1), length


def by_call(bench: Bench, plan: Call) -> Check:
    """A prompt that reaches the model along a call plan, against recomputation of the same tokens alone."""
    adapter, (prompt, length) = bench.runner.adapter, _lengths(bench.context)
    path = ExecutionPath(kernels=bench.runner.kernels or Native(), call=plan)
    tokens = bench.tokens(length)
    try:
        made, _, witness = decoded(adapter, path, tokens, prompt)
    except (InputError, UnsupportedError) as why:
        raise NotRunError(str(why)) from why
    if missing := plan.missing(witness):
        raise NotRunError(f"not exercised: {missing}.")
    reference = bench.reference(tokens, first=prompt - 1)
    if "recompute" in plan.forms:
        whole = decoded(adapter, dataclasses.replace(path, form="recompute"), tokens, prompt)[0]
        off = apart(whole, reference.logits[:, prompt - 1 :])
        if off > bench.beyond * reference.null and off > bench.reach / bench.beyond:
            said = f"without a cache {plan} is off by {off:.1e} from the prompt alone, so it shows nothing of the cache"
            raise UnclearError(f"{said}.", off)
        reference = reference._replace(null=max(reference.null, off))
    happened = ", ".join(f"{name} {count}" for name, count in witness.items())
    what = f"a prompt of {prompt} tokens and {length - prompt} decode steps ({happened}), against recomputation alone"
    check = bench.settle(Errors().add(made, reference, prompt - 1), what)
    return check if check.status != "failed" else dataclasses.replace(check, layer=_place(bench, path, tokens, prompt))


def decoded(
    adapter: Adapter, path: ExecutionPath, tokens: Tensor, prompt: int
) -> tuple[Tensor, list[Tensor], dict[str, int]]:
    """Logits from the prompt's last token on, ``[1, step, vocab]``; what each block gave there; the witness."""
    layers = range(adapter.facts.layers)
    recorder = Recorder(adapter, "resid_post") if all(adapter.supports("resid_post", n) for n in layers) else None
    with Runner(adapter, path, tokens[:, :prompt], tokens.shape[1] - prompt, [recorder] if recorder else []) as runner:
        made = [runner.advance()] + [runner.advance(token) for token in tokens[:, prompt:].unbind(1)]
    if recorder is not None:
        recorder.end_step()
    streams = [] if recorder is None else [torch.stack(kept, 1) for kept in recorder.kept.values()]
    return torch.stack(made, 1), streams, runner.witness


def _place(bench: Bench, path: ExecutionPath, tokens: Tensor, prompt: int) -> int:
    """The first block whose output is off by more than rounding; that behind the last where it is the logits alone."""
    adapter, plain = bench.runner.adapter, dataclasses.replace(path, form="recompute", call=None)
    mine, theirs = (decoded(adapter, each, tokens, prompt)[1] for each in (path, plain))
    limit = bench.excused * bench.plain_null
    return next((n for n, (a, b) in enumerate(zip(mine, theirs, strict=True)) if apart(a, b) > limit), len(mine))
