"""HOW it runs: :func:`run`, which sends one model along one path."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from kvinterp.errors import NonFiniteError, located
from kvinterp.inputs import (
    check_choice,
    check_seed,
    checked_continuation,
    chosen_heads,
    chosen_layers,
    chosen_steps,
    encode,
    listed,
)
from kvinterp.models import Adapter, dtype_named, wrap
from kvinterp.models.threads import own_threads
from kvinterp.paths.batches import batched, in_batches
from kvinterp.paths.finite import first_nonfinite
from kvinterp.paths.loops import LOGITS, RecorderWatcher, Runner, Watcher
from kvinterp.paths.model_cache import CHECKED_NUMBERS, CHECKED_SITES, path_store
from kvinterp.paths.path import ExecutionPath, path_named
from kvinterp.paths.sampling import Strategy, strategy_named, uniforms
from kvinterp.paths.vocabulary import end_tokens, padding_of, sound_rows
from kvinterp.provenance import provenance
from kvinterp.recording import Recorder, Trace

__all__ = [
    "CHECKED_NUMBERS",
    "CHECKED_SITES",
    "LOGITS",
    "RecorderWatcher",
    "Runner",
    "Watcher",
    "batched",
    "first_nonfinite",
    "in_batches",
    "path_store",
    "run",
]


def run(
    model: Any,
    prompt: Any,
    path: str | ExecutionPath = "cached",
    *,
    max_new_tokens: int = 48,
    strategy: str | Strategy = "greedy",
    seed: int = 0,
    continuation: Sequence[int] | None = None,
    record: str | Sequence[str] | None = None,
    layers: Iterable[int] | None = None,
    heads: Iterable[int] | None = None,
    kv_heads: Iterable[int] | None = None,
    steps: Iterable[int] | None = None,
    positions: str = "newest",
    logits: str = "discard",
    stop: str = "end of sequence",
    batch_size: int = 1,
) -> Any:
    """Runs a model along one path and keeps what was asked.

    Args:
        model: A model of any kind, or an adapter.
        prompt: A text, a :class:`Prompt`, or token ids (a list, an array or a tensor); or a list of these, run in batches
            where that keeps the bits. A tensor or array of two dimensions is a list, a prompt a row.
        path: How to run it, such as ``"cached"``, ``"recompute"`` or ``Cached(...)``.
        max_new_tokens: Most steps; step 0 is the token the prefill decides.
        strategy: ``"greedy"``, ``"top_k(50,0.8)"``, ``"top_p(0.95,0.8)"`` or a :class:`Strategy`.
        seed: Seeds the random number of each example and step.
        continuation: Token ids to feed instead of the path's own choices (one prompt only).
        record: Sites to keep, none unless said; see :class:`Recorder`, also for layers, heads, kv_heads, steps and positions.
        layers: Layers to keep.
        heads: Query heads to keep.
        kv_heads: KV heads to keep.
        steps: Steps to keep.
        positions: ``"newest"`` or ``"all"``.
        logits: ``"keep"`` keeps the full-vocabulary logits of every step; ``"discard"`` does not.
        stop: ``"end of sequence"`` (or at the length, whichever comes first) or ``"length"``.
        batch_size: Most prompts in a batch; prompts of equal length are batched if the bits were checked to be the same.

    Returns:
        A trace for one prompt, a list of traces for a list.

    Raises:
        InputError: Something given does not exist or does not fit.
        NonFiniteError: NaN or Inf logits (for a list the trace says so in ``failure`` and the rest goes on).
    """
    adapter, path, strategy = wrap(model), path_named(path), strategy_named(strategy)
    check_choice("logits", logits, ("keep", "discard"))
    check_choice("stop", stop, ("end of sequence", "length"))
    check_seed(seed)
    items, single = listed(prompt)
    prompts = [encode(adapter, item, max_new_tokens) for item in items]
    forced = checked_continuation(continuation, len(prompts), adapter)
    # Made into lists here: each batch asks for them again.
    layers = None if layers is None else chosen_layers(adapter, layers)
    heads = chosen_heads(heads, adapter.facts.query_heads, "query head")
    kv_heads = chosen_heads(kv_heads, adapter.facts.kv_heads, "KV head")
    steps = None if steps is None else chosen_steps(steps)
    record = () if record is None else record
    with located(f"model {adapter.facts.name}, path {path}"), own_threads(adapter):
        target = adapter.at(dtype_named(path.dtype))

        def one_batch(indices: Sequence[int]) -> list[Trace]:
            recorder = Recorder(target, record, layers, heads, kv_heads, steps, positions)
            return _run_batch(
                adapter,
                path,
                [prompts[i] for i in indices],
                indices,
                max_new_tokens,
                strategy,
                seed,
                forced,
                recorder,
                logits == "keep",
                stop == "end of sequence",
            )

        Recorder(target, record, layers, heads, kv_heads, steps, positions)
        traces = in_batches(adapter, (path,), prompts, max_new_tokens, batch_size, one_batch)
    if single:
        if traces[0].failure:
            raise NonFiniteError(traces[0].failure)
        return traces[0]
    return traces


def _run_batch(
    adapter: Adapter,
    path: ExecutionPath,
    prompts: Sequence[Sequence[int]],
    indices: Sequence[int],
    max_new_tokens: int,
    strategy: Strategy,
    seed: int,
    continuation: Sequence[int] | None,
    recorder: Recorder,
    keep_logits: bool,
    stop_at_end: bool,
) -> list[Trace]:
    prompt = torch.tensor(list(map(list, prompts)), device=adapter.device)
    random = torch.stack([uniforms(seed, index, max_new_tokens) for index in indices]).to(prompt.device)
    ends = end_tokens(adapter, prompt.device) if stop_at_end else None
    forced = None if continuation is None else torch.tensor(list(continuation), device=prompt.device)
    length = max_new_tokens if forced is None else min(max_new_tokens, len(forced) + 1)
    kept, chosen, fed, finite = [], [], [], []
    finished = torch.zeros(len(prompt), dtype=torch.bool, device=prompt.device)
    watchers = [RecorderWatcher(recorder)] if recorder.kept else []
    padding: Tensor | None = None
    with Runner(adapter, path, prompt, length, watchers) as runner:
        logits = runner.advance()
        for step in range(length):
            token = strategy.choose(logits, random[:, step])
            chosen.append(token)
            padding = padding_of([logits]) if padding is None else padding
            finite.append(sound_rows(logits, padding))
            if keep_logits:
                kept.append(logits.clone())
            feed = token if forced is None or step >= len(forced) else forced[step].expand(len(prompt))
            if ends is not None:
                finished = finished | torch.isin(feed, ends)
                if bool(finished.all()):
                    break
            if step + 1 < length:
                fed.append(feed)
                logits = runner.advance(feed)
    recorder.end_step()
    tokens = torch.stack(chosen, 1).tolist()
    given = torch.stack(fed, 1).tolist() if fed else [[] for _ in prompts]
    whole = torch.stack(finite, 1).tolist()
    about = provenance(adapter, path=str(path), strategy=str(strategy), seed=seed, cache=runner.cache)
    all_logits = torch.stack(kept, 1) if kept else None
    stops = ends.tolist() if ends is not None else []
    traces = []
    for row in range(len(prompts)):
        followed = tokens[row] if forced is None else [*given[row], *tokens[row][len(given[row]) :]]
        count = next((i + 1 for i, t in enumerate(followed) if t in stops), len(tokens[row]))
        steps = [i for i, step in enumerate(recorder.recorded_steps) if step < count]
        failure = ""
        if not all(whole[row][:count]):
            failure = first_nonfinite(adapter, path, prompts[row], given[row][: count - 1])
        traces.append(
            Trace(
                path=str(path),
                prompt=tuple(prompts[row]),
                tokens=tuple(tokens[row][:count]),
                fed=tuple(given[row][: count - 1]),
                records={p: [kept_step[row] for kept_step in seen[: len(steps)]] for p, seen in recorder.kept.items()},
                steps=tuple(recorder.recorded_steps[: len(steps)]),
                logits=None if all_logits is None else all_logits[row, :count],
                ended="end of sequence" if followed[count - 1] in stops else "length",
                failure=failure,
                provenance=about,
                heads=recorder.heads,
                kv_heads=recorder.kv_heads,
                derived=recorder.derived,
            )
        )
    return traces
